"""`/logprob` and `/diagnostics`: exact log-probabilities of targets given contexts.

`targets.plan_targets` makes score jobs from contexts and targets, and `assemble_targets` the
answer's scores from the jobs' outputs.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import DiagnosticsRequest, LogprobRequest
from logsteer.schemas.logprob import SpacePolicy
from logsteer.schemas.perplexity import exp_mean
from logsteer_server.contract.batches import ScoreOutputs, add_between, find_starts
from logsteer_server.contract.jobs import (
    ALTERNATIVES,
    ALTERNATIVES_TAIL,
    NEUTRAL,
    TOP_IDS,
    TOP_LOGPROBS,
    TOP_TAIL,
    ScoreJob,
    ScoreOutput,
    Scores,
)
from logsteer_server.interventions.interventions import UNCHANGED, Interventions
from logsteer_server.interventions.references import check_feature
from logsteer_server.settings import Settings
from logsteer_server.tasks.comparison import export_jobs, read_rows, reserve_references
from logsteer_server.tasks.planning import ItemProblems, Planner
from logsteer_server.tasks.policies import plan_policy
from logsteer_server.tasks.run import Batch, BodyTask, Collector, TensorLayout
from logsteer_server.tasks.targets import (
    Column,
    PlannedItem,
    PlannedTarget,
    TargetPlan,
    aggregate_columns,
    check_items,
    describe_rows,
    find_longest,
    plan_targets,
    show_columns,
)
from logsteer_server.text.sums import log_sum_exp
from logsteer_server.text.tokenizer import TextCodec

LISTS = {TOP_IDS, TOP_LOGPROBS, TOP_TAIL, ALTERNATIVES, ALTERNATIVES_TAIL}
LEFT_OUT = "merged_left_out"
"""Flag of an item whose merged targets are not compared with exact ones."""


class FiniteDocuments(list[dict[str, Any]]):
    """Documents known to hold only finite numbers outside arrays; skips the check."""


def sum_targets(plan: TargetPlan, outputs: ScoreOutputs) -> list[float]:
    """Return the log-probability of each target, summed over its tokens in float64."""
    values = outputs.columns["logprob"].astype(np.float64)
    sums: list[float] = add_between(values, *plan.find_rows(outputs.row_starts)).tolist()
    return sums


def assemble_targets(
    plan: TargetPlan,
    outputs: ScoreOutputs,
    codec: TextCodec,
    body: LogprobRequest,
    interventions: Interventions = UNCHANGED,
    captured: Sequence[ScoreOutput] = (),
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """Return the `results` of an answer, as `ItemScore`, with numpy arrays for columns.

    `captured`: outputs that have activations, by job; `dtype`: of listed log-probabilities.
    """
    begins, ends = plan.find_rows(outputs.row_starts)
    totals = add_between(outputs.columns["logprob"].astype(np.float64), begins, ends).tolist()
    greedy: list[bool | None] = [None] * len(totals)
    if "rank" in outputs.columns:
        is_first = outputs.columns["rank"] == 1
        firsts = add_between(is_first.astype(np.int64), begins, ends)
        greedy = (firsts == ends - begins).tolist()
    scores = []
    writer = _ScoreWriter(outputs, codec, body, dtype)
    for target, begin, end, total, is_greedy in zip(
        plan.planned, begins.tolist(), ends.tolist(), totals, greedy, strict=True
    ):
        score = writer.write(target, begin, end, total, is_greedy)
        if interventions.probes:
            first = plan.jobs[target.job].prompt_len
            readings = outputs.readings[target.job]
            score |= interventions.show_readings(readings, first)
        if captured:
            score |= interventions.show_activations(captured[target.job].activations)
        scores.append(score)
    results = [_score_item(item, scores, body.space) for item in plan.items]
    return results if interventions.probes else FiniteDocuments(results)


def _score_item(
    item: PlannedItem, scores: Sequence[dict[str, Any]], space: SpacePolicy
) -> dict[str, Any]:
    """Return the `ItemScore` of targets: `_leave_out_merged` says which of them are compared."""
    targets = [scores[index] for index in item.targets]
    if item.variants is None:
        if len(targets) == 1 and targets[0]["logprob"] is not None:
            return {"targets": targets, "best": 0, "choice_probs": [1.0]}
        return {"targets": targets, **_rank_choices(targets, "logprob")}
    shown: list[dict[str, Any]] = []
    ranked: list[dict[str, Any]] = []
    for text, given, variants in zip(item.given, targets, item.variants, strict=True):
        both = _leave_out_merged([scores[index] for index in variants])
        known = [found for found in both if found["logprob"] is not None]
        total = log_sum_exp([found["logprob"] for found in known]) if known else None
        if space == "best":
            better = max(known, key=lambda found: found["logprob"]) if known else given
            own = {"target": text, "sequence": better["target"]}
        else:
            better = given
            with_space, without_space = (scores[index] for index in variants)
            own = {"variants": {"with_space": with_space, "without_space": without_space}}
        is_exact = any(found["boundary"] == "exact" for found in both)
        shown.append(better | own | {"logprob_any_space": total})
        ranked.append(shown[-1] | {"boundary": "exact" if is_exact else "merged"})
    return {"targets": shown} | _rank_choices(ranked, "logprob_any_space")


def _leave_out_merged(scores: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those whose boundary is exact; all of them where none is."""
    return [score for score in scores if score["boundary"] == "exact"] or list(scores)


def _rank_choices(targets: Sequence[dict[str, Any]], by: str) -> dict[str, Any]:
    """Return the fields of `ItemScore` that compare targets by this field.

    Merged targets are not compared with exact ones: they have fewer tokens of their own to score.
    """
    compared = _leave_out_merged(targets)
    kept = {id(target) for target in compared}
    flags = {} if len(kept) == len({id(target) for target in targets}) else {"flags": [LEFT_OUT]}
    logprobs = [target[by] if id(target) in kept else None for target in targets]
    known = [value for value in logprobs if value is not None]
    if len(known) == len(logprobs) == 1:
        return {"best": 0, "choice_probs": [1.0]}
    if not known:
        return {"best": None, "choice_probs": [None] * len(logprobs)} | flags
    total = log_sum_exp(known)
    probs = [None if value is None else math.exp(value - total) for value in logprobs]
    return {"best": logprobs.index(max(known)), "choice_probs": probs} | flags


def show_listed(
    read: Mapping[str, Column], codec: TextCodec | None, dtype: str = "float32"
) -> dict[str, Any]:
    """Return the tokens listed for some rows, as `top` and `alternatives` of an answer.

    Without a codec the texts of tokens are left out.
    """
    shown: dict[str, Any] = {}
    if dtype == "float16":
        read = {n: v if n == TOP_IDS else v.astype(np.float16) for n, v in read.items()}
    if TOP_IDS in read:
        shown["top"] = {"token_ids": read[TOP_IDS], "logprobs": read[TOP_LOGPROBS]}
        if codec is not None:
            rows = read[TOP_IDS].tolist()
            shown["top"]["tokens"] = [list(map(codec.piece, row)) for row in rows]
    if ALTERNATIVES in read:
        shown["alternatives"] = {"logprobs": read[ALTERNATIVES]}
    for name, tail in (("top", TOP_TAIL), ("alternatives", ALTERNATIVES_TAIL)):
        if tail in read:
            shown[name]["tail"] = read[tail]
    return shown


class _ScoreWriter:
    """Writes targets as `TargetScore`; equal ones share the lists of their tokens."""

    def __init__(
        self, outputs: ScoreOutputs, codec: TextCodec, body: LogprobRequest, dtype: str
    ) -> None:
        self._outputs = outputs
        self._codec = codec
        self._body = body
        self._dtype = dtype
        self._columns = show_columns(outputs.columns, body.columns)
        self._others: dict[str, Column] | None = self._columns.pop("columns", None)
        self._listed = outputs.columns.keys() & LISTS
        self._tokens: dict[int, list[str]] = {}
        """Tokens of a list of ids, by the address of the list."""

    def write(
        self, target: PlannedTarget, begin: int, end: int, total: float, is_greedy: bool | None
    ) -> dict[str, Any]:
        """Return the score of a target with these rows and this sum."""
        text, token_ids, offsets, finding, truncated, _, _ = target
        finite = math.isfinite(total)
        scored = self._codec.decode(token_ids) if finding == "no_context" else text
        score: dict[str, Any] = {
            "target": text,
            "logprob": total if finite else None,
            "prob": math.exp(total) if finite else None,
            "perplexity": exp_mean(-total, len(token_ids)),
            "num_tokens": len(token_ids),
            "num_bytes": len(scored) if scored.isascii() else len(scored.encode()),
            "is_greedy": is_greedy,
            "boundary": finding,
            "truncated_tokens": truncated,
            "flags": [] if finite else ["non_finite"],
        }
        body = self._body
        if isinstance(body, DiagnosticsRequest):
            columns = self._outputs.columns
            asked: dict[str, Column] = {name: columns[name][begin:end] for name in body.columns}
            score["aggregates"] = aggregate_columns(asked, body.window)
        if body.per_token:
            score["token_ids"] = token_ids
            if body.detokenize:
                if (tokens := self._tokens.get(id(token_ids))) is None:
                    tokens = self._tokens[id(token_ids)] = list(map(self._codec.piece, token_ids))
                score["tokens"] = tokens
                score["offsets"] = offsets
            for name, values in self._columns.items():
                score[name] = values[begin:end]
            if self._others is not None:
                others = self._others.items()
                score["columns"] = {name: values[begin:end] for name, values in others}
            if self._listed:
                listed = {name: self._outputs.columns[name][begin:end] for name in self._listed}
                codec = self._codec if body.detokenize else None
                score |= show_listed(listed, codec, self._dtype)
        return score


def _add_rows(results: Sequence[dict[str, Any]], plan: TargetPlan, rows: Sequence[Scores]) -> None:
    """Give each target of the results its rows [T, V], of those [R, V] of the planned jobs."""
    for result, item in zip(results, plan.items, strict=True):
        for score, index in zip(result["targets"], item.targets, strict=True):
            target = plan.planned[index]
            own = slice(None) if target.slot is None else slice(target.slot, target.slot + 1)
            score["vocabulary_logprobs"] = rows[target.job][own]


class LogprobTask(BodyTask[LogprobRequest]):
    """Exact log-probability of every target given its context."""

    kind = "logprob"
    has_file = True

    compares: ClassVar[bool] = False
    """Whether rows are compared with another model's."""
    _problems: ItemProblems
    _vocabulary: Sequence[Scores] = ()

    def check_limits(self, settings: Settings) -> None:
        """Bound items and targets. Errors: APIError `payload_too_large`."""
        check_items(self._body.items, settings)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score all targets in one batch, then sum them up."""
        body = self._body
        planner.cover_text(find_longest(body.items))
        self._problems = ItemProblems("items", body.on_error)
        plan, jobs = await planner.run(self._plan, planner)
        if not jobs:  # each item has a problem
            self.results = self._problems.fill([], self.request_id)
            return
        rows = len(plan.jobs.targets)
        planner.expect_rows(rows, len(body.columns), plan.num_listed, detokenize=body.detokenize)
        if self.interventions.probes:
            contexts = [plan.jobs[target.job].prompt_len for target in plan.planned]
            planner.expect_readings(self.interventions, len(contexts), rows, sum(contexts))
        if self.interventions.capture:
            self.documents = [target.job for target in plan.planned]
            planner.expect_captured(self.interventions, (jobs[n] for n in self.documents))
        collector = Collector()
        if body.vocabulary or self.compares:
            batches = self._exchange_rows(planner, plan, jobs, collector)
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        else:
            yield Batch(jobs, collector.take, cache=body.cache)
        self.results = await planner.run(
            assemble_targets,
            plan,
            collector.scores,
            self.codec,
            body,
            self.interventions,
            collector.outputs if self.interventions.capture else (),
            body.dtype if planner.packs_arrays else "float32",
        )
        if self._vocabulary:
            _add_rows(self.results, plan, self._vocabulary)
        if self._problems:
            self.results = self._problems.fill(self.results, self.request_id)

    async def _exchange_rows(
        self, planner: Planner, plan: TargetPlan, jobs: Sequence[ScoreJob], collector: Collector
    ) -> AsyncGenerator[Batch, None]:
        """Yield the batches of jobs whose whole rows are exchanged through files; here to the
        answer.
        """
        vocab_size = self.info.vocab_size
        planner.expect_arrays(len(plan.jobs.targets) * vocab_size)
        exported = reserve_references(jobs, vocab_size, planner, self._scratch)
        async with exported as files:
            yield Batch(export_jobs(jobs, files), collector.take)
            read = partial(read_rows, files, vocab_size)
            self._vocabulary = await planner.capacity.call_long(read)

    def _plan(self, planner: Planner) -> tuple[TargetPlan, Sequence[ScoreJob]]:
        body, info = self._body, self.info
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        top = min(body.top, info.vocab_size)
        reads_end = bool(self.interventions.probes)
        policy = NEUTRAL
        if "policy" in body.model_fields_set:
            policy = plan_policy(body.policy, self.codec, info)
        read = describe_rows(
            body.columns, policy, body.precision, top, reads_end=reads_end, tail=body.tail
        )
        plan = plan_targets(body.items, self.codec, info, body, read, planner.cover, self._problems)
        if body.step_tokens is not None:
            check_feature("step_tokens", info, "step_tokens")
            like = replace(plan.jobs.like, step_tokens=body.step_tokens)
            plan = replace(plan, jobs=replace(plan.jobs, like=like))
        return plan, self.interventions.apply(plan.jobs) if plan.jobs else ()

    def lay_out(self, document: dict[str, Any]) -> TensorLayout:
        """Return the answer as the tensors of a file, as `LogprobAnswer` says."""
        targets = [one for result in document["results"] for one in result.get("targets", ())]
        tensors: dict[str, list[Column]] = {}
        for target in targets:
            own = {"vocabulary_logprobs": target.pop("vocabulary_logprobs", None)}
            own |= _pop_listed(target)
            own |= _pop_captured(target, self.interventions)
            for name, rows in own.items():
                if rows is not None:
                    tensors.setdefault(name, []).append(rows)
        if not tensors:
            detail = (
                "A file has arrays: ask for top, alternatives, capture or vocabulary: true, or for "
                "JSON."
            )
            raise api_error("invalid_request", detail, param="vocabulary")
        sizes = {"row_starts": [target["num_tokens"] for target in targets]}
        capture = self.interventions.capture
        if capture and not self.interventions.stored:
            first = f"{capture.capture.hook}.{capture.capture.layers[0]}"
            sizes["activation_starts"] = list(map(len, tensors[first]))
        starts = {name: [find_starts(n).astype(np.int32)] for name, n in sizes.items()}
        return TensorLayout(tensors | starts, {"answer": document})


def _pop_listed(target: dict[str, Any]) -> dict[str, Column]:
    """Remove the listed tokens from a target, under their names in a file."""
    top, others = target.pop("top", {}), target.pop("alternatives", {})
    names = {TOP_IDS: "token_ids", TOP_LOGPROBS: "logprobs", TOP_TAIL: "tail"}
    found = {name: top[shown] for name, shown in names.items() if shown in top}
    names = {ALTERNATIVES: "logprobs", ALTERNATIVES_TAIL: "tail"}
    return found | {name: others[shown] for name, shown in names.items() if shown in others}


def _pop_captured(target: dict[str, Any], interventions: Interventions) -> dict[str, Column]:
    """Take the arrays of activations out of a target, as a file names them."""
    if interventions.capture is None or interventions.stored:
        return {}
    capture, shown = interventions.capture.capture, target["activations"]
    found = {f"{capture.hook}.{layer}": rows for layer, rows in shown.pop("layers").items()}
    if capture.read == "mean":
        return found
    return found | {"activation_positions": shown.pop("positions")}


class DiagnosticsTask(LogprobTask):
    """Targets as a sampling policy saw them: every column of each token, and aggregates."""
