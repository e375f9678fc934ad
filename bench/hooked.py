"""Steered generation with TransformerLens: `hooked.py MODEL RUNS BATCH…`, a process of its own.

Every way continues the same prompts greedily by the same number of tokens, with the same vector
added behind the same layer for every token.
"""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from decoding import GREEDY, generate
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.engines.tlens.engine import TransformerLensEngine
from models import DEVICE
from timing import compare, join_results, summarize, time_in_turn

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

Way = Callable[[Tensor], list[list[int]]]


def make_prompts(path: str, batch: int) -> Tensor:
    """The first prompts' tokens [B, T]."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids_BT = [tokenizer(text)["input_ids"][:LENGTH] for text in PROMPTS[:batch]]
    return torch.tensor(ids_BT, device=DEVICE)


def make_engine(path: str, vector: Tensor) -> Way:
    """logsteer's engine; a job for each prompt."""
    engine = TransformerLensEngine(EngineSpec("bench", "transformer_lens", path, dtype="float32"))
    plan = SteeringPlan((Site(LAYER, "resid_post", vector.cpu().numpy()),))

    def run(prompts_BT: Tensor) -> list[list[int]]:
        ids_BT = prompts_BT.cpu().numpy().astype(np.int32)
        jobs = [
            GenerateJob(ids_T, GENERATED, GREEDY, ignore_eos=True, plan=plan) for ids_T in ids_BT
        ]
        return generate(engine, jobs)

    return run


def repeat(read: Callable[[Tensor], Tensor]) -> Way:
    """A loop that reads the whole sequences again for every token; `read` gives their logits."""

    def run(prompts_BT: Tensor) -> list[list[int]]:
        ids_BT = prompts_BT
        for _ in range(GENERATED):
            next_B1 = read(ids_BT)[:, -1].argmax(-1, keepdim=True)
            ids_BT = torch.cat([ids_BT, next_B1], dim=-1)
        return _cut(ids_BT)

    return run


def make_bridge_ways(path: str, vector: Tensor) -> dict[str, Way]:
    """TransformerLens's own: `run_with_hooks` again and again, and `generate` under hooks."""
    bridge = TransformerBridge.boot_transformers(path, device=DEVICE, dtype=torch.float32)
    hooks: list[Any] = [(f"blocks.{LAYER}.hook_out", lambda x, hook: x + vector)]  # noqa: ARG005

    def continue_(prompts_BT: Tensor) -> list[list[int]]:
        with bridge.hooks(fwd_hooks=hooks):
            ids_BT = bridge.generate(
                prompts_BT, max_new_tokens=GENERATED, stop_at_eos=False, do_sample=False,
                use_past_kv_cache=True, return_type="tokens", verbose=False,
            )  # fmt: skip
        assert isinstance(ids_BT, Tensor)
        return _cut(ids_BT)

    return {
        "whole sequence again, TransformerLens run_with_hooks": repeat(
            lambda ids_BT: bridge.run_with_hooks(ids_BT, fwd_hooks=hooks)
        ),
        "TransformerLens generate with hooks": continue_,
    }


def make_transformers_ways(path: str, vector: Tensor) -> dict[str, Way]:
    """Bare transformers with a forward hook: the whole sequence again, and `generate`."""
    model = _load(path)

    def add(_module: object, _args: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + vector, *output[1:])
        return output + vector

    model.model.layers[LAYER].register_forward_hook(add)
    return {
        "whole sequence again, transformers with a hook": repeat(
            lambda ids_BT: model(ids_BT, use_cache=False).logits
        ),
        "transformers generate with a hook": lambda ids_BT: _generate(model, ids_BT),
    }


def make_repeng(path: str, vector: Tensor) -> dict[str, Way]:
    """`ControlModel.generate` of repeng; nothing where repeng is not installed."""
    if importlib.util.find_spec("repeng") is None:
        return {}
    if not hasattr(np, "float_"):
        np.float_ = np.float64  # repeng 0.4.0 names it when imported, and NumPy 2 has dropped it
    from repeng import ControlModel

    model = ControlModel(_load(path), [LAYER])
    model.set_raw_control({LAYER: vector})
    return {"repeng ControlModel generate": lambda ids_BT: _generate(model, ids_BT)}


def _load(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(DEVICE)
    model.generation_config.eos_token_id = None  # so that `generate` never ends early
    return model


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
        seconds = time_in_turn({name: lambda n=name: run(n) for name in ways}, runs)
    result = summarize(seconds, len(prompts_BT) * GENERATED, "tokens")
    own, *peers = ways
    result["ratios"] = {f"{own} / {peer}": compare(seconds[own], seconds[peer]) for peer in peers}
    for name in peers:
        same = sum(a == b for a, b in zip(tokens[name], tokens[own], strict=True))
        result["ways"][name]["sequences_as_the_engine"] = same
    return result


def main() -> None:
    """Measure every batch and print what was found."""
    path, (runs, *batches) = sys.argv[1], map(int, sys.argv[2:])
    width = json.loads(Path(path, "config.json").read_text())["hidden_size"]
    rng = np.random.default_rng(3)
    vector = torch.tensor(rng.normal(size=width, scale=0.3).astype(np.float32), device=DEVICE)
    repeng = make_repeng(path, vector)
    with contextlib.redirect_stdout(sys.stderr):
        ways: dict[str, Way] = {"the engine": make_engine(path, vector)}
        ways |= make_transformers_ways(path, vector) | make_bridge_ways(path, vector) | repeng
    found = {f"batch {b}": measure(ways, make_prompts(path, b), runs) for b in batches}
    result = join_results(found)
    result["notes"] = [] if repeng else ["repeng is not installed; it was left out"]
    print("result", json.dumps(result))


if __name__ == "__main__":
    main()
