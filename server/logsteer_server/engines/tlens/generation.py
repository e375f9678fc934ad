"""Generation: batches of continuations that grow by a token each per step.

Prompts are padded on the left, so that every row's next token comes at the end; padding is masked,
and positions count from each row's own first token. Keys and values stay in transformers' cache
until their row ends. Axis letters: B rows, T tokens, V vocabulary, K alternatives, W values of a
row.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.batches import describe_non_finite
from logsteer_server.contract.jobs import (
    GenerateJob,
    GenerateOutput,
    JobResult,
)
from logsteer_server.contract.plan import ParameterDelta
from logsteer_server.engines.drawn import DrawnTokens
from logsteer_server.engines.tlens.captures import CapturedRow
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import HookFunction, PassTokens, Point
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    JobQueue,
    Results,
    accept_row,
    hooked,
)
from logsteer_server.engines.tlens.steering import BatchSteering, SteeredRow
from logsteer_server.numerics.adjustments import TokenHistory
from logsteer_server.numerics.drawing import RowSampler

MAX_RUNNING_DELTAS = 2
"""The most parameter deltas, each a copy of parameters, of running batches."""


@dataclass(slots=True, kw_only=True)
class GenerationRow(Entry):
    """One job's row of a batch."""

    drawn: DrawnTokens
    history: TokenHistory | None

    @classmethod
    def start(
        cls, job_id: int, job: GenerateJob, steered: SteeredRow | None, model: CausalModel
    ) -> "GenerationRow":
        """Return the row of a job that has no token yet."""
        drawn = DrawnTokens(job, model.eos_ids, model.tokenizer)
        history = None
        if job.policy.adjustments:
            history = TokenHistory.begin(job.tokens, job.max_tokens, model.device)
        captured = CapturedRow.place(model, job)
        return cls(job_id, job, steered, captured=captured, drawn=drawn, history=history)

    @property
    def length(self) -> int:
        """The number of the prompt's tokens and drawn ones."""
        return len(self.job.tokens) + self.drawn.num_tokens

    def take(self, finish_reason: str | None) -> GenerateOutput:
        """Return the tokens since the last output; with a reason, the final output."""
        others: dict[str, Any] = {}
        if self.steered:
            # The last token was sampled and never read.
            others["trace"] = self.steered.trace(self.length - 1) if finish_reason else None
            others["readings"] = self.steered.take_readings()
        if self.captured and self.captured.capture.read == "each" and not finish_reason:
            others["activations"] = self.captured.take()
        return self.drawn.pop(finish_reason, **others)


class RunningBatch:
    """A batch of continuations: one forward pass over the prompts, then one per token.

    `parameters` replace the model's of their names in every step, and `hooks` act after steering.
    """

    def __init__(
        self,
        model: CausalModel,
        rows: list[GenerationRow],
        parameters: Mapping[str, Tensor],
        hooks: Sequence[tuple[Point, HookFunction]] = (),
    ) -> None:
        self._model = model
        self.parameters = parameters
        self._hooks = hooks
        self.rows = rows
        self._cache = model.new_cache()
        lengths = [len(row.job.tokens) for row in rows]
        width = max(lengths)
        self._pads = [width - length for length in lengths]
        self._num_columns = width
        self._next_BT = torch.zeros((len(rows), width), dtype=torch.int64)
        for b, row in enumerate(rows):
            self._next_BT[b, self._pads[b] :] = torch.from_numpy(row.job.tokens)
        self._set_rows()

    @property
    def delta(self) -> ParameterDelta:
        """The parameter delta of all rows; there must be a row."""
        delta: ParameterDelta = self.rows[0].job.delta
        return delta

    def run(self) -> Results:
        """Read the newest tokens and sample the next of each row.

        Returns the outputs of rows that end, and the new pieces of streamed rows.
        """
        return self._model.parameters.call_with(self.parameters, self._step)

    @torch.inference_mode()
    def _step(self) -> Results:
        logits_BV = self._read()
        ids_B, finite_B, values_BW = self._sample(logits_BV)
        results: Results = []
        ended: dict[int, str] = {}
        for b, row in enumerate(self.rows):
            if not finite_B[b]:
                ended[b] = "broken"
                continue
            reason = row.drawn.add(int(ids_B[b]), values_BW[b : b + 1])
            if reason:
                ended[b] = reason
            elif row.job.stream:
                results.append((row.job_id, row.take(None)))
        if ended:
            self._steering.collect()
            results += [self._end(self.rows[b], why) for b, why in ended.items()]
        self._next_BT = torch.from_numpy(ids_B.astype(np.int64))[:, None]
        self._num_columns += 1
        self._select([b for b in range(len(self.rows)) if b not in ended])
        return results

    def _end(self, row: GenerationRow, why: str) -> tuple[int, JobResult]:
        if why != "broken":
            return row.conclude(row.take(why))
        found = f"after {row.length} tokens the logits are not finite"
        return row.job_id, describe_non_finite(row.job, found)

    def _read(self) -> Tensor:
        """Return the logits of each row's newest token; the cache then holds all tokens."""
        width = self._next_BT.shape[1]
        first_B = self._num_columns - width - np.array(self._pads)
        positions_BT = torch.from_numpy((first_B[:, None] + np.arange(width)).clip(min=0))
        mask_BT = None
        if any(self._pads):
            mask_BT = (torch.arange(self._num_columns) >= torch.tensor(self._pads)[:, None]).long()
        tokens = PassTokens.of(first_B, first_B + width, width)
        with hooked(self._model, self.rows, self._steering, tokens, self._hooks):
            hidden_BTD = self._model.read(
                self._next_BT, mask_BT, positions_BT, self._cache, self.delta.cast
            )
        return self._model.project(hidden_BTD[:, -1])

    def _sample(self, logits_BV: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sample each row's next token.

        Returns the tokens [B], whether their logits were finite [B], and their values [B, W].
        """
        drawn_B = np.array([row.drawn.num_tokens for row in self.rows])
        drawn = self._sampler.draw(logits_BV, drawn_B)
        # One array, because each copy from a GPU waits for it. Ids are exact in float32 (`rows`).
        first_B2 = torch.stack([drawn.ids_R, drawn.finite_R], dim=-1)
        found_BW = torch.cat([first_B2, drawn.values_RW], dim=-1).cpu().numpy()
        return found_BW[:, 0], found_BW[:, 1] > 0, found_BW[:, 2:]

    @torch.inference_mode()
    def drop(self, job_ids: frozenset[int]) -> None:
        """Remove the rows of these jobs."""
        if not any(row.job_id in job_ids for row in self.rows):
            return
        self._steering.collect()
        self._select([b for b, row in enumerate(self.rows) if row.job_id not in job_ids])

    def _select(self, indices: list[int]) -> None:
        """Keep only these rows."""
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in indices]
        if self.rows:
            self._next_BT = self._next_BT[indices]
            self._pads = [self._pads[b] for b in indices]
            self._cache.batch_select_indices(torch.tensor(indices))
            self._set_rows()

    def _set_rows(self) -> None:
        """Build the steering and the sampler of the current rows."""
        self._steering = BatchSteering([row.steered for row in self.rows])
        specs = [row.drawn.spec for row in self.rows]
        seeds, histories = [row.job.seed for row in self.rows], [row.history for row in self.rows]
        self._sampler = RowSampler(specs, seeds, histories=histories)


class GenerateQueue(JobQueue[GenerationRow]):
    """Prompts to continue, and the batches that run, each under one parameter delta.

    A waiting batch starts before a running one takes its next step. Running batches use at most
    MAX_RUNNING_DELTAS deltas; jobs under another one wait.
    """

    def __init__(self, model: CausalModel, deltas: DeltaCache, limits: EngineLimits) -> None:
        super().__init__(model, deltas, limits)
        # The first takes the next step.
        self._running: deque[RunningBatch] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a job waits or runs."""
        return bool(self._running) or super().has_work

    @property
    def num_running(self) -> int:
        """The number of running jobs."""
        return sum(len(batch.rows) for batch in self._running)

    def take(self) -> list[GenerationRow]:
        """Return the rows of the next step: of a new batch, or of one that runs."""
        running = {batch.delta for batch in self._running}
        # The next waiting job is not overtaken.
        if super().has_work and (
            len(running) < MAX_RUNNING_DELTAS or self._first.job.delta in running
        ):
            return super().take()
        self._running.rotate(-1)
        return self._running[-1].rows

    def drop(self, job_ids: frozenset[int]) -> None:
        """Drop waiting and running jobs."""
        super().drop(job_ids)
        for batch in self._running:
            batch.drop(job_ids)
        self._running = deque(batch for batch in self._running if batch.rows)

    def _accept(self, job_id: int, job: GenerateJob) -> GenerationRow:
        return GenerationRow.start(job_id, job, accept_row(self._model, job), self._model)

    def run(self, batch: list[GenerationRow]) -> Results:
        """Take a step with these rows and return its results. Errors: RefusedJobError."""
        same = [running for running in self._running if running.rows is batch]
        if not same:
            delta = batch[0].job.delta
            alike = [running for running in self._running if running.delta == delta]
            parameters = alike[0].parameters if alike else self._deltas.apply(delta)
            same = [RunningBatch(self._model, batch, parameters)]
            self._running.append(same[0])
        results = same[0].run()
        if not same[0].rows:
            self._running.remove(same[0])
        return results
