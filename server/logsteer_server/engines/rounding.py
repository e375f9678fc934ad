"""The rounding error of half precision on a model, measured at its start against float32."""

import logging
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.engine import Engine, EngineSpec
from logsteer_server.contract.jobs import JobResult, ScoreJob, ScoreOutput
from logsteer_server.engines.machine import measure_memory
from logsteer_server.engines.needs import estimate_weights
from logsteer_server.engines.weights import locate_model
from logsteer_server.imports import load_tokenizer

log = logging.getLogger(__name__)

MOST_BYTES = 8 * 2**30
"""Size in float32 of the largest model that is measured: two billion parameters."""

TEXT = (
    "The lighthouse at the end of the pier was built in 1874, when most of the town still lived "
    "from herring. Its keeper wrote down the weather every evening: wind from the west, rain after "
    "ten, two boats not yet home. Today the lamp turns by itself, and his granddaughter sells "
    'tickets at the door. "People ask me whether it is lonely up there," she says, "but on a clear '
    'night you can count the lights of 12 villages, and each of them is somebody you know."'
)


def measure_rounding(engine: Engine, spec: EngineSpec) -> float | None:
    """Return the largest error of an engine's log-probabilities in half precision, in nats.

    It is over the tokens of TEXT, against transformers in float32 on the CPU. None if the engine is
    not in half precision, or if it was not measured: the weights are quantised, the machine has no
    room for them in float32, or transformers does not support the model.
    """
    info = engine.info
    if info.dtype not in ("bfloat16", "float16") or info.quantization:
        return None
    path = locate_model(spec.path)
    size, free = estimate_weights(path, "float32"), measure_memory()[1]
    if size > min(MOST_BYTES, free // 2):
        log.info("%s: rounding not measured: its weights take %d bytes in float32", spec.id, size)
        return None
    try:
        ids_T, exact_R = _score_in_float32(path, info.context_length)
    except Exception:  # a model's own code may raise anything; transformers lacks some of vLLM's
        log.warning("%s: rounding not measured: transformers failed", spec.id, exc_info=True)
        return None
    engine.add([(0, ScoreJob(ids_T[:-1], ids_T[1:]))])
    results = list[tuple[int, JobResult]]()
    while engine.busy:
        results += engine.step()
    scored = cast(ScoreOutput, results[0][1])
    return float(np.abs(scored.columns["logprob"] - exact_R).max())


def _score_in_float32(
    path: Path, most: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return at most `most` tokens of TEXT, and the log-probability of each after the first."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ids_T = torch.tensor(load_tokenizer(path)(TEXT)["input_ids"][:most])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        log_p_RV = model(ids_T[None, :-1]).logits[0].log_softmax(-1)
    exact_R = log_p_RV.gather(-1, ids_T[1:, None])[:, 0]
    return ids_T.numpy().astype(np.int32), exact_R.numpy()
