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
