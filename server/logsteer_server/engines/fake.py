"""A fake engine for tests of the HTTP surface: log-probabilities from a hash, no model."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from logsteer.schemas import Column
from logsteer_server.contract.captures import CapturedActivations
from logsteer_server.contract.engine import EngineInfo, EngineReading, EngineRoom, EngineSpec
from logsteer_server.contract.jobs import (
    ALTERNATIVES,
    ALTERNATIVES_TAIL,
    TOP_IDS,
    TOP_LOGPROBS,
    TOP_TAIL,
    CaptureJob,
    CaptureOutput,
    CheckAdapterJob,
    CheckAdapterOutput,
    CheckOverrideJob,
    CheckOverrideOutput,
    Feature,
    GenerateJob,
    GenerateOutput,
    Job,
    JobFailure,
    JobResult,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Readings
from logsteer_server.numerics.sinks import finish_capture

FAKE_COLUMNS = get_args(Column)
HANG_S = 3600.0
HELD_POLL_S = 0.005
ELSEWHERE = "serve the model with engine transformer_lens"
LACKS: dict[Feature, str] = {
    "override": f"the engine fake has no parameter overrides; {ELSEWHERE}",
    "gradient": f"the engine fake has no gradients; {ELSEWHERE}",
    "adapter": f"the engine fake has no adapters; {ELSEWHERE}",
    "structure": f"the engine fake forces no form on a reply; {ELSEWHERE}",
    "step_tokens": f"the engine fake reads every text in one step; {ELSEWHERE}",
}


def fake_logprobs(job: ScoreJob) -> np.ndarray:
    """Return log-probabilities in [-9, -0.1], fixed by each target and the token before it."""
    rows = -1 if job.shares_row else slice(job.first_row, None)
    mixed = (
        job.tokens[rows].astype(np.int64) * 2654435761
        + job.targets.astype(np.int64) * 40503
        + 12345
    ) % 8900
    return (-0.1 - mixed / 1000).astype(np.float32)


def fake_activations(job: Job, tokens: np.ndarray, width: int) -> CapturedActivations | None:
    """Return a job's captured activations of these tokens, or None without a capture.

    Each dimension is a sine in [-1, 1] of the layer, the hook and the sum of the tokens so far.
    """
    if (capture := job.capture) is None:
        return None
    places = capture.find_places(len(tokens), job.prompt_len, len(tokens))
    read_T = tokens.astype(np.float64).cumsum()[places]
    layers_L11 = np.array(capture.layers, dtype=np.float64)[:, None, None]
    dims_D = np.arange(1, width + 1, dtype=np.float64)
    phase = sum(capture.hook.encode())
    waves_LTD = np.sin(read_T[:, None] * dims_D + 7.0 * layers_L11 + phase)
    return finish_capture(capture, places, waves_LTD.astype(np.float32))


def fake_readings(job: Job, tokens: np.ndarray) -> Readings | None:
    """Return the probe readings of these tokens, or None if a job's plan keeps none.

    They are components in [-5, 5] of activations with norm 10, and depend on the token, the layer
    and the probe's number; steering adds 1.
    """
    if job.plan is None or (first := job.plan.first_kept(job.prompt_len)) is None:
        return None
    layers_G = np.array([probe.layer for probe in job.plan.probes])
    numbers_G = np.arange(len(layers_G))
    found_TG = (7 * tokens[first:, None].astype(np.int64) + 3 * layers_G + numbers_G) % 11 - 5
    after_TG = found_TG + bool(job.plan.sites)
    norms_TG = np.full_like(found_TG, 10)
    stacked = np.stack([found_TG, norms_TG, after_TG, norms_TG], axis=-1)
    return Readings(first, stacked.astype(np.float32))


def fake_generation(job: GenerateJob) -> list[JobResult]:
    """Repeat the prompt's tokens, each as a letter; in pieces of one token for a stream."""
    ids = np.resize(job.tokens, job.max_tokens)
    size = 1 if job.stream else job.max_tokens
    probed = fake_readings(job, np.concatenate([job.tokens, ids[:-1]]))
    num_output = 0
    pieces: list[JobResult] = []
    for start in range(0, job.max_tokens, size):
        part = ids[start : start + size]
        shape = (len(part), job.top)
        own = None
        if probed is not None:
            end = max(probed.first, job.prompt_len - 1) - probed.first + start + len(part)
            own = Readings(probed.first + num_output, probed.values_TGR[num_output:end])
            num_output = end
        pieces.append(
            GenerateOutput(
                part,
                "".join(chr(97 + token % 26) for token in part.tolist()),
                np.full(len(part), -0.5, dtype=np.float32),
                np.zeros(shape, dtype=np.int32),
                np.zeros(shape, dtype=np.float32),
                "length" if start + size >= job.max_tokens else None,
                fake_columns(job.columns, np.full(len(part), -0.5, dtype=np.float32)),
                readings=own,
            )
        )
    return pieces


def fake_columns(names: Sequence[str], logprobs: np.ndarray) -> dict[str, np.ndarray]:
    """Return columns derived from the log-probabilities, with values that are possible."""
    values = dict.fromkeys(names, -logprobs / 3) | {
        "logprob": logprobs,
        "rank": (1 - logprobs).astype(np.int32),
        "entropy": -logprobs / 2,
        **dict.fromkeys(("kl", "forward_kl", "reverse_kl", "jsd"), np.zeros_like(logprobs)),
        "top1_agrees": np.ones_like(logprobs),
    }
    return {name: values[name] for name in names}


def fake_change(job: Job) -> float:
    """Return the shift of a job's log-probabilities by an adapter and an override, in (-0.2, 0].

    It is determined by the SHA-256 of the files. Errors: OSError; ValueError for a wrong SHA-256.
    """
    change = 0.0
    for stored in job.delta.files:
        digest = hashlib.sha256(Path(stored.path).read_bytes()).hexdigest()
        if digest != stored.sha256:
            raise ValueError(f"{stored.path} is not {stored.sha256}")
        change -= int(digest[:2], 16) / 2560
    return change


def fake_scores(job: ScoreJob, shift: float = 0.0) -> list[JobResult]:
    """Return a score job's columns and alternatives, its log-probabilities plus `shift`."""
    try:
        logprobs = fake_logprobs(job) + np.float32(shift + fake_change(job))
    except (OSError, ValueError) as error:
        return [JobFailure("internal", str(error))]
    columns = fake_columns(job.columns, logprobs)
    if job.top:
        columns[TOP_IDS] = np.arange(job.top, dtype=np.int32)[None].repeat(len(logprobs), 0)
        columns[TOP_LOGPROBS] = logprobs[:, None] - np.arange(job.top, dtype=np.float32)
    if job.alternatives is not None:
        columns[ALTERNATIVES] = logprobs[:, None] - job.alternatives.astype(np.float32)
    if job.tail:
        tails = ((TOP_TAIL, TOP_IDS), (ALTERNATIVES_TAIL, ALTERNATIVES))
        columns |= {name: np.exp(logprobs) for name, listed in tails if listed in columns}
    return [ScoreOutput(columns, readings=fake_readings(job, job.tokens))]


class FakeEngine:
    """Answer all jobs in one step, without a model.

    `engine_args`: `vocab_size`, `context_length`, `num_layers`, `hidden_size`, `ahead_tokens` of
    its room, `delay_s` seconds a step, `shift` of log-probabilities, `piecewise`: one piece of a
    stream per step. With `reads_files` it supports adapters and overrides, by `fake_change`.

    Faults: the token id `crash_id` raises, `exit_id` ends the process, `hang_id` hangs the step,
    `fail_id` fails its job alone. A start runs out of memory until the file `memory_file` exists,
    and hangs if `hang_file` exists. While `hold_file` exists, starts and steps wait; with a
    `hold_id`, only steps with this token id.
    """

    def __init__(self, spec: EngineSpec) -> None:
        args = self._args = spec.engine_args
        self._jobs: dict[int, Job] = {}
        self._pieces: dict[int, list[JobResult]] = {}
        if "memory_file" in args and not Path(args["memory_file"]).exists():
            raise MemoryError("the fake engine was told to lack memory")
        if "hang_file" in args and Path(args["hang_file"]).exists():
            time.sleep(HANG_S)
        self._wait_while_held()
        if not Path(spec.path).is_dir():
            raise ValueError(f"{spec.path}: no such directory")
        self._info = EngineInfo(
            engine="fake",
            engine_version="0",
            model_path=spec.path,
            tokenizer_path=spec.path,
            weights_digest="none",
            dtype="float32",
            logits_dtype="float32",
            quantization=None,
            tensor_parallel=1,
            pipeline_parallel=1,
            batch_invariant=True,
            context_length=spec.max_model_len or int(args.get("context_length", 128)),
            vocab_size=int(args["vocab_size"]),
            columns=FAKE_COLUMNS,
            eos_ids=(2,),
            num_layers=int(args.get("num_layers", 4)),
            hidden_size=int(args.get("hidden_size", 16)),
            hooks=spec.hooks,
            room=EngineRoom(int(args.get("ahead_tokens", 65_536))),
            lacks=LACKS if not args.get("reads_files") else {"gradient": LACKS["gradient"]},
        )
        self._answers: dict[type[Job], Callable[[Any], list[JobResult]]] = {
            ScoreJob: partial(fake_scores, shift=float(args.get("shift", 0.0))),
            GenerateJob: fake_generation,
            CaptureJob: lambda _: [CaptureOutput()],
            CheckAdapterJob: lambda _: [CheckAdapterOutput(0)],
            CheckOverrideJob: lambda _: [CheckOverrideOutput(moved=1, total=1)],
        }

    @property
    def info(self) -> EngineInfo:
        """The description of this engine."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._jobs)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Accept jobs; the next step answers them."""
        self._jobs.update(jobs)

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Drop jobs."""
        for job_id in job_ids:
            self._jobs.pop(job_id, None)
            self._pieces.pop(job_id, None)

    def step(self) -> list[tuple[int, JobResult]]:
        """Answer every job, or a piece of each."""
        time.sleep(self._args.get("delay_s", 0.0))
        if "hold_id" not in self._args or any(
            self._has_fault("hold", job) for job in self._jobs.values()
        ):
            self._wait_while_held()
        jobs, self._jobs = self._jobs, {}
        results = []
        for job_id, job in jobs.items():
            pieces = self._pieces.pop(job_id, None) or self._answer(job)
            if self._args.get("piecewise") and len(pieces) > 1:
                self._jobs[job_id], self._pieces[job_id] = job, pieces[1:]
                pieces = pieces[:1]
            results += [(job_id, result) for result in pieces]
        return results

    def _wait_while_held(self) -> None:
        while "hold_file" in self._args and Path(self._args["hold_file"]).exists():
            time.sleep(HELD_POLL_S)

    def _has_fault(self, fault: str, job: Job) -> bool:
        """Return whether a job has the token id that triggers a fault."""
        return self._args.get(f"{fault}_id", -1) in job.tokens

    def _answer(self, job: Job) -> list[JobResult]:
        if failure := self._info.refuse(job):
            return [failure]
        if self._has_fault("crash", job):
            raise RuntimeError("the fake engine was told to crash")
        if self._has_fault("exit", job):
            os._exit(1)
        if self._has_fault("hang", job):
            time.sleep(HANG_S)
        if self._has_fault("fail", job):
            return [JobFailure("internal", "the fake engine was told to fail this job")]
        return self._add_activations(job, self._answers[type(job)](job))

    def _add_activations(self, job: Job, results: list[JobResult]) -> list[JobResult]:
        """Add the job's captures to its last output."""
        *others, last = results
        if last.failed or job.capture is None:
            return results
        drawn = [out.token_ids for out in results if isinstance(out, GenerateOutput)]
        tokens = np.concatenate([job.tokens, *drawn])[: job.num_read]
        activations = fake_activations(job, tokens, self._info.hidden_size)
        return [*others, replace(last, activations=activations)]

    def take_load(self) -> None:
        """Return None: every generation ends in the step in which it begins."""

    def read(self) -> EngineReading:
        """Return the number of jobs that wait for the next step."""
        return EngineReading(waiting=len(self._jobs))

    def close(self) -> None:
        """Do nothing: there is no model to free."""
