"""How long the texts of evaluations are: quantiles of real data, in tokens of the demo's tokenizer.

    .venv/bin/python -m bench.capacity.lengths ../shared/data

The data is no part of the project: sentences of BLiMP, passages of LAMBADA, paragraphs of
WikiText-2. The figures go to `measured.json`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.capacity.steps import BENCH, write_measured

QUANTILES = 21
LEAST_WORDS = 6
"""Lines of WikiText with fewer are headings."""


def read_texts(directory: Path) -> dict[str, list[str]]:
    """Return the texts of each data set."""
    sentences = [
        json.loads(line)["sentence_good"]
        for path in sorted((directory / "blimp").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    lambada = (directory / "lambada-500.jsonl").read_text().splitlines()
    lines = (directory / "wikitext2-valid.txt").read_text().splitlines()
    return {
        "BLiMP sentences": sentences,
        "LAMBADA passages": [json.loads(line)["text"] for line in lambada],
        "WikiText-2 paragraphs": [line for line in lines if len(line.split()) >= LEAST_WORDS],
    }


def describe(texts: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the quantiles of the lengths, their mean, and how they vary."""
    lengths = np.array([len(own.ids) for own in tokenizer.encode_batch(texts)])
    quantiles = np.quantile(lengths, np.linspace(0, 1, QUANTILES))
    return {
        "texts": len(texts),
        "mean": round(float(lengths.mean()), 1),
        "cv2": round(float(lengths.var() / lengths.mean() ** 2), 3),
        "words": round(float(np.mean([len(text.split()) for text in texts])), 1),
        "quantiles": [round(value) for value in quantiles.tolist()],
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    tokenizer = Tokenizer.from_file(str(BENCH.parent / "demo" / "model" / "tokenizer.json"))
    texts = read_texts(parser.parse_args().directory)
    found = {name: describe(own, tokenizer) for name, own in texts.items()}
    write_measured("lengths", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
