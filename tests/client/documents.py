"""Answers as a server would send them, small."""

import json
from typing import Any

HEALTH = {"status": "ok", "version": "1"}
PROVENANCE = {
    "engine": "fake",
    "engine_version": "1",
    "model_path": "p",
    "weights_digest": "w",
    "dtype": "float32",
    "logits_dtype": "float32",
    "quantization": None,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "batch_invariant": True,
    "vocab_size": 7,
    "tokenizer_digest": "t",
    "protocol": "sliding",
}
ANSWER: dict[str, Any] = {
    "id": "r",
    "model": "demo",
    "usage": {"prompt_tokens": 3, "scored_tokens": 2},
    "timing": {"queue_ms": 0.5, "engine_ms": 1.5},
    "provenance": PROVENANCE,
}
SCORE = {
    "sum_logprob": -2.0,
    "sum_squared_logprob": 3.0,
    "num_tokens": 5,
    "num_scored": 4,
    "num_bytes": 8,
    "num_chars": 8,
    "num_words": 2,
    "perplexity": 1.6487,
    "word_perplexity": 2.7,
    "byte_perplexity": 1.3,
    "bits_per_byte": 0.36,
    "stderr": 0.2,
}
PERPLEXITY = {**ANSWER, "results": [SCORE], "total": SCORE}
START = {"id": "r", "model": "demo", "provenance": PROVENANCE}
MODELS = {
    "models": [
        {
            "id": "demo",
            "engine": "fake",
            "state": "ready",
            "detail": "[bold]serving",
            "required": True,
            "context_length": 128,
        }
    ]
}
TOKENS = {
    "model": "demo",
    "results": [{"token_ids": [1, 9], "tokens": ["<s>", " Hi"], "offsets": [None, [0, 3]]}],
}


def window(done: int, total: int | None = None) -> dict[str, Any]:
    """The `done`-th window's event."""
    one = {
        "text": 0,
        "start": 2 * done,
        "end": 2 * done + 2,
        "num_scored": 2,
        "sum_logprob": -1.0,
        "sum_squared_logprob": 1.0,
    }
    return {
        "window": one,
        "windows_done": done,
        "windows_total": total,
        "sum_logprob": -1.0 * done,
        "num_scored": 2 * done,
        "perplexity": 1.65,
    }


def target(text: str, logprob: float | None, **more: Any) -> dict[str, Any]:
    """One target's score."""
    return {
        "target": text,
        "logprob": logprob,
        "prob": 0.25,
        "perplexity": 2.0,
        "num_tokens": len(text),
        "num_bytes": len(text),
        "boundary": "exact",
        **more,
    }


def logprob_answer(*results: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer of `/logprob` with these targets per item; the first target is the best."""
    items = [{"targets": r, "best": 0, "choice_probs": [1 / len(r)] * len(r)} for r in results]
    return {**ANSWER, "results": items}


def events(*pairs: tuple[str, Any]) -> str:
    """Server-sent events of these names and documents."""
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in pairs)


PERPLEXITY_EVENTS = events(
    ("start", START), ("window", window(1)), ("window", window(2, 2)), ("result", PERPLEXITY)
)


def steering_receipt() -> dict[str, Any]:
    """A receipt of one vector at one layer."""
    return {
        "tokens_steered": 5,
        "layers": {"2": {"tokens": 5, "relative_norm": 0.25}},
        "vectors": [{"name": "mood", "sha256": "ab" * 32, "scale": 2.0}],
    }


def piece(text: str, *, steered: bool = True) -> dict[str, Any]:
    """A piece of the first completion."""
    return {
        "prompt": 0,
        "completion": 0,
        "steered": steered,
        "text": text,
        "token_ids": [1],
        "logprobs": [-0.5],
        "finish_reason": None,
    }


def completion(text: str, seed: int = 7) -> dict[str, Any]:
    """A completion of two tokens."""
    return {
        "text": text,
        "token_ids": [1, 2],
        "tokens": [text[:1], text[1:]],
        "logprobs": [-0.5, -1.0],
        "logprob": -1.5,
        "num_tokens": 2,
        "finish_reason": "length",
        "seed": seed,
    }


def steer_answer(n: int = 1, *, baseline: bool = False) -> dict[str, Any]:
    """An answer of `/steer` with completions "glad 0", "glad 1", and baselines "sad 0", …"""
    steered = [completion(f"glad {k}", 7 + k) for k in range(n)]
    plain = [completion(f"sad {k}", 7 + k) for k in range(n)] if baseline else None
    results = [{"completions": steered, "baseline": plain, "prompt_ids": [1, 9]}]
    return {**ANSWER, "results": results, "steering": steering_receipt()}


def sweep_point(scale: float, layers: list[int] | None) -> dict[str, Any]:
    """One item with two targets and one text at a scale; a null at -1."""
    logprobs = {-1: [-2.5, None], 0: [-1.0, -2.0], 1: [-0.5, -4.0]}[int(scale)]
    changes = {-1: [-1.5, None], 0: [0.0, 0.0], 1: [0.5, -2.0]}[int(scale)]
    pairs = zip(logprobs, changes, strict=True)
    targets = [{"logprob": logprob, "change": change} for logprob, change in pairs]
    perplexity = {-1: 3.0, 0: 2.0, 1: 4.0}[int(scale)]
    return {
        "layers": layers,
        "scale": scale,
        "items": [{"targets": targets, "kl": 0.5 * abs(scale)}],
        "texts": [{"perplexity": perplexity, "sum_logprob": -1.0, "num_scored": 3}],
        "relative_norm": 0.125 if scale else None,
    }


SWEEP = {
    **ANSWER,
    "unsteered": sweep_point(0, None),
    "points": [sweep_point(scale, [layer]) for layer in (2, 3) for scale in (-1, 0, 1)],
}
CHECKS = [
    {
        "name": name,
        "promise": "It [red]holds.",
        "verdict": verdict,
        "reason": reason,
        "num_compared": count,
        "largest_difference": largest,
        "rms_difference": largest,
        "tolerance": 1e-4,
        "noise_floor": 5e-7,
    }
    for name, verdict, reason, count, largest in (
        ("batched", "passed", "10 texts", 903, 0.0),
        ("shuffled", "passed", "10 texts", 902, 5.7e-6),
        ("steered_neighbour", "failed", "value 3 differs", 901, 0.25),
        ("chunked", "not_run", "one step", 0, None),
    )
]
SELFTEST = {
    **ANSWER, "verdict": "failed", "checks": CHECKS, "against": None, "num_texts": 10,
    "num_tokens": 913, "seconds": 2.5,
}  # fmt: skip


def gradient_answer(**fields: Any) -> dict[str, Any]:
    """An answer of `/gradient` with one target."""
    one = {"target": " glad", "token_ids": [5], "logprobs": [-1.0], "logprob": -1.0,
           "num_context": 2, "boundary": "exact", **fields}  # fmt: skip
    return {**ANSWER, "results": [{"targets": [one]}]}


ATTRIBUTED = gradient_answer(
    input_ids=[3, 4], input_tokens=["I", " <am>"], attributions=[0.5, -0.25],
    baseline_logprob=-1.25, convergence_delta=0.0,
)  # fmt: skip
