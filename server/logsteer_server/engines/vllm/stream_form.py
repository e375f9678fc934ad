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

    score(None)
    exact = str(model.dtype) == "torch.float32" and model.quantization is None
    form = find_stream_form(outputs, score, exact=exact)
    vllm.call_workers("set_stream_form", form)
    return form


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
