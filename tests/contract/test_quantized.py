"""Quantised checkpoints on vLLM, against their arithmetic in plain PyTorch.

All of it holds on CPUs without AVX-512, too: `make test-avx2`.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from logsteer import Client
from logsteer.schemas import ScoredTarget
from logsteer_server.engines.weights import find_weight_shapes
from tests.conftest import DEMO_MODEL, QUANTIZED, Server
from tests.contract.quantized_cases import (
    FACTS,
    SHUFFLED,
    STORIES,
    TEXTS,
    WEIGHTS,
    Reference,
    divergences,
    make_float_layer,
    quantized_layers,
)
from tests.probes import run_probe

pytestmark = pytest.mark.engine

# Nats a token. In float32, products of quantised numbers are exact or nearly so, but the sums
# between layers are not, and an activation that their last bit puts on the other side of a rounding
# boundary moves by a whole step. So two right answers are further apart than unquantised. Weights
# of 4 bits leave activations alone, but float16 rounds every one of them to 11 bits, which costs
# the unquantised model as much: 4e-4.
MEAN = {"w8a8": 3e-4, "fp8": 3e-4, "w4a16": 1.5e-3, "awq": 1.5e-3}
WORST = 3e-2
KL = 0.05
"""Relative tolerance of a divergence."""
FURTHEST = {"w8a8": 0.5 / 127.5, "fp8": 16 / 448, "w4a16": 0.5 / 7.5, "awq": 2 / 15}
"""How far a weight may move, in the largest of its row: half a step; a whole one with zero points,
which are rounded, too."""


@pytest.fixture(scope="module", params=QUANTIZED)
def scheme(request: pytest.FixtureRequest) -> str:
    """How the model of a test is quantised: the models' ids, too."""
    return request.param


@pytest.fixture(scope="module")
def checkpoint(quantized_server: Server, scheme: str) -> Path:
    """The demo model as its script quantises it."""
    return quantized_server.directory / scheme


@pytest.fixture(scope="module")
def client(quantized_server: Server, scheme: str) -> Iterator[Client]:
    """A client whose requests go to the quantised model unless they name `demo`."""
    with Client(quantized_server.url, model=scheme, max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def emulation(checkpoint: Path) -> Reference:
    """What the checkpoint ought to say."""
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def plain() -> Reference:
    """What the model says that was quantised."""
    return Reference()


def items_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"context": "", "targets": [text]} for text in texts]


def targets_of(client: Client, texts: Sequence[str]) -> list[ScoredTarget]:
    return [result.targets[0] for result in client.logprob(items_of(texts)).results]


def flatten(targets: Sequence[ScoredTarget]) -> list[float]:
    """The log-probabilities of all tokens; NaN where there is none, which no comparison passes."""
    return [math.nan if v is None else v for t in targets for v in t.logprobs or []]


def scores_of(client: Client, texts: Sequence[str]) -> list[float]:
    return flatten(targets_of(client, texts))


def gaps(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean and largest difference."""
    apart = np.abs(np.subtract(a, b))
    return float(apart.mean()), float(apart.max())


def test_linear_layers_are_quantised_on_disk_and_nothing_else(
    checkpoint: Path, scheme: str
) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    given = load_file(DEMO_MODEL / "model.safetensors")
    paths = quantized_layers(stored)
    assert len(paths) == 5 * 7
    assert not any("embed" in path or "norm" in path or "head" in path for path in paths)
    for path in paths:
        weight_NK = given.pop(f"{path}.weight")
        moved_NK = (WEIGHTS[scheme](stored, path) - weight_NK).abs()
        # A thousandth for float16, which some scales are stored in.
        bound_N = (1.001 * FURTHEST[scheme] + 0.001) * weight_NK.abs().amax(1)
        assert (moved_NK <= bound_N[:, None]).all(), path
    for name, tensor in given.items():
        assert torch.equal(stored[name], tensor)
    sizes = [(path / "model.safetensors").stat().st_size for path in (DEMO_MODEL, checkpoint)]
    assert sizes[1] < 0.5 * sizes[0]


def test_shapes_are_those_of_the_matrices_however_they_are_packed(checkpoint: Path) -> None:
    shapes = find_weight_shapes(AutoConfig.from_pretrained(checkpoint))
    weights = load_file(DEMO_MODEL / "model.safetensors")
    assert {name: weight.shape for name, weight in weights.items()} == shapes


def test_answers_say_what_the_model_is(client: Client, scheme: str) -> None:
    quantised = client.logprob(items_of(FACTS[:1])).provenance
    demo = client.logprob(items_of(FACTS[:1]), model="demo").provenance
    method = "awq" if scheme == "awq" else "compressed-tensors"
    assert (quantised.quantization, quantised.dtype) == (method, QUANTIZED[scheme])
    assert (demo.quantization, demo.dtype, demo.int8_products) == (None, "float32", None)
    assert quantised.weights_digest != demo.weights_digest
    assert quantised.tokenizer_digest == demo.tokenizer_digest
    assert (quantised.int8_products is not None) == (scheme == "w8a8")
    if scheme == "w8a8" and os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        assert quantised.int8_products == "float32_blocks"


def test_scores_are_those_of_the_scheme_and_no_other(
    client: Client, checkpoint: Path, emulation: Reference, plain: Reference, scheme: str
) -> None:
    """A model that vLLM had turned back into floats would agree with the other references."""
    scores = scores_of(client, TEXTS)
    mean, worst = gaps(scores, emulation.scores(TEXTS))
    others = [plain]
    if scheme in ("w8a8", "fp8"):  # its weights under float32 activations
        others.append(Reference(checkpoint, make_float_layer))
    assert mean < MEAN[scheme]
    assert worst < WORST
    for other in others:
        assert gaps(scores, other.scores(TEXTS))[0] > 2 * MEAN[scheme]


def test_alone_batched_and_prefix_cached_are_the_same(client: Client, scheme: str) -> None:
    """Each story follows those before it, so that one alone finds its context in the cache."""
    items = [
        {"context": " ".join(STORIES[:count]), "targets": [f" {STORIES[count]}"]}
        for count in range(1, len(STORIES))
    ]
    answers = [client.logprob([item]) for item in items]
    assert sum(answer.usage.cached_tokens for answer in answers) > 0
    alone = flatten([answer.results[0].targets[0] for answer in answers])
    batch = flatten([result.targets[0] for result in client.logprob(items).results])
    # The stories after the first are the end of the whole text.
    whole = scores_of(client, [" ".join(STORIES)])[-len(batch) :]
    for other in (alone, whole):
        mean, worst = gaps(batch, other)
        assert mean < MEAN[scheme]
        assert worst < WORST


@pytest.mark.parametrize(
    ("texts", "agreement"),
    [pytest.param(TEXTS, 0.98, id="texts"), pytest.param(SHUFFLED, 0.9, id="shuffled")],
)
def test_divergence_from_float32_is_that_of_the_scheme(
    client: Client, emulation: Reference, plain: Reference, texts: list[str], agreement: float
) -> None:
    kl, agrees = divergences(plain, emulation, texts)
    found = client.perplexity(texts, reference="demo").divergence
    assert found.num_tokens == len(kl)
    assert found.kl_mean == pytest.approx(np.mean(kl), rel=KL)
    assert found.kl_max == pytest.approx(max(kl), rel=KL)
    assert found.top1_agreement == pytest.approx(np.mean(agrees), abs=0.005)
    assert found.top1_agreement > agreement


@pytest.mark.parametrize("scheme", ["w8a8"], indirect=True)
def test_the_other_direction_of_the_divergence_is_told_apart(
    client: Client, emulation: Reference, plain: Reference, scheme: str
) -> None:
    """Means of both directions are alike where models are close; the largest values are not."""
    forward, _ = divergences(plain, emulation, SHUFFLED)
    reverse, _ = divergences(emulation, plain, SHUFFLED)
    found = client.perplexity(SHUFFLED, model="demo", reference=scheme).divergence
    assert abs(max(forward) / max(reverse) - 1) > 2 * KL
    assert found.kl_mean == pytest.approx(np.mean(reverse), rel=KL)
    assert found.kl_max == pytest.approx(max(reverse), rel=KL)
    answer = client.divergence(
        [{"context": "", "targets": [text]} for text in SHUFFLED], {"model": scheme}, model="demo"
    )
    apart = answer.divergence
    assert apart["reverse_kl"].mean == pytest.approx(found.kl_mean, rel=1e-3)
    assert apart["forward_kl"].max == pytest.approx(max(forward), rel=KL)
    assert 0 < apart["jsd"].mean < found.kl_mean


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """What `int8_probe.py` found with oneDNN as on a CPU without AVX-512 and VNNI."""
    return run_probe("tests.contract.int8_probe", ONEDNN_MAX_CPU_ISA="AVX2")


def test_int8_layers_are_exact_where_the_instructions_saturate(kernels: dict[str, Any]) -> None:
    for layer in kernels["layers"]:
        # What rounding leaves, in the largest output: bfloat16 has 8 bits.
        rounded = 1e-6 if layer["dtype"] == "torch.float32" else 2**-7
        assert layer["error"] < rounded
        assert layer["products"] == "float32_blocks" or layer["vllm_error"] < rounded
    worst = max(layer["vllm_error"] for layer in kernels["layers"])
    assert worst > 0.1, "oneDNN's products do not saturate any more: are blocks still needed?"
    assert kernels["is_exact"]


def test_weights_of_4_bits_are_refused_in_float32(kernels: dict[str, Any]) -> None:
    assert "set dtype to float16 or bfloat16" in kernels["float32"]
