"""`/logprob`: a request's contexts and targets as score jobs, and the jobs' outputs as results."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import LogprobRequest, OverflowPolicy
from logsteer_server.engines.base import EngineInfo, ScoreJob, ScoreOutput
from logsteer_server.scoring.boundaries import Cut, Pair, cut_pairs, space_variants
from logsteer_server.scoring.sums import exp_mean, log_sum_exp
from logsteer_server.scoring.tokenizer import TextCodec

ARRAY_NAMES = {"logprob": "logprobs", "rank": "ranks"}
"""Names of columns in the answer, where they differ from the request's."""


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """One string or id sequence to score: its tokens, its job, and what was cut off for it."""

    text: str
    cut: Cut
    job: ScoreJob
    truncated: int


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One item's targets as given; with `space: both`, the indices of each target's variants."""

    targets: list[int]
    variants: list[tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class LogprobPlan:
    """Everything to score for one request; `items` point into `planned`."""

    request: LogprobRequest
    planned: list[PlannedTarget]
    items: list[PlannedItem]

    @property
    def jobs(self) -> list[ScoreJob]:
        """The jobs, in the order of `planned`."""
        return [target.job for target in self.planned]


def plan_targets(request: LogprobRequest, codec: TextCodec, info: EngineInfo) -> LogprobPlan:
    """The jobs of a request.

    Errors: APIError `invalid_request`, `boundary_empty`, `context_too_long`.
    """
    texts: list[str] = []
    cuts: list[Cut] = []
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
    planned = [_plan(text, cut, request, info) for text, cut in zip(texts, cuts, strict=True)]
    return LogprobPlan(request, planned, items)


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
        front = codec.bos_ids("auto" if request.bos == "auto" else request.bos, target_ids)
        if not front:
            detail = f"items[{index}].context_ids is empty: nothing precedes the target; give one."
            raise api_error("boundary_empty", detail, param=f"items[{index}].context_ids")
        context_ids = front
    return Cut(context_ids, target_ids, None)


def _plan(text: str, cut: Cut, request: LogprobRequest, info: EngineInfo) -> PlannedTarget:
    sequence = cut.context_ids + cut.target_ids
    tokens = sequence[:-1]
    excess = fit_context(len(tokens), len(cut.target_ids), info.context_length, request.on_overflow)
    job = ScoreJob(
        tokens=np.array(tokens[excess:], dtype=np.int32),
        targets=np.array(cut.target_ids, dtype=np.int32),
        columns=tuple(dict.fromkeys(["logprob", *request.columns])),
        top=min(request.top, info.vocab_size),
    )
    return PlannedTarget(text, cut, job, excess)


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
    scores = [
        _score(target, output, request, codec)
        for target, output in zip(plan.planned, outputs, strict=True)
    ]
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
    if request.per_token:
        score |= dict(_list_tokens(target, output, request, codec))
    return score


def _list_tokens(
    target: PlannedTarget, output: ScoreOutput, request: LogprobRequest, codec: TextCodec
) -> Iterator[tuple[str, Any]]:
    yield "token_ids", target.job.targets
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
