"""Scores of both engines and of transformers in float32, held against transformers in float64."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.models import DEMO, ROOT, Workplace
from bench.timing import spread
from logsteer import Client

SENTENCES = 1000
Floats = NDArray[np.float64]


def read_sentences() -> list[str]:
    """Return sentences of this project's Markdown, each with at least four words."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "SECURITY.md"]
    text = re.sub(r"```.*?```", "", "\n\n".join(p.read_text() for p in pages), flags=re.DOTALL)
    found = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s|\n\n|\|", text))
    return list(dict.fromkeys(part for part in found if part.count(" ") >= 3))[:SENTENCES]


@torch.inference_mode()
def score_in_transformers(path: Path, texts: list[list[int]], dtype: torch.dtype) -> list[Floats]:
    """Return the log-probabilities of each text's tokens after the first, by teacher forcing."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    scores = []
    for ids in texts:
        log_p_TV = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        scores.append(log_p_TV[range(len(ids) - 1), ids[1:]].numpy())
    return scores


def score_over_http(
    place: Workplace, engine: str, path: Path, texts: list[list[int]]
) -> list[Floats]:
    """Return the same from a server of ours."""
    items = [{"context_ids": ids[:1], "target_ids": [ids[1:]]} for ids in texts]
    with place.serve(path, engine, dtype="float32") as url, Client(url, timeout=600) as client:
        answer = client.logprob(items)
    return [np.array(result.targets[0].logprobs, dtype=np.float64) for result in answer.results]


def measure_exactness(place: Workplace, runs: int) -> dict[str, Any]:
    """Errors of each way in nats: of a token, on average and at most, and of a sentence's sum."""
    path = place.given or DEMO
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer(sentence).input_ids for sentence in read_sentences()]
    exact = score_in_transformers(path, texts, torch.float64)
    scores = {
        "transformers": score_in_transformers(path, texts, torch.float32),
        "vllm": score_over_http(place, "vllm", path, texts),
        "transformer_lens": score_over_http(place, "transformer_lens", path, texts),
    }
    ways, means = {}, {}
    for way, own in scores.items():
        errors = [a - b for a, b in zip(own, exact, strict=True)]
        tokens = np.abs(np.concatenate(errors))
        sums = np.array([abs(error.sum()) for error in errors])
        means[way] = float(tokens.mean())
        ways[way] = {
            "nats a token, mean": float(f"{means[way]:.2g}"),
            "nats a token, largest": float(f"{tokens.max():.2g}"),
            "nats a sentence, largest": float(f"{sums.max():.2g}"),
        }
    ratios = {
        f"{way} / transformers": spread([means[way] / means["transformers"]])
        for way in ("vllm", "transformer_lens")
    }
    return {"runs": runs, "ways": ways, "ratios": ratios, "notes": [f"{len(texts)} sentences"]}
