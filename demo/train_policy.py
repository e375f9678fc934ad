"""Trains a policy with REINFORCE: the demo model learns to tell happy stories, in twenty steps.

    .venv/bin/python demo/train_policy.py --plot train-policy.png

The reward of a story is +1 for a happy word in it and -1 for a sad one, 0 for neither or both. Each
step draws stories, reads their log-probabilities with their graph, and weighs those of a story's
tokens by its reward less a baseline: a ridge regression on the seven features of each step, fitted
to the stories of the step before, so that it knows nothing of those that it judges. A penalty holds
the policy near the model that it began as: the reward of a token is less by BETA times log p of the
policy less log p of that model. It takes a minute on two cores.
"""

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import HAPPY_WORDS, SAD_WORDS
from logsteer_server.embedded import LocalModel

MODEL = Path(__file__).resolve().parent / "model"
PROMPTS = ("One day, Lily was very", "Tom felt", "Once upon a time", "Mia saw a dog and was")
STORIES = 64
"""Stories a step."""
MAX_TOKENS = 24
BATCH_TOKENS = 1024
"""Tokens whose activations are kept at a time; the gradient is that of all stories."""
RATE = 4e-4
BETA = 0.05
RIDGE = 1.0


def judge(text: str) -> float:
    """Return the reward of a story."""
    words = {word.strip(".,!?\"'").lower() for word in text.split()}
    return float(bool(words & set(HAPPY_WORDS))) - float(bool(words & set(SAD_WORDS)))


class Baseline:
    """What is to be expected of a story's rest, by a ridge regression on its steps' features."""

    def __init__(self) -> None:
        self._weights_F: Tensor | None = None

    def predict(self, features_RF: Tensor) -> Tensor:
        """Return the expected returns [R]; 0 before the first fit."""
        if self._weights_F is None:
            return torch.zeros(len(features_RF))
        return _add_one(features_RF) @ self._weights_F

    def fit(self, features_RF: Tensor, returns_R: Tensor) -> None:
        """Fit it to steps and what came of them."""
        x_RF = _add_one(features_RF)
        gram_FF = x_RF.T @ x_RF + RIDGE * torch.eye(x_RF.shape[-1])
        self._weights_F = torch.linalg.solve(gram_FF, x_RF.T @ returns_R)


def _add_one(features_RF: Tensor) -> Tensor:
    return torch.cat([features_RF, torch.ones(len(features_RF), 1)], dim=-1)


@dataclass
class Report:
    """What is plotted, a number a step."""

    reward: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    """Standard error of the mean reward."""
    divergence: list[float] = field(default_factory=list)
    """Nats a story that the policy is away from the model that it began as."""
    entropy: list[float] = field(default_factory=list)
    explained: list[float] = field(default_factory=list)
    """Share of the returns' variance that the baseline knew beforehand."""


def train(steps: int, seed: int = 0) -> tuple[LocalModel, Report]:
    """Return the trained policy, and what happened."""
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    policy = LocalModel(module, tokenizer)
    start = LocalModel(copy.deepcopy(module).requires_grad_(False), tokenizer)
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE)
    baseline, report = Baseline(), Report()
    prompts = [policy.encode(PROMPTS[k % len(PROMPTS)]) for k in range(STORIES)]
    for step in range(steps):
        begun = time.perf_counter()
        stories = policy.sample(prompts, MAX_TOKENS, seed=seed + step * STORIES)
        rewards = [judge(policy.decode(ids)) for ids in stories]
        loss = compute_loss(policy, start, baseline, prompts, stories, rewards, report)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        print(
            f"step {step + 1:2d}: reward {report.reward[-1]:+.2f} (+- {report.error[-1]:.2f}), "
            f"{report.divergence[-1]:.2f} nats from the start, {report.entropy[-1]:.2f} nats of "
            f"entropy a token, {time.perf_counter() - begun:.1f} s"
        )
    return policy, report


def compute_loss(
    policy: LocalModel,
    start: LocalModel,
    baseline: Baseline,
    prompts: Sequence[Sequence[int]],
    stories: Sequence[np.ndarray],
    rewards: Sequence[float],
    report: Report,
) -> Tensor:
    """Return a loss whose gradient is that of the expected reward, turned round."""
    names = ["logprob", "entropy"]
    rows = policy.columns(prompts, stories, names, batch_tokens=BATCH_TOKENS)
    with torch.no_grad():
        before = start.columns(prompts, stories, batch_tokens=BATCH_TOKENS)
    features = policy.features(prompts, stories, max_tokens=MAX_TOKENS, batch_tokens=BATCH_TOKENS)
    returns = []
    for row, old, reward in zip(rows, before, rewards, strict=True):
        gains_R = -BETA * (row["logprob"].detach() - old["logprob"])
        gains_R[-1] += reward
        returns.append(gains_R.flip(0).cumsum(0).flip(0))  # what comes from each step on
    all_returns, all_features = torch.cat(returns), torch.cat(features)
    expected = baseline.predict(all_features)
    advantages = all_returns - expected
    baseline.fit(all_features, all_returns)
    logprobs = torch.cat([row["logprob"] for row in rows])
    ratios = logprobs.detach() - torch.cat([row["logprob"] for row in before])
    report.reward.append(float(np.mean(rewards)))
    report.error.append(float(np.std(rewards) / len(rewards) ** 0.5))
    report.divergence.append(float(ratios.sum()) / len(stories))
    report.entropy.append(float(torch.cat([row["entropy"].detach() for row in rows]).mean()))
    report.explained.append(float(1 - advantages.var() / all_returns.var()))
    return -(advantages * logprobs).sum() / len(stories)


def plot(report: Report, path: Path) -> None:
    """Draw what happened."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, 3)
    steps, reward = np.arange(1, len(report.reward) + 1), np.array(report.reward)
    error = np.array(report.error)
    panels[0].plot(steps, reward, color="#1f6fb4", marker="o", markersize=4)
    panels[0].fill_between(steps, reward - error, reward + error, color="#1f6fb4", alpha=0.2)
    panels[0].set_ylim(top=1.05)
    panels[1].plot(steps, report.divergence, color="#d9541e", marker="s", markersize=4)
    panels[1].set_ylim(bottom=min(0, *report.divergence))
    panels[2].plot(steps[1:], report.explained[1:], color="#2f9e5b", marker="^", markersize=4)
    titles = (
        ("Reward of a story", "mean, standard error shaded"),
        ("Distance from the model at the start", "mean log-ratio, nats a story"),
        ("Variance that the baseline explains", "share, on new stories"),
    )
    for axes, (title, unit) in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10.5, loc="left", pad=8)
        axes.set_ylabel(unit)
        axes.set_xlabel("step")
        axes.set_xticks(sorted({1, *steps[4::5].tolist(), len(steps)}))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.axhline(0, color="#8a8a8a", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train the policy, print some of its stories, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="a .png, .svg or .pdf to write")
    options = parser.parse_args()
    begun = time.perf_counter()
    policy, report = train(options.steps, options.seed)
    print(f"{options.steps} steps in {time.perf_counter() - begun:.0f} s")
    prompts = [policy.encode(prompt) for prompt in PROMPTS]
    for prompt, ids in zip(prompts, policy.sample(prompts, MAX_TOKENS, seed=1), strict=True):
        print(f"  {policy.decode([*prompt, *ids])!r}")
    if options.plot is not None:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
