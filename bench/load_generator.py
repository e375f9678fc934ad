"""`vllm bench serve`, the field's own load generator, on stock vLLM and on ours: unmodified."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.models import DEVICE, ID, ROOT, Workplace
from bench.timing import divide, spread

SCRIPT = ROOT / "tests" / "outside" / "clients" / "ask_bench.py"
PROMPTS, LENGTH, TOKENS = (256, 512, 128) if DEVICE == "cuda" else (16, 128, 32)
MEASURED = {
    "request_throughput": "requests_per_s",
    "mean_ttft_ms": "ms_to_first_token",
    "mean_itl_ms": "ms_between_tokens",
}
"""A figure in its result -> its name here."""


def compare_load(place: Workplace, runs: int) -> dict[str, Any]:
    """Its figures on both servers, in turn, on the user's model or SmolLM2."""
    from tests.trained import convert_smollm2

    path = place.given or convert_smollm2()
    found: dict[str, dict[str, list[float]]] = {}
    with place.serve(path) as ours, place.serve_stock(path) as stock:
        servers = {"logsteer": (ours, ID), "stock vLLM server": (stock, "stock")}
        for run in range(runs + 1):
            for way, (url, model) in servers.items():
                result = run_load(url, path, model, place.directory / "load.json", seed=run)
                for figure, name in MEASURED.items():
                    values = found.setdefault(way, {}).setdefault(name, [])
                    if run:
                        values.append(result[figure])
    own, other = found.values()
    ratios = {
        f"logsteer / stock vLLM server, {name}": divide(own[name], other[name])
        if name == "requests_per_s"
        else divide(other[name], own[name])
        for name in MEASURED.values()
    }
    return {
        "runs": runs,
        "unit": "requests",
        "amount": PROMPTS,
        "ways": {
            way: {name: spread(values) for name, values in figures.items()}
            for way, figures in found.items()
        },
        "ratios": ratios,
        "note": f"{PROMPTS} prompts of {LENGTH} random tokens at once, {TOKENS} tokens each; of "
        "times a ratio above 1 is less time",
    }


def run_load(url: str, path: Path, model: str, output: Path, seed: int) -> dict[str, Any]:
    """Return what `vllm bench serve` finds. Errors: RuntimeError where a request fails."""
    options = {
        "base-url": url, "model": path, "served-model-name": model, "seed": seed,
        "dataset-name": "random", "random-input-len": LENGTH, "random-output-len": TOKENS,
        "num-prompts": PROMPTS, "temperature": 0, "result-dir": output.parent,
        "result-filename": output.name,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(
        [*command, "--ignore-eos", "--save-result"],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(output.read_text()) if done.returncode == 0 else {}
    if found.get("failed") != 0:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])
    return found
