"""How many rows go through the head at once, and of how many columns are read."""

import pytest
import torch

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.numerics.hidden_rows import RowBounds
from logsteer_server.numerics.rows import RowSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20
PLAIN, SHAPED = RowSpec(), RowSpec(("log_q",))
MODEL = EngineSpec("a", "vllm", "a")
DEFAULT = RowBounds(MODEL.chunk_bytes, MODEL.column_bytes)


@pytest.mark.parametrize("vocab", [1436, 32_000, 128_256, 262_144])
@pytest.mark.parametrize("spec", [PLAIN, SHAPED], ids=["plain", "shaped"])
def test_by_default_a_product_has_256_rows_or_more(vocab: int, spec: RowSpec) -> None:
    assert DEFAULT.rows_per_product(vocab, spec, CUDA) >= 256
    assert DEFAULT.rows_per_product(vocab, spec, CPU) >= 256
    assert DEFAULT.rows_per_product(vocab, spec, CPU) <= 512  # no more than helps


def test_a_bound_holds_whatever_the_machine() -> None:
    small = RowBounds(10 * 4 * 1000, 3 * 16 * 1000)
    for device in (CPU, CUDA):
        assert small.rows_per_product(1000, PLAIN, device) == 10
        assert small.rows_per_product(1000, RowSpec(double=True), device) == 5
        assert small.rows_per_pass(1000, PLAIN, device) == 3
        assert small.rows_per_pass(1000, SHAPED, device) == 1
        assert small.rows_per_product(10**6, PLAIN, device) == 1


def test_a_cpu_reads_columns_of_what_its_cache_holds() -> None:
    assert DEFAULT.rows_per_pass(128_256, PLAIN, CPU) == 4
    assert DEFAULT.rows_per_pass(128_256, PLAIN, CUDA) == 256 * MIB // (16 * 128_256)
