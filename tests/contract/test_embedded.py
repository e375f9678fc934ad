"""The model in Python, without HTTP: numbers that carry their graph."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer_server.contract.jobs import Policy
from logsteer_server.embedded import LocalModel
from tests.conftest import DEMO_MODEL
from tests.contract.directions import load_model, save_model
from tests.contract.tlens_cases import OTHERS, draw_ids

pytestmark = pytest.mark.engine

POLICY = Policy(temperature=0.8, top_p=0.9, top_k=200)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(DEMO_MODEL, device="cpu")


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    path = save_model(OTHERS["gpt2"], tmp_path_factory.mktemp("fine"))
    return LocalModel(path, dtype="float64", device="cpu")


def draw_pairs() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [draw_ids(rng, n) for n in (4, 20, 9)], [draw_ids(rng, n) for n in (6, 1, 12)]


def leaves(model: LocalModel) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in model.parameters.items()}


def test_log_probabilities_and_their_gradient_are_transformers(model: LocalModel) -> None:
    contexts, targets = draw_pairs()
    theta = leaves(model)
    found = [row["logprob"] for row in model.columns(contexts, targets, parameters=theta)]
    sum(values.sum() for values in found).backward()  # type: ignore[union-attr]
    reference = load_model(DEMO_MODEL).requires_grad_(True)
    for context, target, values in zip(contexts, targets, found, strict=True):
        ids_T = torch.from_numpy(np.concatenate([context, target]).astype(np.int64))
        rows = reference(ids_T[None, :-1]).logits[0, -len(target) :].log_softmax(-1)
        wanted = rows.gather(-1, ids_T[-len(target) :, None])[:, 0]
        assert values.detach().numpy() == pytest.approx(wanted.detach().numpy(), abs=1e-4)
        wanted.sum().backward()
    wanted_gradients = dict(reference.named_parameters())
    assert theta.keys() == wanted_gradients.keys()
    for name, tensor in theta.items():
        assert tensor.grad is not None
        wanted = wanted_gradients[name].grad
        assert (tensor.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name
    plain = [row["logprob"] for row in model.columns(contexts, targets)]
    for values, other in zip(plain, found, strict=True):
        assert values.numpy() == pytest.approx(other.detach().numpy(), abs=1e-5)
    assert not any(values.requires_grad for values in plain)


@pytest.mark.parametrize("policy", [Policy(), POLICY], ids=["softmax", "policy"])
def test_entropies_and_their_derivatives_are_finite_differences(
    fine: LocalModel, policy: Policy
) -> None:
    contexts, targets = draw_pairs()
    theta = leaves(fine)
    found = read_entropies(fine, policy, parameters=theta)
    total = torch.cat(found).sum()
    total.backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(2)
    v = {name: torch.randn_like(tensor) * 0.1 for name, tensor in theta.items()}
    slope = sum(float((v[name] * t.grad).sum()) for name, t in theta.items() if t.grad is not None)
    sums = []
    for sign in (1, -1):
        moved = {n: t.detach() + sign * 1e-6 * v[n] for n, t in theta.items()}
        sums.append(float(torch.cat(read_entropies(fine, policy, parameters=moved)).sum()))
    assert slope == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-5)
    for rows, entropies in zip(fine.read(contexts, targets), found, strict=True):
        for logits_V, entropy in zip(rows.logits_RV, entropies, strict=True):
            assert float(entropy.detach()) == pytest.approx(define_entropy(logits_V, policy))


def read_entropies(model: LocalModel, policy: Policy, **changes: Any) -> list[Tensor]:
    rows = model.columns(*draw_pairs(), ["rb_entropy"], policy=policy, **changes)
    return [row["rb_entropy"] for row in rows]


def define_entropy(logits_V: Tensor, policy: Policy) -> float:
    """-sum q log q by the definition, a token at a time."""
    scaled = sorted((logits_V / policy.temperature).tolist(), reverse=True)
    kept = scaled[: policy.top_k or None]
    p = np.exp(np.array(kept) - kept[0])
    p /= p.sum()
    if policy.top_p < 1:
        p = p[: int(np.searchsorted(p.cumsum(), policy.top_p)) + 1]
        p /= p.sum()
    return float(-(p * np.log(p)).sum())


def test_a_policy_scores_what_it_draws(model: LocalModel) -> None:
    prompt = model.encode("Once upon a time")
    samples = model.sample([prompt] * 4, 12, POLICY, seed=3)
    assert [s.tolist() for s in model.sample([prompt] * 4, 12, POLICY, seed=3)] == [
        s.tolist() for s in samples
    ]
    for rows in model.read([prompt] * 4, samples):
        assert rows.columns(["log_q"], POLICY)["log_q"].isfinite().all()
        q_RV = rows.log_q_RV(POLICY).exp()
        assert q_RV.sum(-1).numpy() == pytest.approx(1.0, abs=1e-5)
        unlikely_R = rows.logits_RV.argmin(-1)
        assert (rows.log_q_RV(POLICY)[torch.arange(len(q_RV)), unlikely_R] == -torch.inf).all()
        with pytest.raises(ValueError, match="temperature 0"):
            rows.columns(["rb_entropy"], Policy(temperature=0.0))


def test_one_step_of_reinforce_lowers_the_loss(model: LocalModel) -> None:
    """The reward is the share of one token, the one that varies most; the loss is its negative,
    expected under the policy. Importance weights say what it is after the step.
    """
    before = {name: tensor.clone() for name, tensor in model.parameters.items()}
    theta = leaves(model)
    prompts = [model.encode("Once upon a time, there was")] * 64
    samples = model.sample(prompts, 8, seed=0, parameters=theta)
    ids = np.unique(np.concatenate(samples))
    spread = [np.std([(sample == token).mean() for sample in samples]) for token in ids]
    wanted = ids[np.argmax(spread)]
    rewards = torch.tensor([float((sample == wanted).mean()) for sample in samples])
    weights = rewards - rewards.mean()
    rows = model.columns(prompts, samples, ["logprob", "entropy"], parameters=theta)
    logp = torch.stack([row["logprob"].sum() for row in rows])
    entropy = torch.cat([row["entropy"] for row in rows]).mean()
    loss = -(weights * logp).mean() - 1e-3 * entropy
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(theta.values(), lr=3e-2).step()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        after = model.columns(prompts, samples, parameters=theta)
    ratio = (torch.stack([row["logprob"].sum() for row in after]) - logp.detach()).exp()
    expected = float((ratio * rewards).sum() / ratio.sum())
    fresh = mean_reward(model.sample(prompts, 8, seed=1000, parameters=theta), int(wanted))
    plain = mean_reward(model.sample(prompts, 8, seed=1000), int(wanted))
    print(f"\nreward {rewards.mean():.4f}; after one step {expected:.4f} by importance weights;")
    print(f"on fresh samples {plain:.4f} before and {fresh:.4f} after")
    assert -expected < -float(rewards.mean())
    assert fresh > plain
    assert all((tensor == before[name]).all() for name, tensor in model.parameters.items())


def mean_reward(samples: Sequence[np.ndarray], wanted: int) -> float:
    return float(np.mean([(sample == wanted).mean() for sample in samples]))


def test_what_does_not_fit_is_refused(model: LocalModel) -> None:
    name = "model.norm.weight"
    for contexts, targets, parameters, reason in (
        ([[1]], [], {}, "give pairs"),
        ([[]], [[1]], {}, "empty"),
        ([[1] * 2000], [[1]], {}, "reads 1024"),
        ([[1]], [[1]], {"nothing": torch.ones(3)}, "no such parameter"),
        ([[1]], [[1]], {name: torch.ones(3)}, r"\[3\]"),
        ([[1]], [[1]], {name: torch.ones(128, dtype=torch.float64)}, "float64"),
    ):
        with pytest.raises(ValueError, match=reason):
            model.read(contexts, targets, parameters=parameters)  # type: ignore[arg-type]


def test_the_example_of_the_module_runs() -> None:
    import logsteer_server.embedded as embedded

    assert embedded.__doc__ is not None
    lines = [line[4:] for line in embedded.__doc__.splitlines() if line.startswith("    ")]
    code = "\n".join(lines).replace('"demo/model"', repr(str(DEMO_MODEL)))
    scope = {"torch": torch, "reward": lambda ids: len(set(ids.tolist()))}
    exec(code, scope)
    assert bool(scope["loss"].isfinite())  # type: ignore[attr-defined]
