"""`/generate` and `/diagnostics`: what a sampling policy saw, on every real engine."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from logsteer import Client
from logsteer.schemas import ALL_COLUMNS, GenerateAnswer, SteerPiece
from logsteer_server.contract.jobs import Policy
from tests.contract.conftest import clients_of
from tests.contract.steering import HookedReference
from tests.server.test_rows import reference_columns

pytestmark = pytest.mark.engine

POLICY = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
PROMPTS = ["Once upon a time", "The capital of France is"]
SAMPLING: Any = {"max_tokens": 24, "n": 2, "seed": 5, **POLICY}


client = clients_of("vllm", "tlens")


def finite(values: list[float | None]) -> np.ndarray:
    return np.array([-math.inf if value is None else value for value in values])


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_every_column_is_its_definition(
    client: Client, hooked: HookedReference, precision: Any
) -> None:
    answer = client.generate(PROMPTS, diagnostics=True, precision=precision, **SAMPLING)
    policy = Policy(POLICY["temperature"], int(POLICY["top_k"]), POLICY["top_p"])
    for prompt, result in zip(PROMPTS, answer.results, strict=True):
        context = client.tokenize(prompt).results[0].token_ids
        for completion in result.completions:
            columns = completion.columns | {
                "logprob": completion.logprobs,
                "rank": [float(rank) for rank in completion.ranks],
            }
            assert columns.keys() == set(ALL_COLUMNS)
            digits = max(len(repr(logprob)) for logprob in completion.logprobs)
            assert (digits > 15) == (precision == "float64")
            ids = torch.tensor([*context, *completion.token_ids])
            with torch.no_grad():
                logits_RV = hooked.model(ids[None]).logits[0, len(context) - 1 : -1]
            expected = reference_columns(logits_RV, ids[len(context) :], policy, eos_ids=(2,))
            for name, values in expected.items():
                found = finite(columns[name])
                same = np.isfinite(found) == np.isfinite(values)
                close = np.isclose(found, values, atol=2e-3, rtol=1e-3)
                assert (same & (close | ~np.isfinite(values))).mean() > 0.9, name


def test_samples_are_those_of_one_request_whatever_their_batches(client: Client) -> None:
    prompts = [*PROMPTS, "The king", "Once upon a time"]
    whole = client.generate(prompts, columns=["log_q"], **SAMPLING)
    samples = client.sample(prompts, columns=["log_q"], batch_size=1, concurrency=3, **SAMPLING)
    expected = [one for result in whole.results for one in result.completions]
    assert [one.completion.token_ids for one in samples] == [one.token_ids for one in expected]
    assert [one.completion.seed for one in samples] == [one.seed for one in expected]
    assert [one.prompt_ids for one in samples[::2]] == [one.prompt_ids for one in whole.results]
    for found, wanted in zip(samples, expected, strict=True):
        assert found.completion.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert (found.completion.columns or {}).keys() == {"log_q"}


PENALISED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.3,
    "logit_bias": {"265": -1.0, "300": 2.5},
    "bad_words": ["."],
    "min_tokens": 4,
    "stop_token_ids": [534],
}


@pytest.mark.parametrize("adjusted", [{}, PENALISED], ids=["plain", "penalised"])
def test_diagnostics_of_a_sample_are_those_it_was_generated_with(
    client: Client, adjusted: dict[str, Any]
) -> None:
    sampling, policy = SAMPLING | adjusted, POLICY | adjusted
    answer = client.generate(PROMPTS, diagnostics=True, **sampling)
    contexts = [client.tokenize(prompt).results[0].token_ids for prompt in PROMPTS]
    assert answer.usage.generated_tokens > 0
    if adjusted:
        first = answer.results[0].completions[0]
        assert "." not in first.text
        item = {"context_ids": contexts[0], "target_ids": [first.token_ids]}
        plain = client.diagnostics([item], policy=POLICY).results[0].targets[0]
        changes = finite(plain.columns["log_q"]) - finite(first.columns["log_q"])
        assert np.abs(changes).max() > 0.1
    assert answer.usage.scored_tokens == 0, "what is generated is not read again"
    assert answer.usage.prompt_tokens == SAMPLING["n"] * sum(map(len, contexts))
    for context, result in zip(contexts, answer.results, strict=True):
        targets = [completion.token_ids for completion in result.completions]
        again = client.diagnostics(
            [{"context_ids": context, "target_ids": targets}], policy=policy, cache=False
        )
        for completion, target in zip(result.completions, again.results[0].targets, strict=True):
            assert target.logprobs == pytest.approx(completion.logprobs, abs=1e-4)
            for name in ALL_COLUMNS:
                if name in target.columns:
                    values = finite(target.columns[name])
                    found = finite(completion.columns[name])
                    assert values == pytest.approx(found, abs=1e-4, rel=1e-4), name
            assert target.ranks == completion.ranks
            assert completion.aggregates["surprisal"].sum == pytest.approx(
                -(completion.logprob or 0), abs=1e-3
            )
            assert target.aggregates.keys() == {*ALL_COLUMNS, "surprisal"}
            early = completion.aggregates["entropy"].early
            assert early == pytest.approx(np.mean(completion.columns["entropy"][:16]), abs=1e-5)


def test_a_stop_string_may_stay(client: Client) -> None:
    options: Any = {"max_tokens": 60, "temperature": 0.0, "stop": ["."]}
    without = client.generate("Once upon a time", **options).results[0].completions[0]
    with_stop = client.generate("Once upon a time", include_stop=True, **options)
    kept = with_stop.results[0].completions[0]
    assert kept.finish_reason == without.finish_reason == "stop"
    assert kept.text == without.text + "."
    assert kept.token_ids == without.token_ids
    assert kept.num_tokens == len(kept.logprobs) == len(kept.tokens)


def test_streamed_pieces_have_the_columns_of_their_tokens(client: Client) -> None:
    options: Any = SAMPLING | {"stop": ["."], "diagnostics": True, "window": 3}
    whole = client.generate(PROMPTS, **options)
    events = list(client.generate_events(PROMPTS, **options))
    last = events[-1]
    assert isinstance(last, GenerateAnswer)
    for prompt, result in enumerate(whole.results):
        for index, completion in enumerate(result.completions):
            own = [
                event
                for event in events
                if isinstance(event, SteerPiece)
                and (event.prompt, event.completion) == (prompt, index)
            ]
            streamed = last.results[prompt].completions[index]
            ranks = [rank for piece in own for rank in piece.ranks or []]
            assert len(ranks) == completion.num_tokens
            assert ranks == completion.ranks == streamed.ranks
            assert streamed.aggregates.keys() == completion.aggregates.keys()
            for name, values in completion.columns.items():
                told = [value for piece in own for value in (piece.columns or {})[name]]
                assert finite(told) == pytest.approx(finite(values), abs=1e-4, rel=1e-4), name
                assert streamed.columns[name] == told
