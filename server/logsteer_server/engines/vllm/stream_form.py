"""Asking a model that has just started where its residual stream is."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.engines.vllm.extra_args import describe_rows
from logsteer_server.engines.vllm.stream import (
    Change,
    StreamForm,
    UnknownStreamError,
    find_stream_form,
)
from logsteer_server.numerics.rows import RowSpec, unpack

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.core import VllmCore

PROBE_TOKENS = 16


def ask_stream_form(vllm: "VllmCore") -> StreamForm:
    """Return where the residual stream of a model is, and tell its workers.

    It reads a text of PROBE_TOKENS tokens five times at most, outside compiled graphs. Errors:
    UnknownStreamError where the model gives none.
    """
    if reason := vllm.call_workers("find_scaled_stream")[0]:
        raise UnknownStreamError(reason)
    model = vllm.config.model_config
    ids = np.linspace(3, model.get_vocab_size() - 1, PROBE_TOKENS).astype(np.int32)
    outputs: set[str] = set()

    def score(change: Change | None) -> npt.NDArray[np.float32]:
        vllm.call_workers("begin_stream_probe", change)
        try:
            return _score(vllm, ids)
        finally:
            outputs.update(*vllm.call_workers("end_stream_probe"))

    exact = str(model.dtype) == "torch.float32" and model.quantization is None
    plain_R = score(None)
    if not model.enforce_eager:
        check_graphs(plain_R, _score(vllm, ids), exact=exact)
    form = find_stream_form(outputs, score, exact=exact)
    vllm.call_workers("set_stream_form", form)
    return form


GRAPH_LIMITS = {True: 0.01, False: 0.5}
"""Nats a token that graphs may be from the same layers run one by one, by whether all is computed
in float32. In half precision both round, at other places; a wrong graph is off by much more."""


def check_graphs(
    eager_R: npt.NDArray[np.float32], served_R: npt.NDArray[np.float32], *, exact: bool
) -> None:
    """Compare a text's log-probabilities without graphs and as they are served.

    Errors: ValueError where they are not the same up to rounding.
    """
    finite_R = np.isfinite(eager_R)
    off = float(np.abs(served_R - eager_R)[finite_R].mean()) if finite_R.any() else 0.0
    if not off <= GRAPH_LIMITS[exact]:
        raise ValueError(
            f"compile: this model's compiled graphs give log-probabilities that are {off:.2g} nats "
            "a token from those of its layers run one by one; set compile: false"
        )


def _score(vllm: "VllmCore", ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    job = ScoreJob(ids[:-1], ids[1:])
    spec = RowSpec.of(job, ())
    salt = "stream probe"  # what a probe leaves in the prefix cache is for nobody
    wanted = vllm.schedule(ids[:-1].tolist(), describe_rows(job, spec), None, salt, use_cache=False)
    while True:
        for output in vllm.step():
            if output.request_id == wanted and output.finished:
                values = output.prompt_token_id_logprobs.numpy().reshape(-1, spec.width)
                return unpack(values, spec).columns["logprob"]
