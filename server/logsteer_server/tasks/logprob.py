"""`/logprob` and `/diagnostics`: exact log-probabilities of targets given contexts.

Contexts and targets become score jobs (`plan_targets`), and what comes of those an answer's scores
(`assemble_targets`).
"""

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    BosPolicy,
    DiagnosticsRequest,
    LogprobItem,
    LogprobRequest,
    OverflowPolicy,
)
from logsteer.schemas.logprob import Boundary, BoundaryFinding, SpacePolicy
from logsteer.schemas.perplexity import exp_mean
from logsteer_server.contract.batches import (
    ScoreJobs,
    ScoreOutputs,
    Starts,
    add_between,
    find_starts,
)
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Ids, ScoreJob, Scores
from logsteer_server.interventions.interventions import UNCHANGED, Interventions
from logsteer_server.settings import Settings
from logsteer_server.tasks.columns import Column, ColumnOptions, aggregate_columns, show_columns
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.problems import ItemProblems
from logsteer_server.tasks.run import Batch, BodyTask, Collector, check_count
from logsteer_server.text.boundaries import Cut, Pair, cut_pairs, space_variants
from logsteer_server.text.sums import log_sum_exp
from logsteer_server.text.tokenizer import Offsets, TextCodec

TARGET_WORK = 64
"""Tokens that take as long to look at as everything else of a target does."""
PAUSE_AFTER = 4096
"""Tokens of such work that a step takes, or a conversation, whose template may take long."""
WRITTEN_AT_ONCE = 32
"""Targets that a step writes."""
STEP_TEXTS = 256
"""Texts that are compared, or put into their places, in a step."""

LEFT_OUT = "merged_left_out"
"""Flag of an item of which merged targets take no part in the comparison with exact ones."""

MAX_TARGETS = 65_536
"""Targets of one request, all items: four for each of as many items as a request may have."""


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
    count = 0
    for item in items:
        count += len(item.targets or item.target_ids or ())
    check_count("items[].targets", count, MAX_TARGETS)


def find_longest(items: Sequence[LogprobItem]) -> int:
    """Return the characters of the longest context with its longest target."""
    longest = 0
    for item in items:
        if item.targets is not None:
            length = len(item.context or "") + max(map(len, item.targets))
            if item.messages is not None:
                length += sum(len(message.content) for message in item.messages)
            longest = max(longest, length)
    return longest


class PlannedTarget(NamedTuple):
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


class PlannedItem(NamedTuple):
    """One item's targets as given; with `space: both` or `best`, the indices of each's variants."""

    targets: list[int]
    variants: list[tuple[int, ...]] | None
    given: Sequence[str] = ()

    def renumber(self, numbers: Sequence[int | None]) -> "PlannedItem":
        """Return the item with the number of each target in place of the target.

        A variant without a number is left out; the target that it is has that of the other.
        """
        if self.variants is None:
            return PlannedItem([n for t in self.targets if (n := numbers[t]) is not None], None)
        variants = [
            tuple(n for variant in pair if (n := numbers[variant]) is not None)
            for pair in self.variants
        ]
        targets = [numbers[t] for t in self.targets]
        kept = [v[0] if n is None else n for n, v in zip(targets, variants, strict=True)]
        return PlannedItem(kept, variants, self.given)


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """Everything to score; `items` point into `planned`, that into `jobs`."""

    planned: list[PlannedTarget]
    items: list[PlannedItem]
    """Those that have no problem."""
    jobs: ScoreJobs

    def context(self, target: PlannedTarget) -> Ids:
        """Return what the model reads in front of a target."""
        starts = self.jobs.token_starts
        end = starts[target.job + 1] - len(target.token_ids) + 1
        return self.jobs.tokens[starts[target.job] : end]

    def find_rows(self, row_starts: Starts) -> tuple[Starts, Starts]:
        """Return where each target's rows begin and end, among those of the jobs' outputs."""
        found = [(t.job, t.slot or 0, len(t.token_ids)) for t in self.planned]
        found_N3 = np.array(found, dtype=np.int64).reshape(-1, 3)
        jobs, slots, counts = found_N3.T
        begins = row_starts[jobs] + slots
        return begins, begins + counts


def plan_targets(
    given: Sequence[LogprobItem],
    codec: TextCodec,
    info: EngineInfo,
    options: TargetOptions,
    read: ColumnOptions,
    problems: ItemProblems | None = None,
) -> Steps[TargetPlan]:
    """Plan one job a target, but one for all single tokens after a context.

    What is wrong with an item is added to `problems`; the first is raised where that is None.
    Errors: APIError `invalid_request`, `boundary_empty`, `context_too_long`.
    """
    problems = ItemProblems("items") if problems is None else problems
    texts: list[str] = []
    pairs: list[Pair] = []
    items: list[PlannedItem] = []
    firsts: list[int] = []
    id_cuts: dict[int, Cut] = {}
    distinct: dict[tuple[int, ...], list[int]] = {}
    work = 0
    for index, item in enumerate(given):
        first = len(texts)
        firsts.append(first)
        try:
            if item.context_ids is not None:
                for cut in _cut_ids(codec, info, options.bos, item, distinct):
                    id_cuts[len(texts)] = cut
                    texts.append("")
                    work += len(cut.target_ids)
                items.append(PlannedItem(list(range(first, len(texts))), None))
                work += TARGET_WORK + len(item.context_ids)
            else:
                context, rendered = item.context or "", False
                if item.messages is not None:
                    context, rendered = codec.render_chat(item.messages), True
                as_given, variants = _lay_out(
                    item.targets or [], options.space != "as_given", texts
                )
                pairs += [Pair(context, text, rendered) for text in texts[first:]]
                items.append(PlannedItem(as_given, variants, item.targets or ()))
                work += PAUSE_AFTER if rendered else TARGET_WORK
        except APIError as error:
            problems.add(index, error)
            del texts[first:]
            items.append(PlannedItem([], None))
        if work >= PAUSE_AFTER:
            work = 0
            yield 0
    decoded = yield from _decode_targets(codec, list(distinct.values()))
    text_cuts = cut_pairs(codec, pairs, options.boundary, options.bos) if pairs else iter(())
    builder = _JobBuilder(options.on_overflow, info)
    planned: list[PlannedTarget] = []
    numbers: list[int | None] = []
    for place, text in enumerate(texts):
        numbers.append(len(planned))
        if place in id_cuts:
            cut = id_cuts[place]
            text = decoded[id(cut.target_ids)]
        else:
            found = next(text_cuts)
            if isinstance(found, APIError):
                numbers[place] = None
                first = firsts[bisect_right(firsts, place) - 1]
                twin = first + ((place - first) ^ 1)
                # Of two variants one is enough, and the second one is looked at last.
                has_twin = twin > place or numbers[twin] is not None
                if options.space != "best" or found.param or not has_twin:
                    _add_problem(problems, items, firsts, place, "targets", found)
                continue
            cut = found
        try:
            planned.append(builder.place(text, cut))
        except APIError as error:
            field = "target_ids" if place in id_cuts else "targets"
            _add_problem(problems, items, firsts, place, field, error)
        work += TARGET_WORK + len(cut.target_ids)
        if work >= PAUSE_AFTER:
            work = 0
            yield builder.num_tokens
    if problems or None in numbers:
        items = [item.renumber(numbers) for n, item in enumerate(items) if n not in problems]
    return TargetPlan(planned, items, builder.make_jobs(read))


def _add_problem(
    problems: ItemProblems,
    items: Sequence[PlannedItem],
    firsts: Sequence[int],
    place: int,
    field: str,
    error: APIError,
) -> None:
    """Add the error of the target at a place among the texts to the problems of its item."""
    index = bisect_right(firsts, place) - 1
    number = (place - firsts[index]) // (1 if items[index].variants is None else 2)
    problems.add(index, error, None if error.param else f"{field}[{number}]")


def _decode_targets(codec: TextCodec, targets: list[list[int]]) -> Steps[dict[int, str]]:
    """Return the text of each list of ids, by the list's address."""
    decoded: dict[int, str] = {}
    for target_ids, text in zip(targets, codec.decode_lazily(targets), strict=True):
        decoded[id(target_ids)] = text
        if not len(decoded) % STEP_TEXTS:
            yield 0
    return decoded


def _lay_out(
    targets: Sequence[str], both: bool, texts: list[str]
) -> tuple[list[int], list[tuple[int, ...]] | None]:
    """Append what is scored for these targets to `texts`; return where each is."""
    if "" in targets:
        raise _empty_target(f"targets[{targets.index('')}]")
    if not both:
        first = len(texts)
        texts += targets
        return list(range(first, len(texts))), None
    given: list[int] = []
    variants: list[tuple[int, ...]] = []
    for number, target in enumerate(targets):
        with_space, bare = space_variants(target)
        if not bare:
            detail = f"Target {target!r} is a space alone: without it nothing is left to score. "
            detail += "Send space: as_given."
            raise api_error("boundary_empty", detail, param=f"targets[{number}]")
        first = len(texts)
        texts += [with_space, bare]
        variants.append((first, first + 1))
        given.append(first if target == with_space else first + 1)
    return given, variants


def _cut_ids(
    codec: TextCodec,
    info: EngineInfo,
    bos: BosPolicy,
    item: LogprobItem,
    distinct: dict[tuple[int, ...], list[int]],
) -> list[Cut]:
    """Return an item of ids as cuts, which have its context as the same list.

    Equal targets are the same list, too: the first of them, which `distinct` has.
    """
    context_ids = item.context_ids or []
    _check_ids(context_ids, "context_ids", info)
    cuts = []
    for number, target_ids in enumerate(item.target_ids or []):
        name = f"target_ids[{number}]"
        if not target_ids:
            raise _empty_target(name)
        _check_ids(target_ids, name, info)
        if len(target_ids) > info.context_length + 1:  # before millions of ids are decoded
            detail = f"The target has {len(target_ids)} tokens, this model reads "
            detail += f"{info.context_length}: split it."
            raise api_error("context_too_long", detail, param=name)
        front = context_ids or codec.bos_ids(bos, target_ids)
        if not front:
            detail = "The context has no token: nothing precedes the target; give one."
            raise api_error("boundary_empty", detail, param="context_ids")
        cuts.append(Cut(front, distinct.setdefault(tuple(target_ids), target_ids), None))
    return cuts


def _empty_target(name: str) -> APIError:
    detail = "A target needs at least one token, and this one is empty; leave it out."
    return api_error("invalid_request", detail, param=name)


def _check_ids(ids: list[int], name: str, info: EngineInfo) -> None:
    if ids and max(ids) >= info.vocab_size:
        detail = f"There is no token {max(ids)}; the model's vocabulary ends at "
        raise api_error("invalid_request", f"{detail}{info.vocab_size - 1}.", param=name)


class _JobBuilder:
    """Makes the jobs: one a target, but one for all single tokens after a context.

    Those need the same one row of logits, so their context is read once: after "2 + 2 =", the
    targets " 4" and " 5" are two entries of the last row of one job.
    """

    def __init__(self, on_overflow: OverflowPolicy, info: EngineInfo) -> None:
        self._on_overflow = on_overflow
        self._limit = info.context_length
        self._tokens = array("i")
        self._lengths: list[int] = []
        self._context_ids: list[int] = []
        self._context = array("i")
        self._shared: int | None = None
        """The job of the single tokens after the latest context."""
        self._targets: list[list[int]] = []
        self._sharing: dict[bytes, int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads for the jobs so far."""
        return len(self._tokens)

    def place(self, text: str, cut: Cut) -> PlannedTarget:
        """Put a target into a job. Errors: APIError `context_too_long`."""
        context_ids, target_ids, offsets, finding = cut
        count, excess, slot = len(target_ids), 0, None
        if len(context_ids) + count - 1 > self._limit:
            num_read = len(context_ids) + count - 1
            excess = fit_context(num_read, count, self._limit, self._on_overflow)
        if self._context_ids is not context_ids:
            self._context_ids, self._context = context_ids, array("i", context_ids)
            self._shared = None
        if count > 1:
            job = self._open(self._context[excess:] if excess else self._context, target_ids)
            self._tokens.fromlist(target_ids[:-1])
            self._lengths[job] += count - 1
        else:
            if self._shared is None:
                self._shared = self._share(self._context[excess:])
            job = self._shared
            slot = len(self._targets[job])
            self._targets[job].append(target_ids[0])
        return PlannedTarget(text, target_ids, offsets, finding, excess, job, slot)

    def _share(self, tokens: "array[int]") -> int:
        """Return the job of the single tokens after a context."""
        key = hashlib.sha256(tokens.tobytes()).digest()
        if key not in self._sharing:
            self._sharing[key] = self._open(tokens, [])
        return self._sharing[key]

    def _open(self, tokens: "array[int]", targets: list[int]) -> int:
        self._tokens.extend(tokens)
        self._lengths.append(len(tokens))
        self._targets.append(targets)
        return len(self._lengths) - 1

    def make_jobs(self, read: ColumnOptions) -> ScoreJobs:
        """Return the jobs, by their numbers, which read these columns."""
        none = np.zeros(0, dtype=np.int32)
        like = ScoreJob(none, none, read.columns, read.top, policy=read.policy, double=read.double)
        counts = np.array(list(map(len, self._targets)))
        shares_row = np.zeros(len(counts), dtype=bool)
        shares_row[list(self._sharing.values())] = True
        return ScoreJobs(
            like,
            np.frombuffer(self._tokens, dtype=np.int32),
            find_starts(self._lengths),
            np.array(list(chain.from_iterable(self._targets)), dtype=np.int32),
            find_starts(counts),
            shares_row & (counts > 1),
        )


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


class FiniteDocuments(list[dict[str, Any]]):
    """Documents whose numbers are finite outside of arrays, so that none has to be looked at."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows of each target: its tokens, these columns, what probes of the
    interventions have read, aggregates over `window`.
    """

    columns: Sequence[str]
    per_token: bool = True
    window: int | None = None
    interventions: Interventions = UNCHANGED
    space: SpacePolicy = "as_given"


def sum_targets(plan: TargetPlan, outputs: ScoreOutputs) -> list[float]:
    """Return the log-probability of each target, summed over its tokens in float64."""
    values = outputs.columns["logprob"].astype(np.float64)
    sums: list[float] = add_between(values, *plan.find_rows(outputs.row_starts)).tolist()
    return sums


def assemble_targets(
    plan: TargetPlan, outputs: ScoreOutputs, codec: TextCodec, shown: Shown
) -> Steps[list[dict[str, Any]]]:
    """Return the `results` of an answer, as `ItemScore`, with numpy arrays for columns."""
    begins, ends = plan.find_rows(outputs.row_starts)
    totals = add_between(outputs.columns["logprob"].astype(np.float64), begins, ends).tolist()
    greedy: list[bool | None] = [None] * len(totals)
    if "rank" in outputs.columns:
        is_first = outputs.columns["rank"] == 1
        firsts = add_between(is_first.astype(np.int64), begins, ends)
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
        results.append(_score_item(item, scores, shown.space))
        if not len(results) % WRITTEN_AT_ONCE:
            yield 0
    return results


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
    """Return the fields of `ItemScore` that compare targets by this field of theirs.

    Merged targets take no part beside exact ones: they have fewer tokens of their own to score.
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
            if (tokens := self._tokens.get(id(token_ids))) is None:
                tokens = self._tokens[id(token_ids)] = list(map(self._codec.piece, token_ids))
            score["tokens"] = tokens
            score["offsets"] = offsets
            for name, values in self._columns.items():
                score[name] = values[begin:end]
            if self._others is not None:
                others = self._others.items()
                score["columns"] = {name: values[begin:end] for name, values in others}
            top_ids, top_logprobs = self._outputs.top_ids, self._outputs.top_logprobs
            if top_ids is not None and top_logprobs is not None:
                score["top"] = self._list_top(top_ids[begin:end], top_logprobs[begin:end])
        return score

    def _list_top(self, top_ids: Ids, top_logprobs: Scores) -> dict[str, Any]:
        """Return the alternatives of some rows."""
        piece = self._codec.piece
        tokens = [[piece(token_id) for token_id in row] for row in top_ids.tolist()]
        return {"token_ids": top_ids, "tokens": tokens, "logprobs": top_logprobs}


class LogprobTask(BodyTask[LogprobRequest]):
    """Exact log-probability of every target given its context."""

    kind = "logprob"

    _problems: ItemProblems
    _results: list[dict[str, Any]]

    def check_limits(self, settings: Settings) -> None:
        """Bound items and targets. Errors: APIError `payload_too_large`."""
        check_items(self._body.items, settings)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score all targets in one batch, then sum them up."""
        body = self._body
        planner.cover_text(find_longest(body.items))
        self._problems = ItemProblems("items", body.on_error)
        plan, jobs = await planner.advance(self._plan())
        if not jobs:  # each item has a problem
            self._results = self._problems.fill([], self.request_id)
            return
        rows = len(plan.jobs.targets)
        planner.expect_rows(rows, len(body.columns), min(body.top, self.info.vocab_size))
        if self.interventions.probes:
            contexts = [plan.jobs[target.job].prompt_len for target in plan.planned]
            planner.expect_readings(self.interventions, len(contexts), rows, sum(contexts))
        collector = Collector()
        yield Batch(jobs, collector.take, cache=body.cache)
        window = body.window if isinstance(body, DiagnosticsRequest) else None
        shown = Shown(body.columns, body.per_token, window, self.interventions, body.space)
        steps = assemble_targets(plan, collector.scores, self.codec, shown)
        self._results = self._problems.fill(await planner.advance(steps), self.request_id)

    def _plan(self) -> Steps[tuple[TargetPlan, Sequence[ScoreJob]]]:
        body, info = self._body, self.info
        self.interventions = Interventions.resolve(body, self._stores, info)
        options = TargetOptions(body.boundary, body.space, body.bos, body.on_overflow)
        top = min(body.top, info.vocab_size)
        read = ColumnOptions.of(body.columns, body.policy, body.precision, top)
        plan = yield from plan_targets(body.items, self.codec, info, options, read, self._problems)
        return plan, self.interventions.apply(plan.jobs) if plan.jobs else ()

    def report(self) -> dict[str, Any]:
        """Return the scores of each item's targets."""
        return {"results": self._results}


class DiagnosticsTask(LogprobTask):
    """Targets as a sampling policy saw them: every column of each token, and aggregates."""
