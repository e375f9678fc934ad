"""`/divergence`: two models' next-token distributions, against transformers in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from logsteer import APIError, Client
from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.rows import COLUMNS, Rows
from tests.conftest import DEMO_MODEL
from tests.contract.conftest import clients_of
from tests.contract.steering import LAYER, HookedReference

client = clients_of("vllm", "tlens")

CONTEXT, TARGETS = [1, 40, 7, 300, 12], [[9, 55, 1200, 3], [77], [4]]
COLUMN_NAMES = ["forward_kl", "reverse_kl", "jsd"]
WITHIN = 2e-6
"""Nats: sums over the vocabulary in float32."""


def define(p_TV: torch.Tensor, q_TV: torch.Tensor, beta: float) -> dict[str, np.ndarray]:
    """Each divergence of log-probabilities by its definition, in float64."""
    p_TV, q_TV = p_TV.double(), q_TV.double()
    m_TV = (beta * p_TV.exp() + (1 - beta) * q_TV.exp()).log()

    def kl(a_TV: torch.Tensor, b_TV: torch.Tensor) -> torch.Tensor:
        return (a_TV.exp() * (a_TV - b_TV)).sum(-1)

    jsd_T = beta * kl(p_TV, m_TV) + (1 - beta) * kl(q_TV, m_TV)
    found = {"forward_kl": kl(p_TV, q_TV), "reverse_kl": kl(q_TV, p_TV), "jsd": jsd_T}
    return {name: values.numpy() for name, values in found.items()}


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("double", [False, True])
def test_columns_are_what_their_definitions_say(
    temperature: float, beta: float, double: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits_RV = 4 * torch.randn(9, 30_011, generator=generator)
    other_RV = logits_RV + torch.randn(9, 30_011, generator=generator)
    other_RV = other_RV.double().log_softmax(-1).float()  # as a file has it
    rows = Rows(
        logits_RV, torch.zeros(9, dtype=torch.int64), other_RV, Policy(temperature),
        double=double, beta=beta,
    )  # fmt: skip
    wanted = define(
        (logits_RV.double() / temperature).log_softmax(-1),
        (other_RV.double() / temperature).log_softmax(-1),
        beta,
    )
    for name, values in wanted.items():
        assert COLUMNS[name](rows).numpy() == pytest.approx(values, abs=2e-7 if double else WITHIN)


@pytest.fixture(scope="module")
def exact() -> HookedReference:
    return HookedReference(DEMO_MODEL, dtype=torch.float64)


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_steered_model_against_itself(
    client: Client, exact: HookedReference, temperature: float
) -> None:
    """Both sides may be steered; single tokens after one context share a row.

    Their hidden states meet at the head: no row of the vocabulary is written.
    """
    width = client.model("demo").hidden_size
    vectors = [[0.3, -0.2] * (width // 2), [-0.1, 0.4] * (width // 2)]
    sides: list[Any] = [{"vectors": [{"data": {str(LAYER): vector}}]} for vector in vectors]
    items = [{"context_ids": CONTEXT, "target_ids": TARGETS}]
    answer = client.divergence(
        items, {"steering": sides[1]}, model="demo", steering=sides[0], beta=0.3,
        policy={"temperature": temperature}, columns=["logprob", *COLUMN_NAMES, "top1_agrees"],
    )  # fmt: skip
    largest = 0.0
    everything: dict[str, list[float]] = {name: [] for name in COLUMN_NAMES}
    for ids, target in zip(TARGETS, answer.results[0].targets, strict=True):
        p_TV, q_TV = (
            (exact.logits(CONTEXT, ids, lambda x, v=v: x + torch.tensor(v).double()) / temperature)
            .log_softmax(-1)
            for v in vectors
        )  # fmt: skip
        for name, values in define(p_TV, q_TV, 0.3).items():
            assert values.min() > 1e-4, "the models differ"
            largest = max(largest, np.abs(np.array(target.columns[name]) - values).max())
            everything[name] += target.columns[name]
        agrees = (p_TV.argmax(-1) == q_TV.argmax(-1)).double().tolist()
        assert target.columns["top1_agrees"] == agrees
        own = p_TV if temperature == 1 else None
        if own is not None:
            logprobs = own[torch.arange(len(ids)), torch.tensor(ids)].tolist()
            assert target.logprobs == pytest.approx(logprobs, abs=1e-4)
    print(f"temperature {temperature}: {largest:.1e} nats from float64")
    assert largest < WITHIN
    for name, values in everything.items():
        summary = answer.divergence[name]
        assert summary.mean == pytest.approx(np.mean(values), rel=1e-5)
        assert summary.max == pytest.approx(max(values), rel=1e-5)
    assert answer.steering.tokens_steered == answer.reference.steering.tokens_steered > 0
    assert answer.reference.model == "demo"


@pytest.mark.engine
def test_variants_compare_like_what_they_stand_for_and_the_same_is_nothing(client: Client) -> None:
    items = [{"context_ids": CONTEXT, "target_ids": TARGETS[:1]}]
    same = client.divergence(items, {}, model="demo").results[0].targets[0]
    assert np.abs(np.array([same.columns[name] for name in COLUMN_NAMES])).max() < 1e-6
    width = client.model("demo").hidden_size
    client.vectors.put("apart", save({str(LAYER): np.full(width, 0.4, "f4")}), overwrite=True)
    steered = client.divergence(items, {"steering": "apart:1"}, model="demo")
    named = client.divergence(items, {"model": "demo+apart:1"}, model="demo")
    text = client.divergence(
        [{"context": "Once upon a time", "targets": [" there was"]}], {"model": "demo+apart:1"},
        model="demo+apart:1",
    )  # fmt: skip
    one, other = (answer.results[0].targets[0].columns for answer in (steered, named))
    for name in COLUMN_NAMES:
        assert min(one[name]) > 1e-4
        assert one[name] == pytest.approx(other[name], abs=1e-6)
        assert text.divergence[name].max < 1e-6
    client.vectors.delete("apart")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"policy": {"top_p": 0.9}}, "policy"),
        ({"policy": {"temperature": 0}}, "policy"),
        ({"vocabulary": True}, "vocabulary"),
        ({"beta": 1.0}, "beta"),
        ({"reference": {"model": "nobody"}}, None),
    ],
)
def test_what_cannot_be_compared_is_refused(
    client: Client, fields: dict[str, Any], param: str | None
) -> None:
    items = [{"context_ids": CONTEXT, "target_ids": TARGETS[:1]}]
    with pytest.raises(APIError) as caught:
        client.divergence(items, **{"reference": {}, "model": "demo"} | fields)
    assert param is None or caught.value.param == param
    assert caught.value.code == ("invalid_request" if param else "unknown_model")
