"""Planners of texts, continuations and OpenAI's prompts; columns as answers show them."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logsteer.errors import APIError
from logsteer.schemas import BosPolicy, Message, OverflowPolicy, Protocol
from logsteer.schemas.openai import ChatCompletionRequest, CompletionRequest
from logsteer.schemas.perplexity import WindowOptions
from logsteer_server.api.routes.tokens import _encode
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    GenerateJob,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.engines.fake import fake_generation, fake_scores
from logsteer_server.interventions.interventions import UNCHANGED
from logsteer_server.models.admission import Admission, Reservation
from logsteer_server.tasks.activations import CaptureSite, plan_captures, read_items
from logsteer_server.tasks.comparison import (
    REFERENCE_COLUMNS,
    Comparison,
    compare_jobs,
    export_jobs,
)
from logsteer_server.tasks.completions import plan_chat, plan_completions, share_rows
from logsteer_server.tasks.generation import join_pieces, plan_continuations
from logsteer_server.tasks.openai import CompletionTask
from logsteer_server.tasks.perplexity import TextScores, TextWindows, cut_texts
from logsteer_server.tasks.planning import Capacity, ItemProblems
from logsteer_server.tasks.run import Event, Run
from logsteer_server.tasks.targets import aggregate_columns, describe_rows
from logsteer_server.text.incremental import IncrementalEncoder
from logsteer_server.text.prompts import fit_prompt, read_prompts
from logsteer_server.text.windows import fit_windows
from tests.refusals import refused
from tests.server.scripted_model import (
    INFO,
    SETTINGS,
    STORES,
    ScriptedHandle,
    free,
    load_codec,
    make_model,
    register,
)

CODEC = load_codec()
BOS = 1
READ = describe_rows(["rank", "entropy"])
TEXT = "Once upon a time there was a capital of France, and it was a long way off. " * 3
CHAT = [Message(role="user", content="Hi")]


def encode(*texts: str, bos: bool = True) -> list[list[int]]:
    return [[BOS] * bos + ids for ids in CODEC.encode_ids(texts)]


class TestPrompts:
    @given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 20))
    def test_what_is_left_of_a_prompt_fits_and_ends_it(
        self, count: int, max_tokens: int, limit: int
    ) -> None:
        ids = list(range(count))
        try:
            fitted, dropped = fit_prompt(ids, max_tokens, limit, "truncate_left")
        except APIError as error:
            assert error.code == "context_too_long"
            assert max_tokens >= limit
            return
        assert len(fitted) + max_tokens <= limit
        assert fitted == ids[dropped:] != []
        assert dropped == max(0, count + max_tokens - limit)


def cut(
    *texts: str, read: ScoreJob = READ, info: EngineInfo = INFO, **options: Any
) -> tuple[list[Any], list[int]]:
    return cut_texts(
        texts, fit_windows(WindowOptions(**options), info.context_length), read, CODEC, info, free
    )


class TestTexts:
    @pytest.mark.parametrize(
        ("protocol", "bos"), [("sliding", "auto"), ("sliding", "never"), ("rolling", "auto")]
    )
    def test_every_token_of_a_text_is_scored_once(self, protocol: str, bos: str) -> None:
        windows, (length,) = cut(TEXT, protocol=protocol, bos=bos, context_length=16)
        scores = TextScores()
        for window in reversed(windows):  # as they come, in any order
            scores.add(window, fake_scores(window.job)[0], keep_tokens=True)  # type: ignore[arg-type]
        found = scores.list_tokens(["rank", "entropy"], UNCHANGED)
        first = 1 if bos == "never" else 0
        (ids,) = encode(TEXT, bos=False)
        assert found["positions"].tolist() == list(range(first, length))
        assert found["token_ids"].tolist() == ids[first:]
        assert {len(found[name]) for name in ("logprobs", "ranks")} == {length - first}
        assert found["columns"].keys() == {"entropy"}
        assert np.array_equal(found["columns"]["entropy"], -found["logprobs"] / 2)
        assert scores.sums.num_scored == length - first
        if not first:
            assert scores.sums.num_bytes == len(TEXT.encode())
            assert scores.sums.num_words == len(TEXT.split())

    @pytest.mark.parametrize(
        ("options", "code", "param"),
        [
            ({"context_length": 129}, "context_too_long", "context_length"),
            ({"stride": 129}, "invalid_request", "stride"),
            ({"protocol": "rolling", "bos": "never"}, "invalid_request", "bos"),
            ({"protocol": "llamacpp"}, "invalid_request", "texts[0]"),
        ],
    )
    def test_options_that_cannot_be_met_are_named(
        self, options: dict[str, Any], code: str, param: str
    ) -> None:
        with refused(code, param=param):
            cut("a cat", **options)

    def test_a_tokenizer_larger_than_the_model_is_told(self) -> None:
        with pytest.raises(APIError, match="vocabulary ends at"):
            cut(TEXT, info=replace(INFO, vocab_size=10))

    @pytest.mark.parametrize(("bos", "front"), [("auto", 0), ("never", 0), ("always", 1)])
    def test_exl3_adds_a_bos_only_where_it_is_asked_for(self, bos: BosPolicy, front: int) -> None:
        (ids,) = encode(TEXT, bos=False)
        windows, _ = cut(TEXT, protocol="exl3", context_length=16, stride=24, rows=2, bos=bos)
        own = [BOS] * front + ids
        read = [[*w.job.tokens.tolist(), int(w.job.targets[-1])] for w in windows]
        assert read == [own[:16], own[24:40]]

    def test_tokens_of_overlapping_rows_have_one_order(self) -> None:
        windows, _ = cut(TEXT, protocol="exl3", context_length=16, stride=5, rows=4)
        outputs = [
            ScoreOutput(columns={"logprob": np.full(w.num_scored, -n, np.float32)})
            for n, w in enumerate(windows)
        ]
        found = []
        for came in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]):
            scores = TextScores()
            for n in came:
                scores.add(windows[n], outputs[n], keep_tokens=True)
            found.append(scores.list_tokens(["logprob"], UNCHANGED))
        assert found[0]["positions"].tolist().count(7) == 2
        assert len({tuple(each["logprobs"].tolist()) for each in found}) == 1

    @given(
        st.lists(st.integers(0, len(TEXT)), max_size=6),
        st.integers(4, 40),
        st.sampled_from([("sliding", None), ("exl3", 3), ("exl3", None), ("exl3", 50)]),
        st.sampled_from([None, 2]),
    )
    @settings(max_examples=80)
    def test_a_text_in_pieces_gives_the_windows_of_the_whole(
        self, seams: list[int], length: int, moves: tuple[Protocol, int | None], rows: int | None
    ) -> None:
        options = fit_windows(
            WindowOptions(
                protocol=moves[0],
                context_length=length,
                stride=moves[1],
                rows=rows if moves[0] == "exl3" else None,
            ),
            INFO.context_length,
        )
        encoder, text = IncrementalEncoder(CODEC), TextWindows(0, options, READ, CODEC, INFO)
        edges = [0, *sorted(seams), len(TEXT)]
        pieces = [encoder.feed(TEXT[a:b]) for a, b in pairwise(edges)] + [encoder.finish()]
        windows = [window for piece in pieces for window in text.feed(piece)] + text.finish()
        whole, (count,) = cut_texts([TEXT], options, READ, CODEC, INFO, free)
        assert text.num_tokens == count
        assert [(w.start, w.end) for w in windows] == [(w.start, w.end) for w in whole]
        for own, same in zip(windows, whole, strict=True):
            assert own.job.fingerprint == same.job.fingerprint
            assert np.array_equal(own.counts_R3, same.counts_R3)
            assert len(own.counts_R3) == own.num_scored
        assert encoder.seams_moved == 0


FIRST = GenerateJob(np.zeros(0, np.int32), 4, Policy(0.7, 5), seed=11, stop=(".",), stream=True)


def continue_(
    prompts: list[list[int]], count: int = 1, on_overflow: OverflowPolicy = "error", **changes: Any
) -> tuple[list[Any], list[int]]:
    read, problems = read_prompts(prompts, CODEC), ItemProblems("prompts")
    info = replace(INFO, **changes)
    return plan_continuations(read, FIRST, count, info, free, problems, on_overflow)


class TestContinuations:
    def test_seeds_count_on_over_all_completions(self) -> None:
        jobs, truncated = continue_([[5, 6], [7]], 3)
        assert [job.tokens.tolist() for job in jobs] == [[5, 6]] * 3 + [[7]] * 3
        assert [job.seed for job in jobs] == [11, 12, 13, 14, 15, 16]
        assert truncated == [0, 0]
        assert {repr(replace(job, tokens=FIRST.tokens, seed=11)) for job in jobs} == {repr(FIRST)}

    def test_what_does_not_fit_is_an_error_or_cut_at_the_left(self) -> None:
        prompts = [[5, 6, 7, 8], [9]]
        with pytest.raises(APIError, match="holds 6"):
            continue_(prompts, context_length=6)
        jobs, truncated = continue_(prompts, 2, "truncate_left", context_length=6)
        assert [job.tokens.tolist() for job in jobs] == [[7, 8]] * 2 + [[9]] * 2
        assert truncated == [2, 0]
        with pytest.raises(APIError):
            continue_(prompts, 1, "truncate_left", context_length=4)

    def test_a_completion_is_its_pieces(self) -> None:
        (job,), _ = continue_([[5, 6]])
        whole = join_pieces(pieces := fake_generation(replace(job, columns=("rank", "entropy"))))
        assert len(pieces) == 4
        assert whole.token_ids.tolist() == [5, 6, 5, 6]
        assert whole.text == "".join(piece.text for piece in pieces)
        assert (whole.logprobs.sum(), whole.finish_reason) == (-2.0, pieces[-1].finish_reason)
        assert whole.columns["entropy"].tolist() == [0.25] * 4


GREEDY = {"max_tokens": 1, "temperature": 0}


def run_completion(**fields: Any) -> list[Event]:
    """The events of a request for completions."""

    async def collect() -> list[Event]:
        body = CompletionRequest(**fields)
        run = Run(CompletionTask(body, register(make_model()), STORES), Capacity(SETTINGS))
        return [event async for event in run.events()]

    return asyncio.run(collect())


class TestCompletions:
    def plan(self, **fields: Any) -> list[Any]:
        return plan_completions(CompletionRequest(**fields), CODEC, INFO, free)

    def test_samples_have_the_requests_options(self) -> None:
        prompts = self.plan(
            prompt=[[5, 6], [7]], n=2, seed=3, max_tokens=4, temperature=0.5, stop="x", logprobs=2
        )
        jobs = [job for prompt in prompts for job in prompt.jobs]
        assert [job.seed for job in jobs] == [3, 4, 3, 4]
        assert {(job.policy, job.stop, job.top, job.logprobs) for job in jobs} == {
            (Policy(0.5), ("x",), 2, True)
        }
        plain = self.plan(prompt="Once")[0]
        assert (plain.ids, plain.echo_job) == (encode("Once")[0], None)
        assert not plain.samples[0].logprobs
        drawn = [[job.seed for job in self.plan(prompt="Once", n=2)[0].samples] for _ in range(5)]
        assert all(0 <= first < 2**31 and second == first + 1 for first, second in drawn)
        assert len({first for first, _ in drawn}) > 1

    def test_what_prompts_begin_with_is_scored_once(self) -> None:
        prompts = [[5, 6, 7, 8], [5, 6, 7, 9, 4], [5, 6, 7], [3, 6], [9]]
        planned = share_rows(self.plan(prompt=prompts, max_tokens=0, prompt_logprobs=1))
        scored = [each.echo_job.targets.tolist() for each in planned if each.echo_job]
        assert scored == [[6, 7, 8], [9, 4], [7], [6]]
        assert [each.shared for each in planned] == [0, 2, 1, 0, 0]

    def test_one_greedy_token_is_read_from_the_last_row(self) -> None:
        fields = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 1}
        (prompt,) = self.plan(**fields, temperature=0)
        (job,) = prompt.jobs
        assert prompt.reads_next
        assert (job.tokens.tolist(), job.targets.tolist()[:2], job.top) == ([5, 6, 7], [6, 7], 1)
        for more in ({"temperature": 0.1}, {"temperature": 0, "n": 2}):
            (drawn,) = self.plan(**fields, **more)
            assert not drawn.reads_next
            assert len(drawn.samples) == more.get("n", 1)

    @pytest.mark.parametrize("logprobs", [None, 0, 2])
    @pytest.mark.parametrize("more", [{}, {"n": 2}, {"max_tokens": 0}, GREEDY], ids=str)
    def test_an_echo_is_the_same_with_and_without_a_stream(
        self, logprobs: int | None, more: dict[str, Any]
    ) -> None:
        """The prompt comes first, then pieces; joined they are the whole answer."""
        prompts = [[5, 6, 7], [8]]
        fields = {"prompt": prompts, "echo": True, "logprobs": logprobs} | more
        whole = [event.document for event in run_completion(**fields)][-1]
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        start, *chunks, usage, end = run_completion(**fields, **options)
        assert (start.name, end.name) == ("start", "result")
        assert usage.document["choices"] == []
        assert usage.document["usage"] == whole["usage"]
        assert all(chunk.document["usage"] is None for chunk in chunks)
        options["stream_options"]["continuous_usage_stats"] = True
        last, total = run_completion(**fields, **options)[-3:-1]
        assert last.document["usage"] == total.document["usage"] == whole["usage"]
        pieces = [chunk.document["choices"][0] for chunk in chunks]
        assert len(whole["choices"]) == 2 * more.get("n", 1)
        for choice in whole["choices"]:
            own = [piece for piece in pieces if piece["index"] == choice["index"]]
            assert own[0]["text"] == CODEC.decode(prompts[choice["index"] // more.get("n", 1)])
            assert "".join(piece["text"] for piece in own) == choice["text"]
            assert [piece["finish_reason"] for piece in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                assert [v for piece in own for v in piece["logprobs"][name]] == values
            if logprobs and more == GREEDY:
                assert len(choice["logprobs"]["top_logprobs"][-1]) >= logprobs
        assert len(pieces) > 2 * len(whole["choices"]) or more in ({"max_tokens": 0}, GREEDY)

    def test_what_does_not_fit_is_refused(self) -> None:
        full = list(range(INFO.context_length))
        assert self.plan(prompt=full, echo=True, logprobs=0, max_tokens=1, temperature=0)
        for prompt, max_tokens in ((full, 1), ([*full, 5], 0)):
            with refused("context_too_long"):
                self.plan(prompt=prompt, echo=True, logprobs=0, max_tokens=max_tokens)

    def test_a_chat_goes_on_to_the_end_of_the_context(self) -> None:
        (turn,) = CHAT
        ids = CODEC.encode_ids([CODEC.render_chat(CHAT)])[0]
        for fields, wanted in (
            ({}, INFO.context_length - len(ids)),
            ({"max_tokens": 5}, 5),
            ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ):
            request = ChatCompletionRequest(messages=[turn], **fields)
            prompt = plan_chat(request, CODEC, INFO)
            assert prompt.ids == ids
            assert [job.max_tokens for job in prompt.samples] == [wanted]
        with pytest.raises(APIError, match="shorten"):
            plan_chat(
                ChatCompletionRequest(messages=[turn]), CODEC, replace(INFO, context_length=3)
            )

    def test_a_chats_alternatives_need_its_log_probabilities(self) -> None:
        for fields in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}):
            request = ChatCompletionRequest(messages=CHAT, **fields)
            (job,) = plan_chat(request, CODEC, INFO).samples
            assert (job.logprobs, job.top) == ("logprobs" in fields, fields.get("top_logprobs", 0))


class TestColumns:
    def test_aggregates_by_hand(self) -> None:
        found = aggregate_columns({"logprob": np.array([-1.0, -2.0, -6.0], np.float32)}, 2)
        assert found == {
            "logprob": {"sum": -9, "mean": -3, "min": -6, "max": -1, "early": -1.5, "late": -4},
            "surprisal": {"sum": 9, "mean": 3, "min": 1, "max": 6, "early": 1.5, "late": 4},
        }
        assert aggregate_columns({"rank": np.array([2, 4], np.int32)}, 5)["rank"]["late"] == 3
        assert aggregate_columns({"entropy": np.zeros(0)}, 2) == {}

    @given(
        st.lists(st.sampled_from([0.5, -2.0, math.nan, -math.inf]), min_size=1), st.integers(1, 9)
    )
    def test_aggregates_are_finite_or_null(self, values: list[float], window: int) -> None:
        (found,) = aggregate_columns({"log_q": np.array(values, np.float32)}, window).values()
        assert all(value is None or math.isfinite(value) for value in found.values())
        assert (found["sum"] is None) == (not all(map(math.isfinite, values)))


@pytest.mark.parametrize(
    "plan",
    [
        lambda texts, room: _encode(CODEC, texts, "never", room),
        lambda texts, room: cut_texts(
            *(texts, fit_windows(WindowOptions(), INFO.context_length), READ, CODEC, INFO),
            *(room.cover, ItemProblems("texts", "report")),
        ),
        lambda texts, room: plan_captures(
            read_items(texts, "never", CODEC, INFO.vocab_size),
            texts,
            CaptureSite.resolve("resid_post", None, "each", INFO),
            INFO,
            room.cover,
        ),
    ],
    ids=["tokenize", "perplexity", "activations"],
)
def test_what_has_no_room_is_refused_before_all_texts_are_encoded(
    plan: Callable[[list[str], Reservation], object],
) -> None:
    """The last one cannot be encoded at all; the refusal is not a problem of one text."""
    with refused("payload_too_large", "at most 1000"):
        plan([TEXT] * 1000 + ["\ud800"], Admission(1000).enter())


def job_of(rows: int) -> ScoreJob:
    return ScoreJob(np.zeros(rows, np.int32), np.zeros(rows, np.int32))


class TestComparison:
    def test_vocabularies_must_be_the_same(self) -> None:
        other = make_model(ScriptedHandle(replace(INFO, vocab_size=9)), model_id="other")
        with pytest.raises(APIError, match="other and any have different vocabularies"):
            Comparison(make_model(), other)
        short = make_model(ScriptedHandle(replace(INFO, context_length=9)), model_id="other")
        assert Comparison(make_model(), short).context_length == 9

    def test_jobs_differ_in_their_files_alone(self) -> None:
        (exported,) = export_jobs([job_of(2)], ["file"])
        (compared,) = compare_jobs([job_of(2)], ["file"])
        assert (exported.export, exported.reference) == ("file", None)
        assert (compared.export, compared.reference) == (None, "file")
        assert compared.columns == ("logprob", *REFERENCE_COLUMNS)
        assert exported.fingerprint is compared.fingerprint is None
        assert job_of(2).fingerprint is not None
