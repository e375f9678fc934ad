"""What a trained vector's name alone does to texts that it has never seen, against a full sweep.

    .venv/bin/python -m bench.recommendation --model MODEL [--sets mood …] [--engine vllm]

Each set of `contrasts.json` has eight pairs to train on and eight unseen ones: a beginning, and two
continuations. Of the vector at its bare name, and of every layer at one scale, gain and harm are
measured as `tasks/effect.py` defines them, on the unseen pairs and on what the unsteered model says
after their beginnings. The best of the sweep is the largest gain at the harm of the bare name: a
layer's gain is taken to grow with the square root of its harm, as both do for small changes, gain
in proportion to the scale and harm to its square. Perplexity is the
unsteered model's, of what it writes steered: fluent text keeps it near the unsteered one.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers import run_logsteer
from logsteer import Client

SETS = json.loads((Path(__file__).parent / "contrasts.json").read_text())
WAYS: list[dict[str, Any]] = [
    {}, {"method": "pca"}, {"method": "logistic"}, {"method": "lda"}, {"read": "last"},
]  # fmt: skip
CHANGE = 0.12
"""Of an activation's length: the scale of the sweep."""
SAMPLES, SAMPLE_TOKENS, WRITTEN_TOKENS = 2, 16, 32


class Unseen:
    """The unseen pairs of a set, and what the unsteered model says after their beginnings."""

    def __init__(self, client: Client, pairs: Sequence[Sequence[str]]) -> None:
        self._client = client
        self._beginnings = [beginning for beginning, _, _ in pairs]
        drawn = client.generate(
            self._beginnings, n=SAMPLES, max_tokens=SAMPLE_TOKENS, temperature=1.0, seed=0
        )
        self._items: list[dict[str, Any]] = [
            {"context": beginning, "targets": [f" {positive}", f" {negative}"]}
            for beginning, positive, negative in pairs
        ]
        self._items += [
            {"context_ids": result.prompt_ids, "target_ids": [list(one.token_ids)]}
            for result in drawn.results
            for one in result.completions
        ]
        self._unsteered = self._score(None)

    def _score(self, steering: Any) -> list[list[Any]]:
        answer = self._client.logprob(self._items, steering=steering)
        return [[np.array(one.logprobs) for one in item.targets] for item in answer.results]

    def measure(self, steering: Any) -> tuple[float, float]:
        """Return gain, in nats, and harm."""
        gains, changes = [], []
        for steered, base in zip(self._score(steering), self._unsteered, strict=True):
            moved = [one - other for one, other in zip(steered, base, strict=True)]
            if len(moved) == 2:
                gains.append(moved[0].sum() - moved[1].sum())
            else:
                changes.append(moved[0])
        d = np.concatenate(changes)
        return float(np.mean(gains)), float(np.expm1(np.mean(np.expm1(d) - d)))

    def write(self, steering: Any) -> float:
        """Return the unsteered model's perplexity of what it writes when steered."""
        options: dict[str, Any] = {"max_tokens": WRITTEN_TOKENS, "temperature": 1.0, "seed": 1}
        written = self._client.steer(self._beginnings, steering, n=2, **options) if steering else (
            self._client.generate(self._beginnings, n=2, **options)
        )  # fmt: skip
        items = [
            {"context_ids": result.prompt_ids, "target_ids": [list(one.token_ids)]}
            for result in written.results
            for one in result.completions
        ]
        scored = [np.array(one.targets[0].logprobs) for one in self._client.logprob(items).results]
        return float(np.exp(-np.concatenate(scored).mean()))


def sweep(unseen: Unseen, card: Any, harm: float) -> tuple[int, float]:
    """Return the layer with the largest gain at this harm, and that gain."""
    best = (-1, -np.inf)
    for layer in card.layers:
        length = card.about.quality[layer].activation_norm / card.norms[layer]
        gain, found = unseen.measure(f"{card.name}:{CHANGE * length}@{layer}")
        best = max(best, (layer, gain * float(np.sqrt(harm / found))), key=lambda one: one[1])
    return best


def main() -> None:
    """Print a line for each set and way to train, with the sweep where it is the first way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--ways", type=int, default=1, help="of training, of the first set alone")
    options = parser.parse_args()
    print("set; way; s; name alone; gain and harm; unseen gain, harm; sweep: layer, gain; share; "
          "perplexity unsteered, steered", flush=True)  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="logsteer-bench-") as directory,
        run_logsteer(
            {"model": options.model}, Path(directory), options.engine, compile=False
        ) as url,
        Client(url, timeout=3600) as client,
    ):
        for name in options.sets:
            pairs = [(f"{b} {p}", f"{b} {n}") for b, p, n in SETS[name]["train"]]
            unseen = Unseen(client, SETS[name]["unseen"])
            plain = unseen.write(None)
            for way in WAYS[: options.ways if name == options.sets[0] else 1]:
                asked = {"read": SETS[name]["read"], **way}
                started = time.monotonic()
                card = client.vectors.train(name, pairs, overwrite=True, **asked).vector
                seconds, advice = time.monotonic() - started, card.about.recommendation
                assert advice is not None, card.about.validation
                gain, harm = unseen.measure(name)
                cells = [
                    name, str(asked), f"{seconds:.0f}", f"{advice.scale:.3g}@{advice.layer}",
                    f"{advice.gain:.2f} {advice.harm:.3f}", f"{gain:.2f} {harm:.3f}",
                ]  # fmt: skip
                if way is WAYS[0]:
                    layer, best = sweep(unseen, card, harm)
                    cells += [f"{layer} {best:.2f}", f"{gain / best:.2f}"]
                print("; ".join([*cells, f"{plain:.1f} {unseen.write(name):.1f}"]), flush=True)


if __name__ == "__main__":
    main()
