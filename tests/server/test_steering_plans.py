"""Planners of sweeps and of captured activations, with plain arguments: no engine, no request."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from logsteer.errors import APIError
from logsteer.schemas import ActivationsRequest, LogprobItem, Steering
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.interventions.interventions import UNCHANGED
from logsteer_server.tasks.activations import ActivationsTask
from logsteer_server.tasks.planning import BYTES_PER_NUMBER, Capacity
from logsteer_server.tasks.run import Run
from logsteer_server.tasks.sweep import plan_settings, plan_sweep
from logsteer_server.tasks.targets import (
    ColumnOptions,
    TargetOptions,
)
from logsteer_server.text.windows import Windowing
from tests.server.plan_steps import finish
from tests.server.scripted_model import INFO, SETTINGS, STORES, load_codec, make_model, register

CODEC = load_codec()
BOS = 1
READ = ColumnOptions(("logprob", "rank"))
WINDOWS = Windowing(bos="never").fit(INFO.context_length)
ONE = [0.0] * (INFO.hidden_size - 1) + [1.0]


def read_text(job: ScoreJob) -> tuple[list[int], list[int]]:
    return job.tokens.tolist(), job.targets.tolist()


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
        made = finish(
            plan_sweep(items, texts, WINDOWS, CODEC, INFO, TargetOptions(bos="never"), READ)
        )
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
        options = TargetOptions(on_overflow="truncate_left")
        info = replace(INFO, context_length=4)
        made = finish(plan_sweep([item], [], WINDOWS, CODEC, info, options, READ))
        assert read_text(made.next_jobs[0]) == ([6, 7, 8], [9])

    def test_precision_holds_for_all_that_is_scored(self) -> None:
        item = LogprobItem(context_ids=[5, 6], target_ids=[[7]])
        read = ColumnOptions.of((), precision="float64")
        texts = ["Once upon a time"]
        made = finish(plan_sweep([item], texts, WINDOWS, CODEC, INFO, TargetOptions(), read))
        assert [job.double for job in made.jobs] == [True, True, True]


def test_ids_and_positions_count_among_the_numbers_of_an_answer() -> None:
    """Of 30 tokens the last one's activation, its place, and all ids."""
    body = ActivationsRequest(items=[{"token_ids": [5] * 30}], layers=[1], read="last")  # type: ignore[list-item]
    numbers = INFO.hidden_size + 30 + 1

    def ask(limit: int) -> dict[str, Any]:
        task = ActivationsTask(body, register(make_model()), STORES)
        settings = SETTINGS.model_copy(update={"max_activation_bytes": limit})
        return asyncio.run(Run(task, Capacity(settings)).finish())

    assert len(ask(numbers * BYTES_PER_NUMBER)["results"]) == 1
    with pytest.raises(APIError, match="max_activation_bytes"):
        ask(numbers * BYTES_PER_NUMBER - 1)
