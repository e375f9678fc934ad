"""Window protocols: which tokens a model reads, and which of them it scores.

A cutter accepts a text's tokens in pieces of any size and returns each window as soon as it has all
of its tokens, so that a text of any length is cut in bounded memory. The pictures show a context
length of 4, `.` for a token that is only read and a digit for one that is scored.

`sliding`: windows moved by `stride`; only tokens not scored before count. The perplexity guide of
Hugging Face transformers, each token counted once. With a stride of 2:

    .123
      ..45
        ..67

A window never scores its own first token, so with stride = context_length one token a window goes
unscored.

`rolling`: disjoint windows that each read one token before the first that they score.
`loglikelihood_rolling` of lm-evaluation-harness with a context of one token. The first window reads
the prefix token P, and the last is filled up with earlier tokens:

    P0 1 2 3        reads P 0 1 2, scores 0 1 2 3
           4 5 6 7  reads 3 4 5 6, scores 4 5 6 7
               8 9  reads 5 6 7 8, scores 8 9

`disjoint`: windows side by side, first token of each unscored, tail dropped. The perplexity in the
evaluation scripts of GPTQ and AWQ:

    .123
        .567

`llamacpp`: windows side by side, BOS over the first token, second half of each scored, no tail.
`llama-perplexity`: of a window of n tokens those from n/2 + 1 on are scored, and a text must fill
two windows:

    B..3
        B..7

`exl3`: at most `rows` windows moved by `stride`, first token of each unscored, tail dropped.
`eval/ppl.py` of ExLlamaV3: every window (a row there) scores all of its tokens but the first, again
where windows overlap; none of them has the text's last token. With 2 rows:

    .123
        .567      needs 9 tokens or more

The script moves by 2048 whatever its length is, and its softmax leaves out logits that no token of
the tokenizer has; here they count, as everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from logsteer.errors import api_error
from logsteer.schemas.perplexity import DEFAULT_ROWS, WindowOptions


def fit_windows(options: WindowOptions, limit: int) -> WindowOptions:
    """Return the options with all numbers set, for a model with a context of `limit` tokens.

    Errors: APIError `context_too_long`, `invalid_request` for numbers that do not fit.
    """
    length = options.context_length or limit
    if length > limit:
        detail = (
            f"context_length {length} is more than the {limit} tokens that "
            "this model reads; send a smaller one."
        )
        raise api_error("context_too_long", detail, param="context_length")
    slides = options.protocol == "sliding"
    stride = options.stride or (max(1, length // 2) if slides else length)
    if slides and stride > length:
        detail = f"stride {stride} is more than context_length {length}; lower it."
        raise api_error("invalid_request", detail, param="stride")
    rows = options.rows or DEFAULT_ROWS if options.protocol == "exl3" else None
    return options.model_copy(update={"context_length": length, "stride": stride, "rows": rows})


@dataclass(frozen=True, slots=True)
class Window:
    """A window over a text's tokens [start, end); the last `targets` of it are scored.

    The model reads `tokens`; target r follows token len(tokens) - len(targets) + r. `first_scored`
    is the position of targets[0].
    """

    start: int
    end: int
    tokens: Sequence[int]
    targets: Sequence[int]

    @property
    def first_scored(self) -> int:
        """The position in the text of the first scored token."""
        return self.end - len(self.targets)


class WindowCutter:
    """Cut one text into the windows of a protocol.

    `windowing`: from `fit_windows`. `special_id`: the prefix token of `rolling`, which needs one,
    or the BOS of `llamacpp` (None: keep the first token).
    """

    def __init__(self, windowing: WindowOptions, special_id: int | None) -> None:
        length, stride, protocol = windowing.context_length, windowing.stride, windowing.protocol
        assert length is not None and stride is not None, "fit_windows has not been called"
        self.context_length = length
        self.stride = stride
        self.count = 0
        self.begin = 0
        """Start of the next window; no token before it will be scored."""
        self.prefix_id = special_id if protocol == "rolling" else None
        """The token to insert before the text; None if the text begins with it."""
        self._first_id = special_id if protocol == "llamacpp" else None
        """The token that replaces the first of each window."""
        self._num_unscored = {"rolling": 0, "llamacpp": length // 2 + 1}.get(protocol, 1)
        """Tokens at the start of a window that it does not score."""
        self._has_tail = protocol in ("sliding", "rolling")
        self._needs_next = protocol == "exl3"
        """Whether a window needs a token after it."""
        self._scores_again = protocol == "exl3"
        self._min_count = 2 * length if protocol == "llamacpp" else 0
        self._rows_left = windowing.rows
        self._scored_to = 0
        self._kept: list[int] = []
        self._kept_from = 0

    def feed(self, ids: Sequence[int]) -> list[Window]:
        """Add tokens; return the windows that they complete."""
        self._kept.extend(ids)
        self.count += len(ids)
        windows: list[Window] = []
        while self._rows_left != 0 and self.count >= max(
            self._min_count, self.begin + self.context_length + self._needs_next
        ):
            windows += self._cut(self.begin + self.context_length)
            self.begin += self.stride
            if self._rows_left is not None:
                self._rows_left -= 1
        if self._rows_left == 0:
            self.begin = self.count + self.context_length + 1
        # No later window reads the tokens before these.
        keep_from = max(self._kept_from, self.begin - self.context_length - 1)
        keep_from = min(keep_from, self.count)
        del self._kept[: keep_from - self._kept_from]
        self._kept_from = keep_from
        return windows

    def finish(self) -> list[Window]:
        """End the text; return the remaining windows.

        Errors: APIError `invalid_request` if a text of `llamacpp` does not fill two windows.
        """
        if self.count < self._min_count:
            detail = (
                f"protocol llamacpp needs at least {self._min_count} tokens (two windows); "
                f"this text has {self.count}. Send a smaller context_length or another protocol."
            )
            raise api_error("invalid_request", detail)
        return self._cut(self.count) if self._has_tail else []

    def _cut(self, end: int) -> list[Window]:
        """Return the window from `begin` to `end`, unless it scores nothing."""
        start = first = self.begin
        first += self._num_unscored
        if not self._scores_again:
            first = max(first, self._scored_to)
        if first >= end:
            return []
        self._scored_to = end
        if self.prefix_id is not None:
            start = max(0, end - 1 - self.context_length)
        tokens = self._slice(start, end - 1)
        if self.prefix_id is not None and not self.begin:
            tokens.insert(0, self.prefix_id)
        if self._first_id is not None:
            tokens[0] = self._first_id
        return [Window(start, end, tokens, self._slice(first, end))]

    def _slice(self, start: int, end: int) -> list[int]:
        return self._kept[start - self._kept_from : end - self._kept_from]
