"""Activation patching: `/patch` over HTTP against a loop of TransformerLens, the same places."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from bench.models import DEMO, DEVICE
from bench.timing import compare_with_first, spread, summarize, time_in_turn
from bench.workplace import ID, Workplace
from logsteer import Client

TEXT = "Lily went to the big park with her mother and her big {}. The capital of {} is"
CLEAN, CORRUPTED = TEXT.format("dog", "France"), TEXT.format("cat", "Spain")
TARGET = " Paris"
TOKENS, LAYERS = 20, 5
OURS = "/patch on vLLM over HTTP"
LOOP, ALONE = (f"loop over run_with_hooks, TransformerLens{how}" for how in ("", ", one thread"))


class Loop:
    """The patches as they are written with TransformerLens: a forward pass for each place."""

    def __init__(self, clean: list[int], corrupted: list[int], target: int) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self._bridge = TransformerBridge.boot_transformers(
            str(DEMO), device=DEVICE, dtype=torch.float32
        )
        self._clean_1T, self._corrupted_1T = (
            torch.tensor([ids], device=DEVICE) for ids in (clean, corrupted)
        )
        self._target = target

    @torch.inference_mode()
    def run(self, threads: int) -> list[list[float]]:
        """Return the target's log-probability by layer, by position."""
        torch.set_num_threads(threads)
        _, cache = self._bridge.run_with_cache(self._clean_1T)
        return [
            [self._patch(f"blocks.{layer}.hook_out", position, cache) for position in range(TOKENS)]
            for layer in range(LAYERS)
        ]

    def _patch(self, name: str, position: int, cache: Any) -> float:
        def put(x_1TD: Tensor, hook: object) -> Tensor:  # noqa: ARG001
            x_1TD[:, position] = cache[name][:, position]
            return x_1TD

        logits_1TV = self._bridge.run_with_hooks(self._corrupted_1T, fwd_hooks=[(name, put)])
        return float(logits_1TV[0, -1].log_softmax(-1)[self._target])


def compare_patching(place: Workplace, runs: int) -> dict[str, Any]:
    """Patch each layer of the demo model at each of 20 tokens; log p of one token is the metric.

    A forward pass of the loop is so small that its threads may cost more than they bring.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    clean, corrupted = (tokenizer(text)["input_ids"] for text in (CLEAN, CORRUPTED))
    target = tokenizer(CLEAN + TARGET)["input_ids"][-1]
    pair = {
        name: {"context_ids": ids, "target_ids": [[target]]}
        for name, ids in (("clean", clean), ("corrupted", corrupted))
    }
    assert len(clean) == len(corrupted) == TOKENS
    loop, threads = Loop(clean, corrupted, target), torch.get_num_threads()
    found: dict[str, Any] = {}
    # As the demo's own configuration has it: a model of this size gains nothing from compilation.
    with (
        place.serve(DEMO, compile=False) as url,
        Client(url, model=ID, timeout=300) as client,
    ):

        def ask() -> None:
            found[OURS] = client.patch([pair], cache=False).results[0].matrix

        def repeat(threads: int) -> None:
            found[LOOP] = loop.run(threads)

        seconds = time_in_turn(
            {OURS: ask, LOOP: partial(repeat, threads), ALONE: partial(repeat, 1)}, runs
        )
    result = summarize(seconds, LAYERS * TOKENS, "patches")
    difference = np.abs(np.subtract(found[OURS], found[LOOP])).max()
    figures = {"largest difference, nats": spread([float(difference)])}
    return result | {"ratios": compare_with_first(seconds), "figures": figures}
