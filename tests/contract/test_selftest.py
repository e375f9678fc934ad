"""The self-test on real engines, where everything holds; and on one that is not real."""

import time

import pytest

from logsteer import Client
from logsteer.cli import main
from logsteer.schemas import SelftestAnswer, SelftestCheck
from tests.conftest import Server
from tests.contract.conftest import REAL

SOON_S = 300.0
"""It takes seconds; on a busy machine more."""
NOT_RUN = {
    "vllm": {"replicas", "against", "against_steered"},
    "transformer_lens": {"replicas", "against", "against_steered", "prefix_cached", "chunked"},
}
"""By engine, checks that cannot be run on it."""


def by_name(answer: SelftestAnswer) -> dict[str, SelftestCheck]:
    return {check.name: check for check in answer.checks}


@pytest.mark.parametrize("client", REAL, indirect=True)
def test_everything_holds_on_the_demo_model(client: Client) -> None:
    began = time.monotonic()
    answer = client.selftest("demo")
    assert time.monotonic() - began < SOON_S
    assert answer.verdict == "passed"
    for check in answer.checks:
        wanted = "not_run" if check.name in NOT_RUN[answer.provenance.engine] else "passed"
        assert check.verdict == wanted, (check.name, check.reason)
        assert check.tolerance == 1e-4
        if wanted == "passed":
            assert check.num_compared >= 100
            assert check.largest_difference <= 1e-4
    assert answer.provenance.dtype == "float32"
    assert answer.usage.generated_tokens > 0


@pytest.mark.engine
def test_vllm_and_transformer_lens_agree(parity_server: Server) -> None:
    with Client(parity_server.url, max_retries=0, timeout=300) as client:
        for own, other in (("vllm", "tlens"), ("tlens", "vllm")):
            answer = client.selftest(own, against=other)
            assert (answer.verdict, answer.against) == ("passed", other)
            checks = by_name(answer)
            assert checks["against"].num_compared > 500
            assert checks["against_steered"].num_compared == 3 * checks["against"].num_compared
            for name in ("against", "against_steered"):
                assert (checks[name].verdict, checks[name].tolerance) == ("passed", 1e-4)
        texts = client.selftest("vllm", texts=["Once upon a time there was a dog."])
        assert texts.num_texts == 5
        with pytest.raises(Exception, match="vllm itself"):
            client.selftest("vllm", against="vllm")


@pytest.mark.engine
def test_half_precision_has_its_own_tolerance(parity_server: Server) -> None:
    with Client(parity_server.url, max_retries=0, timeout=300) as client:
        answer = client.selftest("half", against="tlens")
    assert answer.verdict == "passed"
    checks = by_name(answer)
    assert 1e-3 < (checks["against"].rms_difference or 0) < checks["against"].tolerance / 4
    assert checks["batched"].noise_floor == pytest.approx(checks["batched"].tolerance / 12)


def test_the_command_tests_from_anywhere_and_fails_with_the_table(
    fake_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", fake_server.url, "--model", "fake"]) == 1
    out, err = capsys.readouterr()
    assert "not run" in out and "zero_scale" in out
    assert err.startswith("error: fake failed its self-test: sampled")
