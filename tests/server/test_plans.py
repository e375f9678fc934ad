"""Planners of targets, gradients, sweeps and captures; how a pair's text is divided."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from logsteer.errors import APIError
from logsteer.schemas import (
    ActivationsRequest,
    LogprobItem,
    LogprobRequest,
    PerplexityRequest,
    Steering,
)
from logsteer.schemas.perplexity import WindowOptions
from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Policy, ScoreJob
from logsteer_server.contract.plan import Direction, Positions
from logsteer_server.engines.fake import FAKE_COLUMNS, fake_scores
from logsteer_server.interventions.interventions import UNCHANGED
from logsteer_server.tasks.activations import ActivationsTask
from logsteer_server.tasks.gradient import plan_gradients
from logsteer_server.tasks.logprob import assemble_targets
from logsteer_server.tasks.perplexity import PerplexityTask
from logsteer_server.tasks.planning import BYTES_PER_NUMBER, Capacity
from logsteer_server.tasks.run import Run
from logsteer_server.tasks.sweep import plan_settings, plan_sweep
from logsteer_server.tasks.targets import (
    TargetPlan,
    describe_rows,
    plan_targets,
)
from logsteer_server.text.boundaries import Cut, cut_pairs
from logsteer_server.text.division import _list_clauses, divides_at_spaces, may_divide
from logsteer_server.text.tokenizer import split_sizes
from logsteer_server.text.windows import fit_windows
from tests.refusals import refused
from tests.server.scripted_model import (
    INFO,
    SETTINGS,
    STORES,
    free,
    load_codec,
    make_model,
    register,
)

CODEC = load_codec()
BOS = 1
READ = describe_rows(["rank"])


def options_of(**fields: Any) -> LogprobRequest:
    return LogprobRequest.model_construct(**fields)


ONE = [0.0] * (INFO.hidden_size - 1) + [1.0]

ids_of = st.lists(st.integers(0, INFO.vocab_size - 1), min_size=1, max_size=12)


def plan(
    *items: dict[str, Any],
    options: LogprobRequest | None = None,
    read: ScoreJob = READ,
    info: EngineInfo = INFO,
) -> TargetPlan:
    given = [LogprobItem(**item) for item in items]
    return plan_targets(given, CODEC, info, options or options_of(), read, free)


def refusal(*items: dict[str, Any], **more: Any) -> tuple[str, str | None]:
    """Code and param of the error that planning these items raises."""
    with pytest.raises(APIError) as caught:
        plan(*items, **more)
    return caught.value.code, caught.value.param


def read_text(job: ScoreJob) -> tuple[list[int], list[int]]:
    return job.tokens.tolist(), job.targets.tolist()


class TestTargets:
    def test_a_joint_target_is_what_follows_the_context(self) -> None:
        made = plan({"context": "The capital of France is ", "targets": ["Paris"]})
        (target,), (job,) = made.planned, made.jobs
        front = CODEC.encode_ids(["The capital of France is"])[0]
        (paris,) = CODEC.encode_ids([" Paris"])
        assert (made.context(target).tolist(), target.token_ids) == ([BOS, *front], paris)
        assert read_text(job) == ([BOS, *front], paris)
        assert (job.columns, job.top, job.policy, job.double) == (READ.columns, 0, Policy(), False)
        assert target.offsets == [(-1, 5)]

    def test_a_separate_target_is_encoded_alone(self) -> None:
        options = options_of(boundary="separate", bos="never")
        made = plan({"context": "ca", "targets": ["ts"]}, options=options)
        (target,) = made.planned
        assert made.context(target).tolist() == CODEC.encode_ids(["ca"])[0]
        assert target.token_ids == CODEC.encode_ids(["ts"])[0]
        assert target.finding == "exact"

    def test_ids_without_a_context_begin_with_bos(self) -> None:
        made = plan({"context_ids": [], "target_ids": [[9]]})
        assert read_text(made.jobs[0]) == ([BOS], [9])
        alone = options_of(bos="never")
        made = plan({"context_ids": [], "target_ids": [[9, 10]]}, options=alone)
        assert read_text(made.jobs[0]) == ([9], [10])
        assert made.planned[0].finding == "no_context"
        nothing = {"context_ids": [], "target_ids": [[9]]}
        assert refusal(nothing, options=alone) == ("boundary_empty", "items[0].target_ids[0]")

    @given(
        st.lists(
            st.tuples(ids_of, st.lists(ids_of, min_size=1, max_size=4)), min_size=1, max_size=5
        )
    )
    @settings(max_examples=60)
    def test_every_target_finds_its_own_scores(
        self, given_: list[tuple[list[int], list[list[int]]]]
    ) -> None:
        """Whatever shares jobs and rows, each target gets what it would get alone."""
        items = [{"context_ids": context, "target_ids": targets} for context, targets in given_]
        options = options_of(on_overflow="truncate_left", columns=list(READ.columns))
        info = replace(INFO, context_length=14)

        def score(*some: dict[str, Any]) -> list[Any]:
            made = plan(*some, info=info, options=options)
            outputs = ScoreOutputs.of([fake_scores(job)[0] for job in made.jobs])
            return assemble_targets(made, outputs, CODEC, options)

        together = score(*items)
        for item, found in zip(items, together, strict=True):
            for target_ids, target in zip(item["target_ids"], found["targets"], strict=True):
                alone = score({"context_ids": item["context_ids"], "target_ids": [target_ids]})
                (same,) = alone[0]["targets"]
                assert target["token_ids"] == target_ids
                assert target["logprobs"].tolist() == same["logprobs"].tolist()
                assert target["truncated_tokens"] == same["truncated_tokens"]
            logprobs = [target["logprob"] for target in found["targets"]]
            assert logprobs[found["best"]] == max(logprobs)
            assert sum(found["choice_probs"]) == pytest.approx(1)


class TestGradients:
    ITEMS = ({"context_ids": [5, 6, 7], "target_ids": [[8, 9], [10]]},)

    def test_numbers_are_bounded(self) -> None:
        """Targets that read 4 and 3 tokens, at 2 sites: 14 rows."""
        sites = ((0, "resid_post"), (2, "resid_post"))
        targets = plan(*self.ITEMS)
        jobs = plan_gradients(targets, sites, Positions(), None, 10, 140)
        assert all(job.sites == sites and job.along is None for job in jobs)
        with refused("payload_too_large", "14 rows of 10 numbers", param="wrt"):
            plan_gradients(targets, sites, Positions(), None, 10, 139)

    def test_along_a_direction_there_are_no_sites(self) -> None:
        direction = Direction("file", "0" * 64)
        jobs = plan_gradients(plan(*self.ITEMS), (), Positions(), direction, 10, 1)
        assert [(job.along, job.sites) for job in jobs] == [(direction, ())] * 2

    def test_what_was_truncated_is_not_read(self) -> None:
        options = options_of(on_overflow="truncate_left")
        info = replace(INFO, context_length=3)
        targets = plan(*self.ITEMS, info=info, options=options)
        jobs = plan_gradients(targets, ((0, "resid_post"),), Positions(), None, 10, 1000)
        assert [job.tokens.tolist() for job in jobs] == [[6, 7, 8], [5, 6, 7]]


WINDOWS = fit_windows(WindowOptions(bos="never"), INFO.context_length)


class TestSweeps:
    STEERING = Steering(vectors=[{"data": {"1": ONE}, "scale": 3.0}, {"data": {"2": ONE}}])  # type: ignore[list-item]

    def settings_of(self, scales: Sequence[float], layers: Sequence[list[int]] | None) -> list[Any]:
        return list(plan_settings(self.STEERING, scales, layers, UNCHANGED, STORES, INFO))

    def test_a_setting_for_each_set_of_layers_and_scale_after_the_unsteered(self) -> None:
        found = self.settings_of([-1.0, 0.0, 2.0], [[0], [1, 3]])
        assert [(setting.layers, setting.scale) for setting in found] == [
            (None, 0.0),
            ([0], -1.0), ([0], 0.0), ([0], 2.0),
            ([1, 3], -1.0), ([1, 3], 0.0), ([1, 3], 2.0),
        ]  # fmt: skip
        steered = [setting.interventions.steering is not None for setting in found]
        assert steered == [False, True, False, True, True, False, True]
        sites = found[4].interventions.steering.plan.sites
        assert [site.layer for site in sites] == [1, 3]

    def test_scales_multiply_the_vectors_own(self) -> None:
        (_, setting) = self.settings_of([2.0], None)
        sites = setting.interventions.steering.plan.sites
        assert [(site.layer, float(site.offset[-1])) for site in sites] == [(1, 6.0), (2, 2.0)]
        assert [used.scale for used in setting.interventions.steering.vectors] == [6.0, 2.0]

    def test_a_layer_that_the_model_lacks_is_refused(self) -> None:
        with pytest.raises(APIError, match=r"model.s are 0 to 3"):
            self.settings_of([1.0], [[4]])

    def test_targets_next_tokens_and_windows_in_this_order(self) -> None:
        items = [
            LogprobItem(context_ids=[5, 6], target_ids=[[7], [8, 9]]),
            LogprobItem(context="Once", targets=[" upon"]),
        ]
        texts = ["Once upon a time there was", "a cat"]
        made = plan_sweep(items, texts, WINDOWS, CODEC, INFO, options_of(bos="never"), READ, free)
        assert [read_text(job) for job in made.next_jobs] == [
            ([5, 6], [7]),
            (CODEC.encode_ids(["Once"])[0], CODEC.encode_ids(["Once upon"])[0][1:][:1]),
        ]
        assert (made.num_texts, [window.text for window in made.windows]) == (2, [0, 1])
        windows = [window.job for window in made.windows]
        assert [job.tokens.tolist() for job in windows] == [
            ids[:-1] for ids in CODEC.encode_ids(texts)
        ]
        wanted = [*made.targets.jobs, *made.next_jobs, *windows]
        assert [read_text(job) for job in made.jobs] == [read_text(job) for job in wanted]

    def test_next_tokens_follow_what_is_left_of_a_context(self) -> None:
        item = LogprobItem(context_ids=[5, 6, 7, 8], target_ids=[[9, 10]])
        options = options_of(on_overflow="truncate_left")
        info = replace(INFO, context_length=4)
        made = plan_sweep([item], [], WINDOWS, CODEC, info, options, READ, free)
        assert read_text(made.next_jobs[0]) == ([6, 7, 8], [9])


def test_ids_and_positions_count_among_the_numbers_of_an_answer() -> None:
    """Of 30 tokens the last one's activation in two layers, its place, and all ids."""
    body = ActivationsRequest(items=[{"token_ids": [5] * 30}], layers=[0, 1], read="last")  # type: ignore[list-item]
    numbers = 2 * INFO.hidden_size + 30 + 1

    def ask(limit: int) -> dict[str, Any]:
        task = ActivationsTask(body, register(make_model()), STORES)
        settings = SETTINGS.model_copy(update={"max_activation_bytes": limit})
        return asyncio.run(Run(task, Capacity(settings)).finish())

    assert len(ask(numbers * BYTES_PER_NUMBER)["results"]) == 1
    with pytest.raises(APIError, match="max_activation_bytes"):
        ask(numbers * BYTES_PER_NUMBER - 1)


def test_an_answer_of_every_column_takes_no_more_than_was_expected() -> None:
    body = PerplexityRequest(texts=SAMPLES, tokens=True, columns=list(FAKE_COLUMNS))
    run = Run(PerplexityTask(body, register(make_model()), STORES), Capacity(SETTINGS))
    answer = json.dumps(asyncio.run(run.finish()), default=lambda array: array.tolist())
    assert len(answer) <= run.expected_bytes


SAMPLES = [
    "Once upon a time there was a cat. It's 12345 days, they'll say: \n\n  \tnever\r\n mind!!  ",
    "def f(x):\n    return x  # \u00e9t\u00e9, na\u00efve; \u65e5\u672c\u8a9e 3.1 \u2581 \u00a0",
] * 8
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = st.text(st.sampled_from("ab 1.'s\n\t\u00e9\u0301\u2581\u00a0\u65e5<s>!\r\x1c"), max_size=12)


def train(cuts: Any = None, normalizer: Any = None, byte_fallback: bool = True) -> Tokenizer:
    """A small tokenizer that has learnt the samples."""
    backend = Tokenizer(models.BPE(byte_fallback=byte_fallback))
    backend.pre_tokenizer, backend.normalizer = cuts, normalizer
    given = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(SAMPLES, given)
    return backend


def cut_bytes(pattern: str) -> Any:
    apart = pre_tokenizers.Split(Regex(pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([apart, as_bytes])


def make_sign() -> Any:
    return normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")])


def gpt2(*, trims: bool = False) -> Tokenizer:
    backend = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    return backend


def gemma() -> Tokenizer:
    """One that has learnt within words, and cuts none."""
    backend = train(pre_tokenizers.Metaspace(prepend_scheme="never"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.normalizer = make_sign()
    return add_bytes(backend)


def add_bytes(backend: Tokenizer) -> Tokenizer:
    """The tokenizer with a token for each byte."""
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    vocab.update({f"<0x{n:02X}>": len(vocab) + n for n in range(256)})
    return Tokenizer.from_str(json.dumps(content))


BACKENDS = {
    "demo": CODEC._backend,
    "gpt2": gpt2(),
    "llama3": train(cut_bytes(LLAMA_3), normalizers.NFC()),
    "gemma": gemma(),
}


def test_a_bar_in_a_group_or_a_class_ends_no_clause() -> None:
    clauses = ["a(b|c)", "[|(]", r"\|", r"[\]|]d", ""]
    assert _list_clauses("|".join(clauses)) == clauses


def read(backend: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    found = backend.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


@pytest.mark.parametrize("name", BACKENDS)
@given(front=TEXTS, rest=TEXTS)
@settings(max_examples=400, deadline=None)
def test_the_parts_give_the_tokens_and_offsets_of_the_whole(
    name: str, front: str, rest: str
) -> None:
    backend, rest = BACKENDS[name], f" {rest}"
    assert divides_at_spaces(backend)
    if not may_divide(front, rest):
        return
    (own, first), (others, second) = read(backend, front), read(backend, rest)
    moved = [(start + len(front), end + len(front)) for start, end in second]
    assert read(backend, front + rest) == (own + others, first + moved)


@pytest.mark.parametrize(
    ("front", "rest", "wanted"),
    [
        ("a", " b", True),
        ("a", "b", False),
        ("a ", " b", False),
        ("a\n", " b", False),
        ("\u2581", " b", False),
        ("", " b", False),
        ("a", "\nb", False),
        ("a", "", False),
    ],
)
def test_a_text_is_divided_at_a_space_behind_what_is_none(
    front: str, rest: str, wanted: bool
) -> None:
    assert may_divide(front, rest) is wanted


def add_token(backend: Tokenizer, content: str, **options: bool) -> Tokenizer:
    backend.add_special_tokens([AddedToken(content, **options)])
    return backend


REFUSED: dict[str, Callable[[], Tokenizer]] = {
    "a space is put in front": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "tokens go across spaces": lambda: add_bytes(train(None)),
    "signs without a token": lambda: train(pre_tokenizers.Split(" ", "isolated"), make_sign()),
    "an unknown pattern": lambda: train(cut_bytes(r"\w+ \w+|.")),
    "it looks behind": lambda: train(cut_bytes(r"(?<=a) b|\s+|\p{L}+")),
    "spaces are cut off offsets": lambda: gpt2(trims=True),
    "an added token takes what follows": lambda: add_token(gpt2(), "<mask>", rstrip=True),
    "an added token is a word": lambda: add_token(gpt2(), "<w>", single_word=True),
    "an added token has a space": lambda: add_token(gpt2(), "a b"),
    "another normalizer": lambda: train(None, normalizers.NFKC()),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0, " ": 1}, "a")),
    "dropout": lambda: Tokenizer(models.BPE({" ": 0}, [], dropout=0.5)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_told_is_not_divided(why: str) -> None:
    assert not divides_at_spaces(REFUSED[why]())


@given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_pairs_are_cut_as_their_joint_texts_are(given: list[tuple[str, str, bool]]) -> None:
    texts = [(f"a{context}", f"{' ' * spaced}{target}b") for context, target, spaced in given]
    wholes = CODEC.encode([context + target for context, target in texts])
    contexts = CODEC.encode_ids([context.rstrip() for context, _ in texts])
    assume(all(len(a.ids) > len(b) for a, b in zip(wholes, contexts, strict=True)))
    pairs = [(context, target, False) for context, target in texts]
    cuts = list(cut_pairs(CODEC, pairs, "joint", "never"))
    for (context, _), cut, whole, own in zip(texts, cuts, wholes, contexts, strict=True):
        assert isinstance(cut, Cut)
        count, start = len(own), len(context)
        assert cut.context_ids == whole.ids[:count]
        assert cut.target_ids == whole.ids[count:]
        assert cut.offsets == [(a - start, b - start) for a, b in whole.offsets[count:]]
        assert cut.finding == ("exact" if whole.ids[:count] == own else "merged")


def test_entries_go_together_until_they_come_to_the_limit() -> None:
    assert list(split_sizes([3, 3, 6, 1], 5)) == [range(2), range(2, 3), range(3, 4)]
    assert list(split_sizes([2, 3, 5], 5)) == [range(2), range(2, 3)]
