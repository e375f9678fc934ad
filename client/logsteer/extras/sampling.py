"""Samples of many prompts, with their rewards: what `Client.sample` gives, and how it gets them."""

import asyncio
import inspect
import math
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, overload

from logsteer._calls import NOT_GIVEN, read_request
from logsteer._progress import CountingProgress
from logsteer.errors import DIVISIBLE, AnswerError, InvalidRequestError, LogsteerError
from logsteer.extras.datasets import (
    PromptRow,
    Row,
    Source,
    check_counts,
    draw_prompts,
    read_prompts,
)
from logsteer.extras.rows import to_frame
from logsteer.schemas import Completion, GenerateAnswer, GenerateRequest

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of one prompt; `index` is the prompt's place among those drawn.

    `prompt_ids` is the prompt as the model read it. A `reward` that failed is None, and
    `reward_error` says why.
    """

    index: int
    source: PromptRow
    completion: Completion
    prompt_ids: list[int]
    reward: float | None
    reward_error: str | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """Drawn prompts, by their places, that were not continued, and why."""

    draws: range
    error: LogsteerError

    def __str__(self) -> str:
        """Return both in one line."""
        last = f" to {self.draws[-1]}" if len(self.draws) > 1 else ""
        return f"draw {self.draws[0]}{last}: {self.error}"


class Samples(Sequence[Sample]):
    """Samples in the order of their prompts; `failures` says which prompts have none, and why."""

    def __init__(self, samples: Sequence[Sample], failures: Sequence[SampleFailure] = ()) -> None:
        self._samples = samples
        self.failures = list(failures)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> "Samples": ...
    def __getitem__(self, place: int | slice) -> "Sample | Samples":
        found = self._samples[place]
        return found if isinstance(found, Sample) else Samples(found, self.failures)

    def records(self) -> list[dict[str, Any]]:
        """Return a flat record of each: prompt, text, reward, arrays by token, aggregates, row."""
        return [_flatten(sample) for sample in self]

    def to_pandas(self) -> "pd.DataFrame":
        """Return the records as a table. Errors: ImportError that says what to install."""
        return to_frame(self.records())


def _flatten(sample: Sample) -> dict[str, Any]:
    completion = sample.completion
    record: dict[str, Any] = {
        "index": sample.index,
        "prompt": sample.source.prompt,
        "prompt_ids": sample.prompt_ids,
        "prompt_length": sample.prompt_length,
        "text": completion.text,
        "reward": sample.reward,
        "reward_error": sample.reward_error,
        "logprob": completion.logprob,
        "num_tokens": completion.num_tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }
    record |= completion.columns or {}
    for name, aggregate in (completion.aggregates or {}).items():
        record[f"{name}_mean"] = aggregate.mean
    return {f"row_{name}": value for name, value in sample.source.row.items()} | record


Reward: TypeAlias = Callable[[Row, str, str], float | Awaitable[float]]
"""A number for a row of the source, its prompt, and the text of one continuation; or what is
awaited for it."""


def check_reward(reward: Reward) -> None:
    """Refuse what cannot be called as a reward is; one that does not say how it is called passes.

    Raises InvalidRequestError.
    """
    try:
        inspect.signature(reward).bind({}, "", "")
    except ValueError:  # it has no signature, as some functions written in C
        return
    except TypeError as error:
        detail = f"a reward is called with (row, prompt, text), and {reward!r} is not: {error}"
        raise InvalidRequestError("invalid_request", detail, param="reward") from error


class Rating(NamedTuple):
    """A reward, or None and the reason."""

    value: float | None
    error: str | None = None


async def rate(reward: Reward, row: Row, prompt: str, text: str) -> Rating:
    """Return the rating of one text.

    An exception of the function, and a value that is not finite, are that text's alone.
    """
    try:
        value = reward(row, prompt, text)
        # Most are numbers, and asking whether one can be awaited takes longer than all else here.
        if not isinstance(value, float | int) and inspect.isawaitable(value):
            value = await value
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"the reward is {number}")
    except Exception as error:
        return Rating(None, f"{type(error).__name__}: {error}")
    return Rating(number)


class SamplingRun:
    """The state of one run: what is to be asked for, what came, and what failed.

    A draw is a prompt's place among those drawn. The continuations of draw i have the seeds
    from seed + i n on, whatever batch it is sent in. After `max_failures` failed batches in a row
    no further one is begun.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: Source,
        field: str,
        count: int | None,
        with_replacement: bool,
        max_prompts_pool: int | None,
        reward: Reward | None,
        batch_size: int,
        concurrency: int,
        max_failures: int,
        progress: bool,
    ) -> None:
        optional = {"count": count, "max_prompts_pool": max_prompts_pool}
        check_counts(
            batch_size=batch_size,
            concurrency=concurrency,
            max_failures=max_failures,
            **{name: value for name, value in optional.items() if value is not None},
        )
        if reward is not None:
            check_reward(reward)
        self.concurrency = concurrency
        self._reward, self._max_failures = reward, max_failures
        given = {name: value for name, value in values.items() if value is not NOT_GIVEN}
        self._seed: int = 0 if given.get("seed") is None else given["seed"]
        self._values = {**given, "seed": self._seed}
        pool = read_prompts(source, field, max_prompts_pool)
        self._prompts = draw_prompts(pool, count, with_replacement, self._seed)
        self._field = "prompts" if pool[0].messages is None else "messages"
        if any((row.messages is None) != (self._field == "prompts") for row in pool):
            detail = "the source has texts and conversations; sample them one after the other"
            raise InvalidRequestError("invalid_request", detail, param="source")
        first = [pool[0].messages or pool[0].prompt]
        request = read_request("generate", {**self._values, self._field: first})
        assert isinstance(request, GenerateRequest), "what the endpoint takes"
        self._n = request.n
        self._draws: dict[int, list[Sample]] = {}
        self._answered_by: tuple[str, str] | None = None
        draws = range(len(self._prompts))
        self._batches = (draws[at : at + batch_size] for at in draws[::batch_size])
        self._halves: list[range] = []
        self._failures: list[SampleFailure] = []
        self._failed_in_a_row = 0
        self._reward_errors: list[str] = []
        self.bar = CountingProgress("sampling prompts", len(self._prompts), 0, progress)

    def next_batch(self) -> range | None:
        """Return the draws to ask for next; None where all were drawn, or too many failed."""
        if self._failed_in_a_row >= self._max_failures:
            return None
        return self._halves.pop() if self._halves else next(self._batches, None)

    def arguments(self, batch: range) -> dict[str, Any]:
        """Return the arguments of the call of `generate` for these draws."""
        own = [self._prompts[index] for index in batch]
        given = [row.messages or row.prompt for row in own]
        seed = self._seed + batch.start * self._n
        return {**self._values, "prompts": None, self._field: given, "seed": seed}

    async def rate(self, batch: range, answer: GenerateAnswer) -> list[Rating]:
        """Return the rating of each continuation; none if not asked for.

        Raises AnswerError where there are not `n` continuations for each draw, and for those of
        another model than before.
        """
        sizes = [len(result.completions) for result in answer.results]
        if sizes != [self._n] * len(batch):
            raise AnswerError(
                f"asked for {self._n} continuations of {len(batch)} prompts, got {sizes}: a fault "
                "of the server",
                request_id=answer.id,
            )
        answered_by = answer.model, answer.provenance.weights_digest
        self._answered_by = self._answered_by or answered_by
        if answered_by != self._answered_by:
            raise AnswerError(
                f"another model than before has answered: {answered_by}, not {self._answered_by}",
                request_id=answer.id,
            )
        if self._reward is None:
            return []
        return await asyncio.gather(*(
            rate(self._reward, drawn.row, drawn.prompt, completion.text)
            for drawn, result in zip(
                self._prompts[batch.start : batch.stop], answer.results, strict=True
            )
            for completion in result.completions
        ))  # fmt: skip

    def keep(self, batch: range, answer: GenerateAnswer, ratings: Sequence[Rating]) -> None:
        """Keep the samples of these draws."""
        rated = iter(ratings)
        for index, result in zip(batch, answer.results, strict=True):
            self._draws[index] = [
                Sample(
                    index, self._prompts[index], completion, result.prompt_ids,
                    *next(rated, Rating(None)),
                )
                for completion in result.completions
            ]  # fmt: skip
        self._reward_errors += [rating.error for rating in ratings if rating.error]
        self._failed_in_a_row = 0
        self.bar.count(len(batch))

    def fail(self, batch: range, error: LogsteerError) -> None:
        """Note why these draws failed; halve them where a part may have been refused."""
        if isinstance(error, DIVISIBLE) and len(batch) > 1:
            middle = batch.start + len(batch) // 2
            self._halves += [range(middle, batch.stop), range(batch.start, middle)]
            return
        self._failures.append(SampleFailure(batch, error))
        self._failed_in_a_row += 1

    def finish(self) -> Samples:
        """Return what came, and warn of what did not.

        Raises the first batch's error where there is no draw.
        """
        if self._failures and not self._draws:
            raise self._failures[0].error
        left = LogsteerError(f"not asked for: {self._failed_in_a_row} batches in a row had failed")
        self._failures += [SampleFailure(b, left) for b in (*self._halves, *self._batches)]
        self._failures.sort(key=lambda failure: failure.draws.start)
        if self._failures:
            lost = sum(len(failure.draws) for failure in self._failures)
            warnings.warn(
                f"{lost} of {len(self._prompts)} draws have no samples (see `failures`): "
                f"{self._failures[0]}",
                stacklevel=4,
            )
        if self._reward_errors:
            warnings.warn(
                f"{len(self._reward_errors)} rewards failed (see `reward_error`): "
                f"{self._reward_errors[0]}",
                stacklevel=4,
            )
        samples = [sample for index in sorted(self._draws) for sample in self._draws[index]]
        return Samples(samples, self._failures)


T = TypeVar("T")
_Rated: TypeAlias = tuple[GenerateAnswer, list[Rating]]


def sample_in_threads(run: SamplingRun, ask: Callable[..., GenerateAnswer]) -> None:
    """Send the batches of a run from threads; see `sample_in_tasks`."""
    pool = ThreadPoolExecutor(run.concurrency, "logsteer-sample")

    async def draw(**values: Any) -> GenerateAnswer:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(ask, **values))

    try:
        run_anywhere(sample_in_tasks(run, draw))
    finally:
        # Whoever interrupts does not wait for what is under way.
        pool.shutdown(wait=False, cancel_futures=True)


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a thread where an event loop runs already, as in a notebook.

    Errors: those of the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "logsteer-loop") as pool:
        return pool.submit(asyncio.run, work).result()


async def sample_in_tasks(run: SamplingRun, ask: Callable[..., Awaitable[GenerateAnswer]]) -> None:
    """Send the batches of a run, some at once, and await the rewards of each behind its answer."""
    under_way: dict[asyncio.Task[_Rated], range] = {}

    async def work(batch: range) -> _Rated:
        answer = await ask(**run.arguments(batch))
        return answer, await run.rate(batch, answer)

    def begin() -> None:
        while len(under_way) < run.concurrency and (batch := run.next_batch()):
            under_way[asyncio.create_task(work(batch))] = batch

    with run.bar:
        try:
            begin()
            while under_way:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    batch = under_way.pop(task)
                    try:
                        answer, ratings = task.result()
                    except LogsteerError as error:
                        run.fail(batch, error)
                    else:
                        run.keep(batch, answer, ratings)
                begin()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
