"""Score jobs and outputs as arrays: each is what it would be as an object of its own."""

import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.batches import (
    OutputPart,
    ScoreJobs,
    ScoreOutputs,
    WorkCounts,
    add_between,
    change_all,
    count_positions,
    count_work,
    find_steered,
    make_fingerprints,
    pack_jobs,
    pack_results,
    select_jobs,
)
from logsteer_server.contract.jobs import (
    GenerateOutput,
    Job,
    JobFailure,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import (
    Adapter,
    Direction,
    Override,
    Readings,
    Site,
    SteeringPlan,
    SteeringTrace,
)

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
LIKE = {"columns": ("logprob", "rank"), "top": 2, "policy": Policy(0.5, 3), "double": True}


@st.composite
def job_lists(draw: st.DrawFn) -> list[ScoreJob]:
    drawn = draw(st.lists(st.tuples(IDS, IDS, st.booleans()), min_size=1, max_size=6))
    others = draw(st.sampled_from([0, 1, 3]))
    return [
        ScoreJob(  # type: ignore[misc]
            as_ids(read),
            as_ids(scored),
            shares_row=shares,
            alternatives=np.outer(as_ids(scored) % 99, as_ids(range(others))) if others else None,
            **LIKE,  # type: ignore[arg-type]
        )
        for read, scored, shares in drawn
    ]


def as_ids(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def describe(value: Any) -> list[tuple[str, Any]]:
    """The fields of a job or an output, arrays as lists."""
    found = []
    for field in fields(value):
        entry = getattr(value, field.name)
        if isinstance(entry, dict):
            entry = {name: (array.dtype.str, array.tolist()) for name, array in entry.items()}
        if isinstance(entry, np.ndarray):
            entry = (entry.dtype.str, entry.tolist())
        if isinstance(entry, Readings):
            entry = (entry.first, entry.values_TGR.tolist())
        found.append((field.name, entry))
    return found


def same(ours: Sequence[Any], others: Sequence[Any]) -> bool:
    return [describe(entry) for entry in ours] == [describe(entry) for entry in others]


class TestJobs:
    @given(job_lists(), st.data())
    def test_a_batch_is_its_jobs(self, jobs: list[ScoreJob], data: st.DataObject) -> None:
        batch = pickle.loads(pickle.dumps(ScoreJobs.of(jobs)))
        assert len(batch) == len(jobs)
        assert same(list(batch), jobs)
        assert same([batch[n] for n in range(len(jobs))], jobs)
        assert same([batch[-1]], jobs[-1:])
        chosen = data.draw(st.lists(st.integers(0, len(jobs) - 1), max_size=8))
        assert same(list(select_jobs(batch, chosen)), [jobs[n] for n in chosen])
        cut = data.draw(st.slices(len(jobs)))
        assert same(list(batch[cut]), jobs[cut])

    @given(job_lists())
    def test_what_is_known_of_all_is_what_each_says(self, jobs: list[ScoreJob]) -> None:
        batch = ScoreJobs.of(jobs)
        assert count_positions(batch) == [job.num_positions for job in jobs]
        assert make_fingerprints(batch) == [job.fingerprint for job in jobs]

    @pytest.mark.parametrize("kept", ["none", "all"])
    def test_a_steered_batch_is_known_by_where_each_job_is_steered(self, kept: Any) -> None:
        site = Site(2, "resid_post", np.ones(4, dtype=np.float32))
        plan = SteeringPlan((site,), kept=kept)
        plain = [ScoreJob(as_ids(range(n)), as_ids([1])) for n in (3, 4)]
        jobs = [replace(job, plan=plan) for job in plain]
        batch = change_all(ScoreJobs.of(plain), lambda job: replace(job, plan=plan))
        assert make_fingerprints(batch) == [job.fingerprint for job in jobs]
        assert same(list(batch), jobs)

    @given(job_lists())
    def test_jobs_that_are_alike_are_packed(self, jobs: list[ScoreJob]) -> None:
        packed = pack_jobs(jobs)
        assert isinstance(packed, ScoreJobs)
        assert same(list(packed), jobs)
        assert pack_jobs(packed) is packed

    @pytest.mark.parametrize(
        "change",
        [
            {"columns": ("logprob",)}, {"top": 1}, {"policy": Policy()}, {"double": False},
            {"cache_namespace": "ann"}, {"export": "file"}, {"reference": "file"},
            {"alternatives": np.zeros((1, 2), np.int32)}, {"tail": True},
            {"plan": SteeringPlan((Site(2, "resid_post", np.ones(4, dtype=np.float32)),))},
            {"override": Override(Direction("file", "a" * 64), 1e-3)},
            {"adapter": Adapter("file", "a" * 64)},
        ],
    )  # fmt: skip
    def test_jobs_that_differ_are_not_packed(self, change: dict[str, Any]) -> None:
        one = ScoreJob(as_ids([1]), as_ids([2]), **LIKE)  # type: ignore[arg-type]
        jobs = [one, replace(one, **change)]
        assert pack_jobs(jobs) is jobs

    def test_an_index_beyond_its_end_is_none(self) -> None:
        batch = ScoreJobs.of([ScoreJob(as_ids([1]), as_ids([2]))])
        for index in (1, -2):
            with pytest.raises(IndexError):
                batch[index]


@st.composite
def output_lists(draw: st.DrawFn) -> list[ScoreOutput]:
    top = draw(st.sampled_from([0, 2]))
    has_trace, has_readings = draw(st.booleans()), draw(st.booleans())
    outputs = []
    for n, rows in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))):
        columns: dict[str, Any] = {
            "logprob": np.arange(rows, dtype=np.float32) - n,
            "rank": np.arange(rows, dtype=np.int32) + 1,
        }
        if top:
            columns["top_ids"] = np.arange(rows * top, dtype=np.int32).reshape(rows, top)
            columns["top_logprobs"] = columns["top_ids"].astype(np.float32)
        trace = SteeringTrace((n,), {"2": (n, 0.5)}) if has_trace and n else None
        readings = Readings(n, np.ones((rows, 1, 4), np.float32)) if has_readings else None
        outputs.append(
            ScoreOutput(
                columns,
                cached_tokens=n,
                trace=trace,
                readings=readings,
            )
        )
    return outputs


class TestOutputs:
    @given(output_lists(), st.data())
    def test_packed_outputs_are_the_same(
        self, outputs: list[ScoreOutput], data: st.DataObject
    ) -> None:
        packed = pickle.loads(pickle.dumps(pack_results(outputs)))
        assert isinstance(packed, ScoreOutputs)
        assert same(list(packed), outputs)
        chosen = data.draw(st.lists(st.integers(0, len(outputs) - 1), min_size=1, max_size=8))
        picked = packed.select(np.array(chosen))
        assert same(list(picked), [outputs[n] for n in chosen])
        cut = data.draw(st.integers(1, len(outputs)))
        parts = [ScoreOutputs.of(own) for own in (outputs[:cut], outputs[cut:]) if own]
        assert same(list(ScoreOutputs.join(parts)), outputs)

    @given(output_lists())
    def test_sums_are_of_each_outputs_own_rows(self, outputs: list[ScoreOutput]) -> None:
        packed = ScoreOutputs.of(outputs)
        begins, ends = packed.row_starts[:-1], packed.row_starts[1:]
        wanted = [out.columns["logprob"].astype(np.float64).sum() for out in outputs]
        values = packed.columns["logprob"].astype(np.float64)
        assert add_between(values, begins, ends).tolist() == wanted
        firsts = add_between((packed.columns["rank"] == 1).astype(np.int64), begins, ends)
        assert firsts.tolist() == [1] * len(outputs)

    def test_what_differs_stays_as_it_is(self) -> None:
        one = ScoreOutput({"logprob": np.zeros(1, np.float32)})
        others = [
            JobFailure("internal", "why"),
            replace(one, columns=one.columns | {"rank": np.ones(1, np.int32)}),
            replace(one, columns=one.columns | {"top_ids": np.zeros((1, 1), np.int32)}),
        ]
        for other in others:
            assert pack_results([one, other]) == [one, other]


class TestWork:
    JOBS = (
        ScoreJob(as_ids([1, 2, 3]), as_ids([3, 4])),
        ScoreJob(as_ids([1, 2]), as_ids([5])),
    )

    def test_it_is_counted_alike_for_arrays_and_objects(self) -> None:
        outputs = [
            ScoreOutput({"logprob": np.zeros(2, np.float32)}, cached_tokens=2),
            ScoreOutput({"logprob": np.zeros(1, np.float32)}, cached_tokens=1),
        ]
        arrays = OutputPart([1, 0], ScoreOutputs.of([outputs[1], outputs[0]]))
        objects = OutputPart([1, 0], [outputs[1], outputs[0]])
        assert count_work(ScoreJobs.of(self.JOBS), arrays) == WorkCounts(5, 3, 0, 3)
        assert count_work(self.JOBS, objects) == WorkCounts(5, 3, 0, 3)

    def test_pieces_count_what_they_bring(self) -> None:
        none = np.zeros((2, 0), np.int32)
        piece = GenerateOutput(as_ids([5, 6]), "", np.zeros(2, np.float32), none, none)
        jobs = [Job(as_ids([1, 2, 3]))]
        assert count_work(jobs, OutputPart([0], [piece])) == WorkCounts(0, 0, 2, 0)
        last = replace(piece, finish_reason="stop")
        assert count_work(jobs, OutputPart([0], [last])) == WorkCounts(3, 0, 2, 0)

    def test_only_steered_jobs_have_a_receipt(self) -> None:
        plan = SteeringPlan((Site(2, "resid_post", np.ones(4, dtype=np.float32)),))
        outputs = ScoreOutputs.of([ScoreOutput({"logprob": np.zeros(1, np.float32)})] * 2)
        part = OutputPart([0, 1], outputs)
        assert find_steered(ScoreJobs.of(self.JOBS), part) == ()
        mixed = [replace(self.JOBS[0], plan=plan), self.JOBS[1]]
        assert len(find_steered(mixed, part)) == 1
