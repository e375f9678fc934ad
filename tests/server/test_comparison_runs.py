"""Runs that leave files while they last: comparisons of two models, and sweeps."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import APIError
from logsteer.schemas import PerplexityRequest, SweepRequest
from logsteer_server.contract.jobs import Job, JobFailure, JobResult
from logsteer_server.engines.fake import fake_scores
from logsteer_server.models.model import ResidentModel
from logsteer_server.settings import Settings
from logsteer_server.tasks import planning
from logsteer_server.tasks.perplexity import PerplexityTask
from logsteer_server.tasks.planning import Capacity
from logsteer_server.tasks.run import Run, Task
from logsteer_server.tasks.sweep import SweepTask
from tests.server.scripted_model import (
    INFO,
    SETTINGS,
    STORES,
    ScriptedHandle,
    make_model,
    register,
)

TEXT = "Once upon a time there was a capital of France, and it was a long way off. " * 20


def score_or_fail(job: Job) -> Sequence[JobResult]:
    """Writes what is to be exported, as engines do; fails on a comparison."""
    for file in (job.export, job.reference):
        assert file is None or Path(file).stat().st_size == 4 * len(job.targets) * INFO.vocab_size
    return fake_scores(job)


def compare(model: ResidentModel, reference: ResidentModel, **fields: Any) -> PerplexityTask:
    body = PerplexityRequest(texts=[TEXT], model=model.id, reference=reference.id, **fields)
    return PerplexityTask(body, register(model, reference), STORES)


def finish(task: Task, settings: Settings = SETTINGS) -> dict[str, Any]:
    return asyncio.run(Run(task, Capacity(settings)).finish())


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


async def test_a_comparison_reserves_its_largest_part_before_its_stream_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models: the first part is not the largest, as its window scores more tokens."""
    monkeypatch.setattr(planning, "SLICE_S", 60.0)  # between slices, room covers the whole plan
    settings = SETTINGS.model_copy(update={"max_reference_bytes": 4 * INFO.vocab_size * 130})
    own, other = ScriptedHandle(), ScriptedHandle()
    model, reference = make_model(own, 10_000), make_model(other, 10_000, model_id="other")
    task = compare(model, reference, context_length=64, stride=16, stream=True)

    found = [
        (event.name, model.admission.pending, reference.admission.pending)
        async for event in Run(task, Capacity(settings)).events()
    ]
    sizes = [sum(job.num_positions for job in call) for call in own.calls]
    assert len(sizes) > 2
    assert max(sizes) > sizes[0]
    assert {name for name, *_ in found} == {"start", "window", "result"}
    assert {tuple(taken) for _, *taken in found} == {(max(sizes), max(sizes))}


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
