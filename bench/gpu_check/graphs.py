"""Steering under a mode of CUDA graphs, with other plans in the same slots between replays.

An engine of the mode, in a process of its own, generates and scores in rounds; every round has
other plans than the one before in the only two slots. The eager engine then scores the very tokens
that were generated, under the same plans.
"""

import json
from pathlib import Path
from sys import executable

from bench.gpu_check.graph_engine import compare, read_rounds
from bench.gpu_check.part import NO_CUDA, ROOT, Findings, Options, Table, run_command, run_part

MODEL = ROOT / "demo" / "model"
LIMIT = 1e-4
"""Nats a token, in float32."""
LEAST_EFFECT = 0.01
"""Nats by which every plan changes some token's log-probability, so that it is seen to act."""


def run_engine(directory: Path, mode: str, *given: Path) -> Path:
    """Run an engine of a mode; return the file of what it answered."""
    answers = directory / f"{mode}.json"
    command = [executable, "-m", "bench.gpu_check.graph_engine", mode, str(MODEL), str(answers)]
    run_command([*command, *map(str, given)])
    return answers


def measure(options: Options, found: Findings) -> None:
    """Run the mode, on vLLM's V2 runner behind `v2-`; then the eager V1 over what it generated."""
    case, mode = options.case, options.case.removeprefix("v2-")
    if case != "NONE" and not options.on_cuda:
        found.not_run.append(f"cudagraph_mode {case}: {NO_CUDA}")
        return
    answers = run_engine(options.directory, case)
    eager = json.loads(run_engine(options.directory, "eager", answers).read_text())
    errors = compare(read_rounds(answers), eager[case])
    effect, ran_as = errors.pop("effect"), json.loads(answers.read_text())["ran_as"]
    for what, difference in errors.items():
        found.need(what, difference, LIMIT)
    if not effect >= LEAST_EFFECT:
        found.failures.append("a plan changes nothing")
    if options.on_cuda and ran_as != mode:
        found.failures.append(f"vLLM made {ran_as} of {mode}")
    table = Table(
        "Largest difference in nats a token, demo model in float32, compiled, from the eager "
        "engine; the rounds' plans take the same two slots in turn, and the last are the first's.",
        ["ran as", *errors, "least effect of steering", "limit"],
    )
    table.rows.append([ran_as, *errors.values(), effect, LIMIT])
    found.add(table)


if __name__ == "__main__":
    run_part(measure)
