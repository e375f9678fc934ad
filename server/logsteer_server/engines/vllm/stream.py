"""Detect where a decoder layer's output has the residual stream, which differs by family.

vLLM's decoder layers return `hidden`, or `(hidden, residual)`. In most families the stream is their
sum; in some it is `hidden`, and `residual` is stale. A model does not say which, so each one is
tested: `StreamProbe` changes its layers' outputs, and `find_stream_form` checks which changes leave
the logits as they are. The module also checks compiled graphs and the activations of hooks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from logsteer_server.contract.jobs import GenerateJob, Policy, ScoreJob
from logsteer_server.engines.drawn import DrawnValues
from logsteer_server.engines.vllm.extra_args import describe_draw, describe_rows
from logsteer_server.numerics.drawing import spec_of_draw
from logsteer_server.numerics.rows import RowSpec, unpack

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.core import VllmCore


StreamForm = Literal["sum", "hidden"]
"""Where the residual stream is in a layer's output: hidden + residual, or hidden."""

Change = Literal["hidden", "shift", "residual"]
"""What is added to a layer's output, for a vector d of a probe: d to hidden; d to hidden and -d to
residual; d to residual."""

EXACT, ROUNDED = 0.01, 0.2
"""Largest effect on the logits to ignore, relative to the effect of changing hidden: in
float32, and in half precision, where d and -d are rounded differently."""


class UnknownStreamError(ValueError):
    """A model whose residual stream was not found; the message says what its layers return."""


def split_output(output: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return a decoder layer's output as hidden and residual [T, D], views; None for other forms.

    Layers of vLLM's Transformers backend return [1, T, D].
    """
    parts = output if isinstance(output, tuple) else (output,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    is_known = all(part is None for part in parts[1:]) or len(parts) == len(tensors) == 2
    if not is_known or not isinstance(parts[0], Tensor):
        return None
    if tensors[0].shape != tensors[-1].shape:
        return None
    if tensors[0].dim() == 3 and len(tensors[0]) == 1:
        tensors = [tensor.squeeze(0) for tensor in tensors]
    if tensors[0].dim() != 2:
        return None
    return tensors[0], tensors[1] if len(tensors) == 2 else None


def read_stream(hidden_TD: Tensor, residual_TD: Tensor | None, index_t: Tensor | None) -> Tensor:
    """Return the residual stream of some tokens in float32: hidden, or hidden + residual.

    Without an index, return that of all tokens, which may be `hidden_TD` itself.
    """
    if index_t is None:
        return hidden_TD.float() if residual_TD is None else hidden_TD.float() + residual_TD.float()
    stream_tD = hidden_TD[index_t].float()
    return stream_tD if residual_TD is None else stream_tD + residual_TD[index_t].float()


def describe_output(output: Any) -> str:
    """Describe a decoder layer's output in words."""
    parts = split_output(output)
    if parts is not None:
        return "hidden" if parts[1] is None else "hidden, residual"
    named = output if isinstance(output, tuple) else (output,)
    shapes = [str(list(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in named]
    return f"unknown: {', '.join(shapes)}"


class StreamProbe:
    """Change the outputs of one rank's decoder layers, and record their form."""

    def __init__(self, layers: Sequence[nn.Module], change: Change | None) -> None:
        self._layers = layers
        self._change = change
        self.outputs: set[str] = set()

    def attached(self) -> AbstractContextManager[Any]:
        """Return a context in which the layers' outputs are changed."""
        stack = ExitStack()
        for number, layer in enumerate(self._layers):
            handle = layer.register_forward_hook(partial(self._change_output, number))
            stack.callback(handle.remove)
        return stack

    def _change_output(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> Any:
        self.outputs.add(describe_output(output))
        parts = split_output(output)
        if parts is None or self._change is None:
            return None
        hidden_TD, residual_TD = parts
        stream_TD = hidden_TD.float() if residual_TD is None else hidden_TD.float() + residual_TD
        scale_T1 = 0.5 * stream_TD.square().mean(-1, keepdim=True).sqrt()
        draw = torch.Generator().manual_seed(layer)
        noise_D = torch.randn(hidden_TD.shape[-1], generator=draw).to(hidden_TD.device)
        vector_TD = (scale_T1 * noise_D).to(hidden_TD.dtype)
        if self._change != "residual":
            hidden_TD = hidden_TD + vector_TD
        if residual_TD is not None and self._change != "hidden":
            sign = 1 if self._change == "residual" else -1
            residual_TD = residual_TD + sign * vector_TD
        if not isinstance(output, tuple):
            return hidden_TD.view(output.shape)
        shape = output[0].shape
        if residual_TD is None:
            return (hidden_TD.view(shape), *output[1:])
        return hidden_TD.view(shape), residual_TD.view(shape)


def find_stream_form(
    outputs: set[str],
    score: Callable[[Change | None], npt.NDArray[np.float32]],
    *,
    exact: bool,
) -> StreamForm:
    """Return where the residual stream of a model is, from the changes that affect its scores.

    Args:
        outputs: the forms of its layers' outputs, as `describe_output`; `score` adds to it.
        score: returns the log-probabilities of a text under a change.
        exact: whether the model computes in float32.

    Errors: UnknownStreamError if neither form explains the effects.

    """
    plain_R = score(None)
    unknown = sorted(outputs - {"hidden", "hidden, residual"})
    if unknown or not outputs:
        raise UnknownStreamError(f"its layers return {', '.join(unknown) or 'nothing'}")

    def measure(change: Change) -> float:
        return float(np.abs(score(change) - plain_R).mean())

    reached = measure("hidden")
    if not reached > 1e-5:
        raise UnknownStreamError("a change behind its layers does not reach its logits")
    if outputs == {"hidden"}:
        return "hidden"
    limit = reached * (EXACT if exact else ROUNDED)
    shift, residual = measure("shift"), measure("residual")
    if shift <= limit < residual:
        return "sum"
    if residual <= limit < shift:
        return "hidden"
    raise UnknownStreamError(
        "its layers return two parts, and the residual stream is neither their sum nor the first: "
        f"nats moved by a change of the first {reached:.2g}, against the second {shift:.2g}, of "
        f"the second {residual:.2g}"
    )


PROBE_TOKENS = 16
DECODED = 3
"""The last tokens of the probe text that are generated, to check decode steps."""


def detect_stream_form(vllm: "VllmCore") -> StreamForm:
    """Detect where the residual stream of a model is; set it in the workers and return it.

    It scores a text of PROBE_TOKENS tokens at most four times, without compiled graphs. Errors:
    UnknownStreamError as `find_stream_form`, or if vLLM scales the stream.
    """
    if reason := vllm.call_workers("find_scaled_stream")[0]:
        raise UnknownStreamError(reason)
    outputs: set[str] = set()

    def score(change: Change | None) -> npt.NDArray[np.float32]:
        return _score_layers(vllm, change, outputs, _probe_text(vllm))

    form = find_stream_form(outputs, score, exact=_is_exact(vllm))
    vllm.call_workers("set_stream_form", form)
    return form


def check_model_graphs(vllm: "VllmCore") -> None:
    """Check a compiled model's graphs, of prompts and of decode steps, on unsteered texts.

    Errors: ValueError as `check_graphs`.
    """
    if vllm.config.model_config.enforce_eager:
        return
    ids, exact = _probe_text(vllm), _is_exact(vllm)
    check_graphs(_score_layers(vllm, None, set(), ids), _score(vllm, ids), exact=exact)
    prompt = ids[:-DECODED]
    drawn, drawn_R = _generate(vllm, prompt)
    eager_R = _score_layers(vllm, None, set(), np.concatenate([prompt, drawn]))
    # The prompt's step samples the first token.
    check_graphs(eager_R[1 - DECODED :], drawn_R[1:], exact=exact)


def _is_exact(vllm: "VllmCore") -> bool:
    """Return whether the model computes in float32."""
    model = vllm.config.model_config
    return str(model.dtype) == "torch.float32" and model.quantization is None


def check_points(vllm: "VllmCore", form: StreamForm, hooks: Sequence[str]) -> dict[str, str]:
    """Return, by hook, why some hooks' activations are not the ones they are named after.

    It scores the text of `detect_stream_form` twice. The second time it changes the activations
    without faults, which shows whether the model passes the changes on.
    """
    ids, faults = _probe_text(vllm), dict[str, str]()
    for is_changed in (False, True):
        changed = [hook for hook in hooks if hook not in faults] if is_changed else []
        vllm.call_workers("begin_point_probe", form, changed)
        try:
            _score(vllm, ids)
        finally:
            for found in vllm.call_workers("end_point_probe"):
                faults |= found
    return {hook: reason for hook, reason in faults.items() if hook in hooks}


GRAPH_LIMITS = {True: 0.01, False: 0.5}
"""Largest mean difference between graphs and the same layers run one by one, in nats a token, by
whether the model computes in float32. In half precision they round in different places; a wrong
graph is off by much more."""


def check_graphs(
    eager_R: npt.NDArray[np.float32], served_R: npt.NDArray[np.float32], *, exact: bool
) -> None:
    """Compare a text's log-probabilities without graphs and as they are served.

    Errors: ValueError if they differ by more than rounding.
    """
    finite_R = np.isfinite(eager_R)
    off = float(np.abs(served_R - eager_R)[finite_R].mean()) if finite_R.any() else 0.0
    if not off <= GRAPH_LIMITS[exact]:
        raise ValueError(
            f"compile: this model's compiled graphs give log-probabilities that are {off:.2g} nats "
            "a token from those of its layers run one by one; set compile: false"
        )


def _probe_text(vllm: "VllmCore") -> npt.NDArray[np.int32]:
    """Return PROBE_TOKENS ids spread over the vocabulary."""
    vocab_size = vllm.config.model_config.get_vocab_size()
    return np.linspace(3, vocab_size - 1, PROBE_TOKENS).astype(np.int32)


def _score_layers(
    vllm: "VllmCore", change: Change | None, outputs: set[str], ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Score a text with layers run one by one, under a change; add their outputs' forms."""
    vllm.call_workers("begin_stream_probe", change)
    try:
        return _score(vllm, ids)
    finally:
        outputs.update(*vllm.call_workers("end_stream_probe"))


def _generate(
    vllm: "VllmCore", ids: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the DECODED most probable tokens after a text, and their log-probabilities."""
    job = GenerateJob(ids, DECODED, Policy(temperature=0), ignore_eos=True)
    spec = spec_of_draw(job, ())
    drawn, values = list[int](), DrawnValues(spec)
    vllm.generate(job, describe_draw(job, spec), None, (), use_cache=False)
    while len(drawn) < DECODED:
        for output in vllm.step():
            drawn += output.new_token_ids
            values.add(output.new_logprobs.logprobs)
    return np.array(drawn, np.int32), values.pop()["logprobs"]


def _score(vllm: "VllmCore", ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    job = ScoreJob(ids[:-1], ids[1:])
    spec = RowSpec.of(job, ())
    salt = "stream probe"  # no request may hit the blocks that a probe leaves in the prefix cache
    own_id = vllm.schedule(ids[:-1].tolist(), describe_rows(job, spec), None, salt, use_cache=False)
    while True:
        for output in vllm.step():
            if output.request_id == own_id and output.finished:
                values = output.prompt_token_id_logprobs.numpy().reshape(-1, spec.width)
                logprobs_R: npt.NDArray[np.float32] = unpack(values, spec)["logprob"]
                return logprobs_R
