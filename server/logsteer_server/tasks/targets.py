"""Contexts and targets as score jobs."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import BosPolicy, LogprobItem, OverflowPolicy
from logsteer.schemas.logprob import Boundary, BoundaryFinding, SpacePolicy
from logsteer_server.contract.batches import ScoreJobs, Starts, find_starts
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Ids, ScoreJob
from logsteer_server.settings import Settings
from logsteer_server.tasks.columns import ColumnOptions
from logsteer_server.tasks.planning import Steps
from logsteer_server.tasks.run import check_count
from logsteer_server.text.boundaries import Cut, Pair, cut_pairs, space_variants
from logsteer_server.text.tokenizer import Offsets, TextCodec

TARGET_WORK = 64
"""Tokens that take as long to look at as everything else of a target does."""
PAUSE_AFTER = 4096
"""Tokens of such work that a step takes, or a conversation, whose template may take long."""
STEP_TEXTS = 256
"""Texts that are compared, or put into their places, in a step."""

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
    targets = sum(len(item.targets or item.target_ids or ()) for item in items)
    check_count("items[].targets", targets, MAX_TARGETS)


def find_longest(items: Sequence[LogprobItem]) -> int:
    """Return the characters of the longest context with its longest target."""
    return max((_count_chars(item) for item in items), default=0)


def _count_chars(item: LogprobItem) -> int:
    if item.targets is None:
        return 0
    turns = sum(len(message.content) for message in item.messages) if item.messages else 0
    return len(item.context or "") + turns + max(map(len, item.targets))


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
    """One item's targets as given; with `space: both`, the indices of each target's variants."""

    targets: list[int]
    variants: list[tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """Everything to score; `items` point into `planned`, that into `jobs`."""

    planned: list[PlannedTarget]
    items: list[PlannedItem]
    jobs: ScoreJobs

    def context(self, target: PlannedTarget) -> Ids:
        """Return what the model reads in front of a target."""
        starts = self.jobs.token_starts
        end = starts[target.job + 1] - len(target.token_ids) + 1
        return self.jobs.tokens[starts[target.job] : end]

    def find_rows(self, row_starts: Starts) -> tuple[Starts, Starts]:
        """Return where each target's rows begin and end, among those of the jobs' outputs."""
        jobs = np.array([target.job for target in self.planned])
        slots = np.array([target.slot or 0 for target in self.planned])
        counts = np.array([len(target.token_ids) for target in self.planned])
        begins = row_starts[jobs] + slots
        return begins, begins + counts


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
    id_cuts: dict[int, Cut] = {}
    distinct: dict[tuple[int, ...], list[int]] = {}
    work = 0
    for index, item in enumerate(given):
        first = len(texts)
        if item.context_ids is not None:
            for cut in _cut_ids(codec, info, options.bos, index, item, distinct):
                id_cuts[len(texts)] = cut
                texts.append("")
                work += len(cut.target_ids)
            items.append(PlannedItem(list(range(first, len(texts))), None))
            work += TARGET_WORK + len(item.context_ids)
        else:
            context, rendered = item.context or "", False
            if item.messages is not None:
                context, rendered = codec.render_chat(item.messages), True
            as_given, variants = _lay_out(item.targets or [], options.space == "both", texts)
            pairs += [Pair(context, text, rendered) for text in texts[first:]]
            items.append(PlannedItem(as_given, variants))
            work += PAUSE_AFTER if rendered else TARGET_WORK
        if work >= PAUSE_AFTER:
            work = 0
            yield 0
    decoded = yield from _decode_targets(codec, list(distinct.values()))
    text_cuts = cut_pairs(codec, pairs, options.boundary, options.bos)
    builder = _JobBuilder(options.on_overflow, info)
    planned = []
    for place, text in enumerate(texts):
        if place in id_cuts:
            cut = id_cuts[place]
            text = decoded[id(cut.target_ids)]
        else:
            cut = next(text_cuts)
        planned.append(builder.place(text, cut))
        work += TARGET_WORK + len(cut.target_ids)
        if work >= PAUSE_AFTER:
            work = 0
            yield builder.num_tokens
    return TargetPlan(planned, items, builder.make_jobs(read))


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
    codec: TextCodec,
    info: EngineInfo,
    bos: BosPolicy,
    index: int,
    item: LogprobItem,
    distinct: dict[tuple[int, ...], list[int]],
) -> list[Cut]:
    """Return an item of ids as cuts, which have its context as the same list.

    Equal targets are the same list, too: the first of them, which `distinct` has.
    """
    context_ids = item.context_ids or []
    _check_ids(context_ids, index, "context_ids", info)
    cuts = []
    for target_ids in item.target_ids or []:
        _check_ids(target_ids, index, "target_ids", info)
        if len(target_ids) > info.context_length + 1:  # before millions of ids are decoded
            fit_context(len(target_ids) - 1, len(target_ids), info.context_length, "error")
        front = context_ids or codec.bos_ids(bos, target_ids)
        if not front:
            detail = f"items[{index}].context_ids is empty: nothing precedes the target; give one."
            raise api_error("boundary_empty", detail, param=f"items[{index}].context_ids")
        cuts.append(Cut(front, distinct.setdefault(tuple(target_ids), target_ids), None))
    return cuts


def _check_ids(ids: list[int], index: int, field: str, info: EngineInfo) -> None:
    if ids and max(ids) >= info.vocab_size:
        name = f"items[{index}].{field}"
        detail = f"{name} has id {max(ids)}; this model's vocabulary ends at {info.vocab_size - 1}."
        raise api_error("invalid_request", detail, param=name)


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
        counts = np.array([len(targets) for targets in self._targets])
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
