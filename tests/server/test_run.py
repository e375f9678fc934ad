"""The executor: limits, admission, planning, jobs, answer or events, whatever the task is.

Of runs that leave files while they last, comparisons of two models and sweeps, also the files.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer._endpoints import ENDPOINTS
from logsteer.errors import APIError, OverloadedError
from logsteer.schemas import ALL_COLUMNS, GenerateRequest, PerplexityRequest, Steering, SweepRequest
from logsteer_server.api.routes.tasks import TASKS
from logsteer_server.contract.jobs import (
    GenerateJob,
    Job,
    JobFailure,
    JobResult,
    Output,
    ScoreJob,
)
from logsteer_server.contract.plan import SteeringTrace
from logsteer_server.engines.fake import fake_scores
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.model import ResidentModel
from logsteer_server.settings import Settings
from logsteer_server.stores.vectors import open_vectors
from logsteer_server.tasks.generation import GenerateTask
from logsteer_server.tasks.perplexity import PerplexityTask
from logsteer_server.tasks.planning import Capacity, Planner
from logsteer_server.tasks.run import Batch, Event, Run, Task, check_count, take_each
from logsteer_server.tasks.sweep import SweepTask
from tests.refusals import refused
from tests.server.scripted_model import (
    INFO,
    SETTINGS,
    STORES,
    ScriptedHandle,
    answer_as_fake,
    make_model,
    register,
)

ITEMS = {"items": [{"context_ids": [5], "target_ids": [[6]]}] * 2}
PAIR = {"clean": ITEMS["items"][0], "corrupted": ITEMS["items"][0]}
STEERING = {"steering": {"vectors": [{"data": {"1": [1.0] * INFO.hidden_size}}]}}
ENTRIES: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "logprob": [("items", 2, ITEMS)],
    "diagnostics": [("items", 2, ITEMS)],
    "divergence": [("items", 2, {**ITEMS, "reference": {}})],
    "perplexity": [("texts", 2, {"texts": ["a"] * 2})],
    "generate": [("prompts x n", 6, {"prompts": ["a"] * 2, "n": 3})],
    "steer": [("prompts x n", 6, {"prompt_ids": [[5]] * 2, "n": 3, **STEERING})],
    "sweep": [("scales x layers x (items and texts)", 6, {**ITEMS, "scales": [1, 2], **STEERING})],
    "patch": [("pairs", 2, {"pairs": [PAIR] * 2})],
    "lens": [("items", 2, ITEMS)],
    "gradient": [("items", 2, {**ITEMS, "wrt": {"layers": [0]}})],
    "activations": [("items", 2, {"items": [{"token_ids": [5]}] * 2, "layers": [1]})],
    "vectors.train": [
        ("pairs", 4, {"name": "a", "pairs": [{"positive": "a", "negative": "b"}] * 2})
    ],
    "v1.completions": [
        ("prompt", 6, {"prompt": ["a"] * 2, "n": 3}),
        ("prompt", 6, {"prompt": [[5, 6]] * 2, "n": 3}),
        ("prompt", 3, {"prompt": [5, 6], "n": 3}),
        ("prompt", 3, {"prompt": "a b", "n": 3}),
    ],
    "v1.chat.completions": [("n", 3, {"messages": [{"role": "user", "content": "a"}], "n": 3})],
    "v1.score": [
        ("items", 2, {"items": ["a"] * 2, "label_token_ids": [3, 4]}),
        ("items", 2, {"items": [[5]] * 2, "label_token_ids": [3, 4]}),
    ],
}
"""Name of an endpoint -> what `max_items` bounds, how many that are, and the request."""

Plan = Callable[["ScriptedTask"], AsyncGenerator[Batch, None]]


class ScriptedTask(Task):
    """A task whose plan is a function; it notes what is asked of it, in order."""

    kind = "scripted"

    def __init__(self, model: ResidentModel, plan: Plan, limit: APIError | None = None) -> None:
        super().__init__(model)
        self.asked: list[str] = []
        self._plan = plan
        self._limit = limit

    def check_limits(self, settings: Settings) -> None:
        self.asked.append("limits")
        if self._limit:
            raise self._limit

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        self.asked.append("plan")
        plan = self._plan(self)
        try:
            async for batch in plan:
                yield batch
        finally:
            await plan.aclose()
            self.asked.append("plan closed")

    def report(self) -> dict[str, Any]:
        self.asked.append("report")
        return {"asked": list(self.asked)}


def score(count: int, first: int = 5, targets: int = 2) -> list[ScoreJob]:
    """Jobs of 10 tokens, each another sequence."""
    return [
        ScoreJob(np.full(10, first + n, dtype=np.int32), np.arange(targets, dtype=np.int32))
        for n in range(count)
    ]


def generate(max_tokens: int = 3) -> GenerateJob:
    return GenerateJob(np.arange(5, 9, dtype=np.int32), max_tokens, stream=True)


def show_all(index: int, _output: Output) -> Event:
    return Event("piece", {"index": index})


async def nothing(_task: Task) -> AsyncGenerator[Batch, None]:
    return
    yield


def plan_of(*batches: Batch) -> Plan:
    async def plan(_task: Task) -> AsyncGenerator[Batch, None]:
        for batch in batches:
            yield batch

    return plan


def finish(task: Task, settings: Settings = SETTINGS) -> dict[str, Any]:
    return asyncio.run(Run(task, Capacity(settings)).finish())


def events_of(task: Task, settings: Settings = SETTINGS) -> list[Event]:
    async def collect() -> list[Event]:
        return [event async for event in Run(task, Capacity(settings)).events()]

    return asyncio.run(collect())


LONG = "as long as may be"
LONG_ITEM = {"items": [{"context": "a", "targets": ["b"]}, {"context": LONG, "targets": ["b"]}]}
LONG_TEXTS: dict[str, list[dict[str, Any]]] = {
    "logprob": [LONG_ITEM, {"items": [{"context": "a", "targets": ["b", LONG]}]}],
    "diagnostics": [LONG_ITEM],
    "divergence": [{**LONG_ITEM, "reference": {}}],
    "perplexity": [{"texts": ["a", LONG]}],
    "generate": [{"prompts": ["a", LONG]}, {"messages": [{"role": "user", "content": LONG}]}],
    "steer": [{"prompts": ["a", LONG], **STEERING}],
    "sweep": [
        {**LONG_ITEM, "scales": [1], **STEERING},
        {"texts": ["a", LONG], "scales": [1], **STEERING},
    ],
    "patch": [{"pairs": [dict.fromkeys(("clean", "corrupted"), LONG_ITEM["items"][1])]}],
    "lens": [LONG_ITEM],
    "gradient": [{**LONG_ITEM, "wrt": {"layers": [0]}}],
    "activations": [{"items": ["a", LONG], "layers": [1]}],
    "vectors.train": [{"name": "a", "pairs": [{"positive": "a", "negative": LONG}] * 2}],
    "v1.completions": [{"prompt": LONG}, {"prompt": ["a", LONG]}],
    "v1.chat.completions": [{"messages": [{"role": "user", "content": LONG}]}],
    "v1.score": [
        {"items": ["a", LONG], "label_token_ids": [3, 4]},
        {"items": ["a"], "query": LONG, "label_token_ids": [3, 4]},
    ],
}
"""Name of an endpoint -> requests whose longest text is LONG."""


@pytest.mark.parametrize("name", TASKS)
def test_a_text_longer_than_the_limit_is_refused(name: str, tmp_path: Path) -> None:
    vectors = open_vectors(tmp_path, 2**20)
    stores = replace(STORES, vectors=vectors)
    for body in LONG_TEXTS[name]:
        request = ENDPOINTS[name].request
        task = TASKS[name](request.model_validate(body), register(make_model()), stores)
        with refused("payload_too_large", "max_text_chars"):
            finish(task, SETTINGS.model_copy(update={"max_text_chars": len(LONG) - 1}))


@pytest.mark.parametrize("name", TASKS)
def test_one_entry_more_than_the_limit_is_refused(name: str) -> None:
    for field, count, body in ENTRIES[name]:
        request = ENDPOINTS[name].request
        task = TASKS[name](request.model_validate(body), register(make_model()), STORES)
        task.check_limits(SETTINGS.model_copy(update={"max_items": count}))
        with refused("payload_too_large", f"has {count} entries, at most {count - 1}", param=field):
            task.check_limits(SETTINGS.model_copy(update={"max_items": count - 1}))


def generate_with(**fields: Any) -> list[GenerateJob]:
    """The jobs of a request to generate."""
    handle = ScriptedHandle()
    body = GenerateRequest(prompts=["a"], max_tokens=2, **fields)
    finish(GenerateTask(body, register(make_model(handle)), STORES))
    return handle.calls[0]  # type: ignore[return-value]


def test_seeds_are_the_callers_or_drawn_and_columns_those_that_are_named() -> None:
    one, two = (generate_with(seed=7, n=2) for _ in range(2))
    assert [job.seed for job in one] == [job.seed for job in two]
    drawn = [job.seed for _ in range(2) for job in generate_with(n=2)]
    assert len({*drawn, *(job.seed for job in one)}) == 6
    columns = [
        generate_with(**fields)[0].columns
        for fields in ({}, {"diagnostics": True}, {"diagnostics": True, "columns": ["rank"]})
    ]
    assert columns == [(), tuple(ALL_COLUMNS), ("rank",)]


def test_the_answer_has_what_every_answer_has() -> None:
    model = make_model()
    task = ScriptedTask(model, plan_of(Batch(score(2))))
    answer = finish(task)
    assert answer["id"] == task.id
    assert answer["id"].startswith("scripted-")
    assert answer["model"] == "any"
    assert answer["provenance"]["precision"] == "float32"
    assert (answer["steering"], answer["override"], answer["adapter"]) == (None, None, None)
    assert answer["timing"].keys() == {"queue_ms", "engine_ms"}
    assert answer["usage"] == {
        "prompt_tokens": 20, "scored_tokens": 4, "generated_tokens": 0, "cached_tokens": 0,
        "cached_results": 0,
    }  # fmt: skip
    assert answer["asked"] == ["limits", "plan", "plan closed", "report"]


def test_limits_come_before_admission_and_that_before_the_plan() -> None:
    handle = ScriptedHandle()
    model = make_model(handle, max_tokens=100)
    with model.admission.enter() as other:
        other.cover(100)
        with pytest.raises(APIError, match="at most 3") as limited:
            check_count("items", 4, 3)
        task = ScriptedTask(model, nothing, limited.value)
        with pytest.raises(APIError, match="items has 4 entries"):
            finish(task)
        assert task.asked == ["limits"]
        task = ScriptedTask(model, nothing)
        with pytest.raises(OverloadedError):
            finish(task)
        assert task.asked == ["limits"], "it planned, though there was no room"
    assert handle.calls == []


def test_a_model_that_does_not_answer_says_so_before_it_takes_work() -> None:
    handle = ScriptedHandle()
    handle.state = "loading"
    task = ScriptedTask(make_model(handle), nothing)
    with refused("model_loading"):
        finish(task)
    assert task.asked == ["limits"]


def test_jobs_run_once_their_batch_is_admitted() -> None:
    handle = ScriptedHandle()
    model = make_model(handle, max_tokens=100)
    task = ScriptedTask(model, plan_of(Batch(score(4)), Batch(score(5)), Batch(score(3))))
    with model.admission.enter() as other:
        other.cover(55)
        with pytest.raises(OverloadedError, match=r"95 tokens of work are taken .* adds 10"):
            finish(task)
        assert [len(call) for call in handle.calls] == [4]
        assert model.admission.pending == 55
    assert task.asked == ["limits", "plan", "plan closed"]
    finish(ScriptedTask(model, plan_of(Batch(score(4)), Batch(score(5)), Batch(score(3)))))
    assert [len(call) for call in handle.calls] == [4, 4, 5, 3]


def test_a_batch_may_reserve_what_later_ones_need() -> None:
    handle = ScriptedHandle()
    model = make_model(handle, max_tokens=100)
    task = ScriptedTask(model, plan_of(Batch(score(1), room=60), Batch(score(6))))
    with model.admission.enter() as other:
        other.cover(50)
        with pytest.raises(OverloadedError):
            finish(task)
    assert handle.calls == []


def test_the_plan_goes_on_after_the_last_output_was_taken() -> None:
    order: list[str] = []

    async def plan(_task: Task) -> AsyncGenerator[Batch, None]:
        for name in "ab":
            jobs = score(2)
            order.append(f"plan {name}")

            def take(index: int, _output: Output, name: str = name) -> None:
                order.append(f"take {name}{index}")

            yield Batch(jobs, take_each(take))
        order.append("end")

    finish(ScriptedTask(make_model(), plan))
    assert order == ["plan a", "take a0", "take a1", "plan b", "take b0", "take b1", "end"]


def test_only_work_counts_for_all() -> None:
    """What others are compared with counts for nothing."""
    steering = Steering(vectors=[{"data": {"1": [1.0] * INFO.hidden_size}}])  # type: ignore[list-item]
    interventions = Interventions(resolve_steering(steering, STORES.vectors, INFO))
    answer = {}
    for purpose in ("work", "reference"):

        async def plan(task: Task, purpose: Any = purpose) -> AsyncGenerator[Batch, None]:
            task.interventions = interventions
            jobs = interventions.apply(score(1))
            yield Batch(jobs)
            yield Batch([*jobs, generate()], purpose=purpose)

        answer[purpose] = finish(ScriptedTask(make_model(ScriptedHandle(answer=steer)), plan))
    usage = {
        purpose: [found["usage"][f"{kind}_tokens"] for kind in ("prompt", "scored", "generated")]
        for purpose, found in answer.items()
    }
    assert usage == {"work": [24, 4, 3], "reference": [10, 2, 0]}
    steered = {purpose: found["steering"]["tokens_steered"] for purpose, found in answer.items()}
    assert steered == {"work": 20, "reference": 10}
    for found in answer.values():
        assert found["steering"]["layers"]["1"]["relative_norm"] == 0.5
    timed = [answer[purpose]["timing"]["engine_ms"] for purpose in answer]
    assert all(ms > 0 for ms in timed)


def steer(job: Job) -> Sequence[JobResult]:
    """Answers with a trace of the steering that the job asked for."""
    if job.plan is None:
        return answer_as_fake(job)
    trace = SteeringTrace((len(job.tokens),), {site.name: (len(job.tokens), 0.5)
                                            for site in job.plan.sites})  # fmt: skip
    return [replace(output, trace=trace) for output in answer_as_fake(job)]  # type: ignore[type-var]


def test_work_of_a_reference_alone_is_not_timed() -> None:
    task = ScriptedTask(make_model(), plan_of(Batch(score(1), purpose="reference")))
    assert finish(task)["timing"] == {"queue_ms": 0.0, "engine_ms": 0.0}


def test_cached_results_are_counted_and_neither_run_nor_admitted() -> None:
    results = ResultCache(2**20)
    handle = ScriptedHandle()
    model = make_model(handle, max_tokens=40, results=results)
    try:
        for jobs, cache, known, run in (
            (score(4), True, 0, 4),
            (score(2) + score(2), True, 4, 4),
            (score(4) + score(4, first=50), True, 4, 8),
            (score(3) + score(1), False, 0, 12),
            (score(1, first=90) * 9, True, 8, 13),
        ):
            answer = finish(ScriptedTask(model, plan_of(Batch(jobs, cache=cache))))
            assert (answer["usage"]["cached_results"], handle.num_jobs) == (known, run)
            assert answer["usage"]["prompt_tokens"] == 10 * len(jobs)
        answer = finish(ScriptedTask(model, plan_of(Batch(score(4), purpose="reference"))))
        assert answer["usage"]["cached_results"] == 0
    finally:
        results.close()


def test_pieces_are_taken_one_by_one_and_tokens_counted_once() -> None:
    pieces: list[Any] = []

    def take(index: int, output: Any) -> Event:
        pieces.append(output)
        return Event("piece", {"index": index, "last": output.is_last})

    found = events_of(ScriptedTask(make_model(), plan_of(Batch([generate(4)], take_each(take)))))
    assert [event.name for event in found] == ["start", *["piece"] * 4, "result"]
    assert [event.document["last"] for event in found[1:-1]] == [False, False, False, True]
    usage = found[-1].document["usage"]
    assert (usage["prompt_tokens"], usage["generated_tokens"]) == (4, 4)


async def test_start_comes_first_and_with_the_first_batch_that_is_not_silent() -> None:
    handle = ScriptedHandle()
    calls_at: list[tuple[str, int]] = []
    silent = Batch(score(1), silent=True)
    batches = [silent, silent, Batch(score(2), take_each(show_all))]

    run = Run(ScriptedTask(make_model(handle), plan_of(*batches)), Capacity(SETTINGS))
    calls_at.extend([(event.name, len(handle.calls)) async for event in run.events()])
    assert calls_at == [("start", 2), ("piece", 3), ("piece", 3), ("result", 3)]


@pytest.mark.parametrize("batches", [[], [Batch(score(1), silent=True)], [Batch([])]])
def test_a_stream_has_a_start_whatever_is_planned(batches: list[Batch]) -> None:
    found = events_of(ScriptedTask(make_model(), plan_of(*batches)))
    assert [event.name for event in found] == ["start", "result"]
    start, result = (event.document for event in found)
    assert start == {name: result[name] for name in ("id", "model", "provenance")}


def fail_on(token: int) -> Callable[[Job], Sequence[JobResult]]:
    def answer(job: Job) -> Sequence[JobResult]:
        if token in job.tokens:
            return [JobFailure("internal", "told to fail")]
        return answer_as_fake(job)

    return answer


async def fail_to_plan(_task: Task) -> AsyncGenerator[Batch, None]:
    yield Batch(score(3))
    raise RuntimeError("told to fail")


@pytest.mark.parametrize("plan", [plan_of(Batch(score(3))), fail_to_plan], ids=["job", "plan"])
def test_failures_end_the_run_and_give_the_room_back(plan: Plan) -> None:
    """One by a job, one by the plan itself."""
    handle = ScriptedHandle(answer=fail_on(6) if plan is not fail_to_plan else answer_as_fake)
    model = make_model(handle)
    task = ScriptedTask(model, plan)
    with pytest.raises((APIError, RuntimeError), match="told to fail"):
        finish(task)
    assert model.admission.pending == 0
    assert handle.open == 0
    assert task.asked == ["limits", "plan", "plan closed"]


async def test_what_fails_while_it_is_taken_ends_the_jobs_too() -> None:
    def take(_index: int, _output: Output) -> None:
        raise RuntimeError("told to fail")

    handle = ScriptedHandle()
    model = make_model(handle)

    with pytest.raises(RuntimeError):
        await Run(
            ScriptedTask(model, plan_of(Batch(score(3), take_each(take)))), Capacity(SETTINGS)
        ).finish()
    assert (handle.open, model.admission.pending) == (0, 0)


async def test_closing_the_events_ends_jobs_plan_and_reservation_at_once() -> None:
    handle = ScriptedHandle()
    model = make_model(handle)
    task = ScriptedTask(model, plan_of(Batch(score(3), take_each(show_all))))

    events = Run(task, Capacity(SETTINGS)).events()
    names = [(await anext(events)).name, (await anext(events)).name]
    assert names == ["start", "piece"]
    assert (handle.open, model.admission.pending) == (1, 30)
    await events.aclose()
    assert (handle.open, model.admission.pending) == (0, 0)
    assert task.asked[-1] == "plan closed"


async def test_cancelling_a_run_ends_its_jobs_before_it_is_over() -> None:
    """As the deadline does, and a caller who hangs up."""
    handle = ScriptedHandle()
    model = make_model(handle)
    task = ScriptedTask(model, plan_of(Batch(score(50))))

    running = asyncio.create_task(Run(task, Capacity(SETTINGS)).finish())
    while not handle.open:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    assert (handle.open, model.admission.pending) == (0, 0)


def test_a_generation_at_work_is_answered_though_its_model_is_closed_meanwhile() -> None:
    """As `unload` and `drain` promise."""

    def answer(job: Job) -> Sequence[JobResult]:
        model.closed = ("draining", "it is being unloaded")
        return answer_as_fake(job)

    model = make_model(ScriptedHandle(answer=answer))
    body = GenerateRequest(prompts=["Once"], max_tokens=3)
    found = finish(GenerateTask(body, register(model), STORES))
    assert found["results"][0]["completions"][0]["num_tokens"] == 3


# ------------------------------------------------------------------ comparisons and sweeps


TEXT = "Once upon a time there was a capital of France, and it was a long way off. " * 20


def score_or_fail(job: Job) -> Sequence[JobResult]:
    """Writes what is to be exported, as engines do; fails on a comparison."""
    for file in (job.export, job.reference):
        assert file is None or Path(file).stat().st_size == 4 * len(job.targets) * INFO.vocab_size
    return fake_scores(job)


def compare(model: ResidentModel, reference: ResidentModel, **fields: Any) -> PerplexityTask:
    body = PerplexityRequest(texts=[TEXT], model=model.id, reference=reference.id, **fields)
    return PerplexityTask(body, register(model, reference), STORES)


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Temporary files are in the test's own directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def sweep(model: ResidentModel) -> SweepTask:
    item = {"context_ids": [5, 6, 7], "target_ids": [[8, 9], [10]]}
    ablate = {"data": {"1": [1.0] * INFO.hidden_size}, "op": "ablate"}
    body = SweepRequest(items=[item], steering={"vectors": [ablate]}, scales=[1.0, 2.0])  # type: ignore[list-item, arg-type]
    return SweepTask(body, register(model), STORES)


@pytest.mark.parametrize("end", ["finish", "close", "fail"])
@pytest.mark.parametrize("kind", ["comparison", "sweep"])
def test_files_of_log_probabilities_are_gone_however_a_run_ends(
    tmp_path: Path, kind: str, end: str
) -> None:
    seen: list[list[Path]] = []

    def answer(job: Job) -> Sequence[JobResult]:
        seen.append([path for path in tmp_path.rglob("*") if path.is_file()])
        if end == "fail" and job.reference is not None:
            return [JobFailure("internal", "told to fail")]
        return score_or_fail(job)

    model = make_model(ScriptedHandle(answer=answer))
    reference = make_model(ScriptedHandle(answer=answer), model_id="other")
    task = sweep(model) if kind == "sweep" else compare(model, reference, stream=True)
    run = Run(task, Capacity(SETTINGS))

    async def leave() -> None:
        events = run.events()
        await anext(events)
        if kind == "comparison":
            await anext(events)
        assert [path for path in tmp_path.rglob("*") if path.is_file()]
        await events.aclose()

    if end == "close":
        asyncio.run(leave())
    elif end == "fail":
        with pytest.raises(APIError, match="told to fail"):
            asyncio.run(run.finish())
    else:
        asyncio.run(run.finish())
    assert any(seen) or end == "close", "there were no files at all"
    assert list(tmp_path.iterdir()) == []
    assert model.admission.pending == reference.admission.pending == 0


@pytest.mark.parametrize("rows", [130, 10], ids=["several windows fit", "not even one"])
async def test_a_comparison_reserves_its_largest_part_before_its_stream_opens(rows: int) -> None:
    """The reference: the first part is not the largest, as its window scores more tokens."""
    own, other = ScriptedHandle(), ScriptedHandle()
    model, reference = make_model(own, 10_000), make_model(other, 10_000, model_id="other")
    task = compare(model, reference, context_length=64, stride=16, stream=True)
    limit = 4 * INFO.vocab_size * rows
    task._scratch.limit = limit
    settings = SETTINGS.model_copy(update={"max_reference_bytes": limit})

    found = [
        (event.name, model.admission.pending, reference.admission.pending)
        async for event in Run(task, Capacity(settings)).events()
    ]
    sizes = [sum(job.num_positions for job in call) for call in own.calls]
    assert len(sizes) > 2
    assert max(sizes) > sizes[0] or rows < 64
    assert {name for name, *_ in found} == {"start", "window", "result"}
    assert {taken for *_, taken in found} == {max(sizes)}
    assert min(taken for _, taken, _ in found) >= max(sizes)


def test_a_comparison_counts_its_own_work_alone(tmp_path: Path) -> None:
    model, reference = (
        make_model(max_tokens=10_000),
        make_model(max_tokens=10_000, model_id="other"),
    )
    alone = finish(PerplexityTask(PerplexityRequest(texts=[TEXT]), register(model), STORES))
    compared = finish(compare(model, reference))
    assert compared["usage"] == alone["usage"]
    assert compared["divergence"]["num_tokens"] == alone["usage"]["scored_tokens"]
    assert compared["results"] == alone["results"]


def test_a_text_that_is_too_short_to_score_can_be_compared(tmp_path: Path) -> None:
    body = PerplexityRequest(texts=["a"], model="any", reference="other", bos="never")
    models = register(make_model(), make_model(model_id="other"))
    task = PerplexityTask(body, models, STORES)
    answer = finish(task)
    assert answer["divergence"]["num_tokens"] == 0
    assert answer["results"][0]["flags"] == ["nothing_scored"]
