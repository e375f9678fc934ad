"""`POST /perplexity` and `/perplexity/stream` on every engine."""

import io
import math
from typing import Any

import httpx
import pytest

from logsteer import Client
from logsteer.errors import APIError
from logsteer.schemas import PerplexityAnswer, Protocol, WindowEvent
from tests.refusals import refused

TEXT = " ".join(
    f"Once upon a time there was a cat named Tom {i}. The cat was happy." for i in range(40)
)
PROTOCOLS: list[Protocol] = ["sliding", "rolling", "disjoint", "llamacpp", "exl3"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_windows_and_tokens_add_up_to_the_text(client: Client, protocol: Protocol) -> None:
    answer = client.perplexity(
        [TEXT] if protocol == "exl3" else [TEXT, TEXT[:900]],
        protocol=protocol,
        context_length=64,
        windows=True,
        tokens=True,
    )
    for result in answer.results:
        assert sum(w.num_scored for w in result.windows) == result.num_scored
        assert sum(w.sum_logprob or 0 for w in result.windows) == pytest.approx(result.sum_logprob)
        assert len(result.tokens.positions) == len(set(result.tokens.positions))
        assert sum(v or 0 for v in result.tokens.logprobs) == pytest.approx(
            result.sum_logprob, rel=1e-5
        )
        pieces = client.detokenize([[token_id] for token_id in result.tokens.token_ids]).texts
        assert result.tokens.tokens is not None and len(result.tokens.tokens) == len(pieces)
        assert all(
            one.strip() == other.strip()
            for one, other in zip(result.tokens.tokens, pieces, strict=True)
        )
        assert result.perplexity == pytest.approx(math.exp(-result.sum_logprob / result.num_scored))
    total = answer.total
    assert total.num_scored == sum(r.num_scored for r in answer.results)
    assert total.sum_logprob == pytest.approx(sum(r.sum_logprob or 0 for r in answer.results))
    made = answer.provenance
    assert (made.protocol, made.context_length) == (protocol, 64)
    assert made.stride == (32 if protocol == "sliding" else 64)
    assert made.rows == (100 if protocol == "exl3" else None)


def test_a_stream_says_why_it_lists_no_tokens(client: Client) -> None:
    for name, reason in (("tokens", "keeps no tokens"), ("windows", "events are the windows"),
                         ("reference", "send the text to /perplexity")):  # fmt: skip
        url = f"{client.base_url}/perplexity/stream"
        answer = httpx.post(url, params={name: "true"}, content=TEXT.encode())
        assert (answer.status_code, answer.json()["param"]) == (422, name)
        assert reason in answer.json()["detail"]


def test_tokens_stand_beside_a_comparison(client: Client) -> None:
    """Columns in float64 and the divergence from another model, over one long text."""
    model = client.models().models[0].id
    options: Any = {"tokens": True, "columns": ["entropy", "rank"], "precision": "float64"}
    answer = client.perplexity(
        TEXT, model=model, reference=model, protocol="exl3", context_length=32, rows=5, **options
    )
    tokens = answer.results[0].tokens
    assert tokens.columns.keys() == {"entropy"}
    assert len(tokens.columns["entropy"]) == len(tokens.ranks) == 5 * 31
    assert answer.divergence is not None and answer.divergence.num_tokens == 5 * 31


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_token_ids_are_windowed_as_their_text(client: Client, protocol: Protocol) -> None:
    """Every statistic is that of the text, its bytes, characters and words among them."""
    text = f"{TEXT} Café 日本 🙂, naïve."
    (encoded,) = client.tokenize(text, bos="never").results
    options: Any = {"protocol": protocol, "context_length": 48, "windows": True, "cache": False}
    if protocol != "rolling":  # which puts its own token in front
        options["bos"] = "always"
    by_text, by_ids = (client.perplexity([given], **options) for given in (text, encoded.token_ids))
    found, wanted = (answer.results[0].model_dump() for answer in (by_ids, by_text))
    assert found.keys() == wanted.keys() and wanted["num_scored"] > 48
    for name in ("num_tokens", "num_scored", "num_bytes", "num_chars", "num_words"):
        assert found[name] == wanted[name], name
    assert found["sum_logprob"] == pytest.approx(wanted["sum_logprob"], abs=1e-3)
    assert [(one["start"], one["end"]) for one in found["windows"]] == [
        (one["start"], one["end"]) for one in wanted["windows"]
    ]


def test_token_ids_are_taken_as_they_are(client: Client) -> None:
    (encoded,) = client.tokenize(TEXT[:200]).results
    whole = client.perplexity([encoded.token_ids]).results[0]
    assert whole.num_scored == len(encoded.token_ids) - 1
    plain = client.perplexity([TEXT[:200]]).results[0]
    assert whole.sum_logprob == pytest.approx(plain.sum_logprob, abs=1e-3)
    with refused("invalid_request", "vocabulary ends at", param="texts[1]"):
        client.perplexity(["a", [1, 10**6]])


ALL_BUT_LOGPROB = ["rank", "entropy", "log_q", "rb_entropy", "effective_support", "logit_std"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_long_text_has_every_column_in_float64(client: Client, protocol: Protocol) -> None:
    """Windowed, whole and as a stream; in float64 what float32 gives but for its rounding."""
    options: Any = {
        "protocol": protocol, "context_length": 48, "tokens": True, "policy": {"top_k": 20},
        "columns": ["logprob", *ALL_BUT_LOGPROB],
    }  # fmt: skip
    single = client.perplexity(TEXT, **options)
    double = client.perplexity(TEXT, precision="float64", **options)
    *_, streamed = client.perplexity_events(TEXT, precision="float64", **options)
    assert isinstance(streamed, PerplexityAnswer)
    assert double.provenance.precision == "float64"
    count = double.total.num_scored
    assert count > 4 * 48
    rows = [answer.results[0].tokens for answer in (single, double, streamed)]
    for tokens in rows:
        assert tokens.columns.keys() == set(ALL_BUT_LOGPROB) - {"rank"}
        assert {len(tokens.ranks), *map(len, tokens.columns.values())} == {count}
        assert min(tokens.ranks) >= 1
    one, two, three = (tokens.model_dump() for tokens in rows if tokens)
    assert one["positions"] == two["positions"] == three["positions"]
    for name in ("logprobs", "columns"):
        flat = [x[name] if name == "logprobs" else x[name]["entropy"] for x in (one, two, three)]
        assert flat[1] == pytest.approx(flat[2], abs=1e-4)
        assert flat[1] == pytest.approx(flat[0], abs=1e-4)
    # Each digit of float64 is there: sums that the client adds up are those of the server.
    rel = 1e-7 if double.provenance.engine == "fake" else 1e-12
    assert sum(two["logprobs"]) == pytest.approx(double.total.sum_logprob, rel=rel)


def test_exl3_scores_overlapping_rows_each_time(client: Client) -> None:
    """The sum of rows that are sent by themselves, as ids; the limit counts rows, not tokens."""
    ids = client.tokenize(TEXT, bos="never").results[0].token_ids
    answer = client.perplexity(
        TEXT, protocol="exl3", context_length=40, stride=15, rows=3, tokens=True, windows=True
    )
    rows = [ids[start : start + 40] for start in (0, 15, 30)]
    items: Any = [{"context_ids": row[:1], "target_ids": [row[1:]]} for row in rows]
    wanted = [item.targets[0].logprob for item in client.logprob(items).results]
    result = answer.results[0]
    assert [window.sum_logprob for window in result.windows] == pytest.approx(wanted, abs=1e-3)
    assert result.num_scored == 3 * 39 == len(result.tokens.positions)
    assert result.tokens.positions.count(20) == 2
    assert result.sum_logprob == pytest.approx(sum(v or 0 for v in wanted), abs=1e-3)
    for options in ({"protocol": "disjoint", "rows": 3}, {"protocol": "rolling", "stride": 8}):
        with pytest.raises(APIError, match="it belongs to protocol"):
            client.perplexity(TEXT, **options)  # type: ignore[arg-type]
    with pytest.raises(APIError, match="cuts one text into rows"):
        client.perplexity([TEXT, TEXT], protocol="exl3")


@pytest.mark.parametrize("protocol", ["sliding", "rolling"])
def test_a_protocol_that_drops_nothing_covers_the_whole_text(
    client: Client, protocol: Protocol
) -> None:
    result = client.perplexity([TEXT], protocol=protocol, context_length=50).results[0]
    assert result.num_scored == result.num_tokens
    assert (result.num_bytes, result.num_words) == (len(TEXT.encode()), len(TEXT.split()))
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
    assert final.total.sum_logprob == pytest.approx(plain.total.sum_logprob, rel=1e-5)
    assert final.total.flags == [] and isinstance(events[-2], WindowEvent)


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
        with refused(code):
            client.perplexity(["Once upon a time"], **options)  # type: ignore[arg-type]
    with pytest.raises(APIError, match="UTF-8"):
        list(client.perplexity_stream(io.BytesIO(b"Once \xff upon")))
    with pytest.raises(APIError, match="empty"):
        list(client.perplexity_stream(io.BytesIO(b"")))


def test_a_model_compared_with_itself_does_not_diverge(client: Client) -> None:
    model = client.models().models[0].id
    answer = client.perplexity([TEXT], context_length=64, reference=model, model=model)
    plain = client.perplexity([TEXT], context_length=64, model=model)
    assert answer.divergence.num_tokens == answer.total.num_scored
    assert answer.divergence.kl_max == pytest.approx(0, abs=1e-5)
    assert answer.divergence.top1_agreement == 1
    assert answer.total.sum_logprob == pytest.approx(plain.total.sum_logprob, abs=1e-3)
