"""Rows that are read in parts, as chunked prefills and preemption cut them, are the whole's."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.engines.vllm.extra_args import SCORE, describe_rows
from logsteer_server.engines.vllm.scoring import PromptPart, RowReader
from logsteer_server.numerics.hidden_rows import RowBounds
from logsteer_server.numerics.rows import RowSpec, unpack

V, T = 23, 12
IDS_T = np.arange(1, T + 1, dtype=np.int32)
LOGITS_TV = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
"""The hidden states are their own logits."""


def wanted(targets: np.ndarray, **options: Any) -> dict[str, Any]:
    job = ScoreJob(IDS_T, targets, ("logprob", "rank"), **options)
    return describe_rows(job, RowSpec.of(job, ()))[SCORE]


def make_reader(writes_exports: bool = True) -> RowReader:
    return RowReader(RowBounds(5 * 4 * V, 2 * 16 * V), V, 0 if writes_exports else 1, 2)


def read_parts(
    reader: RowReader, request: dict[str, Any], parts: list[tuple[int, int]]
) -> torch.Tensor | None:
    """What the last of a request's parts gives, each in a step behind three strange tokens."""
    finished: dict[str, torch.Tensor] = {}
    for begin, end in parts:
        hidden_TD = torch.cat([torch.full((3, V), 7.0), LOGITS_TV[begin:end]])
        reader.begin_step()
        reader.read([PromptPart("a", request, begin, end, T, 3)], hidden_TD, lambda rows: rows)
        finished = reader.pop_finished()
        assert bool(finished) == (end == T)
    return finished.get("a")


def expected(targets: np.ndarray, rows: slice | list[int]) -> np.ndarray:
    log_p_RV = LOGITS_TV[rows].log_softmax(-1)
    return log_p_RV[range(len(targets)), targets].numpy()


@settings(deadline=None)
@given(
    count=st.integers(1, T),
    cuts=st.lists(st.integers(1, T - 1), max_size=4),
    again=st.integers(0, T - 1),
)
def test_cut_and_preempted_prefills_give_the_rows_of_the_whole(
    count: int, cuts: list[int], again: int
) -> None:
    targets = np.arange(count, dtype=np.int32)
    edges = sorted({0, *cuts})
    parts = [(first, last) for first, last in pairwise(edges) if last <= again]
    parts += list(pairwise([*edges, T]))  # thrown out after `again` tokens, and begun anew
    others = np.stack([targets, (targets + 3) % V], axis=1)
    values = read_parts(make_reader(), wanted(targets, alternatives=others), parts)
    spec = RowSpec(("logprob", "rank"), alternatives=2)
    rows = unpack(values.numpy().reshape(-1, spec.width), spec)
    for number, found in enumerate((rows["logprob"], *rows["alternatives"].T)):
        own = others[:, max(0, number - 1)]
        assert np.allclose(found, expected(own, slice(T - count, T)), atol=1e-6)


def test_a_row_that_targets_share_goes_through_the_head_once() -> None:
    seen: list[int] = []

    def project(hidden_RV: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden_RV))
        return hidden_RV

    jobs = [
        ScoreJob(IDS_T, np.arange(V, dtype=np.int32), ("logprob", "rank"), shares_row=True),
        ScoreJob(IDS_T, np.arange(3, dtype=np.int32), ("logprob", "rank")),
        ScoreJob(IDS_T, np.array([9, 9], np.int32), ("logprob", "rank"), shares_row=True),
    ]
    parts = [
        PromptPart(str(i), describe_rows(job, RowSpec.of(job, ()))[SCORE], 0, T, T, i * T)
        for i, job in enumerate(jobs)
    ]
    hidden_TV = torch.cat([LOGITS_TV, LOGITS_TV.flip(0), 2 * LOGITS_TV])
    for passes in (1, 4, 100):
        seen.clear()
        reader = RowReader(RowBounds(3 * 4 * V, passes * 16 * V), V, 0, 1)
        reader.read(parts, hidden_TV, project)
        assert seen == [2, 3]  # as evenly as three at once allow
        found = reader.pop_finished()
        for i, job in enumerate(jobs):
            rows_RV = hidden_TV[i * T : (i + 1) * T]
            rows_RV = rows_RV[[T - 1] * len(job.targets) if job.shares_row else slice(T - 3, T)]
            expected_R = rows_RV.log_softmax(-1)[range(len(job.targets)), job.targets]
            ranks_R = 1 + (rows_RV > rows_RV[range(len(job.targets)), job.targets, None]).sum(-1)
            values_R2 = found[str(i)].reshape(-1, 2)
            assert torch.allclose(values_R2[:, 0], expected_R, atol=1e-6)
            assert torch.equal(values_R2[:, 1], ranks_R.float())


def test_the_costliest_reading_fills_the_bound_and_no_more() -> None:
    seen: list[int] = []

    def project(hidden_RV: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden_RV))
        return hidden_RV

    reader = RowReader(RowBounds(5 * 4 * V, 2 * 72 * V), V, 0, 1)
    reader.read_costliest(torch.zeros(64, V), project)
    reader.read_costliest(torch.zeros(3, V), project)
    assert seen == [5, 3]
    assert not reader.pop_finished()


def test_rows_that_the_prefix_cache_hides_give_none() -> None:
    values = read_parts(make_reader(), wanted(np.arange(5, dtype=np.int32)), [(T - 3, T)])
    assert values.numel() == 0


def test_a_request_that_is_gone_leaves_nothing_behind() -> None:
    reader, request = make_reader(), wanted(np.arange(5, dtype=np.int32))
    read_parts(reader, request, [(0, T - 2)])
    reader.keep_only(["other"])
    values = read_parts(reader, request, [(T - 2, T)])
    assert values.numel() == 0, "rows of a request of the same name were taken over"


def test_one_rank_alone_writes_a_file_and_every_rank_reads_it(tmp_path: Path) -> None:
    targets = np.arange(4, dtype=np.int32)
    path = tmp_path / "rows"
    np.zeros((4, V), np.float32).tofile(path)
    read_parts(make_reader(False), wanted(targets, export=str(path)), [(0, T)])
    assert not np.fromfile(path, np.float32).any()
    read_parts(make_reader(), wanted(targets, export=str(path)), [(0, T - 2), (T - 2, T)])
    table_RV = np.fromfile(path, np.float32).reshape(4, V)
    assert np.allclose(table_RV, LOGITS_TV[T - 4 :].log_softmax(-1).numpy(), atol=1e-6)
    job = ScoreJob(IDS_T, targets, ("kl",), reference=str(path))
    request = describe_rows(job, RowSpec.of(job, ()))[SCORE]
    values = read_parts(make_reader(False), request, [(0, T)])
    assert np.allclose(values.numpy(), 0, atol=1e-6)
