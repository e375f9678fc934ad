"""Steering that leaves the numbers of float32 fails, and reaches nobody else."""

from typing import Any

import numpy as np
import pytest

from logsteer_server.contract.batches import ScoreOutputs, find_failure, is_finite
from logsteer_server.contract.jobs import GenerateJob, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import (
    Adapter,
    Direction,
    Override,
    Site,
    SteeringPlan,
    SteeringTrace,
)
from logsteer_server.models.cache import ResultCache, make_keys
from tests.conftest import DEMO_MODEL
from tests.faults.poison_probe import NEIGHBOURS
from tests.probes import run_probe

IDS = np.arange(4, dtype=np.int32)
PLAN = SteeringPlan((Site(0, "resid_post", np.ones(4, np.float32)),))


@pytest.fixture(scope="module", params=["eager"])
def probe(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `poison_probe.py` saw; `compiled` is another mode of it."""
    return run_probe("tests.faults.poison_probe", str(DEMO_MODEL), request.param)


@pytest.mark.engine
@pytest.mark.parametrize("phase", ["among", "beside", "behind", "cancelled"])
def test_neighbours_of_poison_answer_as_a_quiet_engine_does(
    probe: dict[str, Any], phase: str
) -> None:
    quiet, found = probe["quiet"], probe[phase]
    assert len(quiet) == len(found) == NEIGHBOURS
    differences = {index: np.abs(np.subtract(found[index], quiet[index])).max() for index in quiet}
    wrong = {index: worst for index, worst in differences.items() if not worst < 1e-4}
    assert not wrong, f"{len(wrong)} of {NEIGHBOURS} neighbours: {wrong}"


@pytest.mark.engine
def test_poison_fails_and_ends(probe: dict[str, Any]) -> None:
    assert set(probe["poison"].values()) == {"non_finite"}
    assert probe["left"] == 0


@pytest.mark.engine
def test_a_job_over_which_vllm_raises_fails_alone(probe: dict[str, Any]) -> None:
    assert set(probe["misfits"].values()) == {"internal"}


def output_of(*logprobs: float, **columns: list[float]) -> ScoreOutput:
    own = {"logprob": np.array(logprobs, np.float32)}
    return ScoreOutput(own | {name: np.array(values) for name, values in columns.items()})


@pytest.mark.parametrize(
    ("output", "finite"),
    [
        (output_of(-1.0, -2.0), True),
        (output_of(-1.0, -np.inf), True),  # the model puts this token out never
        (output_of(-1.0, log_q=[-np.inf]), True),  # it lies outside the nucleus
        (output_of(-1.0, np.nan), False),
        (output_of(-1.0, entropy=[np.nan]), False),
        (output_of(-1.0, rank=[0]), False),
        (output_of(-1.0, rank=[1]), True),
    ],
)
async def test_what_is_not_finite_is_never_kept(output: ScoreOutput, finite: bool) -> None:
    assert is_finite(output) is finite
    job = ScoreJob(IDS[: len(output.columns["logprob"])], IDS[:1], tuple(output.columns))
    (key,) = make_keys(b"scope", [job])
    assert key is not None

    cache = ResultCache(2**20)
    cache.keep([([(key, [0])], ScoreOutputs.of([output]))])
    found = len((await cache.find(b"scope", [job])).hits)
    cache.close()
    assert found == finite


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"plan": PLAN}, "smaller scale"),
        ({"override": Override(Direction("p", "s"), 1.0)}, "smaller eta"),
        ({"adapter": Adapter("p", "s")}, "adapter"),
        ({}, None),
    ],
)
def test_a_changed_model_that_is_not_finite_fails(fields: dict[str, Any], hint: str | None) -> None:
    job = ScoreJob(IDS, IDS, **fields)
    failure = find_failure(job, output_of(np.nan))
    if hint is None:
        assert failure is None, "the model's own scores are given, with a flag"
        return
    assert failure.code == "non_finite"
    assert hint in failure.detail
    assert find_failure(job, output_of(-1.0)) is None


@pytest.mark.parametrize("mean", [np.inf, np.nan])
def test_a_change_that_could_not_be_measured_fails(mean: float) -> None:
    trace = SteeringTrace((3,), {"0": (3, mean)})
    job = GenerateJob(IDS, 3, plan=PLAN)
    output = ScoreOutput({}, trace=trace)
    failure = find_failure(job, output)
    assert failure.code == "non_finite"
