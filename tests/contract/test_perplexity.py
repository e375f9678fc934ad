"""`POST /perplexity` and `/perplexity/stream` on every engine."""

import io
import math

import pytest

from logsteer import Client
from logsteer.errors import APIError
from logsteer.schemas import PerplexityAnswer, Protocol, WindowEvent

TEXT = " ".join(
    f"Once upon a time there was a cat named Tom {i}. The cat was happy." for i in range(40)
)
PROTOCOLS: list[Protocol] = ["sliding", "rolling", "disjoint", "llamacpp"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_windows_and_tokens_add_up_to_the_text(client: Client, protocol: Protocol) -> None:
    answer = client.perplexity(
        [TEXT, TEXT[:900]], protocol=protocol, context_length=64, windows=True, tokens=True
    )
    for result in answer.results:
        assert result.windows is not None
        assert result.tokens is not None
        assert sum(w.num_scored for w in result.windows) == result.num_scored
        assert sum(w.sum_logprob or 0 for w in result.windows) == pytest.approx(result.sum_logprob)
        assert len(result.tokens.positions) == len(set(result.tokens.positions))
        assert sum(v or 0 for v in result.tokens.logprobs) == pytest.approx(
            result.sum_logprob, rel=1e-5
        )
        assert result.sum_logprob is not None
        assert result.perplexity == pytest.approx(math.exp(-result.sum_logprob / result.num_scored))
    total = answer.total
    assert total.num_scored == sum(r.num_scored for r in answer.results)
    assert total.sum_logprob == pytest.approx(sum(r.sum_logprob or 0 for r in answer.results))
    assert answer.provenance.protocol == protocol


@pytest.mark.parametrize("protocol", ["sliding", "rolling"])
def test_a_protocol_that_drops_nothing_covers_the_whole_text(
    client: Client, protocol: Protocol
) -> None:
    result = client.perplexity([TEXT], protocol=protocol, context_length=50).results[0]
    assert result.num_scored == result.num_tokens
    assert (result.num_bytes, result.num_words) == (len(TEXT.encode()), len(TEXT.split()))
    assert result.sum_logprob is not None
    assert result.bits_per_byte == pytest.approx(
        -result.sum_logprob / math.log(2) / len(TEXT.encode())
    )


def test_one_window_is_the_log_probability_of_the_text(client: Client) -> None:
    text = TEXT[:200]
    whole = client.perplexity([text]).results[0]
    target = client.logprob([{"context": "", "targets": [text]}]).results[0].targets[0]
    assert whole.sum_logprob == pytest.approx(target.logprob, abs=1e-4)
    assert whole.num_scored == target.num_tokens


def test_streamed_events_end_in_the_same_answer(client: Client) -> None:
    plain = client.perplexity([TEXT], context_length=64, stride=32)
    events = list(client.perplexity_events([TEXT], context_length=64, stride=32))
    windows = [event for event in events if isinstance(event, WindowEvent)]
    assert len(windows) > 5
    assert windows[-1].windows_done == windows[-1].windows_total == len(windows)
    assert windows[-1].num_scored == plain.total.num_scored
    final = events[-1]
    assert isinstance(final, PerplexityAnswer)
    assert final.total.sum_logprob == pytest.approx(plain.total.sum_logprob, abs=1e-3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_uploaded_text_scores_as_a_given_one(client: Client, protocol: Protocol) -> None:
    text = TEXT * 20
    plain = client.perplexity([text], protocol=protocol, context_length=96)
    events = list(
        client.perplexity_stream(io.BytesIO(text.encode()), protocol=protocol, context_length=96)
    )
    final = events[-1]
    assert isinstance(final, PerplexityAnswer)
    assert final.total.num_scored == plain.total.num_scored
    assert final.total.num_words == plain.total.num_words
    assert final.total.sum_logprob == pytest.approx(plain.total.sum_logprob, rel=1e-6)
    assert final.total.flags == []


def test_what_cannot_be_scored_says_so(client: Client) -> None:
    short = client.perplexity(["Once upon"], protocol="disjoint", context_length=64)
    assert short.results[0].flags == ["nothing_scored"]
    assert short.results[0].perplexity is None
    for options, code in (
        ({"protocol": "llamacpp", "context_length": 64}, "invalid_request"),
        ({"protocol": "rolling", "bos": "never"}, "invalid_request"),
        ({"context_length": 10**6}, "context_too_long"),
        ({"context_length": 10, "stride": 11}, "invalid_request"),
    ):
        with pytest.raises(APIError) as caught:
            client.perplexity(["Once upon a time"], **options)  # type: ignore[arg-type]
        assert caught.value.code == code
    with pytest.raises(APIError, match="UTF-8"):
        list(client.perplexity_stream(io.BytesIO(b"Once \xff upon")))
    with pytest.raises(APIError, match="empty"):
        list(client.perplexity_stream(io.BytesIO(b"")))


def test_a_model_compared_with_itself_does_not_diverge(client: Client) -> None:
    model = client.models().models[0].id
    answer = client.perplexity([TEXT], context_length=64, reference=model, model=model)
    plain = client.perplexity([TEXT], context_length=64, model=model)
    assert answer.divergence is not None
    assert answer.divergence.num_tokens == answer.total.num_scored
    assert answer.divergence.kl_max == pytest.approx(0, abs=1e-5)
    assert answer.divergence.top1_agreement == 1
    assert answer.total.sum_logprob == pytest.approx(plain.total.sum_logprob, abs=1e-3)
