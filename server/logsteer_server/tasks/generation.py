"""`/steer` and `/generate`: continuations of prompts, with what the sampling policy saw."""

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from logsteer.errors import APIError
from logsteer.schemas import (
    ALL_COLUMNS,
    BosPolicy,
    GenerateRequest,
    Message,
    OverflowPolicy,
    PromptRequest,
    SteerRequest,
    list_conversations,
)
from logsteer_server.contract.captures import CapturedActivations
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    NO_TOKENS,
    GenerateJob,
    GenerateOutput,
    ScoreJob,
    ScoreOutput,
    draw_seed,
)
from logsteer_server.contract.plan import Readings
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.settings import Settings
from logsteer_server.tasks.planning import Cover, ItemProblems, Planner
from logsteer_server.tasks.policies import plan_policy
from logsteer_server.tasks.run import Batch, BodyTask, Event, check_count, take_each
from logsteer_server.tasks.targets import aggregate_columns, show_columns
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.prompts import check_prompt, find_longest_prompt, fit_prompt, read_prompts
from logsteer_server.text.tokenizer import ANSWERED, TextCodec


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts to continue: texts or ids, or conversations for the chat template."""

    given: Sequence[str] | Sequence[list[int]] = ()
    conversations: Sequence[Sequence[Message]] = ()
    chat: ChatForm = ANSWERED
    bos: BosPolicy = "auto"
    on_overflow: OverflowPolicy = "error"

    def encode(self, codec: TextCodec) -> Iterator[tuple[str | None, list[int]] | APIError]:
        """Yield the text, None where ids were given, and the tokens of each prompt; or its error.

        Errors: APIError `invalid_request`.
        """
        for text in codec.render_each(self.conversations, self.chat):
            yield text if isinstance(text, APIError) else (text, codec.encode_ids([text])[0])
        if self.given:
            yield from read_prompts(self.given, codec, self.bos)


def plan_continuations(
    prompts: Prompts,
    first: GenerateJob,
    count: int,
    codec: TextCodec,
    info: EngineInfo,
    cover: Cover,
    problems: ItemProblems | None = None,
) -> tuple[list[GenerateJob], list[int]]:
    """Plan an unsteered job for each completion, `count` of the first prompt, then of the next.

    `first` has everything but the tokens; seeds count up from its own over all completions,
    including prompts with a problem, which have no job. Also returned: how many tokens of each
    planned prompt were dropped. Problems are added to `problems`; the first is raised if that is
    None. Errors: APIError `invalid_request`, `context_too_long`.
    """
    problems = ItemProblems("prompts") if problems is None else problems
    jobs: list[GenerateJob] = []
    truncated: list[int] = []
    num_planned = 0
    limit, policy = info.context_length, prompts.on_overflow
    for index, found in enumerate(prompts.encode(codec)):
        with problems.catch(index):
            if isinstance(found, APIError):
                raise found
            text, given = found
            check_prompt(text, given, info.vocab_size)
            ids, dropped = fit_prompt(given, first.max_tokens, limit, policy)
        if index in problems:
            continue
        truncated.append(dropped)
        tokens = np.array(ids, dtype=np.int32)
        start = first.seed + index * count
        jobs += [replace(first, tokens=tokens, seed=start + k) for k in range(count)]
        num_planned += count * jobs[-1].num_expected
        cover(num_planned)
    return jobs, truncated


@dataclass(slots=True)
class Continuation:
    """The pieces of one job's output that have arrived so far."""

    job: GenerateJob
    pieces: list[GenerateOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """All its tokens so far."""
        return [token for piece in self.pieces for token in piece.token_ids.tolist()]

    @property
    def is_steered(self) -> bool:
        """Whether it is not a baseline."""
        return self.job.plan is not None and bool(self.job.plan.sites)

    @property
    def readings(self) -> Readings | None:
        """The readings of probes in all its pieces."""
        found = [piece.readings for piece in self.pieces if piece.readings is not None]
        if not found:
            return None
        return Readings(found[0].first, np.concatenate([part.values_TGR for part in found]))

    @property
    def activations(self) -> CapturedActivations | None:
        """The activations captured in all its pieces."""
        found = [piece.activations for piece in self.pieces if piece.activations is not None]
        return CapturedActivations.join(found) if found else None

    @property
    def last(self) -> GenerateOutput:
        """The piece that it has ended with; the latest one, if it has not."""
        return next((p for p in self.pieces if p.finish_reason is not None), self.pieces[-1])

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns of all its tokens, log-probabilities included."""
        parts = [_read_columns(piece) for piece in self.pieces]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def write(
        self, codec: TextCodec, interventions: Interventions, window: int | None
    ) -> dict[str, Any]:
        """Render the whole as a `Completion`, with aggregates if there is a window."""
        ids, columns = self.token_ids, self.columns
        logprobs = columns["logprob"]
        total = float(logprobs.astype(np.float64).sum())
        aggregates = {} if window is None else {"aggregates": aggregate_columns(columns, window)}
        return {
            "text": "".join(piece.text for piece in self.pieces),
            "token_ids": ids,
            "tokens": [codec.piece(token) for token in ids],
            "logprobs": logprobs,
            "logprob": total if math.isfinite(total) else None,
            "num_tokens": len(ids),
            "finish_reason": self.last.finish_reason,
            "seed": self.job.seed,
            **interventions.show_readings(
                self.readings, len(self.job.tokens), is_steered=self.is_steered
            ),
            **interventions.show_activations(self.activations),
            **show_columns(columns, self.job.columns),
            **aggregates,
        }


def _read_columns(piece: GenerateOutput) -> dict[str, np.ndarray]:
    return {"logprob": piece.logprobs, **piece.columns}


def read_end(job: GenerateJob, token_ids: Sequence[int]) -> ScoreJob:
    """Return the job by which probes read the last token of a job's continuation.

    That token ended the generation, so the model has not read it.
    """
    tokens = np.concatenate([job.tokens, np.array(token_ids, dtype=np.int32)])
    targets = np.array([*token_ids, 0], dtype=np.int32)
    return ScoreJob(
        tokens,
        targets,
        reads_end=True,
        plan=job.plan,
        override=job.override,
        adapter=job.adapter,
        cache_namespace=job.cache_namespace,
    )


def add_end(output: GenerateOutput, end: ScoreOutput) -> GenerateOutput:
    """Return a whole continuation with the readings of its last token."""
    assert output.readings is not None
    assert end.readings is not None
    parts = [output.readings.values_TGR, end.readings.values_TGR[-1:]]
    return replace(output, readings=Readings(output.readings.first, np.concatenate(parts)))


def make_end(last: GenerateOutput, output: ScoreOutput) -> GenerateOutput:
    """Return a piece without tokens, with the readings of the last one."""
    assert output.readings is not None
    first, values_TGR = output.readings.first, output.readings.values_TGR
    return replace(
        last,
        token_ids=last.token_ids[:0],
        text="",
        logprobs=last.logprobs[:0],
        top_ids=last.top_ids[:0],
        top_logprobs=last.top_logprobs[:0],
        columns={name: values[:0] for name, values in last.columns.items()},
        finish_reason=None,
        readings=Readings(first + len(values_TGR) - 1, values_TGR[-1:]),
        cached_tokens=0,
        trace=None,
        activations=None,
    )


class Continuations:
    """The completions of a request: those of its jobs, then those of a baseline's."""

    def __init__(
        self,
        jobs: Sequence[GenerateJob],
        baseline: Sequence[GenerateJob],
        per_prompt: int,
        seed: int,
    ) -> None:
        self.jobs = [*jobs, *baseline]
        self.entries = [Continuation(job) for job in self.jobs]
        self._per_prompt = per_prompt
        self._seed = seed
        self._num_own = len(jobs)

    def add(
        self, index: int, piece: GenerateOutput, interventions: Interventions
    ) -> dict[str, Any]:
        """Add a piece of a job's output; return it as a `SteerPiece`."""
        entry = self.entries[index]
        entry.pieces.append(piece)
        place = entry.job.seed - self._seed
        return {
            "prompt": place // self._per_prompt,
            "completion": place % self._per_prompt,
            "steered": entry.is_steered,
            "text": piece.text,
            "token_ids": piece.token_ids,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            **interventions.show_readings(
                piece.readings, len(entry.job.tokens), is_steered=entry.is_steered
            ),
            **interventions.show_activations(piece.activations),
            **show_columns(_read_columns(piece), entry.job.columns),
        }

    def read_ends(self) -> list[ScoreJob]:
        """Return the jobs by which probes read the last token of each."""
        return [read_end(entry.job, entry.token_ids) for entry in self.entries]

    def end(self, index: int, output: ScoreOutput, interventions: Interventions) -> dict[str, Any]:
        """Add the readings of a job's last token; return them as a `SteerPiece`."""
        return self.add(index, make_end(self.entries[index].pieces[-1], output), interventions)

    def write(
        self,
        codec: TextCodec,
        interventions: Interventions,
        truncated: Sequence[int],
        window: int | None = None,
    ) -> list[dict[str, Any]]:
        """Render all as `PromptCompletions`; a `window` as in `Continuation.write`."""
        written = [entry.write(codec, interventions, window) for entry in self.entries]
        size, own = self._per_prompt, self._num_own
        return [
            {
                "completions": written[start : start + size],
                "baseline": written[own + start : own + start + size] or None,
                "prompt_ids": self.jobs[start].tokens,
                "truncated_tokens": truncated[start // size],
            }
            for start in range(0, own, size)
        ]


P = TypeVar("P", bound=PromptRequest)


class GenerationTask(BodyTask[P]):
    """Continue prompts, and report what each token was drawn from."""

    _problems: ItemProblems
    _truncated: list[int]
    _continuations: Continuations

    @property
    def columns(self) -> list[str]:
        """Columns that the completions show."""
        return list(self._body.columns or ())

    @property
    def window(self) -> int | None:
        """The window of `early` and `late` aggregates; None without aggregates."""
        return None

    @property
    def has_baseline(self) -> bool:
        """Whether everything is also continued without steering."""
        return False

    def check_limits(self, settings: Settings) -> None:
        """Bound prompts times completions. Errors: APIError `payload_too_large`."""
        given = self._body.prompts or self._body.prompt_ids or self._conversations
        check_count("prompts x n", len(given) * self._body.n, settings.max_items)

    @property
    def _conversations(self) -> list[list[Message]]:
        """The conversations to continue, if any."""
        return list_conversations(self._body.messages) if self._body.messages else []

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Generate everything in one batch; in another, probes read the last tokens."""
        body = self._body
        planner.cover_text(find_longest_prompt(body.prompts or [], self._conversations))
        self._continuations = await planner.run(self._plan, planner)
        if not self._continuations.jobs:  # each prompt has a problem
            return
        tokens = len(self._continuations.jobs) * body.max_tokens
        planner.expect_rows(tokens, 1 + len(self.columns))
        contexts = [job.prompt_len for job in self._continuations.jobs]
        planner.expect_readings(self.interventions, len(contexts), tokens, sum(contexts))
        planner.expect_captured(self.interventions, self._continuations.jobs)
        yield Batch(self._continuations.jobs, take_each(self._take))
        if self.interventions.probes:
            ends = self._continuations.read_ends()
            yield Batch(ends, take_each(self._take_end), purpose="reference", silent=True)

    def _plan(self, planner: Planner) -> Continuations:
        body = self._body
        interventions = Interventions.resolve(body, self._stores, self.info, self.codec)
        given = body.prompts or body.prompt_ids or []
        field = "prompts" if body.prompts else "prompt_ids" if body.prompt_ids else "messages"
        is_one = bool(body.messages) and isinstance((body.messages or [])[0], Message)
        self._problems = ItemProblems(field, body.on_error, is_one=is_one)
        prompts = Prompts(given, self._conversations, ChatForm.of(body), body.bos, body.on_overflow)
        first = GenerateJob(
            NO_TOKENS,
            body.max_tokens,
            plan_policy(body, self.codec, self.info, ignore_eos=body.ignore_eos),
            seed=draw_seed() if body.seed is None else body.seed,
            stop=tuple(body.stop),
            include_stop=body.include_stop,
            stop_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            stream=body.stream,
            columns=tuple(self.columns),
            double=body.precision == "float64",
        )
        plain, self._truncated = plan_continuations(
            prompts, first, body.n, self.codec, self.info, planner.cover, self._problems
        )
        self.interventions = interventions
        baseline: Sequence[GenerateJob] = []
        if self.has_baseline:
            baseline = interventions.unsteered.apply(plain)
        steered = interventions.apply(plain) if plain else []
        return Continuations(steered, baseline, body.n, first.seed)

    def _take(self, index: int, piece: GenerateOutput) -> Event | None:
        document = self._continuations.add(index, piece, self.interventions)
        return Event("piece", document) if self.streams else None

    def _take_end(self, index: int, output: ScoreOutput) -> Event | None:
        document = self._continuations.end(index, output, self.interventions)
        return Event("piece", document) if self.streams else None

    def report(self) -> dict[str, Any]:
        """Return the completions of each prompt."""
        results = self._continuations.write(
            self.codec, self.interventions, self._truncated, self.window
        )
        return {"results": self._problems.fill(results, self.request_id)}


class SteerTask(GenerationTask[SteerRequest]):
    """Continuations of prompts under steering, with a receipt of the changes."""

    kind = "steer"

    @property
    def has_baseline(self) -> bool:
        """Whether everything is also continued without steering."""
        return self._body.baseline


class GenerateTask(GenerationTask[GenerateRequest]):
    """Continuations of prompts, with the sampling policy's diagnostics on request."""

    kind = "generate"

    @property
    def columns(self) -> list[str]:
        """Columns that the completions show: all of them for diagnostics, unless named."""
        named = super().columns
        return list(ALL_COLUMNS) if self._body.diagnostics and not named else named

    @property
    def window(self) -> int | None:
        """What `early` and `late` aggregates are over; None without diagnostics."""
        return self._body.window if self._body.diagnostics else None
