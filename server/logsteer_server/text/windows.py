"""Window protocols: which tokens a model reads, and which of them it scores.

A cutter takes a text's tokens in pieces of any size and gives each window as soon as all of its
tokens are there, so a text of any length is cut in bounded memory. The pictures show a context
length of 4, `.` for a token that is read only and a digit for one that is scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from logsteer.errors import api_error
from logsteer.schemas import BosPolicy, Protocol
from logsteer.schemas.perplexity import DEFAULT_ROWS, WindowOptions


@dataclass(frozen=True, slots=True)
class Windowing:
    """How a text is cut into windows, as `WindowOptions` says; None: set by `fit`."""

    protocol: Protocol = "sliding"
    context_length: int | None = None
    stride: int | None = None
    rows: int | None = None
    bos: BosPolicy = "auto"

    @classmethod
    def of(cls, options: WindowOptions) -> "Windowing":
        """Return the windowing of a request's fields."""
        return cls(
            options.protocol, options.context_length, options.stride, options.rows, options.bos
        )

    def fit(self, limit: int) -> "Windowing":
        """Return the windowing with every number, for a model that reads `limit` tokens.

        Errors: APIError `context_too_long`, `invalid_request` for numbers that do not fit.
        """
        length = self.context_length or limit
        if length > limit:
            detail = (
                f"context_length {length} is more than the {limit} tokens that "
                "this model reads; send a smaller one."
            )
            raise api_error("context_too_long", detail, param="context_length")
        slides = self.protocol == "sliding"
        stride = self.stride or (max(1, length // 2) if slides else length)
        if slides and stride > length:
            detail = f"stride {stride} is more than context_length {length}; lower it."
            raise api_error("invalid_request", detail, param="stride")
        rows = self.rows or DEFAULT_ROWS if self.protocol == "exl3" else None
        return replace(self, context_length=length, stride=stride, rows=rows)


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
    """Cuts one sequence of tokens into windows of at most `context_length` tokens.

    Each begins `stride` tokens after the one before; None: where that ends.
    """

    prefix_id: int | None = None
    """The token before a text that does not begin with it."""

    def __init__(self, context_length: int, stride: int | None = None) -> None:
        self.context_length = context_length
        self.stride = stride or context_length
        self.count = 0
        self.begin = 0
        """Where the next window begins: no token before it will be scored."""
        self._kept: list[int] = []
        self._kept_from = 0

    def feed(self, ids: Sequence[int]) -> list[Window]:
        """Return windows that these tokens complete."""
        self._kept.extend(ids)
        self.count += len(ids)
        windows = list(self._cut_full())
        # No later window reads the tokens before these.
        keep_from = max(self._kept_from, self.begin - self.context_length - 1)
        keep_from = min(keep_from, self.count)
        del self._kept[: keep_from - self._kept_from]
        self._kept_from = keep_from
        return windows

    def finish(self) -> list[Window]:
        """Return the windows that are left when no more tokens come."""
        return list(self._cut_rest())

    def _tokens(self, start: int, end: int) -> list[int]:
        return self._kept[start - self._kept_from : end - self._kept_from]

    def _cut_full(self) -> Iterator[Window]:
        while self.count >= self.begin + self.context_length:
            window = self._cut(self.begin, self.begin + self.context_length)
            self.begin += self.stride
            if window.targets:
                yield window

    def _cut(self, begin: int, end: int) -> Window:
        raise NotImplementedError

    def _cut_rest(self) -> Iterator[Window]:
        yield from ()


class SlidingCutter(WindowCutter):
    """Windows moved by `stride`; only tokens not scored before count.

    The perplexity guide of Hugging Face transformers, each token counted once. With a stride of 2:

        .123
          ..45
            ..67

    A window never scores its own first token, so with stride = context_length one token a window
    goes unscored.
    """

    def __init__(self, context_length: int, stride: int) -> None:
        super().__init__(context_length, stride)
        self._scored_to = 0

    def _cut(self, begin: int, end: int) -> Window:
        first = max(self._scored_to, begin + 1)
        self._scored_to = end
        return Window(begin, end, self._tokens(begin, end - 1), self._tokens(first, end))

    def _cut_rest(self) -> Iterator[Window]:
        if self.count > max(self._scored_to, self.begin + 1):
            yield self._cut(self.begin, self.count)


class RollingCutter(WindowCutter):
    """Disjoint windows that each read one token before the first that they score.

    `loglikelihood_rolling` of lm-evaluation-harness with a context of one token. The first window
    reads the prefix token P, and the last is filled up with earlier tokens:

        P0 1 2 3        reads P 0 1 2, scores 0 1 2 3
               4 5 6 7  reads 3 4 5 6, scores 4 5 6 7
                   8 9  reads 5 6 7 8, scores 8 9
    """

    prefix_id: int

    def __init__(self, context_length: int, prefix_id: int) -> None:
        super().__init__(context_length)
        self.prefix_id = prefix_id

    def _cut(self, begin: int, end: int) -> Window:
        targets = self._tokens(begin, end)
        if begin == 0:
            return Window(0, end, [self.prefix_id, *targets[:-1]], targets)
        start = end - 1 - self.context_length
        return Window(start, end, self._tokens(start, end - 1), targets)

    def _cut_rest(self) -> Iterator[Window]:
        if self.count > self.begin:
            yield self._cut(self.begin, self.count)


class DisjointCutter(WindowCutter):
    """Windows side by side, first token of each unscored, tail dropped.

    The perplexity in the evaluation scripts of GPTQ and AWQ:

        .123
            .567
    """

    def _cut(self, begin: int, end: int) -> Window:
        tokens = self._tokens(begin, end)
        return Window(begin, end, tokens[:-1], tokens[1:])


class LlamaCppCutter(WindowCutter):
    """Windows side by side, BOS over the first token, second half of each scored, tail dropped.

    `llama-perplexity`: of a window of n tokens those from n/2 + 1 on are scored, and a text must
    fill two windows. Errors: APIError `invalid_request` from `finish` where it does not.

        B..3
            B..7
    """

    def __init__(self, context_length: int, bos_id: int | None) -> None:
        super().__init__(context_length)
        self._bos_id = bos_id

    def _cut_full(self) -> Iterator[Window]:
        return super()._cut_full() if self.count >= 2 * self.context_length else iter(())

    def _cut(self, begin: int, end: int) -> Window:
        tokens = self._tokens(begin, end)
        targets = tokens[self.context_length // 2 + 1 :]
        if self._bos_id is not None:
            tokens[0] = self._bos_id
        return Window(begin, end, tokens[:-1], targets)

    def _cut_rest(self) -> Iterator[Window]:
        if self.count < 2 * self.context_length:
            detail = (
                f"protocol llamacpp needs at least {2 * self.context_length} tokens (two windows); "
                f"this text has {self.count}. Send a smaller context_length or another protocol."
            )
            raise api_error("invalid_request", detail)
        yield from ()


class Exl3Cutter(WindowCutter):
    """At most `rows` windows moved by `stride`, first token of each unscored, tail dropped.

    `eval/ppl.py` of ExLlamaV3: every window (a row there) scores all of its tokens but the first,
    again where windows overlap; none of them has the text's last token. With 2 rows:

        .123
            .567      needs 9 tokens or more

    The script moves by 2048 whatever its length is, and its softmax leaves out logits that no token
    of the tokenizer has; here they count, as everywhere.
    """

    def __init__(self, context_length: int, stride: int, rows: int) -> None:
        super().__init__(context_length, stride)
        self._rows_left = rows

    def _cut_full(self) -> Iterator[Window]:
        while self._rows_left and self.count > self.begin + self.context_length:
            yield self._cut(self.begin, self.begin + self.context_length)
            self.begin += self.stride
            self._rows_left -= 1
        if not self._rows_left:
            self.begin = self.count + self.context_length + 1

    def _cut(self, begin: int, end: int) -> Window:
        tokens = self._tokens(begin, end)
        return Window(begin, end, tokens[:-1], tokens[1:])


def make_cutter(windowing: Windowing, special_id: int | None) -> WindowCutter:
    """Make a cutter for one text, of a windowing that is fitted to a model.

    `special_id` is the prefix token of `rolling`, which needs one, and the BOS of `llamacpp` (None:
    the first token stays).
    """
    length, stride = windowing.context_length, windowing.stride
    assert length is not None and stride is not None, "fit has not been called"
    match windowing.protocol:
        case "sliding":
            return SlidingCutter(length, stride)
        case "disjoint":
            return DisjointCutter(length)
        case "exl3":
            assert windowing.rows is not None
            return Exl3Cutter(length, stride, windowing.rows)
        case "llamacpp":
            return LlamaCppCutter(length, special_id)
        case "rolling":
            if special_id is None:
                raise ValueError("the rolling protocol needs a prefix token")
            return RollingCutter(length, special_id)
