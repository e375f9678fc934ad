"""vLLM's V2 runner gives the numbers of V1, and those of transformers.

On a CPU its kernels are interpreted. `LOGSTEER_TEST_RUNNER=v2` has all other tests of this suite
start vLLM with it.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from logsteer_server.contract.plan import CONFIG_KEY
from tests.conftest import DEMO_MODEL
from tests.contract import v2_probe
from tests.contract.draws_probe import POLICIES
from tests.contract.lora import write_adapter
from tests.contract.test_exactness import deviate
from tests.contract.v2_probe import KINDS
from tests.families.checkpoints import FAMILIES
from tests.families.test_families import CHECKS, TOLERANCE, measure
from tests.probes import run_probe

pytestmark = [pytest.mark.engine, pytest.mark.v2]

LIMIT = 1e-5
FAMILY_NAMES = ("qwen3", "gpt_neox")
HYBRID = "granite_hybrid"
CASES = (
    "plain", "shared row", "adapter", "adapter, steered",
    *(f"{what}, {kind}" for what in ("score", "generate", "stop") for kind in KINDS),
    *(f"capture, {number}" for number in range(5)),
    *(f"draw, {number}" for number in range(2 * len(POLICIES))),
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `v2_probe.py` found, by runner."""
    directory = write_adapter(tmp_path_factory.mktemp("v2") / "adapter")
    path = directory.parent / "adapter.safetensors"
    config = (directory / "adapter_config.json").read_text()
    save_file(load_file(directory / "adapter_model.safetensors"), path, {CONFIG_KEY: config})
    probe = partial(run_probe, "tests.contract.v2_probe")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(("v1", "v2"), pool.map(probe, ("v1", "v2"), [str(path)] * 2), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_is_preempted_on_v2_has_the_numbers_of_v1(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    v1, v2 = (found[runner]["numbers"][case] for runner in ("v1", "v2"))
    assert len(v1) == len(v2) > 0
    assert deviate(v1, v2) < LIMIT


def test_v2_ran_was_preempted_and_read_its_prefix_cache(found: dict[str, dict[str, Any]]) -> None:
    assert [len(found[runner]["numbers"]) for runner in ("v1", "v2")] == [len(CASES)] * 2
    assert "model runner V2" in found["v2"]["computed_on"]
    assert "model runner V2" not in found["v1"]["computed_on"]
    assert found["v1"]["preempted"] < 10 < found["v2"]["preempted"]
    assert found["v1"]["cached"] == found["v2"]["cached"] > 64
    for which in ("first", "second"):
        wanted, own = (found[runner]["again"][which] for runner in ("v1", "v2"))
        assert deviate(wanted, own) < LIMIT


def test_our_code_never_waits_for_the_gpu_in_a_step(found: dict[str, dict[str, Any]]) -> None:
    """But for a cut, once a step, which shows that waits are seen."""
    waits = found["v2"]["waits"]
    cut = waits.pop("cut")
    assert waits == {
        kind: {} for kind in ("greedy", "log-probabilities", "steered", "captured", "scored")
    }
    assert 0 < sum(cut.values()) <= v2_probe.COUNTED_STEPS, cut


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_captures_in_flight_are_those_of_the_finished_text(
    found: dict[str, dict[str, Any]], runner: str
) -> None:
    print(f"{runner}: they differ by {found[runner]['recaptured']:.2e}")
    assert found[runner]["recaptured"] < LIMIT


def test_two_steps_of_v2_are_under_way_at_once(found: dict[str, dict[str, Any]]) -> None:
    assert [found[runner]["depth"] for runner in ("v1", "v2")] == [1, 2]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `family_probe.py` found of tiny checkpoints and of the demo model, on V2."""
    directory = tmp_path_factory.mktemp("families")
    for family in (*FAMILY_NAMES, HYBRID):
        FAMILIES[family].make(directory / family)
    paths = [DEMO_MODEL, *(directory / family for family in (*FAMILY_NAMES, HYBRID))]
    lines = measure("vllm", "eager", paths, LOGSTEER_TEST_RUNNER="v2")
    return {family: line for (family, *_), line in lines.items()}


@pytest.mark.parametrize("family", [DEMO_MODEL.name, *FAMILY_NAMES])
def test_a_family_has_the_numbers_of_transformers_on_v2(
    families: dict[str, Any], family: str
) -> None:
    line = families[family]
    assert "died" not in line, line["died"]
    for check in CHECKS:
        assert not isinstance(line[check], str), f"{check}: {line[check]}"
        assert line[check] < TOLERANCE, (check, line)


def test_what_is_not_tried_on_v2_is_refused(families: dict[str, Any]) -> None:
    assert "runner: v2 is not tried with state space layers" in families[HYBRID]["refused"]
