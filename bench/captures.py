"""Activations of one layer at every token of texts: from `/captures`, from vLLM's own
`extract_hidden_states`, and from a loop of transformers; beside the same texts scored, and read for
one token, without captures.
"""

import uuid
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models import DEVICE, ID, ROOT, Workplace
from bench.servers import start_worker
from bench.timing import summarize, time_in_turn
from logsteer import Client

LAYER = 12
TEXTS = 400 if DEVICE == "cuda" else 64
CHARS = 1000
BATCHES = (1, 4, 16)
"""Of the loop, which is measured at each."""


def cut_texts() -> list[str]:
    """Return pieces of the documentation."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    pieces = [text[start : start + CHARS] for start in range(0, len(text), CHARS)]
    return (pieces * -(-TEXTS // len(pieces)))[:TEXTS]


class Loop:
    """What one writes without a server: `output_hidden_states`, padded at the right, sorted by
    length; the rows are copied to numpy.
    """

    def __init__(self, path: str, dtype: str, ids: list[list[int]]) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self._model = model.to(DEVICE).eval().model  # without the head
        self._ids = sorted(ids, key=len)

    @torch.no_grad()
    def run(self, batch: int) -> int:
        """Capture all texts; return the rows."""
        rows = []
        for start in range(0, len(self._ids), batch):
            own = self._ids[start : start + batch]
            width = max(map(len, own))
            ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in own], device=DEVICE)
            mask_BT = torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i in own]).to(DEVICE)
            found = self._model(ids_BT, attention_mask=mask_BT, output_hidden_states=True)
            # The embeddings come first.
            rows.append(found.hidden_states[LAYER + 1][mask_BT.bool()].float().cpu().numpy())
        return len(np.concatenate(rows))


def compare_captures(place: Workplace, runs: int) -> dict[str, Any]:
    """Return tokens a second of each way, in turn."""
    from tests.trained import convert_smollm2

    path = place.given or convert_smollm2()
    texts, tokenizer = cut_texts(), AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    dtype = place.settings["dtype"]
    loop = Loop(str(path), dtype, ids)
    log = place.directory / "hidden_states.log"
    with (
        place.serve(path) as url,
        Client(url, model=ID, timeout=1200, max_retries=0) as client,
        start_worker(log, "hidden_states", path, dtype, LAYER) as vllm,
    ):

        def capture() -> None:
            name = uuid.uuid4().hex  # a name of its own, or the job is the one before
            index = client.capture(texts, name, [LAYER], progress=False)
            assert index.rows == sum(map(len, ids)), index
            client.captures.delete(name)

        def generate() -> None:
            # Or the prompts would come from the cache of what was read before.
            httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
            client.generate(prompt_ids=ids, max_tokens=1, ignore_eos=True)

        def extract() -> None:
            rows = vllm.ask(ids)
            assert rows == sum(map(len, ids)), rows

        ways: dict[str, Callable[[], object]] = {
            "logsteer, /captures": capture,
            "vLLM, extract_hidden_states": extract,
            "logsteer, /perplexity": lambda: client.perplexity(texts, cache=False),
            "logsteer, /generate of one token": generate,
        }
        for batch in BATCHES:
            ways[f"transformers, batch {batch}"] = lambda batch=batch: loop.run(batch)  # type: ignore[misc]
        seconds = time_in_turn(ways, runs)
    loops = [name for name in seconds if name.startswith("transformers")]
    best = min(loops, key=lambda name: sorted(seconds[name])[len(seconds[name]) // 2])
    seconds["transformers, at its best batch"] = seconds[best]
    first = next(iter(seconds))
    others = [name for name in seconds if name not in (first, *loops)]
    pairs = [(first, other) for other in others]
    result = summarize(seconds, sum(map(len, ids)), "tokens", pairs)
    note = f"layer {LAYER}, {TEXTS} texts of {CHARS} characters; the loop is best at {best}; the "
    note += "client asks five times a second whether a job has ended; vLLM is in the process that "
    note += "asks, and without a GPU its connector runs with two changes (bench/hidden_states.py)"
    return result | {"note": note}
