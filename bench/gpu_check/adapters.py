"""LoRA adapters on vLLM, in bfloat16 on a GPU, against merged weights in float32."""

import numpy as np
from tests.contract.directions import load_model, read_logprobs
from tests.contract.lora import merge_adapter, write_adapter

from bench.gpu_check.report import Findings, Options, Table
from bench.models import DEMO, ID
from bench.servers import run_logsteer
from logsteer import Client

LIMITS = {"float32": 1e-4, "bfloat16": 0.3}
"""Nats a token; those of a half-precision model with random adapters are rounding."""
LENGTH, VOCAB = 48, 1000


def measure(options: Options, found: Findings) -> None:
    """Score one text without and with each of two adapters, at once."""
    dtype = "bfloat16" if options.on_cuda else "float32"
    ids = np.random.default_rng(0).integers(10, VOCAB, LENGTH).astype(np.int32)
    items = [{"context_ids": ids[:1].tolist(), "target_ids": [ids[1:].tolist()]}]
    table = Table(f"Largest difference in nats a token, demo model in {dtype}.",
                  ["adapter", "from transformers", "limit", "effect of the adapter"])  # fmt: skip
    plain_T = read_logprobs(load_model(DEMO), ids)
    settings = {"dtype": dtype, "memory": "256MiB", "adapter_slots": 2, "compile": options.on_cuda}
    with run_logsteer({ID: DEMO}, options.directory, **settings) as url, Client(url) as client:
        for name in ("a", "b", None):
            model = load_model(DEMO)
            if name:
                path = write_adapter(options.directory / name, seed=ord(name))
                client.adapters.put(name, path)
                merge_adapter(model, path)
            exact_T = read_logprobs(model, ids)
            result = client.logprob(items, **({"adapter": name} if name else {})).results[0]
            error = float(abs(np.array(result.targets[0].logprobs) - exact_T).max())
            found.need(f"adapter {name}", error, LIMITS[dtype])
            table.rows.append([name, error, LIMITS[dtype], float(abs(exact_T - plain_T).max())])
    found.add(table)
