"""What vLLM samples with here: the draw that all engines share, in place of vLLM's own.

vLLM is asked for temperature 0 by every request, so that it makes no generators and cuts nothing;
what the request is drawn by stands in its extra arguments. Log-probabilities are still read by
vLLM's code, from the logits as the model puts them out.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

from logsteer_server.contract.jobs import Policy
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.extra_args import DRAW
from logsteer_server.numerics.drawing import RowSampler

WARM_UP = Policy(top_p=0.9)
"""What rows of no request are drawn by, from which vLLM learns how much memory drawing takes."""


class PolicySampler(Sampler):  # type: ignore[misc]
    """Draw each request's token by its own policy, seed, and the number of its tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self._req_ids: list[str] = []
        self._row_sampler = RowSampler([], [])
        self._index_R: np.ndarray | None = None
        self._finite_R: staging.Arriving | None = None

    def expect(self, req_ids: list[str], requests: Mapping[str, Any], index_R: np.ndarray) -> None:
        """Say which requests the rows of the next logits are, and how many tokens each has."""
        self._index_R = index_R
        if req_ids != self._req_ids:
            self._req_ids = req_ids.copy()
            draws = [_read_draw(requests[req_id].sampling_params) for req_id in req_ids]
            self._row_sampler = self._make(draws)

    def sample(
        self,
        logits: Tensor,
        sampling_metadata: Any,  # noqa: ARG002
        logprobs_mode_override: Any = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None]:
        """Return the token of each row, and nothing in place of the model's log-probabilities."""
        index_R, self._index_R = self._index_R, None
        if index_R is not None:
            ids_R = self._row_sampler.draw(logits, index_R)
            # NaN comes out where one is among the logits, and where all are minus infinity.
            # It reaches the host in front of the tokens themselves, which vLLM waits for.
            self._finite_R = staging.Arriving(logits.gather(-1, ids_R[:, None])[:, 0].isfinite())
            return ids_R, None
        rows = len(logits)
        return self._make([(WARM_UP, 0)] * rows).draw(logits, np.zeros(rows, np.int64)), None

    def take_non_finite(self) -> dict[str, int]:
        """Return the requests of the rows just drawn whose logits are not finite, as keys."""
        arriving, self._finite_R = self._finite_R, None
        if arriving is None or (finite_R := arriving.read()).all():
            return {}
        pairs = zip(self._req_ids, finite_R.tolist(), strict=True)
        return {req_id: 1 for req_id, is_finite in pairs if not is_finite}

    def _make(self, draws: list[tuple[Policy, int]]) -> RowSampler:
        policies, seeds = [policy for policy, _ in draws], [seed for _, seed in draws]
        return RowSampler(policies, seeds, self.greedy_sample)


def _read_draw(params: Any) -> tuple[Policy, int]:
    """Return policy and seed of a request; greedy where nothing is generated."""
    *policy, seed = (params.extra_args or {}).get(DRAW, (0.0, 0))
    return Policy(*policy), seed
