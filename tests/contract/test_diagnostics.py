"""`/generate` and `/diagnostics`: what a sampling policy saw, on every real engine."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logsteer import APIError, Client
from logsteer.schemas import ALL_COLUMNS
from logsteer_server.contract.jobs import Policy
from tests.conftest import DEMO_MODEL
from tests.contract.steering import DATA, HookedReference
from tests.server.test_rows import reference_columns

pytestmark = pytest.mark.engine

POLICY = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
PROMPTS = ["Once upon a time", "The capital of France is"]
SAMPLING: Any = {"max_tokens": 24, "n": 2, "seed": 5, **POLICY}


@pytest.fixture(scope="module")
def reference() -> HookedReference:
    return HookedReference(DEMO_MODEL)


@pytest.fixture(params=["vllm", "tlens"])
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.getfixturevalue(f"{request.param}_client")
    return found


def finite(values: list[float | None]) -> np.ndarray:
    return np.array([-math.inf if value is None else value for value in values])


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_every_column_is_its_definition(
    client: Client, reference: HookedReference, precision: Any
) -> None:
    answer = client.generate(PROMPTS, diagnostics=True, precision=precision, **SAMPLING)
    policy = Policy(POLICY["temperature"], int(POLICY["top_k"]), POLICY["top_p"])
    for prompt, result in zip(PROMPTS, answer.results, strict=True):
        context = client.tokenize(prompt).results[0].token_ids
        for completion in result.completions:
            assert completion.columns is not None
            assert completion.ranks is not None
            columns = completion.columns | {
                "logprob": completion.logprobs,
                "rank": [float(rank) for rank in completion.ranks],
            }
            assert columns.keys() == set(ALL_COLUMNS)
            ids = torch.tensor([*context, *completion.token_ids])
            with torch.no_grad():
                logits_RV = reference.model(ids[None]).logits[0, len(context) - 1 : -1]
            expected = reference_columns(logits_RV, ids[len(context) :], policy, eos_ids=(2,))
            for name, values in expected.items():
                found = finite(columns[name])
                same = np.isfinite(found) == np.isfinite(values)
                close = np.isclose(found, values, atol=2e-3, rtol=1e-3)
                assert (same & (close | ~np.isfinite(values))).mean() > 0.9, name


def test_samples_are_those_of_one_request_whatever_their_batches(
    client: Client, tmp_path: Path
) -> None:
    prompts = [*PROMPTS, "The king", "Once upon a time"]
    whole = client.generate(prompts, columns=["log_q"], **SAMPLING)
    samples = client.sample(
        prompts, columns=["log_q"], batch_size=1, concurrency=3, file=tmp_path / "f", **SAMPLING
    )
    expected = [one for result in whole.results for one in result.completions]
    assert [one.completion.token_ids for one in samples] == [one.token_ids for one in expected]
    assert [one.completion.seed for one in samples] == [one.seed for one in expected]
    assert [one.prompt_ids for one in samples[::2]] == [one.prompt_ids for one in whole.results]
    for found, wanted in zip(samples, expected, strict=True):
        assert found.completion.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert (found.completion.columns or {}).keys() == {"log_q"}


def test_diagnostics_of_a_sample_are_those_it_was_generated_with(client: Client) -> None:
    answer = client.generate(PROMPTS, diagnostics=True, **SAMPLING)
    assert answer.usage.generated_tokens == answer.usage.scored_tokens
    for prompt, result in zip(PROMPTS, answer.results, strict=True):
        context = client.tokenize(prompt).results[0].token_ids
        targets = [completion.token_ids for completion in result.completions]
        again = client.diagnostics(
            [{"context_ids": context, "target_ids": targets}], policy=POLICY, cache=False
        )
        for completion, target in zip(result.completions, again.results[0].targets, strict=True):
            assert completion.columns is not None
            assert completion.aggregates is not None
            assert target.aggregates is not None
            assert target.columns is not None
            assert target.logprobs == pytest.approx(completion.logprobs, abs=1e-4)
            for name in ("log_q", "rb_entropy", "head_mass", "margin"):
                values = finite(target.columns[name])
                assert values == pytest.approx(finite(completion.columns[name]), abs=1e-4)
            assert completion.aggregates["surprisal"].sum == pytest.approx(
                -(completion.logprob or 0), abs=1e-3
            )
            assert target.aggregates.keys() == {*ALL_COLUMNS, "surprisal"}
            early = completion.aggregates["entropy"].early
            assert early == pytest.approx(np.mean(completion.columns["entropy"][:16]), abs=1e-5)


def test_what_was_sampled_lies_inside_the_policy(client: Client) -> None:
    answer = client.generate(PROMPTS, diagnostics=True, **SAMPLING)
    for result in answer.results:
        for completion in result.completions:
            assert completion.columns is not None
            assert all(value is not None for value in completion.columns["log_q"])
            log_q, logprob = np.array(completion.columns["log_q"]), np.array(completion.logprobs)
            assert (log_q <= 1e-6).all()
            assert not np.allclose(log_q, logprob)


def test_draws_are_independent_and_repeat_by_seed(client: Client) -> None:
    options: Any = {"max_tokens": 20, "n": 6, "seed": 11}
    first = client.generate("Once upon a time", **options).results[0].completions
    again = client.generate("Once upon a time", **options).results[0].completions
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) > 3
    alone = client.generate("Once upon a time", max_tokens=20, seed=first[3].seed)
    assert alone.results[0].completions[0].token_ids == first[3].token_ids


def test_a_stop_string_may_stay(client: Client) -> None:
    options: Any = {"max_tokens": 60, "temperature": 0.0, "stop": ["."]}
    without = client.generate("Once upon a time", **options).results[0].completions[0]
    with_stop = client.generate("Once upon a time", include_stop=True, **options)
    kept = with_stop.results[0].completions[0]
    assert kept.finish_reason == without.finish_reason == "stop"
    assert kept.text == without.text + "."
    assert kept.token_ids == without.token_ids
    assert kept.num_tokens == len(kept.logprobs) == len(kept.tokens)


def test_steered_samples_have_steered_diagnostics(client: Client) -> None:
    steering = {"vectors": [DATA | {"scale": 1.5}], "positions": "completion"}
    answer = client.generate("Once upon a time", steering=steering, diagnostics=True, **SAMPLING)
    assert answer.steering is not None
    assert answer.steering.tokens_steered > 0
    for completion in answer.results[0].completions:
        assert completion.aggregates is not None
        total = completion.aggregates["logprob"].sum
        assert total == pytest.approx(completion.logprob, abs=1e-4 * completion.num_tokens)


def test_diagnostics_are_not_streamed(client: Client) -> None:
    with pytest.raises(APIError, match="diagnostics are not streamed"):
        list(client.generate_events("Once", diagnostics=True))
