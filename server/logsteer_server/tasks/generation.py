"""`/steer` and `/generate`: continuations of prompts, with what the sampling policy saw."""

import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from logsteer.errors import APIError
from logsteer.schemas import (
    ALL_COLUMNS,
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
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.tasks.planning import Cover, ItemProblems, Planner
from logsteer_server.tasks.policies import plan_policy
from logsteer_server.tasks.run import Batch, BodyTask, Event, check_count, take_each
from logsteer_server.tasks.targets import aggregate_columns, show_columns
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.prompts import check_prompt, find_longest_prompt, fit_prompt, read_prompts

Prompt = tuple[str | None, list[int]]
"""The text of a prompt, None where ids were given, and its tokens."""


def plan_continuations(
    prompts: Iterable[Prompt | APIError],
    first: GenerateJob,
    count: int,
    info: EngineInfo,
    cover: Cover,
    problems: ItemProblems,
    on_overflow: OverflowPolicy = "error",
) -> tuple[list[GenerateJob], list[int]]:
    """Plan an unsteered job for each completion, `count` of the first prompt, then of the next.

    `first` has everything but the tokens; seeds count up from its own over all completions,
    including prompts with a problem, which have no job. Also returned: how many tokens of each
    planned prompt were dropped. Problems are added to `problems`. Errors: APIError
    `invalid_request`, `context_too_long`.
    """
    jobs: list[GenerateJob] = []
    truncated: list[int] = []
    num_planned = 0
    for index, found in enumerate(prompts):
        with problems.catch(index):
            if isinstance(found, APIError):
                raise found
            text, given = found
            check_prompt(text, given, info.vocab_size)
            ids, dropped = fit_prompt(given, first.max_tokens, info.context_length, on_overflow)
        if index in problems:
            continue
        truncated.append(dropped)
        tokens = np.array(ids, dtype=np.int32)
        start = first.seed + index * count
        jobs += [replace(first, tokens=tokens, seed=start + k) for k in range(count)]
        num_planned += count * jobs[-1].num_expected
        cover(num_planned)
    return jobs, truncated


def join_pieces(pieces: Sequence[GenerateOutput]) -> GenerateOutput:
    """Return the pieces of one job's output as one; it has ended where one of them has."""
    last = next((piece for piece in pieces if piece.is_last), pieces[-1])
    names = ("token_ids", "logprobs", "top_ids", "top_logprobs")
    read = [piece.readings for piece in pieces if piece.readings is not None]
    values_TGR = [readings.values_TGR for readings in read]
    captured = [piece.activations for piece in pieces if piece.activations is not None]
    return replace(
        last,
        **{name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in names},
        text="".join(piece.text for piece in pieces),
        columns={
            name: np.concatenate([piece.columns[name] for piece in pieces]) for name in last.columns
        },
        readings=Readings(read[0].first, np.concatenate(values_TGR)) if read else None,
        activations=CapturedActivations.join(captured) if captured else None,
    )


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


def is_steered(job: GenerateJob) -> bool:
    """Return whether a job is not a baseline's."""
    return job.plan is not None and bool(job.plan.sites)


P = TypeVar("P", bound=PromptRequest)


class GenerationTask(BodyTask[P]):
    """Continue prompts, and report what each token was drawn from."""

    _problems: ItemProblems
    _truncated: list[int]
    _jobs: Sequence[GenerateJob]
    """Those of the completions, then those of the baseline."""
    _num_own: int
    _seed: int

    def __init__(self, body: P, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(body, models, stores)
        self._conversations = list_conversations(body.messages) if body.messages else []
        self._pieces: defaultdict[int, list[GenerateOutput]] = defaultdict(list)
        self._has_diagnostics: bool = getattr(body, "diagnostics", False)
        self._columns = body.columns or (ALL_COLUMNS if self._has_diagnostics else ())

    def check_limits(self, settings: Settings) -> None:
        """Bound prompts times completions. Errors: APIError `payload_too_large`."""
        given = self._body.prompts or self._body.prompt_ids or self._conversations
        check_count("prompts x n", len(given) * self._body.n, settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Generate everything in one batch; in another, probes read the last tokens."""
        body = self._body
        planner.cover_text(find_longest_prompt(body.prompts or [], self._conversations))
        jobs = self._jobs = await planner.run(self._plan, planner)
        if not jobs:  # each prompt has a problem
            return
        tokens = len(jobs) * body.max_tokens
        planner.expect_rows(tokens, 1 + len(self._columns))
        contexts = [job.prompt_len for job in jobs]
        planner.expect_readings(self.interventions, len(contexts), tokens, sum(contexts))
        planner.expect_captured(self.interventions, jobs)
        yield Batch(jobs, take_each(self._take))
        if self.interventions.probes:
            drawn = [join_pieces(self._pieces[n]).token_ids.tolist() for n in range(len(jobs))]
            ends = list(map(read_end, jobs, drawn))
            yield Batch(ends, take_each(self._take_end), purpose="reference", silent=True)

    def _plan(self, planner: Planner) -> Sequence[GenerateJob]:
        body = self._body
        self.interventions = Interventions.resolve(body, self._stores, self.info, self.codec)
        field = "prompts" if body.prompts else "prompt_ids" if body.prompt_ids else "messages"
        is_one = bool(body.messages) and isinstance((body.messages or [])[0], Message)
        self._problems = ItemProblems(field, body.on_error, is_one=is_one)
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
            columns=tuple(self._columns),
            double=body.precision == "float64",
        )
        plain, self._truncated = plan_continuations(
            self._read_prompts(),
            first,
            body.n,
            self.info,
            planner.cover,
            self._problems,
            body.on_overflow,
        )
        self._num_own, self._seed = len(plain), first.seed
        has_baseline = getattr(body, "baseline", False)
        baseline = self.interventions.unsteered.apply(plain) if has_baseline else []
        return [*(self.interventions.apply(plain) if plain else ()), *baseline]

    def _read_prompts(self) -> Iterator[Prompt | APIError]:
        """Yield each prompt, or its error. Errors: APIError `invalid_request`."""
        body, codec = self._body, self.codec
        for text in codec.render_each(self._conversations, ChatForm.of(body)):
            yield text if isinstance(text, APIError) else (text, codec.encode_ids([text])[0])
        if given := body.prompts or body.prompt_ids:
            yield from read_prompts(given, codec, body.bos)

    def _take(self, index: int, piece: GenerateOutput) -> Event | None:
        """Add a piece of a job's output; return its `SteerPiece` if the answer is a stream."""
        self._pieces[index].append(piece)
        if not self.streams:
            return None
        job = self._jobs[index]
        prompt, completion = divmod(job.seed - self._seed, self._body.n)
        document = {
            "prompt": prompt,
            "completion": completion,
            "steered": is_steered(job),
            "text": piece.text,
            "token_ids": piece.token_ids,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            **self._show(job, piece),
        }
        return Event("piece", document)

    def _take_end(self, index: int, output: ScoreOutput) -> Event | None:
        """Add the readings of a job's last token."""
        return self._take(index, make_end(self._pieces[index][-1], output))

    def _show(self, job: GenerateJob, piece: GenerateOutput) -> dict[str, Any]:
        """Return what probes have read, what was captured, and the columns."""
        shown = self.interventions
        columns = {"logprob": piece.logprobs, **piece.columns}
        return {
            **shown.show_readings(piece.readings, len(job.tokens), is_steered=is_steered(job)),
            **shown.show_activations(piece.activations),
            **show_columns(columns, job.columns),
        }

    def _write(self, index: int) -> dict[str, Any]:
        """Return a whole continuation as a `Completion`."""
        job, whole = self._jobs[index], join_pieces(self._pieces[index])
        ids: list[int] = whole.token_ids.tolist()
        total = float(whole.logprobs.astype(np.float64).sum())
        written = {
            "text": whole.text,
            "token_ids": ids,
            "tokens": list(map(self.codec.piece, ids)),
            "logprobs": whole.logprobs,
            "logprob": total if math.isfinite(total) else None,
            "num_tokens": len(ids),
            "finish_reason": whole.finish_reason,
            "seed": job.seed,
            **self._show(job, whole),
        }
        if isinstance(self._body, GenerateRequest) and self._has_diagnostics:
            columns = {"logprob": whole.logprobs, **whole.columns}
            written["aggregates"] = aggregate_columns(columns, self._body.window)
        return written

    def report(self) -> dict[str, Any]:
        """Return the completions of each prompt."""
        written = list(map(self._write, range(len(self._jobs))))
        size, own = self._body.n, self._num_own
        results = [
            {
                "completions": written[start : start + size],
                "baseline": written[own + start : own + start + size] or None,
                "prompt_ids": self._jobs[start].tokens,
                "truncated_tokens": self._truncated[start // size],
            }
            for start in range(0, own, size)
        ]
        return {"results": self._problems.fill(results, self.request_id)}


class SteerTask(GenerationTask[SteerRequest]):
    """Continuations of prompts under steering, with a receipt of the changes."""

    kind = "steer"


class GenerateTask(GenerationTask[GenerateRequest]):
    """Continuations of prompts, with the sampling policy's diagnostics on request."""

    kind = "generate"
