"""Short items as evaluations send them, and what they cost without a service.

    .venv/bin/python -m bench.short_items TOKENIZER COUNT < ANSWER.json

prints as JSON the CPU microseconds an item of a process that does nothing but what any service has
to do with such calls: read the JSON of their bodies, encode the texts, write the JSON of the answer
given; and those of the fake engine, called where its jobs are made.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from bench.models import DEMO, corpus
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.engines.fake import FakeEngine

Item = dict[str, Any]
AT_ONCE = 256
"""Items of a call."""
FAKE = {"vocab_size": 2048, "context_length": 512}
"""Settings of the fake engine that answers them."""


def make_pairs(
    count: int, seed: int, ending: str = " Once upon a time there was a cat."
) -> list[tuple[str, str]]:
    """Return contexts and targets of 25 tokens together, in the mean, with the demo's tokenizer.

    So many they are with the ending that is given where nothing else is.
    """
    draw = random.Random(seed)
    countries, cities = list(corpus.CAPITALS), list(corpus.CAPITALS.values())
    elements = list(corpus.SYMBOLS.items())
    pairs = []
    for _ in range(count):
        element, symbol = draw.choice(elements)
        facts = f"The chemical symbol for {element} is {symbol}. The capital of"
        pairs.append((f"{facts} {draw.choice(countries)} is", f" {draw.choice(cities)}.{ending}"))
    return pairs


def as_text(pairs: Sequence[tuple[str, str]]) -> list[Item]:
    """Return the pairs as items of `/logprob`."""
    return [{"context": context, "targets": [target]} for context, target in pairs]


def as_ids(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Item]:
    """Return the pairs as items of `/logprob` that are encoded already."""
    joined = tokenizer.encode_batch([context + target for context, target in pairs])
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    return [
        {"context_ids": own.ids[: len(first.ids)], "target_ids": [own.ids[len(first.ids) :]]}
        for own, first in zip(joined, contexts, strict=True)
    ]


def make_bodies(items: Sequence[Item], model: str = "fake") -> list[bytes]:
    """Return the bodies of the calls that score the items."""
    starts = range(0, len(items), AT_ONCE)
    return [orjson.dumps({"model": model, "items": items[n : n + AT_ONCE]}) for n in starts]


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint as the library `tokenizers` has it."""
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def time_minimum(bodies: Sequence[bytes], answer: dict[str, Any], tokenizer: Tokenizer) -> float:
    """Return the CPU seconds for reading the bodies, encoding their texts, writing the answers."""
    started = time.process_time()
    for body in bodies:
        items = orjson.loads(body)["items"]
        texts = [item["context"] + item["targets"][0] for item in items]
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        assert len(ids) == len(items)
        orjson.dumps(answer)
    return time.process_time() - started


def time_fake_engine(count: int) -> float:
    """Return the CPU seconds of the fake engine for so many items, made before."""
    engine = FakeEngine(EngineSpec("fake", "fake", str(DEMO), engine_args=FAKE))
    rng = np.random.default_rng(0)
    ids_NT = rng.integers(10, 500, (count, 26), dtype=np.int32)
    jobs = list(enumerate(ScoreJob(ids_T[:-1], ids_T[-13:]) for ids_T in ids_NT))
    started = time.process_time()
    for first in range(0, count, AT_ONCE):
        engine.add(jobs[first : first + AT_ONCE])
        engine.step()
    return time.process_time() - started


def main() -> None:
    """Measure once, after calls that warm up."""
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    tokenizer = load_tokenizer(path)
    answer = json.load(sys.stdin)
    bodies = make_bodies(as_text(make_pairs(count, seed=1)))
    time_minimum(bodies[:8], answer, tokenizer)
    time_fake_engine(8 * AT_ONCE)
    found = {
        "tokenising and JSON alone": time_minimum(bodies, answer, tokenizer),
        "the fake engine alone": time_fake_engine(count),
    }
    print(json.dumps({name: 1e6 * seconds / count for name, seconds in found.items()}))


if __name__ == "__main__":
    main()
