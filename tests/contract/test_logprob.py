"""`POST /logprob` on every engine: boundaries, ids, columns, sums, and what is refused."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logsteer import Client
from logsteer.schemas import ScoredTarget
from tests.contract.agreement import PER_TOKEN
from tests.refusals import refused

CONTEXT = "The capital of France is"


def score_one(client: Client, item: dict[str, Any], **options: Any) -> ScoredTarget:
    return client.logprob([item], **options).results[0].targets[0]


def drop_numbers(target: ScoredTarget) -> dict[str, Any]:
    """What is told of a target but for what the sums of a batch round."""
    return target.model_dump(exclude={"logprob", "logprobs", "prob", "perplexity"})


def test_sums_follow_from_the_columns(client: Client) -> None:
    target = score_one(client, {"context": CONTEXT, "targets": [" Paris. It is large."]})
    values = [v for v in target.logprobs if v is not None]
    assert len(values) == target.num_tokens == len(target.token_ids or []) > 3
    assert target.logprob == pytest.approx(sum(values), abs=1e-4)
    assert target.prob == pytest.approx(math.exp(sum(values)), rel=1e-4)
    assert target.perplexity == pytest.approx(math.exp(-sum(values) / len(values)), rel=1e-4)
    assert target.is_greedy == all(rank == 1 for rank in target.ranks)
    assert target.num_bytes == len(b" Paris. It is large.")
    assert "".join(target.tokens or []) == " Paris. It is large."


def test_merged_targets_are_not_compared_with_exact_ones(client: Client) -> None:
    item = {"context": "Once upon a ti", "targets": ["me there was", " and then", "me it was"]}
    mixed = client.logprob([item]).results[0]
    assert [target.boundary for target in mixed.targets] == ["merged", "exact", "merged"]
    assert (mixed.best, mixed.choice_probs) == (1, [None, 1.0, None])
    assert mixed.flags == ["merged_left_out"]
    merged = client.logprob([{**item, "targets": item["targets"][::2]}]).results[0]
    assert merged.best is not None
    assert sum(share or 0 for share in merged.choice_probs) == pytest.approx(1)
    assert merged.flags == []
    # Of two variants the exact one counts, and one that has no token of its own is left out.
    (both,) = client.logprob([{"context": "Par", "targets": [" is"]}], space="best").results
    (alone,) = client.logprob([{"context": "Par", "targets": [" is"]}]).results
    assert both.targets[0].logprob_any_space == pytest.approx(
        alone.targets[0].logprob, abs=PER_TOKEN
    )


def test_the_better_of_both_spaces_is_one_result(client: Client) -> None:
    targets = ["Paris", " London", "!"]
    both, best = (
        client.logprob([{"context": CONTEXT, "targets": targets}], space=space).results[0]
        for space in ("both", "best")
    )
    for given_, pair, one in zip(targets, both.targets, best.targets, strict=True):
        variants = [pair.variants.with_space, pair.variants.without_space]
        exact = [found for found in variants if found.boundary == "exact"] or variants
        wanted = max(exact, key=lambda found: found.logprob or -math.inf)
        assert (pair.target, one.target) == (given_, given_)
        assert (one.sequence, one.variants) == (wanted.target, None)
        assert (one.token_ids, one.boundary) == (wanted.token_ids, wanted.boundary)
        assert one.logprob == pytest.approx(wanted.logprob, abs=PER_TOKEN)
        total = math.log(math.fsum(math.exp(found.logprob or 0) for found in exact))
        assert one.logprob_any_space == pytest.approx(total, abs=PER_TOKEN)
        assert one.logprob_any_space == pytest.approx(pair.logprob_any_space, abs=PER_TOKEN)
    assert best.best == both.best
    records = client.get_log_prob(CONTEXT, targets)
    assert [record.sequence for record in records] == [one.sequence for one in best.targets]


def test_messages_go_through_the_chat_template(client: Client) -> None:
    answer = client.logprob(
        [{"messages": [{"role": "user", "content": "Hi"}], "targets": ["Hello!", "Paris"]}]
    )
    rendered = client.logprob(
        [{"context": "<s><|user|>Hi<|assistant|>", "targets": ["Hello!", "Paris"]}]
    )
    for one, other in zip(answer.results, rendered.results, strict=True):
        for own, same in zip(one.targets, other.targets, strict=True):
            assert own.logprobs == pytest.approx(same.logprobs, abs=PER_TOKEN)
            assert drop_numbers(own) == drop_numbers(same)
        assert one.choice_probs == pytest.approx(other.choice_probs, abs=PER_TOKEN)
        assert one.best == other.best


def test_bos_is_never_doubled_and_can_be_left_out(client: Client) -> None:
    plain = score_one(client, {"context": CONTEXT, "targets": [" Paris"]})
    written = score_one(client, {"context": "<s>" + CONTEXT, "targets": [" Paris"]}, bos="always")
    without = client.logprob([{"context": CONTEXT, "targets": [" Paris"]}], bos="never")
    assert written.logprobs == pytest.approx(plain.logprobs, abs=PER_TOKEN)
    tokens = client.tokenize([CONTEXT], bos="never").results[0].token_ids
    assert without.usage.prompt_tokens == len(tokens)


def test_a_text_alone_is_scored_from_its_second_token_everywhere(client: Client) -> None:
    item, alone = {"context": "", "targets": [CONTEXT]}, {"bos": "never"}
    tokens = client.perplexity([CONTEXT], tokens=True, **alone).results[0].tokens
    score = score_one(client, item, **alone)
    lens = client.lens([CONTEXT], **alone).results[0].targets[0]
    diagnosed = client.diagnostics([item], **alone).results[0].targets[0]
    last = list(lens.layers.values())[-1]
    for found, logprobs in ((score, score.logprobs), (lens, last.logprobs), (diagnosed, None)):
        assert (found.token_ids, found.boundary) == (tokens.token_ids, "no_context")
        assert logprobs is None or logprobs == pytest.approx(tokens.logprobs, abs=PER_TOKEN)
    assert score.num_bytes == len(CONTEXT.encode()[score.offsets[0][0] :])
    assert client.logprob([item]).results[0].targets[0].boundary == "exact"  # after BOS


def test_top_alternatives_are_sorted_and_as_many_as_asked(client: Client) -> None:
    target = score_one(client, {"context": CONTEXT, "targets": [" Paris."]}, top=4)
    assert [len(row) for row in target.top.token_ids] == [4, 4]
    for row in target.top.logprobs:
        assert row == sorted(row, key=lambda v: -(v or 0))
    assert all(len(row) == 4 for row in target.top.tokens)


def test_single_tokens_after_one_context_are_scored_together_as_alone(client: Client) -> None:
    targets = [" Paris", " London", " is a city", " Rome"]
    items = [
        {"context": CONTEXT, "targets": targets[:2]},
        {"context": CONTEXT, "targets": targets[2:]},
    ]
    columns = ["logprob", "rank", "entropy"]
    together = client.logprob(items, top=2, columns=columns)
    found = [target for result in together.results for target in result.targets]
    for text, target in zip(targets, found, strict=True):
        alone = score_one(client, {"context": CONTEXT, "targets": [text]}, top=2, columns=columns)
        assert target.target == alone.target
        assert target.token_ids == alone.token_ids
        assert target.logprobs == pytest.approx(alone.logprobs, abs=PER_TOKEN)
        assert target.ranks == alone.ranks
        assert target.columns["entropy"] == pytest.approx(alone.columns["entropy"], abs=PER_TOKEN)
        assert target.top.token_ids == alone.top.token_ids
    context_tokens = len(client.tokenize([CONTEXT]).results[0].token_ids)
    extra = len(client.tokenize([" is a city"], bos="never").results[0].token_ids) - 1
    assert together.usage.prompt_tokens == 2 * context_tokens + extra


def test_columns_and_arrays_as_asked(client: Client) -> None:
    item = {"context": CONTEXT, "targets": [" Paris"]}
    only = score_one(client, item, columns=["entropy"])
    assert (only.logprobs, only.ranks, only.is_greedy) == (None, None, None)
    assert only.columns["entropy"][0] >= 0
    assert only.logprob == pytest.approx(score_one(client, item).logprob, abs=PER_TOKEN)
    sums = score_one(client, item, per_token=False)
    assert (sums.token_ids, sums.logprobs, sums.offsets) == (None, None, None)
    assert sums.logprob == pytest.approx(only.logprob, abs=PER_TOKEN)


@settings(
    max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.permutations(range(12)), st.integers(1, 11))
def test_order_and_splitting_do_not_matter(client: Client, order: list[int], cut: int) -> None:
    items = [
        {
            "context": f"Once upon a time there were {i} cats",
            "targets": [f" and {i} dogs." * (i + 1)],
        }
        for i in range(12)
    ]
    together = client.logprob(items).results
    shuffled = client.logprob([items[i] for i in order]).results
    parts = client.logprob(items[:cut]).results + client.logprob(items[cut:]).results
    for i, result in enumerate(together):
        expected = result.targets[0].logprobs
        assert shuffled[order.index(i)].targets[0].logprobs == pytest.approx(
            expected, abs=PER_TOKEN
        )
        assert parts[i].targets[0].logprobs == pytest.approx(expected, abs=PER_TOKEN)


def test_a_sequence_that_fills_the_context_is_scored(client: Client) -> None:
    card = client.models().models[0]
    ids = [5 + i % 50 for i in range(card.context_length + 1)]
    target = score_one(client, {"context_ids": ids[:1], "target_ids": [ids[1:]]})
    assert target.num_tokens == card.context_length
    with refused("context_too_long", f"reads {card.context_length}"):
        client.logprob([{"context_ids": ids, "target_ids": [[7]]}])
    cut = score_one(
        client, {"context_ids": [9, *ids], "target_ids": [[7]]}, on_overflow="truncate_left"
    )
    assert cut.truncated_tokens == 2
    with refused("context_too_long"):  # a target is never cut
        client.logprob([{"context_ids": [9], "target_ids": [ids]}], on_overflow="truncate_left")
    kept = score_one(client, {"context_ids": ids[1:], "target_ids": [[7]]})
    assert cut.logprobs == pytest.approx(kept.logprobs, rel=1e-5)


def test_provenance_usage_and_timing(client: Client) -> None:
    answer = client.logprob([{"context": CONTEXT, "targets": [" Paris", " Rome"]}])
    card = client.model(answer.model)
    assert answer.provenance == card.provenance
    assert answer.provenance.vocab_size == card.vocab_size
    assert answer.provenance.tokenizer_digest.startswith("sha256:")
    assert answer.usage.scored_tokens == 2
    assert answer.usage.generated_tokens == 0
    context_tokens = len(client.tokenize([CONTEXT]).results[0].token_ids)
    assert answer.usage.prompt_tokens == context_tokens  # read once for both
    assert answer.timing.engine_ms > 0
