"""Many samples of many prompts, with their rewards: what `Client.sample` gives."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from logsteer._parameters import NOT_GIVEN
from logsteer._progress import SamplingProgress
from logsteer.extras.datasets import PromptRow, Source, draw_prompts, read_prompts
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
        """Return a flat record of each: prompt, text, reward, arrays by token, aggregates, row."""
        return [_flatten(sample) for sample in self._samples]

    def to_pandas(self) -> "pd.DataFrame":
        """Return the records as a table. Errors: ImportError that says what to install."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("tables need pandas: pip install 'logsteer[datasets]'") from error
        return pd.DataFrame(self.records())

    def to_parquet(self, path: str | Path) -> None:
        """Write the table to a file. Errors: ImportError, OSError."""
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


def draw_samples(
    options: Mapping[str, Any],
    source: Source,
    field: str,
    count: int | None,
    with_replacement: bool,
    reward: Reward | None,
    batch_size: int,
    progress: bool,
) -> Generator[dict[str, Any], GenerateAnswer, Samples]:
    """Yield the arguments of each call of `generate`, be sent its answer, and return the samples.

    The arguments are those of `Client.sample`. The first completion of a call has the seed that
    follows those of the samples that are there: with `seed` 5 and 32 samples, 37.
    """
    seed = options["seed"]
    seed = 0 if seed is NOT_GIVEN or seed is None else seed
    prompts = draw_prompts(read_prompts(source, field), count, with_replacement, seed)
    samples: list[Sample] = []
    with SamplingProgress(len(prompts), progress) as bar:
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            texts = [row.prompt for row in batch]
            answer = yield {**options, "prompts": texts, "seed": seed + len(samples)}
            samples += _collect(first, batch, answer, reward)
            bar.advance(len(batch))
    return Samples(samples)


def _collect(
    first: int, prompts: Sequence[PromptRow], answer: GenerateAnswer, reward: Reward | None
) -> list[Sample]:
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
