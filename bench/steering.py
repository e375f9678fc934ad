"""Steered generation: against unsteered, against stock vLLM, and against hooks in Python."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.decoding import GENERATED, SEQUENCES, Answer, Work
from bench.models import DEMO, make_model
from bench.stock import describe_stock
from bench.timing import compare, join_results, summarize
from bench.workplace import Workplace
from logsteer_server.contract.engine import HOOKS

UNCOUNTED = 4
"""Batches of each process before those that count: they use all pages of its cache once."""
SLOTS = 64


class Decoder:
    """A process of `bench/decoding.py` that waits for work; `chosen` has stock's own defaults."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self.chosen: dict[str, Any] = json.loads(self._read("ready"))

    def run(self, work: Work) -> Answer:
        """Do the work there. Errors: RuntimeError where the process ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(work.encode())
        self._process.stdin.flush()
        return Answer(**json.loads(self._read("answer")))

    def _read(self, mark: str) -> str:
        """Return what follows the mark in the next line that begins with it; vLLM prints, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"the process has ended:\n{self._log.read_text()[-3000:]}")


@contextlib.contextmanager
def start_decoder(place: Workplace, kind: str, slots: int = 0, **more: Any) -> Iterator[Decoder]:
    """A process with the model loaded and warm; it is stopped at the end."""
    log = place.directory / f"decoding-{kind}-{slots}-{len(more)}.log"
    path, settings = place.find_model(), json.dumps(place.settings | more)
    command = [sys.executable, "-m", "bench.decoding", kind, str(path), str(slots), settings]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            decoder = Decoder(process, log)
            for seed in range(UNCOUNTED):
                decoder.run(Work(seed))
            yield decoder
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()


@dataclass(slots=True)
class Runs:
    """The runs of one way: seconds of each, and the sequences of the last by their digests."""

    seconds: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def run_in_turn(
    ways: Mapping[str, tuple[Decoder, Mapping[str, Any]]], runs: int
) -> dict[str, Runs]:
    """The runs of each way, in turn, after one uncounted run of each.

    In one turn all ways have the same prompts, which no other turn has.
    """
    found = {name: Runs() for name in ways}
    for turn in range(runs + 1):
        for name, (decoder, settings) in ways.items():
            answer = decoder.run(Work(seed=1000 + turn, **settings))
            found[name].digests = answer.digests
            if turn:
                found[name].seconds.append(answer.seconds)
    return found


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
        ways: dict[str, tuple[Decoder, Mapping[str, Any]]] = {
            plain: (ours, {}),
            all_: (ours, {"steer_every": 1}),
            half: (ours, {"steer_every": 2}),
            without: (ours_without, {}),
            ours_bare: (ours, {"logprobs": False}),
            stock: (vllm, {}),
            bare: (vllm, {"logprobs": False}),
        }
        found = run_in_turn(ways, runs)
        notes = [describe_stock(vllm.chosen)]
    seconds = {name: way.seconds for name, way in found.items()}
    result = summarize(seconds, SEQUENCES * GENERATED, "tokens")
    pairs = [(all_, plain), (half, plain), (plain, without), (plain, stock), (ours_bare, bare)]
    result["ratios"] = {f"{a} / {b}": compare(seconds[a], seconds[b]) for a, b in pairs}
    expected = dict.fromkeys((without, ours_bare, stock, bare), found[plain].digests)
    expected[half] = [
        found[plain if index % 2 else all_].digests[index] for index in range(SEQUENCES)
    ]
    for name, digests in expected.items():
        same = sum(a == b for a, b in zip(found[name].digests, digests, strict=True))
        result["ways"][name]["sequences_as_expected"] = same
    changed = sum(a != b for a, b in zip(found[all_].digests, found[plain].digests, strict=True))
    result["ways"][all_]["sequences_changed"] = changed
    return result | {"notes": notes}


def compare_hooks(place: Workplace, runs: int) -> dict[str, Any]:
    """Steered and not, with every point of a layer compiled in, against resid_post alone."""
    plain, steered = "unsteered, resid_post alone", "steered, resid_post alone"
    idle = "unsteered, all hooks"
    with (
        start_decoder(place, "ours", SLOTS) as default,
        start_decoder(place, "ours", SLOTS, hooks=HOOKS) as ours,
    ):
        ways: dict[str, tuple[Decoder, Mapping[str, Any]]] = {
            plain: (default, {}),
            steered: (default, {"steer_every": 1}),
            idle: (ours, {}),
        } | {f"steered at {h}": (ours, {"steer_every": 1, "hook": h}) for h in HOOKS}
        seconds = {name: way.seconds for name, way in run_in_turn(ways, runs).items()}
    result = summarize(seconds, SEQUENCES * GENERATED, "tokens")
    pairs = [(idle, plain), *((f"steered at {hook}", steered) for hook in HOOKS)]
    result["ratios"] = {f"{a} / {b}": compare(seconds[a], seconds[b]) for a, b in pairs}
    return result


def compare_tlens(place: Workplace, runs: int) -> dict[str, Any]:
    """150 steered tokens from the TransformerLens engine and its peers: two models, or the user's.

    The loop that reads the whole sequences again takes part where a run of it takes seconds.
    """
    if place.given is not None:
        return _run_hooked(place, place.given, runs, batches={1: True, 8: False, 32: False})
    demo = _run_hooked(place, DEMO, runs, batches={1: True, 8: True, 32: False})
    larger = make_model(place.directory)
    found = _run_hooked(place, larger, runs, batches={1: True, 8: False, 32: False})
    return join_results({"demo model": demo, "18 M model": found}) | {"notes": demo["notes"]}


def _run_hooked(
    place: Workplace, path: Path, runs: int, batches: Mapping[int, bool]
) -> dict[str, Any]:
    """What `bench/hooked.py` says of these batches, with the whole sequence again or without."""
    dtype = place.settings["dtype"]
    asked = [str(path), dtype, str(runs), *(f"{n}{'+' * again}" for n, again in batches.items())]
    command = [sys.executable, "-m", "bench.hooked", *asked]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("result "))
    result: dict[str, Any] = json.loads(line.removeprefix("result "))
    return result
