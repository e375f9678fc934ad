"""Scoring the rows of sequences, and capturing their activations, batch by batch.

Axis letters: B sequences, T tokens, R scored rows, W values of a row, D hidden size or width of an
activation, N captured tokens of a batch, L layers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import CaptureJob, ScoreJob, ScoreOutput
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import RefusedJobError
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    ModelQueue,
    Results,
    accept_row,
    read_batch,
    read_behind_contexts,
)
from logsteer_server.engines.tlens.steering import SteeredRow
from logsteer_server.numerics.adjustments import place_targets
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.rows import RowFiles, RowSpec, unpack
from logsteer_server.numerics.sinks import finish_capture

MIN_CONTEXT = 16
"""Tokens from which on a context is looked for among others."""
MIN_SAVED = 64
"""Tokens not read twice from which on contexts are read apart: a pass more costs about as much."""


def _find_head_group(entry: Entry) -> object:
    """Return what jobs whose rows go through the head together have in common.

    A job that exchanges files goes by itself.
    """
    alone = entry.job_id if entry.job.export or entry.job.reference else None
    return RowSpec.of(entry.job, ()), alone


class ScoreQueue(ModelQueue):
    """Sequences whose rows are to be scored, within bounds of what that takes at once."""

    def __init__(
        self, model: BridgeModel, deltas: DeltaCache, limits: EngineLimits, bounds: RowBounds
    ) -> None:
        super().__init__(model, deltas, limits)
        self._bounds = bounds

    def _accept(self, job_id: int, job: ScoreJob) -> Entry:
        steered = accept_row(self._model, job)
        return Entry(job_id, job, steered, context=self._find_context(job, steered))

    def _find_context(self, job: ScoreJob, steered: SteeredRow | None) -> object:
        if job.first_row < MIN_CONTEXT or (steered and steered.probed):
            return None
        if not self._model.is_plain(steered.points if steered else []):
            return None  # what the bridge computes attention with reads texts from their start
        plan = job.plan and job.plan.digest(job.prompt_len)
        return job.tokens[: job.first_row].tobytes(), plan, job.delta

    def _sort(self, entries: list[Entry]) -> list[Entry]:
        """Return the longest first, with those of one context behind one another."""
        longest: dict[object, int] = {}
        for entry in entries:
            own = len(entry.job.tokens)
            longest[entry.context] = max(own, longest.get(entry.context, 0))
        places = {context: place for place, context in enumerate(longest)}

        def order(entry: Entry) -> tuple[int, int]:
            if entry.context is None:
                return -len(entry.job.tokens), -1
            return -longest[entry.context], places[entry.context]

        return sorted(entries, key=order)

    @torch.inference_mode()
    def _compute(self, batch: Sequence[Entry]) -> Results:
        contexts = [entry.context for entry in batch]
        owners = [b if c is None else contexts.index(c) for b, c in enumerate(contexts)]
        lengths = [entry.job.first_row for entry in batch]
        saved = sum(lengths) - sum(lengths[b] for b in set(owners))
        shares = [b for b in range(len(batch)) if owners.count(owners[b]) > 1]
        if saved < MIN_SAVED:
            return self._score_read(batch, read_batch(self._model, batch), [0] * len(batch))
        results: Results = []
        if others := [entry for b, entry in enumerate(batch) if b not in shares]:
            results += self._score_read(others, read_batch(self._model, others), [0] * len(others))
        sharing, begins = [batch[b] for b in shares], [lengths[b] for b in shares]
        firsts = [shares.index(owners[b]) for b in shares]
        hidden_BTD = read_behind_contexts(self._model, sharing, begins, firsts)
        return results + self._score_read(sharing, hidden_BTD, begins)

    def _score_read(
        self, batch: Sequence[Entry], hidden_BTD: Tensor, begins: Sequence[int]
    ) -> Results:
        """Return the results of sequences whose hidden states begin at these of their tokens."""
        results: Results = []
        groups = [_find_head_group(entry) for entry in batch]
        for group in dict.fromkeys(groups):
            members = [b for b, own in enumerate(groups) if own == group]
            results += self._score_group(batch, members, hidden_BTD, begins)
        return results

    def _score_group(
        self,
        batch: Sequence[Entry],
        members: Sequence[int],
        hidden_BTD: Tensor,
        begins: Sequence[int],
    ) -> Results:
        """Return the results of some of a batch's sequences, whose rows share a spec."""
        jobs = [batch[b].job for b in members]
        width = hidden_BTD.shape[1]
        index_R = np.concatenate([batch[b].job.rows - begins[b] + b * width for b in members])
        targets_R = np.concatenate([job.targets for job in jobs])
        spec, vocab_size = RowSpec.of(jobs[0], self._model.eos_ids), self._model.vocab_size
        before = []
        for job in jobs if spec.policy.adjustments else ():
            prompt, device = job.tokens[: job.prompt_len], hidden_BTD.device
            before += place_targets(prompt, job.targets, job.shares_row, device)
        others = [job.alternatives for job in jobs if job.alternatives is not None]
        one, sizes = jobs[0], (vocab_size, hidden_BTD.shape[-1])
        values_RW = read_hidden(
            HiddenRows.take(hidden_BTD.flatten(0, 1), index_R, targets_R, before, others),
            self._model.project,
            vocab_size,
            spec,
            self._bounds,
            RowFiles.open(one.export, one.reference, one.exchange, sizes),
        )
        found_RW = values_RW.cpu().numpy()
        results: Results = []
        start = 0
        for b, job in zip(members, jobs, strict=True):
            columns = unpack(found_RW[start : start + len(job.targets)], spec)
            start += len(job.targets)
            entry, steered = batch[b], batch[b].steered
            readings = steered.take_readings() if steered else None
            output = ScoreOutput(columns, trace=entry.trace, readings=readings)
            results.append(entry.conclude(output))
        return results


class CaptureQueue(ModelQueue):
    """Sequences whose activations are to be captured."""

    def _accept(self, job_id: int, job: CaptureJob) -> Entry:
        steered = accept_row(self._model, job)
        if not job.layers:
            raise RefusedJobError("invalid_request", "layers: name at least one")
        if not len(job.places):
            raise RefusedJobError("invalid_request", "positions: none of the tokens is at them")
        points = tuple(self._model.points.find(layer, job.hook) for layer in job.layers)
        if len({point.width for point in points}) > 1:
            detail = f"{job.hook} is not equally wide in layers {list(job.layers)}; ask apart"
            raise RefusedJobError("invalid_request", detail)
        if job.delta:
            self._model.check_delta(list(points))
        return Entry(job_id, job, steered, points)

    def _group(self, entry: Entry) -> object:
        return entry.job.delta, entry.job.layers, entry.job.hook

    @torch.inference_mode()
    def _compute(self, batch: Sequence[Entry]) -> Results:
        points = batch[0].points
        found: dict[str, Tensor] = {}
        width = max(len(entry.job.tokens) for entry in batch)
        places = [entry.job.places for entry in batch]
        index_N = torch.from_numpy(np.concatenate([p + b * width for b, p in enumerate(places)]))

        def capture(activation: Tensor, hook: Any) -> None:
            device = activation.device
            read_ND = activation.flatten(2).flatten(0, 1)[index_N.to(device)].float()
            found[str(hook.name)] = read_ND.cpu()

        read_batch(self._model, batch, [(point, capture) for point in dict.fromkeys(points)])
        captured_LND = torch.stack([found[point.key] for point in points])
        results: Results = []
        end = 0
        for entry in batch:
            begin, end = end, end + len(entry.job.places)
            # A copy, which holds nothing of the others in the batch.
            own_LTD = captured_LND[:, begin:end].numpy().copy()
            results.append(entry.conclude(finish_capture(entry.job, own_LTD, entry.trace)))
        return results
