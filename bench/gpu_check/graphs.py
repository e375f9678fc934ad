"""Steering under each mode of CUDA graphs, with other plans in the same slots between replays.

An engine of each mode, in a process of its own, generates and scores in rounds; every round has
other plans than the one before in the only two slots. The eager engine then scores the very tokens
that were generated, under the same plans.
"""

import json
import sys
from pathlib import Path

from bench.gpu_check.graph_engine import compare, read_rounds
from bench.gpu_check.part import NO_CUDA, ROOT, Findings, Options, Table, run_command, run_part

MODEL = ROOT / "demo" / "model"
MODES = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")
LIMIT = 1e-4
"""Nats a token, in float32."""
LEAST_EFFECT = 0.01
"""Nats by which every plan changes some token's log-probability, so that it is seen to act."""
TIMEOUT_S = 900


def run_engine(directory: Path, mode: str, *given: Path) -> Path:
    """Run an engine of a mode; return the file of what it answered."""
    answers = directory / f"{mode}.json"
    command = [sys.executable, "-m", "bench.gpu_check.graph_engine", mode, str(MODEL), str(answers)]
    run_command([*command, *map(str, given)], TIMEOUT_S)
    return answers


def measure(options: Options) -> Findings:
    """Run every mode that the device has, then the eager engine over what they generated."""
    found = Findings()
    answers: dict[str, Path] = {}
    for mode in MODES:
        if mode != "NONE" and not options.on_cuda:
            found.not_run.append(f"cudagraph_mode {mode}: {NO_CUDA}")
            continue
        try:
            answers[mode] = run_engine(options.directory, mode)
        except RuntimeError as error:
            found.failures.append(f"cudagraph_mode {mode}: {error}")
    if not answers:
        return found
    eager = json.loads(run_engine(options.directory, "eager", *answers.values()).read_text())
    table = Table(
        "Largest difference in nats a token, demo model in float32, compiled, from the eager "
        "engine; the rounds' plans take the same two slots in turn, and the last are the first's.",
        ["cudagraph_mode", "ran as", "steered, generated", "unsteered, generated",
         "steered, scored", "unsteered, scored", "least effect of steering", "limit"],
    )  # fmt: skip
    for mode, path in answers.items():
        errors = compare(read_rounds(path), eager[mode])
        ran_as = json.loads(path.read_text())["ran_as"]
        for what, difference in errors.items():
            if what != "effect":
                found.need(f"cudagraph_mode {mode}, {what}", difference, LIMIT)
        if not errors["effect"] >= LEAST_EFFECT:
            found.failures.append(f"cudagraph_mode {mode}: a plan changes nothing")
        if options.on_cuda and ran_as != mode:
            found.failures.append(f"cudagraph_mode {mode}: vLLM made {ran_as} of it")
        table.rows.append([mode, ran_as, *errors.values(), LIMIT])
    found.tables.append(table)
    return found


if __name__ == "__main__":
    run_part(measure)
