"""A batch of continuations that grow together, a token each per step.

Prompts are padded on the left, so that every row's next token comes at the end; padding is masked
and positions count from each row's own first token. Keys and values stay in a cache, and rows that
have ended leave it. Axis letters: B rows, T tokens, V vocabulary, K alternatives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import (
    GenerateJob,
    GenerateOutput,
    JobFailure,
    JobResult,
)
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.steering import Span, SteeredRow, Steering
from logsteer_server.engines.tlens.text import GrowingText
from logsteer_server.numerics.rows import Rows, RowSpec, read_rows
from logsteer_server.numerics.sampling import draw_rows, is_greedy, shape_rows


@dataclass(slots=True)
class Continuation:
    """One job's row: what it has, and what has not been handed on yet."""

    job_id: int
    job: GenerateJob
    steered: SteeredRow | None
    text: GrowingText
    generator: torch.Generator
    num_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logprobs: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def start(
        cls, job_id: int, job: GenerateJob, steered: SteeredRow | None, model: BridgeModel
    ) -> "Continuation":
        """The row of a job that has nothing yet."""
        prompt = job.tokens.tolist()
        text = GrowingText(model.tokenizer, prompt, job.stop, job.include_stop)
        generator = torch.Generator()
        if job.seed is None:
            generator.seed()
        else:
            generator.manual_seed(job.seed % 2**63)
        return cls(job_id, job, steered, text, generator)

    def draw(self) -> float:
        """The uniform number of the row's next token; the row's own, whatever the batch."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def add(
        self, token: int, values_W: np.ndarray, top: int, eos_ids: frozenset[int]
    ) -> str | None:
        """Take a token in, with its reading of `top` alternatives; why the row ends, if it does."""
        self.num_tokens += 1
        self.ids.append(token)
        self.logprobs.append(float(values_W[0]))
        self.top_ids.append(values_W[1 : 1 + self.job.top])
        self.top_logprobs.append(values_W[1 + top : 1 + top + self.job.top])
        if token in eos_ids and not self.job.ignore_eos:
            self.text.end()
            return "stop"
        if self.text.add(token):
            return "stop"
        if self.num_tokens < self.job.max_tokens:
            return None
        return "stop" if self.text.end() else "length"

    def take(self, finish_reason: str | None) -> GenerateOutput:
        """All that has not been handed on."""
        shape = (len(self.ids), self.job.top)
        trace = None
        if finish_reason and self.steered:
            # The last token was sampled and never read.
            trace = self.steered.trace(len(self.job.tokens) + self.num_tokens - 1)
        output = GenerateOutput(
            np.array(self.ids, dtype=np.int32),
            self.text.take(finish_reason is not None),
            np.array(self.logprobs, dtype=np.float32),
            np.array(self.top_ids, dtype=np.int32).reshape(shape),
            np.array(self.top_logprobs, dtype=np.float32).reshape(shape),
            finish_reason,
            trace=trace,
        )
        self.ids, self.logprobs, self.top_ids, self.top_logprobs = [], [], [], []
        return output


class Batch:
    """Continuations whose prompts are read in one forward pass, then a token each per step.

    `shifted` are the parameters that they have in place of the model's; `step` runs under them.
    """

    def __init__(
        self, model: BridgeModel, rows: Sequence[Continuation], shifted: Mapping[str, Tensor]
    ) -> None:
        self.shifted = shifted
        self._model = model
        self.rows = list(rows)
        self._cache = model.new_cache()
        lengths = [len(row.job.tokens) for row in rows]
        width = max(lengths)
        self._pads = [width - length for length in lengths]
        self._num_columns = width
        self._next_BT = torch.zeros((len(rows), width), dtype=torch.int64)
        for b, row in enumerate(rows):
            self._next_BT[b, self._pads[b] :] = torch.from_numpy(row.job.tokens)
        self._steering = Steering([row.steered for row in rows])

    @torch.inference_mode()
    def step(self) -> list[tuple[int, JobResult]]:
        """Read the newest tokens, sample the next of each row, and give what is to be handed on."""
        logits_BV = self._read()
        top = max(row.job.top for row in self.rows)
        ids_B, finite_B, values_BW = self._sample(logits_BV, top)
        results: list[tuple[int, JobResult]] = []
        ended: dict[int, str] = {}
        for b, row in enumerate(self.rows):
            if not finite_B[b]:
                ended[b] = "broken"
                continue
            reason = row.add(int(ids_B[b]), values_BW[b], top, self._model.eos_ids)
            if reason:
                ended[b] = reason
            elif row.job.stream:
                results.append((row.job_id, row.take(None)))
        if ended:
            self._steering.collect()
            results += [(self.rows[b].job_id, self._end(b, why)) for b, why in ended.items()]
        self._next_BT = torch.from_numpy(ids_B.astype(np.int64))[:, None]
        self._num_columns += 1
        self._keep([b for b in range(len(self.rows)) if b not in ended])
        return results

    def _end(self, b: int, why: str) -> JobResult:
        row = self.rows[b]
        if why != "broken":
            return row.take(why)
        where = f"after {len(row.job.tokens) + row.num_tokens} tokens the logits are not finite"
        if row.steered:
            return JobFailure("invalid_vector", f"{where}; steer with a smaller scale")
        if row.job.override:
            return JobFailure("invalid_vector", f"{where}; use a smaller eta")
        return JobFailure("internal", f"{where}: the model or its dtype does not hold this text")

    def _read(self) -> Tensor:
        """The logits of each row's newest token; the cache then holds all tokens."""
        width = self._next_BT.shape[1]
        begin = self._num_columns - width
        pads_B1 = torch.tensor(self._pads)[:, None]
        columns_T = torch.arange(begin, self._num_columns)
        positions_BT = (columns_T - pads_B1).clamp(min=0)
        mask_BT = None
        if any(self._pads):
            mask_BT = (torch.arange(self._num_columns) >= pads_B1).long()
        spans = [
            Span(max(0, pad - begin), max(0, begin - pad), self._num_columns - pad)
            for pad in self._pads
        ]
        with self._model.hooked(self._steering.hooks(spans, width)):
            hidden_BTD = self._model.read(self._next_BT, mask_BT, positions_BT, self._cache)
        return self._model.project(hidden_BTD[:, -1])

    def _sample(self, logits_BV: Tensor, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's next token, whether its logits were finite, and the token's reading."""
        policies = [row.job.policy for row in self.rows]
        if all(map(is_greedy, policies)):
            ids_B = logits_BV.argmax(-1)
        else:
            uniform_B = torch.tensor([row.draw() for row in self.rows], dtype=torch.float64)
            ids_B = draw_rows(shape_rows(logits_BV, policies).q_RV, uniform_B)
        rows = Rows(logits_BV, ids_B)
        values_BW = read_rows(rows, RowSpec(("logprob",), top))
        finite_B = values_BW[:, 0].isfinite()
        # One array, because each copy from a GPU waits for it. Ids are exact in float32 (`rows`).
        parts = [ids_B[:, None].float(), finite_B[:, None].float(), values_BW]
        found_BW = torch.cat(parts, dim=-1).cpu().numpy()
        return found_BW[:, 0], found_BW[:, 1] > 0, found_BW[:, 2:]

    def drop(self, job_ids: frozenset[int]) -> None:
        """Take the rows of cancelled jobs out."""
        if not any(row.job_id in job_ids for row in self.rows):
            return
        self._steering.collect()
        self._keep([b for b, row in enumerate(self.rows) if row.job_id not in job_ids])

    def _keep(self, kept: list[int]) -> None:
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in kept]
        self._pads = [self._pads[b] for b in kept]
        self._next_BT = self._next_BT[kept]
        if not self.rows:
            return
        if self._cache.get_seq_length():
            self._cache.batch_select_indices(torch.tensor(kept))
        self._steering = Steering([row.steered for row in self.rows])
