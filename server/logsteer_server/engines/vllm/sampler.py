"""What vLLM samples with here: the draw that all engines share, in place of vLLM's own.

vLLM is asked for temperature 0 by every request, so that it makes no generators; what the request
is drawn by, and what is read with its tokens, stands in its extra arguments. That is read from the
logits that the token is drawn from, and travels the way of vLLM's own log-probabilities.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from logsteer_server.contract.jobs import Policy
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.extra_args import DRAW
from logsteer_server.numerics.drawing import Drawn, RowSampler
from logsteer_server.numerics.rows import PUBLIC_COLUMNS, RowSpec

WARM_UP = RowSpec(PUBLIC_COLUMNS, 1, Policy(top_p=0.9), (0,))
"""What rows of no request are drawn by, from which vLLM learns how much memory drawing takes."""


class PolicySampler(Sampler):  # type: ignore[misc]
    """Draw each request's token by its own policy, seed, and the number of its tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self._req_ids: list[str] = []
        self._row_sampler = self._make([])
        self._index_R: np.ndarray | None = None
        self._finite_R: staging.Arriving | None = None

    def expect(self, req_ids: list[str], requests: Mapping[str, Any], index_R: np.ndarray) -> None:
        """Say which requests the rows of the next logits are, and how many tokens each has."""
        self._index_R = index_R
        if req_ids != self._req_ids:
            self._req_ids = req_ids.copy()
            draws = [_read_draw(requests[req_id].sampling_params) for req_id in req_ids]
            self._row_sampler = self._make(draws)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,  # noqa: ARG002
        predict_bonus_token: bool = False,  # noqa: ARG002
        logprobs_mode_override: Any = None,  # noqa: ARG002
    ) -> SamplerOutput:
        """Return the token of each row, and what its request wants read with it."""
        index_R, self._index_R = self._index_R, None
        if index_R is not None:
            drawn = self._row_sampler.draw(logits, index_R)
            # It reaches the host in front of the tokens themselves, which vLLM waits for.
            self._finite_R = staging.Arriving(drawn.finite_R)
            return _write_output(drawn)
        rows = len(logits)
        return _write_output(self._make([(WARM_UP, 0)] * rows).draw(logits, np.zeros(rows)))

    def take_non_finite(self) -> dict[str, int]:
        """Return the requests of the rows just drawn whose logits are not finite, as keys."""
        arriving, self._finite_R = self._finite_R, None
        if arriving is None or (finite_R := arriving.read()).all():
            return {}
        pairs = zip(self._req_ids, finite_R.tolist(), strict=True)
        return {req_id: 1 for req_id, is_finite in pairs if not is_finite}

    def _make(self, draws: Sequence[tuple[RowSpec | None, int]]) -> RowSampler:
        specs, seeds = [spec for spec, _ in draws], [seed for _, seed in draws]
        return RowSampler(specs, seeds, self.greedy_sample)


def _read_draw(params: Any) -> tuple[RowSpec | None, int]:
    """Return what a request's tokens are drawn by, and its seed; None where none is wanted."""
    spec, seed = (params.extra_args or {}).get(DRAW, (None, 0))
    return spec, seed


def _write_output(drawn: Drawn) -> SamplerOutput:
    """Return what vLLM takes of a sampler.

    Ids of alternatives are among the values, where they are exact (`numerics.rows`), so that one
    array is copied from a GPU. The two others, which nobody reads, are empty, on the same device:
    vLLM asks the first one for it.
    """
    values = None
    if drawn.values_RW.shape[-1]:
        none_R0 = drawn.ids_R.new_empty((len(drawn.ids_R), 0))
        values = LogprobsTensors(none_R0, drawn.values_RW, none_R0)
    return SamplerOutput(drawn.ids_R.to(torch.int32)[:, None], values)
