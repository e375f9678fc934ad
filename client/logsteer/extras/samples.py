"""Many samples of many prompts, with their rewards: what `Client.sample` gives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from pydantic import ValidationError

from logsteer.errors import AnswerError, LogsteerError
from logsteer.extras.datasets import PromptRow
from logsteer.extras.rows import load_pandas
from logsteer.schemas import Completion, PromptCompletions

if TYPE_CHECKING:
    import pandas as pd


class DrawnPrompt(PromptCompletions):
    """One drawn prompt with its continuations.

    `rewards` and `reward_errors` have an entry for each continuation; they are None where no
    reward was asked for, and where none has failed.
    """

    index: int
    rewards: list[float | None] | None = None
    reward_errors: list[str | None] | None = None


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
    """Samples in the order of their prompts; `failures` says which prompts have none, and why.

    `draws` are fields of `DrawnPrompt`, read when they are needed. Reading raises AnswerError
    for anything else.
    """

    def __init__(
        self,
        draws: Sequence[Mapping[str, Any]],
        prompts: Sequence[PromptRow],
        n: int,
        failures: Sequence[SampleFailure] = (),
        places: range | None = None,
    ) -> None:
        self._draws = draws
        self._prompts = prompts
        self._n = n
        self.failures = list(failures)
        self._places = range(len(draws) * n) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sample]:
        last, draw = -1, None
        for place in self._places:
            # Each is read once for all its samples.
            if draw is None or place // self._n != last:
                last = place // self._n
                draw = self._read(last)
            yield self._sample(draw, place % self._n)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> "Samples": ...
    def __getitem__(self, place: int | slice) -> "Sample | Samples":
        found = self._places[place]
        if isinstance(found, range):
            return Samples(self._draws, self._prompts, self._n, self.failures, found)
        return self._sample(self._read(found // self._n), found % self._n)

    def _read(self, place: int) -> DrawnPrompt:
        try:
            return DrawnPrompt.model_validate(self._draws[place])
        except ValidationError as error:
            raise AnswerError(f"what the server sent is not a sample: {error}") from error

    def _sample(self, draw: DrawnPrompt, number: int) -> Sample:
        return Sample(
            draw.index,
            self._prompts[draw.index],
            draw.completions[number],
            draw.prompt_ids,
            None if draw.rewards is None else draw.rewards[number],
            None if draw.reward_errors is None else draw.reward_errors[number],
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a flat record of each: prompt, text, reward, arrays by token, aggregates, row."""
        return [_flatten(sample) for sample in self]

    def to_pandas(self) -> "pd.DataFrame":
        """Return the records as a table. Errors: ImportError that says what to install."""
        frame: pd.DataFrame = load_pandas().DataFrame(self.records())
        return frame


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
