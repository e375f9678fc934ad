"""A teacher's log-probabilities as numpy arrays: what `Client.teacher` gives.

Axis letters: B sequences, T tokens of the longest completion, N tokens of all completions, K tokens
listed of each.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from logsteer.errors import AnswerError
from logsteer.extras.tensors import read_tensors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.floating[Any]]
    Ids: TypeAlias = npt.NDArray[np.int32]


class TeacherScores:
    """The teacher's log-probabilities at every token after the prompts of B sequences, in nats.

    Rows are those of all sequences in order: of sequence b `row_starts[b]` to `row_starts[b + 1]`.
    `token_ids` and `logprobs` [N] are of the tokens themselves, `top_ids` and `top_logprobs` [N, K]
    of the most probable ones, `alternatives` [N, K] of the requested ones; `top_tail` and
    `alternatives_tail` [N] are the mass of all other tokens. None: not requested. `answer` has the
    server's usage, provenance and receipts.
    """

    def __init__(self, file: bytes) -> None:
        import numpy as np

        try:
            arrays, metadata = read_tensors(file)
            self.answer: dict[str, Any] = json.loads(metadata["answer"])
            targets = [result["targets"][0] for result in self.answer["results"]]
            self.row_starts: Ids = arrays["row_starts"]
            ids = [number for target in targets for number in target["token_ids"]]
            read = [target.get("logprobs") or target["columns"]["log_q"] for target in targets]
            own = [value for values in read for value in values]
        except (KeyError, ValueError, TypeError) as error:
            raise AnswerError(f"no file of a teacher: {error}") from error
        self.token_ids: Ids = np.array(ids, np.int32)
        self.logprobs: Floats = np.array(own, np.float32)
        self.top_ids: Ids | None = arrays.get("top_ids")
        self.top_logprobs: Floats | None = arrays.get("top_logprobs")
        self.top_tail: Floats | None = arrays.get("top_tail")
        self.alternatives: Floats | None = arrays.get("alternatives")
        self.alternatives_tail: Floats | None = arrays.get("alternatives_tail")

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def pad(self, name: str, value: float = 0.0) -> Any:
        """Return the array of this name as [B, T] or [B, T, K], filled up at the right."""
        import numpy as np

        array = getattr(self, name)
        lengths = np.diff(self.row_starts)
        padded = np.full((len(self), int(lengths.max()), *array.shape[1:]), value, array.dtype)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = array
        return padded


def list_items(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    alternatives: Sequence[Any] | None,
) -> list[dict[str, Any]]:
    """Return the sequences as items of `/logprob`. Errors: ValueError where lengths differ."""
    items: list[dict[str, Any]] = []
    for ids, length in zip(sequences, prompt_lengths, strict=True):
        own = list(map(int, ids))
        items.append({"context_ids": own[:length], "target_ids": [own[length:]]})
    if alternatives is not None:
        for item, listed in zip(items, alternatives, strict=True):
            item["alternatives"] = [listed.tolist() if hasattr(listed, "tolist") else listed]
    return items
