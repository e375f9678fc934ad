"""`/logprob`: a request's contexts and targets as score jobs, and the jobs' outputs as results."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import DiagnosticsRequest, LogprobRequest, OverflowPolicy
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    Ids,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.tasks.aggregates import aggregate_columns
from logsteer_server.text.boundaries import Cut, Pair, cut_pairs, space_variants
from logsteer_server.text.sums import exp_mean, log_sum_exp
from logsteer_server.text.tokenizer import TextCodec

ARRAY_NAMES = {"logprob": "logprobs", "rank": "ranks"}
"""Names of columns in the answer, where they differ from the request's."""


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """One string or id sequence to score: its tokens, and where its scores will be.

    They are all of job `job`'s rows, or only row `slot` where the job scores alternatives.
    """

    text: str
    cut: Cut
    truncated: int
    job: int
    slot: int | None

    def pick(self, outputs: Sequence[ScoreOutput]) -> ScoreOutput:
        """The target's own rows of the jobs' outputs."""
        output = outputs[self.job]
        if self.slot is None:
            return output
        own = slice(self.slot, self.slot + 1)
        return replace(
            output,
            columns={name: values[own] for name, values in output.columns.items()},
            top_ids=None if output.top_ids is None else output.top_ids[own],
            top_logprobs=None if output.top_logprobs is None else output.top_logprobs[own],
        )


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One item's targets as given; with `space: both`, the indices of each target's variants."""

    targets: list[int]
    variants: list[tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Everything to score for one request; `items` point into `planned`, that into `jobs`."""

    request: LogprobRequest
    planned: list[PlannedTarget]
    items: list[PlannedItem]
    jobs: list[ScoreJob]


def plan_targets(request: LogprobRequest, codec: TextCodec, info: EngineInfo) -> LogprobPlan:
    """The jobs of a request.

    Errors: APIError `invalid_request`, `boundary_empty`, `context_too_long`.
    """
    texts: list[str] = []
    pairs: list[Pair] = []
    items: list[PlannedItem] = []
    by_ids: dict[int, Cut] = {}
    for index, item in enumerate(request.items):
        first = len(texts)
        if item.context_ids is not None:
            for target_ids in item.target_ids or []:
                by_ids[len(texts)] = _cut_ids(codec, info, request, index, target_ids)
                texts.append(codec.decode(target_ids))
            items.append(PlannedItem(list(range(first, len(texts))), None))
            continue
        context, rendered = item.context or "", False
        if item.messages is not None:
            context, rendered = codec.render_chat(item.messages), True
        given, variants = _lay_out(item.targets or [], request.space == "both", texts)
        pairs += [Pair(context, text, rendered) for text in texts[first:]]
        items.append(PlannedItem(given, variants))
    text_cuts = iter(cut_pairs(codec, pairs, request.boundary, request.bos))
    cuts = [by_ids[i] if i in by_ids else next(text_cuts) for i in range(len(texts))]
    desk = _JobDesk(request, info)
    planned = [desk.place(text, cut) for text, cut in zip(texts, cuts, strict=True)]
    return LogprobPlan(request, planned, items, desk.make_jobs())


def _lay_out(
    targets: Sequence[str], both: bool, texts: list[str]
) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Append what is scored for these targets to `texts`; where each target and variant is."""
    if not both:
        first = len(texts)
        texts += targets
        return list(range(first, len(texts))), None
    given, variants = [], []
    for target in targets:
        with_space, bare = space_variants(target)
        if not bare:
            detail = f"Target {target!r} is a space alone: without it nothing is left to score."
            raise api_error("boundary_empty", detail, param="space")
        first = len(texts)
        texts += [with_space, bare]
        variants.append((first, first + 1))
        given.append(first if target == with_space else first + 1)
    return given, variants


def _cut_ids(
    codec: TextCodec, info: EngineInfo, request: LogprobRequest, index: int, target_ids: list[int]
) -> Cut:
    context_ids = request.items[index].context_ids or []
    for name, ids in (("context_ids", context_ids), ("target_ids", target_ids)):
        if ids and max(ids) >= info.vocab_size:
            detail = (
                f"items[{index}].{name} has id {max(ids)}; this model's vocabulary ends at "
                f"{info.vocab_size - 1}."
            )
            raise api_error("invalid_request", detail, param=f"items[{index}].{name}")
    if not context_ids:
        front = codec.bos_ids(request.bos, target_ids)
        if not front:
            detail = f"items[{index}].context_ids is empty: nothing precedes the target; give one."
            raise api_error("boundary_empty", detail, param=f"items[{index}].context_ids")
        context_ids = front
    return Cut(context_ids, target_ids, None)


class _JobDesk:
    """Makes the jobs of one request: one a target, but one for all single tokens after a context.

    Those need the same one row of logits, so their context is read once.
    """

    def __init__(self, request: LogprobRequest, info: EngineInfo) -> None:
        self._request = request
        self._limit = info.context_length
        self._columns = tuple(dict.fromkeys(["logprob", *request.columns]))
        self._top = min(request.top, info.vocab_size)
        self._policy = Policy(**request.policy.model_dump())
        self._tokens: list[Ids] = []
        self._targets: list[list[int]] = []
        self._sharing: dict[bytes, int] = {}

    def place(self, text: str, cut: Cut) -> PlannedTarget:
        """Put a target into a job. Errors: APIError `context_too_long`."""
        sequence = cut.context_ids + cut.target_ids
        count = len(cut.target_ids)
        excess = fit_context(len(sequence) - 1, count, self._limit, self._request.on_overflow)
        tokens = np.array(sequence[excess:-1], dtype=np.int32)
        if count > 1:
            return PlannedTarget(text, cut, excess, self._open(tokens, cut.target_ids), None)
        key = tokens.tobytes()
        if key not in self._sharing:
            self._sharing[key] = self._open(tokens, [])
        job = self._sharing[key]
        self._targets[job].append(cut.target_ids[0])
        return PlannedTarget(text, cut, excess, job, len(self._targets[job]) - 1)

    def _open(self, tokens: Ids, targets: list[int]) -> int:
        self._tokens.append(tokens)
        self._targets.append(list(targets))
        return len(self._tokens) - 1

    def make_jobs(self) -> list[ScoreJob]:
        """The jobs, by their numbers."""
        shared = set(self._sharing.values())
        return [
            ScoreJob(
                tokens,
                np.array(targets, dtype=np.int32),
                self._columns,
                self._top,
                shares_row=job in shared and len(targets) > 1,
                policy=self._policy,
                double=self._request.precision == "float64",
            )
            for job, (tokens, targets) in enumerate(zip(self._tokens, self._targets, strict=True))
        ]


def fit_context(num_read: int, num_targets: int, limit: int, policy: OverflowPolicy) -> int:
    """How many tokens to drop at the left, so that the model can read the rest.

    Errors: APIError `context_too_long` where that is not wanted, or would drop scored tokens.
    """
    excess = num_read - limit
    if excess <= 0:
        return 0
    if policy == "error":
        detail = (
            f"Context and target need {num_read} tokens, this model reads {limit}: shorten them, "
            "or send on_overflow: truncate_left."
        )
        raise api_error("context_too_long", detail)
    if num_targets > limit:
        detail = (
            f"The target alone has {num_targets} tokens, this model reads {limit}: split it, or "
            "send it to /perplexity, which works in windows."
        )
        raise api_error("context_too_long", detail)
    return excess


def assemble_targets(
    plan: LogprobPlan, outputs: Sequence[ScoreOutput], codec: TextCodec
) -> list[dict[str, Any]]:
    """The `results` of the answer, in the shape of `ItemScore`, with numpy arrays for columns."""
    request = plan.request
    scores = [_score(target, target.pick(outputs), request, codec) for target in plan.planned]
    return [_score_item(item, scores) for item in plan.items]


def _score_item(item: PlannedItem, scores: list[dict[str, Any]]) -> dict[str, Any]:
    targets = [dict(scores[index]) for index in item.targets]
    if item.variants is None:
        ranking = [target["logprob"] for target in targets]
    else:
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
    if not known:
        return {"best": None, "choice_probs": [None] * len(logprobs)}
    total = log_sum_exp(known)
    probs = [None if value is None else math.exp(value - total) for value in logprobs]
    return {"best": logprobs.index(max(known)), "choice_probs": probs}


def _score(
    target: PlannedTarget, output: ScoreOutput, request: LogprobRequest, codec: TextCodec
) -> dict[str, Any]:
    total = float(output.columns["logprob"].astype(np.float64).sum())
    count = len(target.cut.target_ids)
    finite = math.isfinite(total)
    ranks = output.columns.get("rank")
    score: dict[str, Any] = {
        "target": target.text,
        "logprob": total if finite else None,
        "prob": math.exp(total) if finite else None,
        "perplexity": exp_mean(-total, count),
        "num_tokens": count,
        "num_bytes": len(target.text.encode()),
        "is_greedy": bool((ranks == 1).all()) if ranks is not None else None,
        "boundary": target.cut.finding,
        "truncated_tokens": target.truncated,
        "flags": [] if finite else ["non_finite"],
    }
    if isinstance(request, DiagnosticsRequest):
        asked = [(name, output.columns[name]) for name in request.columns]
        score["aggregates"] = aggregate_columns(asked, request.window)
    if request.per_token:
        score |= dict(_list_tokens(target, output, request, codec))
    return score


def _list_tokens(
    target: PlannedTarget, output: ScoreOutput, request: LogprobRequest, codec: TextCodec
) -> Iterator[tuple[str, Any]]:
    yield "token_ids", target.cut.target_ids
    yield "tokens", [codec.piece(token_id) for token_id in target.cut.target_ids]
    yield "offsets", target.cut.offsets
    for name in request.columns:
        yield ARRAY_NAMES.get(name, name), output.columns[name]
    if output.top_ids is not None:
        yield (
            "top",
            {
                "token_ids": output.top_ids,
                "tokens": [[codec.piece(i) for i in row] for row in output.top_ids.tolist()],
                "logprobs": output.top_logprobs,
            },
        )
