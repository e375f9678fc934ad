"""Contexts and targets as score jobs, and the jobs' outputs as their scores."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import BosPolicy, LogprobItem, OverflowPolicy
from logsteer.schemas.logprob import Boundary, BoundaryFinding, SpacePolicy
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Ids, ScoreJob, ScoreOutput
from logsteer_server.interventions.interventions import UNCHANGED, Interventions
from logsteer_server.settings import Settings
from logsteer_server.tasks.columns import ColumnOptions, aggregate_columns, show_columns
from logsteer_server.tasks.planning import Steps
from logsteer_server.tasks.run import check_count
from logsteer_server.text.boundaries import Cut, Pair, cut_pairs, space_variants
from logsteer_server.text.sums import exp_mean, log_sum_exp
from logsteer_server.text.tokenizer import Offsets, TextCodec


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How contexts and targets are cut into tokens."""

    boundary: Boundary = "joint"
    space: SpacePolicy = "as_given"
    bos: BosPolicy = "auto"
    on_overflow: OverflowPolicy = "error"


def check_items(items: Sequence[LogprobItem], settings: Settings) -> None:
    """Bound items and targets. Errors: APIError `payload_too_large`."""
    check_count("items", len(items), settings.max_items)
    targets = sum(len(item.targets or item.target_ids or ()) for item in items)
    check_count("items[].targets", targets, settings.max_targets)


def find_longest(items: Sequence[LogprobItem]) -> int:
    """Return the characters of the longest context with its longest target."""
    return max((_count_chars(item) for item in items), default=0)


def _count_chars(item: LogprobItem) -> int:
    turns = sum(len(message.content) for message in item.messages or ())
    return len(item.context or "") + turns + max(map(len, item.targets or ()), default=0)


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """One string or id sequence to score: its tokens, and where its scores will be.

    They are all of job `job`'s rows, or only entry `slot` where the job shares a row.
    """

    text: str
    token_ids: list[int]
    offsets: Offsets | None
    finding: BoundaryFinding
    truncated: int
    job: int
    slot: int | None

    def pick(self, outputs: Sequence[ScoreOutput]) -> ScoreOutput:
        """Return the target's own rows of the jobs' outputs."""
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
class TargetPlan:
    """Everything to score; `items` point into `planned`, that into `jobs`."""

    planned: list[PlannedTarget]
    items: list[PlannedItem]
    jobs: list[ScoreJob]

    def context(self, target: PlannedTarget) -> Ids:
        """Return what the model reads in front of a target."""
        tokens = self.jobs[target.job].tokens
        return tokens[: len(tokens) - len(target.token_ids) + 1]


def plan_targets(
    given: Sequence[LogprobItem],
    codec: TextCodec,
    info: EngineInfo,
    options: TargetOptions,
    read: ColumnOptions,
) -> Steps[TargetPlan]:
    """Plan one job a target, but one for all single tokens after a context.

    Errors: APIError `invalid_request`, `boundary_empty`, `context_too_long`.
    """
    texts: list[str] = []
    pairs: list[Pair] = []
    items: list[PlannedItem] = []
    by_ids: dict[int, Cut] = {}
    for index, item in enumerate(given):
        yield 0
        first = len(texts)
        if item.context_ids is not None:
            for cut in _cut_ids(codec, info, options.bos, index, item):
                by_ids[len(texts)] = cut
                texts.append(codec.decode(cut.target_ids))
                yield 0
            items.append(PlannedItem(list(range(first, len(texts))), None))
            continue
        context, rendered = item.context or "", False
        if item.messages is not None:
            context, rendered = codec.render_chat(item.messages), True
        as_given, variants = _lay_out(item.targets or [], options.space == "both", texts)
        pairs += [Pair(context, text, rendered) for text in texts[first:]]
        items.append(PlannedItem(as_given, variants))
    text_cuts = cut_pairs(codec, pairs, options.boundary, options.bos)
    builder = _JobBuilder(options.on_overflow, read, info)
    planned = []
    for place, text in enumerate(texts):
        cut = by_ids[place] if place in by_ids else next(text_cuts)
        planned.append(builder.place(text, cut))
        yield builder.num_tokens
    return TargetPlan(planned, items, builder.make_jobs())


def _lay_out(
    targets: Sequence[str], both: bool, texts: list[str]
) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Append what is scored for these targets to `texts`; return where each is."""
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
    codec: TextCodec, info: EngineInfo, bos: BosPolicy, index: int, item: LogprobItem
) -> Iterator[Cut]:
    """Yield an item of ids as cuts, which have its context as the same list."""
    context_ids = item.context_ids or []
    _check_ids(context_ids, f"items[{index}].context_ids", info)
    for target_ids in item.target_ids or []:
        _check_ids(target_ids, f"items[{index}].target_ids", info)
        if context_ids:
            yield Cut(context_ids, target_ids, None)
            continue
        front = codec.bos_ids(bos, target_ids)
        if not front:
            detail = f"items[{index}].context_ids is empty: nothing precedes the target; give one."
            raise api_error("boundary_empty", detail, param=f"items[{index}].context_ids")
        yield Cut(front, target_ids, None)


def _check_ids(ids: list[int], name: str, info: EngineInfo) -> None:
    if ids and max(ids) >= info.vocab_size:
        detail = f"{name} has id {max(ids)}; this model's vocabulary ends at {info.vocab_size - 1}."
        raise api_error("invalid_request", detail, param=name)


class _Context:
    """A context's list of ids, the same for all targets of an item; `job`: of its single tokens."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.tokens = np.array(ids, dtype=np.int32)
        self.job: int | None = None


class _JobBuilder:
    """Makes the jobs: one a target, but one for all single tokens after a context.

    Those need the same one row of logits, so their context is read once: after "2 + 2 =", the
    targets " 4" and " 5" are two entries of the last row of one job.
    """

    def __init__(self, on_overflow: OverflowPolicy, read: ColumnOptions, info: EngineInfo) -> None:
        self._on_overflow = on_overflow
        self._read = read
        self._limit = info.context_length
        self.num_tokens = 0
        self._tokens: list[Ids] = []
        self._context = _Context([])
        self._targets: list[list[int]] = []
        self._sharing: dict[bytes, int] = {}

    def place(self, text: str, cut: Cut) -> PlannedTarget:
        """Put a target into a job. Errors: APIError `context_too_long`."""
        count, num_read = len(cut.target_ids), len(cut.context_ids) + len(cut.target_ids) - 1
        excess = fit_context(num_read, count, self._limit, self._on_overflow)
        if self._context.ids is not cut.context_ids:
            self._context = _Context(cut.context_ids)
        context, slot = self._context, None
        if count > 1:
            read = np.array(cut.target_ids[:-1], dtype=np.int32)
            job = self._open(np.concatenate([context.tokens, read])[excess:], cut.target_ids)
        else:
            job = context.job = self._share(context, excess)
            slot = len(self._targets[job])
            self._targets[job].append(cut.target_ids[0])
        return PlannedTarget(text, cut.target_ids, cut.offsets, cut.finding, excess, job, slot)

    def _share(self, context: "_Context", excess: int) -> int:
        """Return the job of the single tokens after a context."""
        if context.job is not None:
            return context.job
        tokens = context.tokens[excess:]
        key = hashlib.sha256(tokens.tobytes()).digest()
        if key not in self._sharing:
            self._sharing[key] = self._open(tokens, [])
        return self._sharing[key]

    def _open(self, tokens: Ids, targets: list[int]) -> int:
        self.num_tokens += len(tokens)
        self._tokens.append(tokens)
        self._targets.append(list(targets))
        return len(self._tokens) - 1

    def make_jobs(self) -> list[ScoreJob]:
        """Return the jobs, by their numbers."""
        shared = set(self._sharing.values())
        return [
            ScoreJob(
                tokens,
                np.array(targets, dtype=np.int32),
                self._read.columns,
                self._read.top,
                shares_row=job in shared and len(targets) > 1,
                policy=self._read.policy,
                double=self._read.double,
            )
            for job, (tokens, targets) in enumerate(zip(self._tokens, self._targets, strict=True))
        ]


def fit_context(num_read: int, num_targets: int, limit: int, policy: OverflowPolicy) -> int:
    """Return how many tokens to drop at the left, so that the model can read the rest.

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


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows of each target: its tokens, these columns, what probes of the
    interventions have read, aggregates over `window`.
    """

    columns: Sequence[str]
    per_token: bool = True
    window: int | None = None
    interventions: Interventions = UNCHANGED


def assemble_targets(
    plan: TargetPlan, outputs: Sequence[ScoreOutput], codec: TextCodec, shown: Shown
) -> Steps[list[dict[str, Any]]]:
    """Return the `results` of an answer, as `ItemScore`, with numpy arrays for columns."""
    scores = []
    for target in plan.planned:
        score = _score(target, target.pick(outputs), shown, codec)
        readings, first_row = outputs[target.job].readings, plan.jobs[target.job].first_row
        scores.append(score | shown.interventions.show_readings(readings, first_row))
        yield 0
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
    target: PlannedTarget, output: ScoreOutput, shown: Shown, codec: TextCodec
) -> dict[str, Any]:
    total = float(output.columns["logprob"].astype(np.float64).sum())
    count = len(target.token_ids)
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
        "boundary": target.finding,
        "truncated_tokens": target.truncated,
        "flags": [] if finite else ["non_finite"],
    }
    if shown.window is not None:
        asked = {name: output.columns[name] for name in shown.columns}
        score["aggregates"] = aggregate_columns(asked, shown.window)
    if shown.per_token:
        score |= dict(_list_tokens(target, output, shown, codec))
    return score


def _list_tokens(
    target: PlannedTarget, output: ScoreOutput, shown: Shown, codec: TextCodec
) -> Iterator[tuple[str, Any]]:
    yield "token_ids", target.token_ids
    yield "tokens", [codec.piece(token_id) for token_id in target.token_ids]
    yield "offsets", target.offsets
    yield from show_columns(output.columns, shown.columns).items()
    if output.top_ids is not None:
        yield (
            "top",
            {
                "token_ids": output.top_ids,
                "tokens": [[codec.piece(i) for i in row] for row in output.top_ids.tolist()],
                "logprobs": output.top_logprobs,
            },
        )
