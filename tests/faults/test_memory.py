"""Memory and disks that run out fail the request that needed them, and no other."""

import asyncio
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from logsteer.errors import APIError
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import CONFIG_KEY
from logsteer_server.engines.tlens.parameters import read_updates
from logsteer_server.engines.vllm.extra_args import SCORE, describe_rows
from logsteer_server.engines.vllm.scoring import NO_FILE, NO_MEMORY, PromptPart, RowReader
from logsteer_server.numerics.hidden_rows import RowBounds
from logsteer_server.numerics.lora import AdapterConfig, AdapterLayoutError
from logsteer_server.numerics.rows import RowSpec
from logsteer_server.tasks.comparison import export_files
from logsteer_server.tasks.planning import Capacity, Planner
from tests.server.scripted_model import SETTINGS

V, T = 23, 6
IDS = np.arange(T, dtype=np.int32)
HIDDEN_TD = torch.randn(3 * T, V, generator=torch.Generator().manual_seed(1))
"""Of three requests; the hidden states are their own logits."""


def read_three(
    reader: RowReader, project: Callable[[Tensor], Tensor], export: str | None = None
) -> dict[str, Tensor]:
    """What three requests get whose prompts a step reads whole; the second may have a file."""
    parts = []
    for index, name in enumerate("abc"):
        job = ScoreJob(IDS, IDS, export=export if name == "b" else None)
        wanted = describe_rows(job, RowSpec.of(job, ()))[SCORE]
        parts.append(PromptPart(name, wanted, 0, T, T, index * T))
    reader.begin_step()
    reader.read(parts, HIDDEN_TD, project)
    return reader.pop_finished()


def lack_memory(error: Exception) -> Callable[[Tensor], Tensor]:
    """A head that has no memory for the second request's rows."""
    marked = HIDDEN_TD[T + 1]

    def project(hidden_RD: Tensor) -> Tensor:
        if (hidden_RD == marked).all(-1).any():
            raise error
        return hidden_RD

    return project


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: 9 bytes")],
    ids=repr,
)
def test_memory_that_runs_out_over_rows_fails_their_request(error: Exception) -> None:
    reader = RowReader(RowBounds(2**20, 2**20), V, 0, 1)
    found = read_three(reader, lack_memory(error))
    assert found["b"].shape == NO_MEMORY.shape
    expected_TV = HIDDEN_TD.log_softmax(-1)
    for index, name in ((0, "a"), (2, "c")):
        own = expected_TV[index * T : (index + 1) * T][range(T), range(T)]
        assert torch.allclose(found[name], own, atol=1e-6)
    assert read_three(reader, lambda rows: rows)["b"].shape == (T,)


def test_what_is_no_lack_of_memory_is_raised() -> None:
    with pytest.raises(IndexError):
        read_three(RowReader(RowBounds(2**20, 2**20), V, 0, 1), lack_memory(IndexError()))


def test_one_of_several_ranks_does_not_go_on_alone() -> None:
    with pytest.raises(MemoryError):
        read_three(RowReader(RowBounds(2**20, 2**20), V, 0, 2), lack_memory(MemoryError()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_is_gone_fails_its_request(tmp_path: Path, ranks: int) -> None:
    found = read_three(
        RowReader(RowBounds(2**20, 2**20), V, 0, ranks), lambda rows: rows, str(tmp_path / "gone")
    )
    assert found["b"].shape == NO_FILE.shape
    assert found["a"].shape == found["c"].shape == (T,)


@contextmanager
def limit_files(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_without_room_is_found_before_an_engine_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [ScoreJob(IDS, IDS), ScoreJob(np.arange(999, dtype=np.int32), IDS)]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    capacity = Capacity(SETTINGS)
    planner = Planner(capacity, capacity.memory.enter(), capacity.memory.enter())

    async def reserve() -> list[int]:
        async with export_files(jobs, V, planner) as files:
            return [Path(file).stat().st_blocks * 512 for file in files]

    assert all(size >= 4 * T * V for size in asyncio.run(reserve())), "holes are no room"
    with limit_files(4 * T * V - 1), pytest.raises(APIError) as caught:
        asyncio.run(reserve())
    assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
    assert str(tmp_path) not in caught.value.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("down", "up"),
    [([1, 200_000], [200_000, 1]), ([1, 8], [8]), ([1, 8], [4, 1]), ([2, 4], [8, 3])],
)
def test_an_adapters_shapes_are_compared_before_its_product(
    tmp_path: Path, down: list[int], up: list[int]
) -> None:
    """The first product has 160 GB."""
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.zeros(down), name.format("B"): torch.zeros(up)}
    config = {CONFIG_KEY: '{"peft_type": "LORA", "r": 1, "lora_alpha": 1}'}
    save_file(tensors, tmp_path / "adapter", config)
    with (
        safe_open(tmp_path / "adapter", "pt") as file,
        pytest.raises(AdapterLayoutError, match="make no update"),
    ):
        read_updates(file, {"layers.0.q_proj.weight": torch.zeros(8, 4)})


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400, "1e39", "NaN"])
@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_numbers_of_an_adapters_configuration_are_bounded(field: str, number: str) -> None:
    other = "lora_alpha" if field == "r" else "r"
    text = f'{{"peft_type": "LORA", "{other}": 2, "{field}": {number}}}'
    with pytest.raises(AdapterLayoutError, match=field):
        AdapterConfig.parse(text)
