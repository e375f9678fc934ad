"""Five families of models against transformers, on tiny random checkpoints."""

import json
import sys
from typing import Any

from tests.families.checkpoints import FAMILIES

from bench.gpu_check.report import NO_CUDA, Cell, Findings, Options, Table, run_command

CHOSEN = ("llama", "qwen3", "gemma3", "mistral", "stablelm")
"""The usual one, a norm on queries and keys, scaled embeddings, a window, a stale residual."""
CHECKS = ("scores", "prefix", "captures", "add", "ablate", "rotate", "generation")
LIMITS = {"float32": 1e-4, "bfloat16": None}
"""Nats, or parts of the activations' size; bfloat16 is shown and not judged."""


def measure(options: Options, found: Findings) -> None:
    """Make the checkpoints, and measure each in one dtype."""
    dtype = options.case
    if dtype != "float32" and not options.on_cuda:
        found.not_run.append(f"{dtype}: {NO_CUDA}")
        return
    paths = []
    for family in CHOSEN:
        FAMILIES[family].make(options.directory / family)
        paths.append(str(options.directory / family))
    mode = "eager" if options.quick else "compiled"
    table = Table(
        f"vLLM, {mode}: largest difference from transformers in float32, of log-probabilities in "
        "nats, of captures as a part of their root mean square.",
        ["family", *CHECKS],
    )
    command = [sys.executable, "-m", "tests.families.family_probe", "vllm", mode, dtype, *paths]
    output = run_command(command).splitlines()
    lines = [json.loads(line) for line in output if line.startswith("{")]
    if len(lines) != len(paths):
        found.failures.append(f"{len(lines)} of {len(paths)} families answered")
    for line in lines:
        table.rows.append([line["family"], *judge(found, line, dtype, LIMITS[dtype])])
    found.add(table)


def judge(found: Findings, line: dict[str, Any], dtype: str, limit: float | None) -> list[Cell]:
    """Return a family's differences, and note what is above the limit, refused or dead."""
    what = f"{line['family']}, {dtype}"
    if words := line.get("refused", line.get("died")):
        found.failures.append(f"{what}: {words}")
        return [None] * len(CHECKS)
    cells: list[Cell] = []
    for check in CHECKS:
        value = line[check]
        if isinstance(value, str):
            found.failures.append(f"{what}, {check}: {value}")
            value = None
        elif limit is not None:
            found.need(f"{what}, {check}", value, limit)
        cells.append(value)
    return cells
