"""What training says of contrast sets, and what its vectors then do to pairs they never saw.

    .venv/bin/python -m bench.vectors --model MODEL --pairs SET.json … [--engine transformer_lens]

Of each set, the first pairs train a vector by each method, and others are held out altogether: on
them the table has the change of the preference for the positive text (nats, mean) at the scales
recommended, beside the AUC that cross-validation promised.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from bench.workplace import run_logsteer
from logsteer import Client
from logsteer.extras.dose_response import DoseResponse, evaluate_vector
from logsteer.schemas import VectorCard

WAYS: list[dict[str, Any]] = [
    {"method": "mean_difference"},
    {"method": "pca"},
    {"method": "logistic"},
    {"method": "logistic", "whiten": True},
    {"method": "lda"},
]
READS: tuple[Literal["last", "mean"], ...] = ("last", "mean")
HEADS = (
    "set", "read", "method", "layer", "AUC", "effect", "scales", "|change|", "change of preference",
    "KL at the last", "s",
)  # fmt: skip


def evaluate(client: Client, name: str, card: VectorCard, pairs: list[Any]) -> DoseResponse:
    """Return the dose-response at the recommended scales and their opposites."""
    assert card.about.recommendation is not None
    first, last = card.about.recommendation.scales
    return evaluate_vector(client, name, pairs, scales=[-last, -first, first, last])


def describe(card: VectorCard, response: DoseResponse, seconds: float) -> list[str]:
    """Return the cells of a row behind set and read."""
    advice = card.about.recommendation
    assert advice is not None and card.about.quality is not None
    best = card.about.quality[str(advice.layer)]
    changes = [_write(point.preference_change, "+.2f") for point in response.points if point.scale]
    method = f"{card.about.method}{', whitened' if card.about.whiten else ''}"
    return [
        method,
        str(advice.layer),
        f"{best.auc:.2f}",
        _write(best.effect_size, ".2f"),
        " to ".join(f"{scale:.3g}" for scale in advice.scales),
        " to ".join(f"{norm:.0%}" for norm in advice.relative_norms),
        " ".join(changes),
        _write(response.points[-1].kl, ".2g"),
        f"{seconds:.1f}",
    ]


def _write(number: float | None, form: str) -> str:
    return "n/a" if number is None else format(number, form)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True)
    parser.add_argument("--engine", default="transformer_lens")
    parser.add_argument("--train", type=int, default=100, help="pairs that train")
    parser.add_argument("--test", type=int, default=50, help="pairs that are evaluated on")
    options = parser.parse_args()
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="logsteer-bench-") as directory,
        run_logsteer({"model": options.model}, Path(directory), options.engine) as url,
        Client(url, timeout=3600) as client,
    ):
        for path, read in itertools.product(options.pairs, READS):
            pairs = json.loads(path.read_text())
            train, test = pairs[: options.train], pairs[options.train :][: options.test]
            for way in WAYS:
                started = time.monotonic()
                card = client.vectors.train("v", train, read=read, overwrite=True, **way).vector
                seconds = time.monotonic() - started
                response = evaluate(client, "v", card, test)
                cells = [path.stem, read, *describe(card, response, seconds)]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
