"""Many samples of many prompts, with their rewards: what `Client.sample` gives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from logsteer.extras.datasets import PromptRow
from logsteer.schemas import Completion, GenerateAnswer

if TYPE_CHECKING:
    import pandas as pd

Reward: TypeAlias = Callable[[str, str], float]
"""A number for a prompt and the text of its continuation."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of one prompt; `index` is the prompt's place among those drawn."""

    index: int
    source: PromptRow
    completion: Completion
    reward: float | None


class Samples(Sequence[Sample]):
    """Samples in the order of their prompts."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> "Samples": ...
    def __getitem__(self, place: int | slice) -> "Sample | Samples":
        found = self._samples[place]
        return found if isinstance(found, Sample) else Samples(found)

    def records(self) -> list[dict[str, Any]]:
        """A flat record of each: prompt, text, reward, arrays by token, aggregates, the row."""
        return [_flatten(sample) for sample in self._samples]

    def to_pandas(self) -> "pd.DataFrame":
        """The records as a table. Errors: ImportError that says what to install."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("tables need pandas: pip install 'logsteer[datasets]'") from error
        return pd.DataFrame(self.records())

    def to_parquet(self, path: str | Path) -> None:
        """Nothing; the table is in the file. Errors: ImportError, OSError."""
        self.to_pandas().to_parquet(path)


def _flatten(sample: Sample) -> dict[str, Any]:
    completion = sample.completion
    record: dict[str, Any] = {
        "index": sample.index,
        "prompt": sample.source.prompt,
        "text": completion.text,
        "reward": sample.reward,
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


def collect(
    first: int, prompts: Sequence[PromptRow], answer: GenerateAnswer, reward: Reward | None
) -> list[Sample]:
    """The samples of one answer, whose first prompt is the `first` of those drawn."""
    return [
        Sample(
            first + place,
            prompt,
            completion,
            None if reward is None else float(reward(prompt.prompt, completion.text)),
        )
        for place, (prompt, result) in enumerate(zip(prompts, answer.results, strict=True))
        for completion in result.completions
    ]
