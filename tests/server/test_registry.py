"""Resident models: found by id, ready or not, and jobs that the result cache spares the engine."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer.errors import APIError
from logsteer_server.contract.batches import ResultPart
from logsteer_server.contract.jobs import Job, JobResult, Routing, ScoreJob
from logsteer_server.models import model as model_module
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.model import PreparedJobs, ResidentModel
from logsteer_server.models.registry import ModelRegistry, make_handles
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.stores.contents import ContentFiles, JobContents
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.text.windows import Windowing
from tests.own_time import run_in_own_time
from tests.refusals import refused
from tests.server.scripted_model import INFO, ScriptedHandle, answer_as_fake, load_codec, make_model


@pytest.fixture
def results() -> Iterator[ResultCache]:
    cache = ResultCache(2**20)
    yield cache
    cache.close()


def registry(*ids: str) -> ModelRegistry:
    settings = Settings(models=[ModelSettings(id=name, engine="fake", path="here") for name in ids])
    return make_registry(settings)


def make_registry(settings: Settings) -> ModelRegistry:
    """Models that are not started."""
    contents = JobContents(ContentFiles(Objects.open(settings), 0), StoreThreads())
    handles = make_handles(settings, contents)
    return ModelRegistry(settings, ResultCache(0), Metrics(), handles)


class TestFind:
    def test_by_id(self) -> None:
        models = registry("a", "b:1")
        assert [models.find(name).id for name in ("b:1", "a")] == ["b:1", "a"]
        assert models.find("a") is models.find("a")

    def test_the_only_one_need_not_be_named(self) -> None:
        assert registry("a").find(None).id == "a"
        with refused("invalid_request", "name one of them as model: a, b", param="model"):
            registry("a", "b").find(None)

    def test_of_several_the_default_need_not_be_named(self) -> None:
        models = [
            ModelSettings(id=one, engine="fake", path="here", default=one == "b") for one in "abc"
        ]
        found = make_registry(Settings(models=models))
        assert [found.find(name).id for name in (None, "a")] == ["b", "a"]
        with pytest.raises(ValueError, match=r"default is set for \['a', 'b'\]"):
            Settings(models=[models[0].model_copy(update={"default": True}), models[1]])

    @pytest.mark.parametrize("name", ["c", "", "A"])
    def test_an_unknown_id_is_told_which_there_are(self, name: str) -> None:
        with refused("unknown_model", "these are: a, b", param="model"):
            registry("a", "b").find(name)


class TestReadiness:
    def test_a_model_without_its_tokenizer_is_still_loading(self) -> None:
        model = make_model()
        model._codec = None
        assert not model.is_ready
        assert model.describe().state == "loading"
        with refused("model_loading", "tokenizer", retry_after=2):
            model.require()
        asyncio.run(model.load_codec())
        assert model.is_ready
        assert model.require()[0].digest == load_codec().digest

    def test_a_tokenizer_that_does_not_load_is_a_failed_model(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("no tokenizer")
        handle = ScriptedHandle(replace(INFO, tokenizer_path=str(tmp_path)))
        model = make_model(handle)
        asyncio.run(model.load_codec())
        assert (model.is_ready, model.describe().state) == (False, "failed")
        assert "tokenizer did not load" in model.describe().detail
        with pytest.raises(APIError, match="tokenizer did not load") as caught:
            model.require()
        assert not caught.value.retryable

    def test_a_card_says_what_the_engine_and_tokenizer_are(self) -> None:
        card = make_model().describe()
        assert (card.id, card.state, card.context_length) == ("any", "ready", INFO.context_length)
        assert (card.vocab_size, card.has_chat_template) == (INFO.vocab_size, True)
        assert (card.num_layers, card.hidden_size) == (INFO.num_layers, INFO.hidden_size)
        assert card.provenance.tokenizer_digest == load_codec().digest
        assert (card.provenance.protocol, card.provenance.context_length) == (None, None)
        told = make_model().provenance(Windowing("exl3", 64, 32, 5), "float64")
        assert (told.protocol, told.precision) == ("exl3", "float64")
        assert (told.context_length, told.stride, told.rows) == (64, 32, 5)


def score(*numbers: int) -> list[ScoreJob]:
    """Jobs of two tokens, equal where the numbers are."""
    return [
        ScoreJob(np.array([5, number], np.int32), np.array([6], np.int32), ("logprob", "rank"))
        for number in numbers
    ]


def cached_prefix(job: Job) -> Sequence[JobResult]:
    """Answers of which a token came from the engine's prefix cache."""
    return [replace(output, cached_tokens=1) for output in answer_as_fake(job)]  # type: ignore[type-var]


async def compute(model: ResidentModel, jobs: Sequence[Job], cache: bool = True) -> dict[int, Any]:
    return dict(await list_outputs(model, await model.prepare(jobs, cache)))


async def list_outputs(model: ResidentModel, prepared: PreparedJobs) -> list[tuple[int, Any]]:
    """Index and output of each job, as they come."""
    return [
        found
        async for part in model.run(prepared)
        for found in zip(part.indices, part.outputs, strict=True)
    ]


class TestJobs:
    async def test_equal_jobs_are_computed_once(self, results: ResultCache) -> None:
        handle = ScriptedHandle(answer=cached_prefix)
        model = make_model(handle, results=results)

        prepared = await model.prepare(score(1, 2, 1, 1), cache=True)
        assert (len(prepared.jobs), prepared.num_known, prepared.num_tokens) == (2, 2, 4)
        found = await list_outputs(model, prepared)
        assert sorted(index for index, _ in found) == [0, 1, 2, 3]
        by_index = dict(found)
        assert [by_index[index].cached_tokens for index in range(4)] == [1, 1, 0, 0]
        assert by_index[0].columns is by_index[2].columns
        again = await compute(model, score(1, 2))
        assert [again[index].cached_tokens for index in range(2)] == [0, 0]
        assert handle.num_jobs == 2

    @pytest.mark.parametrize("at_once", [2, 1000])
    async def test_who_leaves_early_keeps_what_was_computed_and_ends_the_rest(
        self, results: ResultCache, monkeypatch: pytest.MonkeyPatch, at_once: int
    ) -> None:
        monkeypatch.setattr(model_module, "STORED_AT_ONCE", at_once)
        handle = ScriptedHandle()
        model = make_model(handle, results=results)

        prepared = await model.prepare(score(1, 2, 3, 4, 5), cache=True)
        async with aclosing(model.run(prepared)) as outputs:
            for _ in range(3):
                await anext(outputs)
        assert handle.open == 0
        known = await model.prepare(score(1, 2, 3, 4, 5), cache=True)
        assert sorted(index for index, _ in known.hits) == [0, 1, 2]

    def test_finished_work_teaches_how_long_to_wait(self) -> None:
        model = make_model(SlowHandle(), max_tokens=100)
        run_in_own_time(compute(model, score(*range(40))))
        model.admission.enter().cover(100)
        with pytest.raises(APIError) as caught:
            model.admission.enter()
        assert caught.value.retry_after == 5, "80 tokens took 4 s"


class SlowHandle(ScriptedHandle):
    """Takes a tenth of a second for each job."""

    async def run(
        self, jobs: Sequence[Job], routing: Routing | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        async for part in super().run(jobs, routing):
            await asyncio.sleep(0.1)
            yield part
