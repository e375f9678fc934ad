"""Steered generation with TransformerLens: `hooked.py MODEL DTYPE RUNS BATCH…`, in its own process.

Every way continues the same prompts greedily by the same number of tokens, with the same vector
added behind the same layer for every token. A batch with a plus, `8+`, is also continued by reading
the whole sequences again for every token.
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bench.models import DEVICE, GREEDY, generate
from bench.servers import print_result
from bench.timing import join_results, summarize, time_in_turn
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.engines.tlens.engine import TransformerLensEngine

GENERATED = 150
LAYER = 2
PROMPTS = (
    "Once upon a time there was a little girl who had a red ball.",
    "One day a boy went to the park with his dog and his mother.",
    "The capital of France is Paris. The capital of Italy is Rome.",
    "A cat and a bird lived on an old farm near a big dark forest.",
    "Lily was very happy because the sun was warm and the sky blue.",
    "Tom was sad. His kite had flown away over the lake that day.",
    "The chemical symbol for iron is Fe. The largest planet is Jupiter.",
    "There was a pony in the garden and it liked to eat green grass.",
)
LENGTH = 12
"""Tokens that every prompt is cut to, because the peers differ in how they pad."""
EXTRA = 100
"""A token that any model has."""

Way = Callable[[Tensor], list[list[int]]]
AGAIN = "whole sequence again, TransformerLens run_with_hooks"


def make_prompts(path: str, batch: int) -> Tensor:
    """The first prompts' tokens [B, T]; those of the second eight end in other tokens, and so on.

    So no two sequences of a batch are the same.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids_BT = [
        tokenizer(text)["input_ids"][: LENGTH - round_] + [EXTRA + round_] * round_
        for round_ in range(-(-batch // len(PROMPTS)))
        for text in PROMPTS
    ]
    return torch.tensor(ids_BT[:batch], device=DEVICE)


def make_engine(path: str, dtype: str, vector: Tensor) -> Way:
    """logsteer's engine; a job for each prompt."""
    engine = TransformerLensEngine(EngineSpec("bench", "transformer_lens", path, dtype=dtype))
    plan = SteeringPlan((Site(LAYER, "resid_post", vector.float().cpu().numpy()),))

    def run(prompts_BT: Tensor) -> list[list[int]]:
        ids_BT = prompts_BT.cpu().numpy().astype(np.int32)
        jobs = [
            GenerateJob(ids_T, GENERATED, GREEDY, ignore_eos=True, plan=plan) for ids_T in ids_BT
        ]
        return generate(engine, jobs)

    return run


def make_bridge_ways(path: str, vector: Tensor) -> dict[str, Way]:
    """TransformerLens's own: `run_with_hooks` again and again, and `generate` under hooks."""
    bridge = TransformerBridge.boot_transformers(path, device=DEVICE, dtype=vector.dtype)
    hooks: list[Any] = [(f"blocks.{LAYER}.hook_out", lambda x, hook: x + vector)]  # noqa: ARG005

    def repeat(prompts_BT: Tensor) -> list[list[int]]:
        ids_BT = prompts_BT
        for _ in range(GENERATED):
            logits_BTV = bridge.run_with_hooks(ids_BT, fwd_hooks=hooks)
            next_B1 = logits_BTV[:, -1].argmax(-1, keepdim=True)
            ids_BT = torch.cat([ids_BT, next_B1], dim=-1)
        return _cut(ids_BT)

    def continue_(prompts_BT: Tensor) -> list[list[int]]:
        with bridge.hooks(fwd_hooks=hooks):
            ids_BT = bridge.generate(
                prompts_BT, max_new_tokens=GENERATED, stop_at_eos=False, do_sample=False,
                use_past_kv_cache=True, return_type="tokens", verbose=False,
            )  # fmt: skip
        assert isinstance(ids_BT, Tensor)
        return _cut(ids_BT)

    return {AGAIN: repeat, "TransformerLens generate with hooks": continue_}


def make_repeng(path: str, vector: Tensor) -> dict[str, Way]:
    """`ControlModel.generate` of repeng; nothing where it is not installed, as on a bare host."""
    if importlib.util.find_spec("repeng") is None:
        return {}
    if not hasattr(np, "float_"):
        np.float_ = np.float64  # type: ignore[attr-defined]  # repeng 0.4.0 names it when imported, and NumPy 2 has dropped it
    from repeng import ControlModel

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=vector.dtype).eval().to(DEVICE)
    plain.generation_config.eos_token_id = None  # so that `generate` never ends early
    model = ControlModel(plain, [LAYER])
    model.set_raw_control({LAYER: vector})
    return {"repeng ControlModel generate": lambda ids_BT: _generate(model, ids_BT)}


def _generate(model: Any, prompts_BT: Tensor) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=GENERATED, do_sample=False, pad_token_id=0)
    mask_BT = torch.ones_like(prompts_BT)
    return _cut(model.generate(prompts_BT, attention_mask=mask_BT, generation_config=config))


def _cut(ids_BT: Tensor) -> list[list[int]]:
    found: list[list[int]] = ids_BT[:, LENGTH:].tolist()
    assert all(len(ids) == GENERATED for ids in found)
    return found


def measure(ways: dict[str, Way], prompts_BT: Tensor, runs: int) -> dict[str, Any]:
    """Rates of all ways over these prompts, and how many sequences are what the engine gave."""
    tokens: dict[str, list[list[int]]] = {}

    def run(name: str) -> None:
        tokens[name] = ways[name](prompts_BT)

    with torch.inference_mode():
        seconds = time_in_turn({name: partial(run, name) for name in ways}, runs)
    result = summarize(seconds, len(prompts_BT) * GENERATED, "tokens")
    own, *peers = ways
    for name in peers:
        same = sum(a == b for a, b in zip(tokens[name], tokens[own], strict=True))
        result["ways"][name]["sequences_as_the_engine"] = same
    return result


def main() -> None:
    """Measure every batch and print what was found."""
    path, named, runs, *batches = sys.argv[1:]
    config = json.loads(Path(path, "config.json").read_text())
    rng = np.random.default_rng(3)
    drawn_D = rng.normal(size=config["hidden_size"], scale=0.3).astype(np.float32)
    vector = torch.tensor(drawn_D, device=DEVICE, dtype=getattr(torch, named))
    repeng = make_repeng(path, vector)
    with contextlib.redirect_stdout(sys.stderr):
        ways: dict[str, Way] = {"the engine": make_engine(path, named, vector)}
        ways |= make_bridge_ways(path, vector) | repeng
    found = {}
    for batch in batches:
        count = int(batch.removesuffix("+"))
        own = {name: way for name, way in ways.items() if name != AGAIN or batch.endswith("+")}
        found[f"batch {count}"] = measure(own, make_prompts(path, count), int(runs))
    result = join_results(found)
    result["notes"] = [] if repeng else ["repeng is not installed; it was left out"]
    print_result(result)


if __name__ == "__main__":
    main()
