"""Both engines draw what the policy's q and the seed say, and end where one source says.

The checkpoint is the demo model with a generation configuration, a tokenizer and a model
configuration that name different ends of sequence, all of them tokens that are drawn often.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.engines.weights import find_eos
from logsteer_server.numerics.adjustments import adjust_rows, place_targets
from logsteer_server.numerics.drawing import find_uniform
from logsteer_server.numerics.sampling import is_greedy, shape_rows
from tests.conftest import DEMO_MODEL
from tests.contract import draws_probe, tlens_cases
from tests.contract.draws_probe import make_jobs
from tests.probes import run_probe

pytestmark = pytest.mark.engine

BOY, PERIOD, NEVER = 534, 277, 2
"""Tokens of the demo model: ` boy`, a period, and the end that it was trained with."""
NAMED = {
    "config.json": {"eos_token_id": NEVER},
    "generation_config.json": {"eos_token_id": [BOY, 10**6]},
    "tokenizer_config.json": {"eos_token": "."},
}


def write_checkpoint(path: Path, **named: dict[str, Any]) -> Path:
    """Copy the demo model, with fields of its files changed."""
    shutil.copytree(DEMO_MODEL, path)
    for name, fields in named.items():
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = {name.removesuffix(".json"): fields for name, fields in NAMED.items()}
    return write_checkpoint(tmp_path_factory.mktemp("eos") / "model", **named)


@pytest.fixture(scope="module")
def probe(checkpoint: Path, prompt: np.ndarray) -> dict[str, Any]:
    """What `draws_probe.py` drew on vLLM."""
    return run_probe("tests.contract.draws_probe", str(checkpoint), json.dumps(prompt.tolist()))


@pytest.fixture(scope="module")
def tlens(checkpoint: Path, prompt: np.ndarray) -> dict[str, Any]:
    """What TransformerLens drew for the same jobs, in one batch."""
    engine = tlens_cases.build(checkpoint)
    jobs = make_jobs(prompt.tolist())
    outputs = dict(enumerate(tlens_cases.run(engine, *jobs)))
    found = {"eos_ids": list(engine.info.eos_ids), "together": draws_probe.show(outputs)}
    engine.close()
    return found


@torch.inference_mode()
def read_rows(reference: Any, job: GenerateJob, drawn: list[int]) -> torch.Tensor:
    """The logits that each token was drawn from [N, V]: those of transformers, adjusted."""
    ids = torch.tensor([[*job.tokens.tolist(), *drawn]])
    logits_NV = reference(ids).logits[0, len(job.tokens) - 1 : -1].double()
    if (adjustments := job.policy.adjustments) is None:
        return logits_NV
    before = place_targets(job.tokens, np.array(drawn), False, logits_NV.device)
    histories, counts = zip(*before, strict=True)
    return adjust_rows(logits_NV, [adjustments] * len(drawn), histories, counts)


def check_draws(reference: Any, job: GenerateJob, drawn: list[int]) -> None:
    """Check that each token is the one whose part of the CDF its uniform number lies in.

    As far as rounding of the logits lets it be told, which a low temperature makes larger.
    """
    logits_NV, ids_N1 = read_rows(reference, job, drawn), torch.tensor(drawn)[:, None]
    if is_greedy(job.policy):
        short_N1 = logits_NV.amax(-1, keepdim=True) - logits_NV.gather(-1, ids_N1)
        assert short_N1.max() < 1e-4
        return
    q_NV = shape_rows(logits_NV, [job.policy] * len(drawn)).q_RV
    above_N1 = q_NV.cumsum(-1).gather(-1, ids_N1)
    below_N1 = above_N1 - q_NV.gather(-1, ids_N1)
    seed_N = np.full(len(drawn), job.seed % 2**64, np.uint64)
    uniform = find_uniform(seed_N, np.arange(len(drawn), dtype=np.uint64))
    uniform_N1 = torch.from_numpy(uniform)[:, None]
    slack = 1e-4 / min(1.0, job.policy.temperature)
    assert (below_N1 - uniform_N1).max() < slack
    assert (uniform_N1 - above_N1).max() < slack


def test_every_token_is_what_q_and_the_seed_say(
    probe: dict[str, Any], tlens: dict[str, Any], reference: Any, prompt: np.ndarray
) -> None:
    """On vLLM alone, in a batch, and after being thrown out; on TransformerLens in a batch."""
    assert probe["num_preempted"] > 10
    jobs = make_jobs(prompt.tolist())
    ways = [probe["alone"], probe["together"], probe["preempted"]]
    ways.append({str(i): drawn for i, drawn in tlens["together"].items()})
    for drawn in ways:
        assert len(drawn) == len(jobs)
        for index, job in enumerate(jobs):
            check_draws(reference, job, drawn[str(index)][0])
    # A draw that falls on an edge tells them apart, once in thousands of such sequences.
    alike = [sum(way[key][:3] == ways[0][key][:3] for key in ways[0]) for way in ways]
    assert min(alike) >= len(jobs) - 1


def check_read(job: GenerateJob, drawn: list[Any], scored: dict[str, list[float]] | None) -> None:
    """Check what was read with the tokens of a job, against what a later reading gives."""
    ids, _, _, read = drawn
    if not job.logprobs:
        assert not any(read.values())
        return
    asked = {"logprob", *job.columns}
    assert read.keys() == asked | {"top_ids", "top_logprobs"}
    assert {len(values) for values in read.values()} == {len(ids)}, "none is lost, none is double"
    assert {len(row) for row in read["top_ids"]} == {job.top}
    if job.top:
        best = [row[0] for row in read["top_logprobs"]]
        assert (np.array(best) >= np.array(read["logprob"]) - 1e-6).all()
    if "log_q" in asked:
        assert np.isfinite(read["log_q"]).all(), "what was drawn has a probability"
    if scored is None:
        return
    sharp = max(1e-3, min(1.0, job.policy.temperature))
    assert read["logprob"] == pytest.approx(scored["logprob"], abs=1e-4)
    # A token at the edge of the cuts may lie beyond it when it is read once more.
    for name in asked & {"log_q", "eos_prob"}:
        inside = np.isfinite(scored[name])
        assert inside.mean() > 0.9
        wanted = np.array(scored[name])[inside]
        assert np.array(read[name])[inside] == pytest.approx(wanted, abs=1e-4 / sharp), name
    if "rank" in asked:
        assert (np.array(read["rank"]) == scored["rank"]).mean() > 0.95


def test_what_is_told_of_a_token_is_of_what_drew_it(
    probe: dict[str, Any], tlens: dict[str, Any], prompt: np.ndarray
) -> None:
    """Alone, in a batch of jobs that want other things, and after being thrown out."""
    for index, job in enumerate(make_jobs(prompt.tolist())):
        ids = probe["together"][str(index)][0]
        for way in ("alone", "together", "preempted"):
            drawn = probe[way][str(index)]
            check_read(job, drawn, probe["columns"][str(index)] if drawn[0] == ids else None)
        check_read(job, tlens["together"][index], None)


def test_a_low_temperature_draws_as_q_says(probe: dict[str, Any], prompt: np.ndarray) -> None:
    """At 1e-3, which vLLM's own sampler takes for 1e-2, all but near ties are certain."""
    jobs = make_jobs(prompt.tolist())
    low = [str(i) for i, job in enumerate(jobs) if job.policy.temperature == 1e-3]
    assert low
    for index in low:
        assert np.mean(np.array(probe["columns"][index]["log_q"]) > -1e-3) > 0.9


def test_both_engines_end_at_the_tokens_of_one_source(
    probe: dict[str, Any], tlens: dict[str, Any], prompt: np.ndarray
) -> None:
    """The generation configuration's, in place of the model's own, and the tokenizer's."""
    assert probe["eos_ids"] == tlens["eos_ids"] == [PERIOD, BOY]
    jobs = make_jobs(prompt.tolist())
    ends = set()
    for drawn in (probe["together"], {str(i): one for i, one in tlens["together"].items()}):
        for index, job in enumerate(jobs):
            ids, text, reason, _ = drawn[str(index)]
            places = [n for n, token in enumerate(ids) if token in (BOY, PERIOD)]
            if job.ignore_eos:
                assert (len(ids), reason) == (draws_probe.LENGTH, "length")
            elif places:
                assert (places, reason) == ([len(ids) - 1], "stop")
                assert not text.endswith((" boy", "."))
                ends.add(ids[-1])
            else:
                assert reason == "length"
    assert ends == {BOY, PERIOD}


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ({}, (2,)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [7, 9]}},
         (2, 7, 9)),
        ({"generation_config": {"eos_token_id": 4}, "config": {"eos_token_id": 7}}, (2, 4)),
        ({"generation_config": {"eos_token_id": [-1, 1436]}}, (2,)),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": 3}}, (3,)),
    ],
)  # fmt: skip
def test_the_source_of_ends(tmp_path: Path, named: Any, wanted: tuple[int, ...]) -> None:
    path = write_checkpoint(tmp_path / "model", **named)
    assert find_eos(path, path, 1436) == wanted


def test_without_a_generation_configuration_the_models_own_counts(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", config={"eos_token_id": 9})
    (path / "generation_config.json").unlink()
    assert find_eos(path, path, 1436) == (2, 9)
