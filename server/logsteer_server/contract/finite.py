"""Which results are numbers, and how a job fails whose result is none.

A model that was changed for a job (steered, with other parameters) may leave what its dtype holds.
Then its result is NaN, which says nothing: the job fails. A model as it is may do so, too, over a
text that it does not hold; its scores are given as they are, NaN, and become null with a flag.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.contract.captures import CaptureOutput
from logsteer_server.contract.jobs import (
    GenerateOutput,
    GradientOutput,
    Job,
    JobFailure,
    Output,
    ScoreOutput,
)

NON_FINITE = "non_finite"
"""The problem code of a job whose activations or logits are not finite."""


def is_finite(output: Output) -> bool:
    """Return whether no number of an output is NaN, and no rank 0, which stands for it.

    Infinite ones say something: that q leaves a token out, or the model itself does.
    """
    match output:
        case ScoreOutput():
            return bool(_find_finite_rows(output.columns).all())
        case GenerateOutput() | GradientOutput():
            return not np.isnan(output.logprobs).any()
        case CaptureOutput():
            return bool(np.isfinite(output.activations_LTD).all())
    return True


def find_finite(outputs: ScoreOutputs) -> list[bool]:
    """Return for each output whether it is finite, as `is_finite` says."""
    finite_R = _find_finite_rows(outputs.columns)
    found: list[bool] = np.logical_and.reduceat(finite_R, outputs.row_starts[:-1]).tolist()
    return found


def _find_finite_rows(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Return which rows [R] have no NaN in any column, and no rank 0."""
    finite_R: npt.NDArray[np.bool_] = np.logical_and.reduce(
        [values > 0 if name == "rank" else ~np.isnan(values) for name, values in columns.items()]
    )
    return finite_R


def find_failure(job: Job, output: Output) -> JobFailure | None:
    """Return why a changed model's output is not to be given; None where it is finite."""
    traced = output.trace is None or output.trace.is_finite
    if not job.is_changed or (is_finite(output) and traced):
        return None
    return describe_non_finite(job, "the model's activations or logits are not finite")


def describe_non_finite(job: Job, found: str) -> JobFailure:
    """Return the failure of a job of which that was found, with what to do about it."""
    if job.plan is not None and job.plan.sites:
        hint = "steer with a smaller scale or narrower bounds"
    elif job.override is not None:
        hint = "use a smaller eta"
    elif job.adapter is not None:
        hint = "the adapter's updates are too large for the model's dtype"
    else:
        hint = "the model's dtype does not hold this text; serve it in a wider one"
    return JobFailure(NON_FINITE, f"{found}: {hint}")
