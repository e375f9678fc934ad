"""Rows for a host with a model of its user's: stock vLLM's own benchmark, and the harness on it.

.venv/bin/python bench/run.py --model CHECKPOINT --only throughput lm_eval_vllm
"""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import COUNT, make_requests
from logsteer import Client
from models import DEVICE, read_vocab
from timing import compare_with_first, summarize, time_call
from workplace import GPU_CACHE, Workplace

PROMPTS, PROMPT, GENERATED = (256, 512, 128) if DEVICE == "cuda" else (16, 64, 16)
CALLERS = 8
LONGEST = 512
"""Tokens of a sequence of the harness; the sentences have about 22."""


def compare_throughput(place: Workplace, runs: int) -> dict[str, Any]:
    """Generation over HTTP, with log-probabilities, against `vllm bench throughput` without them.

    Random prompts of the same length, greedy, as many tokens generated, the same cache.
    """
    path = place.find_model()
    vocab, part = read_vocab(path), PROMPTS // CALLERS
    ways = {"logsteer /generate": [], "vllm bench throughput": []}  # type: dict[str, list[float]]
    with place.serve(path) as url, Client(url, timeout=3600) as client:

        def ask(seed: int) -> None:
            draw = random.Random(seed)
            ids = [[draw.randrange(10, vocab) for _ in range(PROMPT)] for _ in range(part)]
            client.generate(
                None, prompt_ids=ids, max_tokens=GENERATED, temperature=0.0, ignore_eos=True
            )

        def ask_all(run: int) -> None:
            with ThreadPoolExecutor(CALLERS) as pool:
                list(pool.map(ask, range(run * CALLERS, (run + 1) * CALLERS)))

        for run in range(runs + 1):
            own = time_call(lambda run=run: ask_all(run))  # type: ignore[misc]
            if run:
                ways["logsteer /generate"].append(own)
                ways["vllm bench throughput"].append(run_stock_benchmark(place, path))
    tokens = PROMPTS * (PROMPT + GENERATED)
    return summarize(ways, tokens, "tokens") | {"ratios": compare_with_first(ways)}


def run_stock_benchmark(place: Workplace, path: Path) -> float:
    """Return the seconds that `vllm bench throughput` says, which leave out loading the model."""
    output = place.directory / "throughput.json"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "throughput",
        "--model", str(path), "--dtype", place.settings["dtype"], "--dataset-name", "random",
        "--random-input-len", str(PROMPT), "--random-output-len", str(GENERATED),
        "--num-prompts", str(PROMPTS), "--output-json", str(output),
        "--max-model-len", str(PROMPT + GENERATED + 64), *list_cache_options(),
    ]  # fmt: skip
    own = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr.strip()[-2000:]}")
    return float(json.loads(output.read_text())["elapsed_time"])


def list_cache_options() -> list[str]:
    """Return the arguments that give stock vLLM a cache as large as ours."""
    return ["--kv-cache-memory-bytes", str(GPU_CACHE)] if DEVICE == "cuda" else ["--enforce-eager"]


def compare_harness_on_vllm(place: Workplace, runs: int) -> dict[str, Any]:
    """The adapter over HTTP against the harness's own `vllm` model, in a process of its own."""
    from logsteer.lm_eval import LogsteerLM

    path = place.find_model()
    sort, requests = make_requests(COUNT)
    ways = {"logsteer": [], "lm_eval --model vllm": []}  # type: dict[str, list[float]]
    command = [sys.executable, __file__, str(path), place.settings["dtype"]]
    with (
        place.serve(path) as url,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as harness,
    ):
        model = LogsteerLM(base_url=url)
        assert harness.stdin is not None
        assert harness.stdout is not None
        for run in range(runs + 1):
            own = time_call(lambda: model.loglikelihood(requests, disable_tqdm=True))
            harness.stdin.write("again\n")
            harness.stdin.flush()
            lines = (line for line in harness.stdout if line.startswith("seconds "))
            other = float(next(lines).removeprefix("seconds "))
            if run:
                ways["logsteer"].append(own)
                ways["lm_eval --model vllm"].append(other)
        harness.stdin.close()
    result = summarize(ways, COUNT, "sequences") | {"ratios": compare_with_first(ways)}
    return result | {"notes": [f"{COUNT} sequences of {sort}"]}


def main() -> None:
    """Score all sequences with the harness's `vllm` model for every line of stdin."""
    from lm_eval.models.vllm_causallms import VLLM

    path, dtype = sys.argv[1:]
    cache = {"kv_cache_memory_bytes": GPU_CACHE} if DEVICE == "cuda" else {"enforce_eager": True}
    model = VLLM(pretrained=path, dtype=dtype, batch_size="auto", max_model_len=LONGEST, **cache)
    _, requests = make_requests(COUNT)
    for _ in sys.stdin:
        taken = time_call(lambda: model.loglikelihood(requests, disable_tqdm=True))
        print(f"seconds {taken}", flush=True)


if __name__ == "__main__":
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main()
