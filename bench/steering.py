"""Steered generation against unsteered, stock vLLM and hooks in Python; patching against a loop."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trained import convert_smollm2
from torch import Tensor
from transformers import AutoTokenizer

from bench.decoding import GENERATED, SEQUENCES
from bench.models import DEMO, DEVICE, ID, Workplace
from bench.servers import Worker, run_module, start_worker
from bench.stock import describe_stock
from bench.timing import join_results, spread, summarize, time_in_turn
from logsteer import Client
from logsteer_server.contract.engine import HOOKS

UNCOUNTED = 4
"""Batches of each process before those that count: they use all pages of its cache once."""
SLOTS = 64


@contextlib.contextmanager
def start_decoder(place: Workplace, kind: str, slots: int = 0, **more: Any) -> Iterator[Worker]:
    """Give a process of `bench/decoding.py` with its model loaded and warm."""
    log = place.directory / f"decoding-{kind}-{slots}-{len(more)}.log"
    settings = json.dumps(place.settings | more)
    with start_worker(log, "decoding", kind, place.find_model(), slots, settings) as decoder:
        for seed in range(UNCOUNTED):
            decoder.ask({"seed": seed})
        yield decoder


def run_in_turn(
    ways: Mapping[str, tuple[Worker, Mapping[str, Any]]], runs: int
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Run the ways in turn, after one uncounted run of each.

    Return the seconds of each run by way, and the sequences of the last run by their digests. In
    one turn all ways have the same prompts, which no other turn has.
    """
    turns = [
        {name: worker.ask({"seed": 1000 + turn, **how}) for name, (worker, how) in ways.items()}
        for turn in range(runs + 1)
    ]
    seconds = {name: [turn[name]["seconds"] for turn in turns[1:]] for name in ways}
    return seconds, {name: answer["digests"] for name, answer in turns[-1].items()}


def compare_decoding(place: Workplace, runs: int) -> dict[str, Any]:
    """32 sequences of 64 tokens, steered and not, with room for steering and not, stock vLLM.

    Unsteered, every way is expected to give the same sequences; half steered, those of the steered
    and of the unsteered way in turn.
    """
    plain, all_, half = "unsteered, 64 slots", "steered", "half steered"
    without, stock = "unsteered, 0 slots", "stock vLLM"
    ours_bare, bare = (f"{name}, no log-probabilities" for name in (plain, stock))
    with (
        start_decoder(place, "ours", SLOTS) as ours,
        start_decoder(place, "ours") as ours_without,
        start_decoder(place, "stock") as vllm,
    ):
        ways: dict[str, tuple[Worker, Mapping[str, Any]]] = {
            plain: (ours, {}),
            all_: (ours, {"steer_every": 1}),
            half: (ours, {"steer_every": 2}),
            without: (ours_without, {}),
            ours_bare: (ours, {"logprobs": False}),
            stock: (vllm, {}),
            bare: (vllm, {"logprobs": False}),
        }
        seconds, found = run_in_turn(ways, runs)
        notes = [describe_stock(vllm.told)]
    pairs = [(all_, plain), (half, plain), (plain, without), (plain, stock), (ours_bare, bare)]
    result = summarize(seconds, SEQUENCES * GENERATED, "tokens", pairs)
    expected = dict.fromkeys((without, ours_bare, stock, bare), found[plain])
    expected[half] = [found[plain if index % 2 else all_][index] for index in range(SEQUENCES)]
    for name, digests in expected.items():
        same = sum(a == b for a, b in zip(found[name], digests, strict=True))
        result["ways"][name]["sequences_as_expected"] = same
    changed = sum(a != b for a, b in zip(found[all_], found[plain], strict=True))
    result["ways"][all_]["sequences_changed"] = changed
    return result | {"notes": notes}


def compare_hooks(place: Workplace, runs: int) -> dict[str, Any]:
    """Steered and not, with every point of a layer compiled in, against resid_post alone.

    One sequence, unsteered, shows what points cost that nobody uses.
    """
    plain, steered = "unsteered, resid_post alone", "steered, resid_post alone"
    idle = "unsteered, all hooks"
    with (
        start_decoder(place, "ours", SLOTS) as default,
        start_decoder(place, "ours", SLOTS, hooks=HOOKS) as ours,
    ):
        ways: dict[str, tuple[Worker, Mapping[str, Any]]] = {
            plain: (default, {}),
            steered: (default, {"steer_every": 1}),
            idle: (ours, {}),
        } | {f"steered at {h}": (ours, {"steer_every": 1, "hook": h}) for h in HOOKS}
        seconds, _ = run_in_turn(ways, runs)
        one = {name: (ways[name][0], {"sequences": 1}) for name in (idle, plain)}
        seconds_of_one, _ = run_in_turn(one, runs)
    pairs = [(idle, plain), *((f"steered at {hook}", steered) for hook in HOOKS)]
    return join_results(
        {
            f"{SEQUENCES} sequences": summarize(seconds, SEQUENCES * GENERATED, "tokens", pairs),
            "one sequence": summarize(seconds_of_one, GENERATED, "tokens", [(idle, plain)]),
        }
    )


def compare_tlens(place: Workplace, runs: int) -> dict[str, Any]:
    """150 steered tokens from the TransformerLens engine and its peers: two models, or the user's.

    The loop that reads the whole sequences again takes part where a run of it takes seconds.
    """
    if place.given is not None:
        return _run_hooked(place, place.given, runs, batches={1: True, 8: False, 32: False})
    demo = _run_hooked(place, DEMO, runs, batches={1: True, 8: True, 32: False})
    found = _run_hooked(place, convert_smollm2(), runs, batches={1: False, 8: False, 32: False})
    return join_results({"demo model": demo, "SmolLM2-135M": found}) | {"notes": demo["notes"]}


def _run_hooked(
    place: Workplace, path: Path, runs: int, batches: Mapping[int, bool]
) -> dict[str, Any]:
    """What `bench/hooked.py` says of these batches, with the whole sequence again or without."""
    dtype = place.settings["dtype"]
    asked = [str(path), dtype, str(runs), *(f"{n}{'+' * again}" for n, again in batches.items())]
    return run_module("hooked", *asked)


TEXT = "{} went to the big park with her mother and her big {}. The capital of {} is"
CLEAN = TEXT.format("Lily", "dog", "France")
CORRUPTED, APART = (TEXT.format(name, "cat", "Spain") for name in ("Lily", "Anna"))
TARGET = " Paris"
LAYERS = 5
OURS = "/patch on vLLM over HTTP"
OURS_APART = "/patch of texts whose first words differ"
LOOP, ALONE = (f"loop over run_with_hooks, TransformerLens{how}" for how in ("", ", one thread"))


class Loop:
    """The patches as they are written with TransformerLens: a forward pass for each place."""

    def __init__(self, path: Path, dtype: str, clean: list[int], target: int) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self._bridge = TransformerBridge.boot_transformers(
            str(path), device=DEVICE, dtype=getattr(torch, dtype)
        )
        count = self._bridge.cfg.n_layers
        self.layers = range(0, count, max(1, count // LAYERS))[:LAYERS]
        self._clean_1T = torch.tensor([clean], device=DEVICE)
        self._target = target

    @torch.inference_mode()
    def run(self, corrupted: list[int], threads: int) -> list[list[float]]:
        """Return the target's log-probability by layer, by position."""
        torch.set_num_threads(threads)
        _, cache = self._bridge.run_with_cache(self._clean_1T)
        tokens_1T = torch.tensor([corrupted], device=DEVICE)
        return [
            [
                self._patch(tokens_1T, f"blocks.{n}.hook_out", at, cache)
                for at, _ in enumerate(corrupted)
            ]
            for n in self.layers
        ]

    def _patch(self, tokens_1T: Tensor, name: str, position: int, cache: Any) -> float:
        def put(x_1TD: Tensor, hook: object) -> Tensor:  # noqa: ARG001
            x_1TD[:, position] = cache[name][:, position]
            return x_1TD

        logits_1TV = self._bridge.run_with_hooks(tokens_1T, fwd_hooks=[(name, put)])
        return float(logits_1TV[0, -1].log_softmax(-1)[self._target])


def compare_patching(place: Workplace, runs: int) -> dict[str, Any]:
    """Patch at most five layers at each of some 20 tokens; log p of one token is the metric.

    They are all layers of the demo model, and every sixth of one with 30. A forward pass of the
    loop may be so small that its threads cost more than they bring. The texts begin with the same
    13 tokens, for which the loop runs the model and `/patch` does not; so texts whose first words
    differ are measured, too.
    """
    path = place.given or DEMO
    tokenizer = AutoTokenizer.from_pretrained(path)
    clean, *others = (tokenizer(text)["input_ids"] for text in (CLEAN, CORRUPTED, APART))
    corrupted, apart = others
    target = tokenizer(CLEAN + TARGET)["input_ids"][-1]
    assert len({len(ids) for ids in (clean, corrupted, apart)}) == 1
    loop, threads = Loop(path, place.dtype, clean, target), torch.get_num_threads()
    layers = [[n] for n in loop.layers]
    found: dict[str, Any] = {}
    # Eager, as the loop is, and as the demo's own configuration has it.
    with (
        place.serve(path, compile=False) as url,
        Client(url, model=ID, timeout=300) as client,
    ):

        def ask(name: str, ids: list[int]) -> None:
            items = ({"context_ids": own, "target_ids": [[target]]} for own in (clean, ids))
            pair = dict(zip(("clean", "corrupted"), items, strict=True))
            found[name] = client.patch([pair], layers=layers, cache=False).results[0].matrix

        def repeat(threads: int) -> None:
            found[LOOP] = loop.run(corrupted, threads)

        ways: dict[str, Callable[[], object]] = {
            OURS: partial(ask, OURS, corrupted),
            OURS_APART: partial(ask, OURS_APART, apart),
            LOOP: partial(repeat, threads),
            ALONE: partial(repeat, 1),
        }
        seconds = time_in_turn(ways, runs)
    same = (OURS, found[LOOP]), (OURS_APART, loop.run(apart, 1))
    difference = max(np.abs(np.subtract(found[name], other)).max() for name, other in same)
    figures = {"largest difference, nats": spread([float(difference)])}
    pairs = [(own, other) for own in (OURS, OURS_APART) for other in (LOOP, ALONE)]
    return summarize(seconds, len(layers) * len(clean), "patches", pairs) | {"figures": figures}
