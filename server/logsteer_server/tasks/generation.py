"""`/steer` and `/generate`: continuations of prompts, with what the sampling policy saw."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import numpy as np

from logsteer.schemas import (
    ALL_COLUMNS,
    GenerateRequest,
    Message,
    PromptRequest,
    SteerRequest,
    list_conversations,
)
from logsteer_server.contract.jobs import (
    GenerateJob,
    GenerateOutput,
    Policy,
    ScoreOutput,
    draw_seed,
)
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.settings import Settings
from logsteer_server.tasks.continuations import (
    Continuations,
    Prompts,
    find_longest_prompt,
    plan_continuations,
)
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.problems import ItemProblems
from logsteer_server.tasks.run import Batch, BodyTask, Event, check_count, take_each
from logsteer_server.text.chat import ChatForm

P = TypeVar("P", bound=PromptRequest)
NO_TOKENS = np.zeros(0, dtype=np.int32)


class GenerationTask(BodyTask[P]):
    """Continues prompts, and tells of each token what it was drawn from."""

    _problems: ItemProblems
    _truncated: list[int]
    _continuations: Continuations

    @property
    def columns(self) -> list[str]:
        """Columns that the completions show."""
        return list(self._body.columns or ())

    @property
    def window(self) -> int | None:
        """What `early` and `late` aggregates are over; None without aggregates."""
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
        """The conversations to continue, where there are some."""
        return list_conversations(self._body.messages) if self._body.messages else []

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Generate everything in one batch; in another, probes read the last tokens."""
        body = self._body
        planner.cover_text(find_longest_prompt(body.prompts or [], self._conversations))
        self._continuations = await planner.advance(self._plan())
        if not self._continuations.jobs:  # each prompt has a problem
            return
        tokens = len(self._continuations.jobs) * body.max_tokens
        planner.expect_rows(tokens, 1 + len(self.columns))
        contexts = [job.prompt_len for job in self._continuations.jobs]
        planner.expect_readings(self.interventions, len(contexts), tokens, sum(contexts))
        yield Batch(self._continuations.jobs, take_each(self._take))
        if self.interventions.probes:
            ends = self._continuations.read_ends()
            yield Batch(ends, take_each(self._take_end), purpose="reference", silent=True)

    def _plan(self) -> Steps[Continuations]:
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
            Policy(body.temperature, body.top_k, body.top_p, body.min_p),
            seed=draw_seed() if body.seed is None else body.seed,
            stop=tuple(body.stop),
            include_stop=body.include_stop,
            ignore_eos=body.ignore_eos,
            stream=body.stream,
            columns=tuple(self.columns),
            double=body.precision == "float64",
        )
        steps = plan_continuations(prompts, first, body.n, self.codec, self.info, self._problems)
        plain, self._truncated = yield from steps
        self.interventions = interventions
        baseline: Sequence[GenerateJob] = []
        if self.has_baseline:
            baseline = yield from interventions.unsteered.apply(plain)
        steered = (yield from interventions.apply(plain)) if plain else []
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
    """Continuations of prompts under steering, with a receipt of what was done."""

    kind = "steer"

    @property
    def has_baseline(self) -> bool:
        """Whether everything is also continued without steering."""
        return self._body.baseline


class GenerateTask(GenerationTask[GenerateRequest]):
    """Continuations of prompts, with what the sampling policy saw where asked for."""

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
