"""Contexts and targets as score jobs: the plan of `/logprob` and of other endpoints that score.

And the columns read from each scored row, as an answer shows them.
"""

import hashlib
import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    BosPolicy,
    GradientRequest,
    LensRequest,
    LogprobItem,
    LogprobRequest,
    OverflowPolicy,
    PatchRequest,
    SweepRequest,
)
from logsteer.schemas.common import Precision
from logsteer.schemas.logprob import BoundaryFinding, SpacePolicy
from logsteer_server.contract.batches import ScoreJobs, Starts, find_starts
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import NEUTRAL, NO_TOKENS, Ids, Policy, ScoreJob
from logsteer_server.settings import Settings
from logsteer_server.tasks.planning import Cover, ItemProblems
from logsteer_server.tasks.run import check_count
from logsteer_server.text.boundaries import Cut, Pair, cut_pairs
from logsteer_server.text.chat import ChatForm, count_chars
from logsteer_server.text.tokenizer import Offsets, TextCodec, check_ids

Column = npt.NDArray[Any]

ARRAY_NAMES = {"logprob": "logprobs", "rank": "ranks"}
"""Columns that an answer shows outside of `columns`, under these names."""


def describe_rows(
    columns: Iterable[str] = (),
    policy: Policy = NEUTRAL,
    precision: Precision = "float32",
    top: int = 0,
    *,
    reads_end: bool = False,
    tail: bool = False,
) -> ScoreJob:
    """Return a score job without tokens: what is read of each scored row, `logprob` always.

    `reads_end`: the last token is read, too, for probes.
    """
    return ScoreJob(
        NO_TOKENS,
        NO_TOKENS,
        tuple(dict.fromkeys(["logprob", *columns])),
        top,
        policy=policy,
        double=precision == "float64",
        reads_end=reads_end,
        tail=tail,
    )


def show_columns(read: Mapping[str, Column], asked: Sequence[str]) -> dict[str, Any]:
    """Return the requested columns, at their places in an answer.

    For `["rank", "entropy"]`: `{"ranks": [...], "columns": {"entropy": [...]}}`.
    """
    shown: dict[str, Any] = {}
    for name, shown_as in ARRAY_NAMES.items():
        if name in asked:
            shown[shown_as] = read[name]
    others = {name: read[name] for name in asked if name not in ARRAY_NAMES}
    return shown | ({"columns": others} if others else {})


def aggregate_columns(
    columns: Mapping[str, Column], window: int
) -> dict[str, dict[str, float | None]]:
    """Return the `Aggregate` of each column over a sequence's tokens, and of surprisal, -logprob.

    `early` and `late` are means over the first and the last `window` tokens.
    """
    given = dict(columns)
    if "logprob" in given:
        given["surprisal"] = -given["logprob"]
    return {
        name: _aggregate(values.astype(np.float64), window)
        for name, values in given.items()
        if len(values)
    }


def _aggregate(values: npt.NDArray[np.float64], window: int) -> dict[str, float | None]:
    numbers = {
        "sum": values.sum(),
        "mean": values.mean(),
        "min": values.min(),
        "max": values.max(),
        "early": values[:window].mean(),
        "late": values[-window:].mean(),
    }
    return {name: float(n) if math.isfinite(n) else None for name, n in numbers.items()}


MAX_TARGETS = 65_536
"""Targets of one request, all items: four for each of as many items as a request may have."""


TargetsRequest = LogprobRequest | GradientRequest | LensRequest | PatchRequest | SweepRequest
"""Requests with contexts and targets: their options say how these are cut into tokens."""


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
                length += count_chars(item.messages)
            longest = max(longest, length)
    return longest


class PlannedTarget(NamedTuple):
    """One string or id sequence to score: its tokens, and where its scores will be.

    They are all rows of job `job`, or only entry `slot` if the job shares a row.
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
    """Items without a problem."""
    jobs: ScoreJobs
    num_listed: int = 0
    """Tokens listed for each scored one."""

    def context(self, target: PlannedTarget) -> Ids:
        """Return what the model reads before a target."""
        starts = self.jobs.token_starts
        end = starts[target.job + 1] - len(target.token_ids) + (not self.jobs.like.reads_end)
        return self.jobs.tokens[starts[target.job] : end]

    def find_rows(self, row_starts: Starts) -> tuple[Starts, Starts]:
        """Return where each target's rows begin and end, among those of the jobs' outputs."""
        jobs, slots, counts = [], [], []
        for target in self.planned:
            jobs.append(target.job)
            slots.append(target.slot or 0)
            counts.append(len(target.token_ids))
        begins = row_starts[np.array(jobs, np.int64)] + np.array(slots, np.int64)
        return begins, begins + np.array(counts, np.int64)


def plan_targets(
    given: Sequence[LogprobItem],
    codec: TextCodec,
    info: EngineInfo,
    options: TargetsRequest,
    read: ScoreJob,
    cover: Cover,
    problems: ItemProblems | None = None,
) -> TargetPlan:
    """Plan one job per target, but one for all single tokens after a context that are not read.

    Problems of an item are added to `problems`; the first is raised if that is None. Errors:
    APIError `invalid_request`, `boundary_empty`, `context_too_long`.
    """
    problems = ItemProblems("items") if problems is None else problems
    space: SpacePolicy = getattr(options, "space", "as_given")
    laid = _lay_out_items(given, codec, info, options, space, cover, problems)
    decoded: dict[int, str] = {}  # by the list's address
    targets = list(laid.distinct.values())
    for target_ids, text in zip(targets, codec.decode_lazily(targets), strict=True):
        decoded[id(target_ids)] = text
    pairs = [target for target in laid.scored if not isinstance(target, Cut)]
    text_cuts = cut_pairs(codec, pairs, options.boundary, options.bos) if pairs else iter(())
    builder = _JobBuilder(options.on_overflow, info, read)
    has_alternatives = any(item.alternatives is not None for item in given)
    planned: list[PlannedTarget] = []
    numbers: list[int | None] = []
    for place, target in enumerate(laid.scored):
        numbers.append(len(planned))
        cut: Cut | APIError
        if isinstance(target, Cut):
            text, cut = decoded[id(target.target_ids)], target
        else:
            text, cut = target[1], next(text_cuts)
        if isinstance(cut, APIError):
            numbers[place] = None
            if space != "best" or cut.param or not laid.has_twin(place, numbers):
                laid.add_problem(problems, place, cut)
            continue
        try:
            cut, listed = cut if cut.context_ids else cut.read_first(), None
            if has_alternatives:
                item, number = laid.find_owner(place)
                listed = _list_alternatives(given[item], number, cut, info)
            planned.append(builder.place(text, cut, listed))
        except APIError as error:
            laid.add_problem(problems, place, error)
        cover(len(builder.tokens))
    items = laid.items
    if problems or None in numbers:
        items = [item.renumber(numbers) for n, item in enumerate(items) if n not in problems]
    jobs = builder.make_jobs()
    num_others = 0 if jobs.alternatives is None else jobs.alternatives.shape[1]
    return TargetPlan(planned, items, jobs, read.top + num_others)


@dataclass(slots=True)
class _LaidItems:
    """What is scored of items: text as pairs, ids as cuts. `firsts`: where each item begins there.

    Equal targets that are ids are the same list: the first of them, which `distinct` has.
    """

    scored: list[Pair | Cut] = field(default_factory=list)
    items: list[PlannedItem] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    distinct: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def has_twin(self, place: int, numbers: Sequence[int | None]) -> bool:
        """Return whether the other variant of a target can be scored, or has not been checked yet.

        Of two variants one is enough.
        """
        first = self.firsts[bisect_right(self.firsts, place) - 1]
        twin = first + ((place - first) ^ 1)
        return twin > place or numbers[twin] is not None

    def find_owner(self, place: int) -> tuple[int, int]:
        """Return the item of the target at a place, and the target's number in it."""
        index = bisect_right(self.firsts, place) - 1
        variants = 1 if self.items[index].variants is None else 2
        return index, (place - self.firsts[index]) // variants

    def add_problem(self, problems: ItemProblems, place: int, error: APIError) -> None:
        """Add the error of the target at a place to the problems of its item."""
        index, number = self.find_owner(place)
        name = "target_ids" if isinstance(self.scored[place], Cut) else "targets"
        problems.add(index, error, None if error.param else f"{name}[{number}]")


def _lay_out_items(
    given: Sequence[LogprobItem],
    codec: TextCodec,
    info: EngineInfo,
    options: TargetsRequest,
    space: SpacePolicy,
    cover: Cover,
    problems: ItemProblems,
) -> _LaidItems:
    """List what is scored of the items, which are checked and rendered."""
    laid = _LaidItems()
    scored = laid.scored
    for index, item in enumerate(given):
        first = len(scored)
        laid.firsts.append(first)
        cover(0)  # ends the plan of a request that was given up
        try:
            if item.context_ids is not None:
                scored += _cut_ids(codec, info, options.bos, item, laid.distinct)
                laid.items.append(PlannedItem(list(range(first, len(scored))), None))
            else:
                context, rendered = item.context or "", False
                if item.messages is not None:
                    form = ChatForm.of(options)
                    context, rendered = codec.render_chat(item.messages, form), True
                targets = item.targets or []
                if "" in targets:
                    raise _empty_target(f"targets[{targets.index('')}]")
                variants: list[tuple[int, ...]] | None = None
                if space == "as_given":
                    places = list(range(first, first + len(targets)))
                    scored += [(context, text, rendered) for text in targets]
                else:
                    places, variants = [], []
                    for number, text in enumerate(targets):
                        bare = text.removeprefix(" ")
                        if not bare:
                            detail = (
                                f"Target {text!r} is a space alone: without it nothing is left to "
                                "score. Send space: as_given."
                            )
                            raise api_error("boundary_empty", detail, param=f"targets[{number}]")
                        place = len(scored)
                        places.append(place + (text == bare))
                        variants.append((place, place + 1))
                        scored += [(context, f" {bare}", rendered), (context, bare, rendered)]
                laid.items.append(PlannedItem(places, variants, targets))
        except APIError as error:
            problems.add(index, error)
            del scored[first:]
            laid.items.append(PlannedItem([], None))
    return laid


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
    check_ids(context_ids, info.vocab_size, "context_ids")
    cuts = []
    for number, target_ids in enumerate(item.target_ids or []):
        name = f"target_ids[{number}]"
        if not target_ids:
            raise _empty_target(name)
        check_ids(target_ids, info.vocab_size, name)
        if len(target_ids) > info.context_length + 1:  # before millions of ids are decoded
            detail = (
                f"The target has {len(target_ids)} tokens, this model reads "
                f"{info.context_length}: split it."
            )
            raise api_error("context_too_long", detail, param=name)
        front = context_ids or codec.bos_ids(bos, target_ids)
        cuts.append(Cut(front, distinct.setdefault(tuple(target_ids), target_ids), None))
    return cuts


def _list_alternatives(item: LogprobItem, number: int, cut: Cut, info: EngineInfo) -> Ids | None:
    """Return the alternatives of a target's scored tokens [T, K]; None where the item has none.

    Errors: APIError `invalid_request` where they are not of its tokens.
    """
    given = item.alternatives
    if given is None:
        return None
    count, name = len(cut.target_ids), f"alternatives[{number}]"
    if isinstance(given[0], int):
        rows, name = np.array([given], np.int32).repeat(count, axis=0), "alternatives"
    else:
        listed = given[number] if number < len(given) else []
        listed = listed[cut.finding == "no_context" :]  # its first token is not scored
        if len(listed) != count or len(set(map(len, listed))) > 1:
            detail = (
                f"The target has {count} scored tokens, and {len(listed)} lists of alternatives: "
                "send one for each token, all of the same length."
            )
            raise api_error("invalid_request", detail, param=name)
        rows = np.array(listed, np.int32)
    check_ids([int(rows.max(initial=0))], info.vocab_size, name)
    return rows


def _empty_target(name: str) -> APIError:
    detail = "A target needs at least one token, and this one is empty; leave it out."
    return api_error("invalid_request", detail, param=name)


class _JobBuilder:
    """Makes the jobs: one a target, but one for all single tokens after a context.

    Those need the same one row of logits, so their context is read once: after "2 + 2 =", the
    targets " 4" and " 5" are two entries of the last row of one job. Where targets are read to
    their ends, each has a job of its own.
    """

    def __init__(self, on_overflow: OverflowPolicy, info: EngineInfo, read: ScoreJob) -> None:
        self._read = read
        self._on_overflow = on_overflow
        self._limit = info.context_length
        self.tokens = array("i")
        self._token_starts = [0]
        self._targets: list[list[int]] = []
        self._alternatives: defaultdict[int, list[Ids]] = defaultdict(list)
        """Of each job."""
        self._sharing: dict[bytes, int] = {}
        """The jobs of single tokens, by the SHA-256 of their context."""
        self._context_ids: list[int] = []
        self._shared = 0
        """The job of the single tokens after the latest context."""

    def place(self, text: str, cut: Cut, alternatives: Ids | None) -> PlannedTarget:
        """Put a target into a job. Errors: APIError `context_too_long`."""
        context_ids, target_ids, offsets, finding = cut
        reads_end = self._read.reads_end
        read_ids = target_ids if reads_end else target_ids[:-1]
        num_read, excess, slot = len(context_ids) + len(read_ids), 0, None
        if num_read > self._limit:
            excess = fit_context(num_read, len(read_ids) + 1, self._limit, self._on_overflow)
        job = len(self._targets)
        if read_ids:
            self.tokens.fromlist(context_ids[excess:] if excess else context_ids)
            self.tokens.fromlist(read_ids)
            self._token_starts.append(len(self.tokens))
            self._targets.append([*target_ids, 0] if reads_end else target_ids)
        else:
            if self._context_ids is not context_ids:
                self._context_ids = context_ids
                tokens = array("i", context_ids[excess:])
                key = hashlib.sha256(tokens.tobytes()).digest()
                self._shared = self._sharing.setdefault(key, job)
                if self._shared == job:
                    self.tokens.extend(tokens)
                    self._token_starts.append(len(self.tokens))
                    self._targets.append([])
            job = self._shared
            slot = len(self._targets[job])
            self._targets[job].append(target_ids[0])
        if alternatives is not None:
            end = np.zeros((int(reads_end), alternatives.shape[1]), np.int32)
            self._alternatives[job] += [alternatives, end]
        return PlannedTarget(text, target_ids, offsets, finding, excess, job, slot)

    def make_jobs(self) -> ScoreJobs:
        """Return the jobs, by their numbers."""
        listed = None
        if self._alternatives:
            listed = self._join_alternatives()
        counts = np.array(list(map(len, self._targets)))
        shares_row = np.zeros(len(counts), dtype=bool)
        shares_row[list(self._sharing.values())] = True
        return ScoreJobs(
            self._read,
            np.frombuffer(self.tokens, dtype=np.int32),
            np.array(self._token_starts, dtype=np.int64),
            np.array(list(chain.from_iterable(self._targets)), dtype=np.int32),
            find_starts(counts),
            shares_row & (counts > 1),
            listed,
        )

    def _join_alternatives(self) -> Ids:
        """Return those of all targets [targets, K]. Errors: APIError `invalid_request`."""
        parts = [rows for job in range(len(self._targets)) for rows in self._alternatives[job]]
        counts = {rows.shape[1] for rows in parts}
        if len(counts) > 1 or sum(map(len, parts)) < sum(map(len, self._targets)):
            detail = (
                f"Some tokens have {sorted(counts)} alternatives, or none; all of a request have "
                "equally many: repeat an id where there are fewer, or send two requests."
            )
            raise api_error("invalid_request", detail, param="items")
        return np.concatenate(parts)


def fit_context(num_read: int, least: int, limit: int, policy: OverflowPolicy) -> int:
    """Return how many tokens to drop at the left, so that the model can read the rest: `least`.

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
    if least > limit:
        detail = (
            f"The target alone needs {least} tokens, this model reads {limit}: split it, or send "
            "it to /perplexity, which works in windows."
        )
        raise api_error("context_too_long", detail)
    return excess
