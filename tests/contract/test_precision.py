"""Precision profiles: the dtypes of model and logits, and what an answer says of them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from logsteer import Client
from logsteer_server.engines.rounding import TEXT
from tests.conftest import DEMO_MODEL, Server
from tests.contract.directions import load_model
from tests.contract.tlens_cases import PER_TOKEN, draw_ids

pytestmark = pytest.mark.engine

IDS = draw_ids(np.random.default_rng(4), 24)
ITEM = {"context_ids": IDS[:4].tolist(), "target_ids": [IDS[4:].tolist()]}


@pytest.fixture(scope="module")
def client(precision_server: Server) -> Iterator[Client]:
    """A client of models whose head is computed in float32 and whose body is not."""
    with Client(precision_server.url, max_retries=0, timeout=300) as client:
        yield client


def reference(dtype: torch.dtype, head: torch.dtype) -> np.ndarray:
    """log p of the target's tokens with the body in one dtype and the head in another."""
    model = load_model(DEMO_MODEL, dtype)
    ids_1T = torch.from_numpy(IDS.astype(np.int64))[None]
    with torch.no_grad():
        hidden_TD = model.model(ids_1T[:, :-1]).last_hidden_state[0, 3:]
        logits_RV = hidden_TD.to(head) @ model.lm_head.weight.to(head).T
    log_p_RV = logits_RV.double().log_softmax(-1)
    return log_p_RV.gather(-1, ids_1T[0, 4:, None])[:, 0].numpy()


def share_on_grid(client: Client, model: str) -> float:
    """The share of differences between likely tokens' logits that bfloat16 can express."""
    target = client.logprob([ITEM], model=model, top=8).results[0].targets[0]
    logprobs_RK = np.array(target.top.logprobs, np.float64)
    steps = (logprobs_RK[:, 1:] - logprobs_RK[:, :1]) * 2**7
    return float((np.abs(steps - steps.round()) < 1e-3).mean())


def test_logits_are_computed_in_float32(client: Client) -> None:
    for model in ("vllm", "tlens"):
        told = client.logprob([ITEM], model=model).provenance
        assert (told.dtype, told.logits_dtype, told.tf32) == ("bfloat16", "float32", False)
        assert share_on_grid(client, model) < 0.5


def test_the_card_says_what_half_precision_costs(client: Client) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = client.tokenize([TEXT], model="vllm").results[0].token_ids
    with torch.no_grad():
        log_p_TV = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    exact = log_p_TV.gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
    cards = {card.id: card for card in client.models().models}
    item = {"context_ids": ids[:1], "target_ids": [ids[1:]]}
    for name in ("vllm", "tlens"):
        found = client.logprob([item], model=name).results[0].targets[0].logprobs
        assert cards[name].rounding == pytest.approx(np.abs(found - exact).max(), abs=1e-3)
        assert cards[name].rounding > 0.01
    assert cards["double"].rounding is None


@pytest.mark.parametrize(
    ("model", "dtype", "head"),
    [
        ("tlens", torch.bfloat16, torch.float32),
        ("double", torch.float64, torch.float64),
    ],
)
def test_scores_are_those_of_the_profile(
    client: Client, model: str, dtype: torch.dtype, head: torch.dtype
) -> None:
    found = client.logprob([ITEM], model=model).results[0].targets[0].logprobs
    assert found == pytest.approx(reference(dtype, head), abs=PER_TOKEN)


def test_log_q_of_what_was_drawn_is_finite_in_half_precision(client: Client) -> None:
    """Where many tokens are as probable as the last one of the `top_k`, and rounding decides."""
    for model in ("vllm", "tlens"):
        for policy in ({"top_k": 5}, {"top_p": 0.5, "temperature": 1.5}):
            answer = client.generate(
                "Once upon a time", model=model, n=16, max_tokens=24, seed=1, ignore_eos=True,
                columns=["log_q", "head_mass"], **policy,
            )  # fmt: skip
            for completion in answer.results[0].completions:
                values = np.array(completion.columns["log_q"], np.float64)
                assert len(values) == 24 and np.isfinite(values).all()
                assert (values >= np.array(completion.logprobs) - 1e-6).all() or "top_p" in policy


def test_the_precision_of_a_request_is_told(client: Client) -> None:
    wanted = reference(torch.float64, torch.float64)
    answers = {
        precision: client.logprob([ITEM], model="double", precision=precision)
        for precision in ("float32", "float64")
    }
    errors = {}
    for precision, answer in answers.items():
        assert answer.provenance.precision == precision
        errors[precision] = np.abs(answer.results[0].targets[0].logprobs - wanted).max()
    assert errors["float64"] < 1e-12 < errors["float32"] < 1e-5
    generated = client.generate(
        "Once", model="double", max_tokens=3, diagnostics=True, precision="float64"
    )
    assert generated.provenance.precision == "float64"
