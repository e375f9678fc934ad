"""Activation patching: `/patch` over HTTP against a loop of TransformerLens, the same places."""

from collections.abc import Callable
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

TEXT = "{} went to the big park with her mother and her big {}. The capital of {} is"
CLEAN = TEXT.format("Lily", "dog", "France")
CORRUPTED, APART = (TEXT.format(name, "cat", "Spain") for name in ("Lily", "Anna"))
TARGET = " Paris"
TOKENS, LAYERS = 20, 5
OURS = "/patch on vLLM over HTTP"
OURS_APART = "/patch of texts whose first words differ"
LOOP, ALONE = (f"loop over run_with_hooks, TransformerLens{how}" for how in ("", ", one thread"))


class Loop:
    """The patches as they are written with TransformerLens: a forward pass for each place."""

    def __init__(self, clean: list[int], target: int) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self._bridge = TransformerBridge.boot_transformers(
            str(DEMO), device=DEVICE, dtype=torch.float32
        )
        self._clean_1T = torch.tensor([clean], device=DEVICE)
        self._target = target

    @torch.inference_mode()
    def run(self, corrupted: list[int], threads: int) -> list[list[float]]:
        """Return the target's log-probability by layer, by position."""
        torch.set_num_threads(threads)
        _, cache = self._bridge.run_with_cache(self._clean_1T)
        tokens_1T = torch.tensor([corrupted], device=DEVICE)
        return [
            [self._patch(tokens_1T, f"blocks.{layer}.hook_out", n, cache) for n in range(TOKENS)]
            for layer in range(LAYERS)
        ]

    def _patch(self, tokens_1T: Tensor, name: str, position: int, cache: Any) -> float:
        def put(x_1TD: Tensor, hook: object) -> Tensor:  # noqa: ARG001
            x_1TD[:, position] = cache[name][:, position]
            return x_1TD

        logits_1TV = self._bridge.run_with_hooks(tokens_1T, fwd_hooks=[(name, put)])
        return float(logits_1TV[0, -1].log_softmax(-1)[self._target])


def compare_patching(place: Workplace, runs: int) -> dict[str, Any]:
    """Patch each layer of the demo model at each of 20 tokens; log p of one token is the metric.

    A forward pass of the loop is so small that its threads may cost more than they bring. The texts
    begin with the same 13 tokens, for which the loop runs the model and `/patch` does not; so texts
    whose first words differ are measured, too.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    clean, *others = (tokenizer(text)["input_ids"] for text in (CLEAN, CORRUPTED, APART))
    corrupted, apart = others
    target = tokenizer(CLEAN + TARGET)["input_ids"][-1]
    assert {len(ids) for ids in (clean, corrupted, apart)} == {TOKENS}
    loop, threads = Loop(clean, target), torch.get_num_threads()
    found: dict[str, Any] = {}
    # As the demo's own configuration has it: a model of this size gains nothing from compilation.
    with (
        place.serve(DEMO, compile=False) as url,
        Client(url, model=ID, timeout=300) as client,
    ):

        def ask(name: str, ids: list[int]) -> None:
            items = ({"context_ids": own, "target_ids": [[target]]} for own in (clean, ids))
            pair = dict(zip(("clean", "corrupted"), items, strict=True))
            found[name] = client.patch([pair], cache=False).results[0].matrix

        def repeat(threads: int) -> None:
            found[LOOP] = loop.run(corrupted, threads)

        ways: dict[str, Callable[[], object]] = {
            OURS: partial(ask, OURS, corrupted),
            OURS_APART: partial(ask, OURS_APART, apart),
            LOOP: partial(repeat, threads),
            ALONE: partial(repeat, 1),
        }
        seconds = time_in_turn(ways, runs)
    result = summarize(seconds, LAYERS * TOKENS, "patches")
    pairs = (OURS, found[LOOP]), (OURS_APART, loop.run(apart, 1))
    difference = max(np.abs(np.subtract(found[name], other)).max() for name, other in pairs)
    figures = {"largest difference, nats": spread([float(difference)])}
    ratios = compare_with_first({name: seconds[name] for name in (OURS, LOOP, ALONE)})
    ratios |= compare_with_first({name: seconds[name] for name in (OURS_APART, LOOP, ALONE)})
    return result | {"ratios": ratios, "figures": figures}
