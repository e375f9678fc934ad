"""Outputs of score jobs as the scores of an answer's targets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logsteer.schemas.perplexity import exp_mean
from logsteer_server.contract.batches import ScoreOutputs
from logsteer_server.interventions.interventions import UNCHANGED, Interventions
from logsteer_server.tasks.columns import Column, aggregate_columns, show_columns
from logsteer_server.tasks.planning import Steps
from logsteer_server.tasks.targets import PlannedItem, PlannedTarget, TargetPlan
from logsteer_server.text.sums import log_sum_exp
from logsteer_server.text.tokenizer import TextCodec


class FiniteDocuments(list[dict[str, Any]]):
    """Documents whose numbers are finite outside of arrays, so that none has to be looked at."""


WRITTEN_AT_ONCE = 32
"""Targets that a step writes."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows of each target: its tokens, these columns, what probes of the
    interventions have read, aggregates over `window`.
    """

    columns: Sequence[str]
    per_token: bool = True
    window: int | None = None
    interventions: Interventions = UNCHANGED


def sum_targets(plan: TargetPlan, outputs: ScoreOutputs) -> list[float]:
    """Return the log-probability of each target, summed over its tokens in float64."""
    sums: list[float] = outputs.add_between("logprob", *plan.find_rows(outputs.row_starts)).tolist()
    return sums


def assemble_targets(
    plan: TargetPlan, outputs: ScoreOutputs, codec: TextCodec, shown: Shown
) -> Steps[list[dict[str, Any]]]:
    """Return the `results` of an answer, as `ItemScore`, with numpy arrays for columns."""
    begins, ends = plan.find_rows(outputs.row_starts)
    totals = outputs.add_between("logprob", begins, ends).tolist()
    greedy: list[bool | None] = [None] * len(totals)
    if "rank" in outputs.columns:
        firsts = outputs.count_between(outputs.columns["rank"] == 1, begins, ends)
        greedy = (firsts == ends - begins).tolist()
    scores = []
    writer = _ScoreWriter(outputs, codec, shown)
    for target, begin, end, total, is_greedy in zip(
        plan.planned, begins.tolist(), ends.tolist(), totals, greedy, strict=True
    ):
        score = writer.write(target, begin, end, total, is_greedy)
        if shown.interventions.probes:
            first_row = plan.jobs[target.job].first_row
            readings = outputs.readings[target.job] if outputs.readings else None
            score |= shown.interventions.show_readings(readings, first_row)
        scores.append(score)
        if shown.interventions.probes or not len(scores) % WRITTEN_AT_ONCE:
            yield 0
    results = [] if shown.interventions.probes else FiniteDocuments()
    for item in plan.items:
        results.append(_score_item(item, scores))
        if not len(results) % WRITTEN_AT_ONCE:
            yield 0
    return results


def _score_item(item: PlannedItem, scores: list[dict[str, Any]]) -> dict[str, Any]:
    if item.variants is None:
        if len(item.targets) == 1 and scores[item.targets[0]]["logprob"] is not None:
            return {"targets": [scores[item.targets[0]]], "best": 0, "choice_probs": [1.0]}
        targets = [scores[index] for index in item.targets]
        ranking = [target["logprob"] for target in targets]
    else:
        targets = [dict(scores[index]) for index in item.targets]
        ranking = []
        for target, (with_space, without_space) in zip(targets, item.variants, strict=True):
            both = (scores[with_space], scores[without_space])
            target["variants"] = {"with_space": both[0], "without_space": both[1]}
            known = [v["logprob"] for v in both if v["logprob"] is not None]
            target["logprob_any_space"] = log_sum_exp(known) if known else None
            ranking.append(target["logprob_any_space"])
    return {"targets": targets, **_rank_choices(ranking)}


def _rank_choices(logprobs: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in logprobs if value is not None]
    if len(known) == len(logprobs) == 1:
        return {"best": 0, "choice_probs": [1.0]}
    if not known:
        return {"best": None, "choice_probs": [None] * len(logprobs)}
    total = log_sum_exp(known)
    probs = [None if value is None else math.exp(value - total) for value in logprobs]
    return {"best": logprobs.index(max(known)), "choice_probs": probs}


class _ScoreWriter:
    """Writes targets as `TargetScore`; equal ones share the lists of their tokens."""

    def __init__(self, outputs: ScoreOutputs, codec: TextCodec, shown: Shown) -> None:
        self._outputs = outputs
        self._codec = codec
        self._shown = shown
        self._columns = show_columns(outputs.columns, shown.columns)
        self._others: dict[str, Column] | None = self._columns.pop("columns", None)
        self._tokens: dict[int, list[str]] = {}
        """Of the list of ids that is at an address."""

    def write(
        self, target: PlannedTarget, begin: int, end: int, total: float, is_greedy: bool | None
    ) -> dict[str, Any]:
        """Return the score of a target that has these rows and this sum."""
        text, token_ids, offsets, finding, truncated, _, _ = target
        finite = math.isfinite(total)
        score: dict[str, Any] = {
            "target": text,
            "logprob": total if finite else None,
            "prob": math.exp(total) if finite else None,
            "perplexity": exp_mean(-total, len(token_ids)),
            "num_tokens": len(token_ids),
            "num_bytes": len(text) if text.isascii() else len(text.encode()),
            "is_greedy": is_greedy,
            "boundary": finding,
            "truncated_tokens": truncated,
            "flags": [] if finite else ["non_finite"],
        }
        shown = self._shown
        if shown.window is not None:
            columns = self._outputs.columns
            asked = {name: columns[name][begin:end] for name in shown.columns}
            score["aggregates"] = aggregate_columns(asked, shown.window)
        if shown.per_token:
            score["token_ids"] = token_ids
            score["tokens"] = self._tokens.get(id(token_ids)) or self._split(token_ids)
            score["offsets"] = offsets
            for name, values in self._columns.items():
                score[name] = values[begin:end]
            if self._others is not None:
                others = self._others.items()
                score["columns"] = {name: values[begin:end] for name, values in others}
            self._add_top(score, slice(begin, end))
        return score

    def _split(self, token_ids: list[int]) -> list[str]:
        """Return the text of each token."""
        tokens = self._tokens[id(token_ids)] = list(map(self._codec.piece, token_ids))
        return tokens

    def _add_top(self, score: dict[str, Any], rows: slice) -> None:
        outputs, piece = self._outputs, self._codec.piece
        if outputs.top_ids is not None and outputs.top_logprobs is not None:
            top_ids = outputs.top_ids[rows]
            tokens = [[piece(token_id) for token_id in row] for row in top_ids.tolist()]
            logprobs = outputs.top_logprobs[rows]
            score["top"] = {"token_ids": top_ids, "tokens": tokens, "logprobs": logprobs}
