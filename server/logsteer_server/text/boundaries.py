r"""Where a target begins: contexts and targets as text, cut into tokens.

Joint encoding follows lm-evaluation-harness (`TemplateLM._encode_pair`): white space that ends the
context is moved to the target, both are encoded together, and the target's tokens are those after
as many as the context alone has.

    context "The capital is "   target "Paris"
    encoded  [The][ capital][ is]  |  [ Paris]

A conversation keeps the white space that its template ends in: generation reads it, too.

    context "<|assistant|>\n\n"  target "Paris"
    encoded  [<|assistant|>][\n\n]  |  [Paris]
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from logsteer.errors import APIError, api_error
from logsteer.schemas import BosPolicy, Boundary, BoundaryFinding
from logsteer_server.text.tokenizer import (
    ENCODED_AT_ONCE,
    EncodedText,
    Offsets,
    TextCodec,
    split_sizes,
)

_EXACT: BoundaryFinding = "exact"


class Pair(NamedTuple):
    """A context and a target as text. `is_rendered`: the context came from a chat template.

    It then has its BOS already, and its end is where a generated answer would begin.
    """

    context: str
    target: str
    is_rendered: bool = False


class Cut(NamedTuple):
    """A pair as tokens. `offsets` count characters from the target's first one.

    Equal contexts, and equal targets, may be the same lists.
    """

    context_ids: list[int]
    target_ids: list[int]
    offsets: Offsets | None
    finding: BoundaryFinding = "exact"


def cut_pairs(
    codec: TextCodec, pairs: Sequence[Pair], boundary: Boundary, bos: BosPolicy
) -> Iterator[Cut | APIError]:
    """Cut each pair into tokens, in order, of so many pairs at once that no call takes long.

    In place of a pair that cannot be cut stands its error: `boundary_empty` where no token is left
    for the target, or none before it. Errors: as `TextCodec.bos_ids`.
    """
    cut = _cut_jointly if boundary == "joint" else _cut_separately
    sizes = [len(pair.context) + len(pair.target) for pair in pairs]
    for part in split_sizes(sizes, ENCODED_AT_ONCE):
        yield from cut(codec, pairs[part.start : part.stop], bos)


def _cut_jointly(
    codec: TextCodec, pairs: Sequence[Pair], bos: BosPolicy
) -> Iterator[Cut | APIError]:
    """Yield pairs as cut in their joint tokens; of what is encoded alone, each text is once.

    Where the tokenizer divides the text anyway, its parts are encoded alone.
    """
    fronts = [pair.context if pair.is_rendered else pair.context.rstrip() for pair in pairs]
    rests = [
        pair.context[len(front) :] + pair.target for pair, front in zip(pairs, fronts, strict=True)
    ]
    are_apart = list(map(codec.divides, fronts, rests))
    read = [
        rest if apart else front + rest
        for front, rest, apart in zip(fronts, rests, are_apart, strict=True)
    ]
    contexts = _encode_contexts(codec, fronts)
    encoded = _encode_once(codec, read)
    complete: dict[tuple[str, bool], list[int]] = {}
    for pair, front, text, apart in zip(pairs, fronts, read, are_apart, strict=True):
        own, (ids, offsets) = contexts[front], encoded[text]
        policy: BosPolicy = "never" if pair.is_rendered else bos
        start, finding = len(pair.context), _EXACT
        context: list[int] | None
        if apart:
            start -= len(front)
            context = complete.get((front, pair.is_rendered)) or _add_bos(codec, own, ids, policy)
            if context:
                complete[front, pair.is_rendered] = context
        else:
            count = len(own)
            finding = _EXACT if ids[:count] == own else "merged"
            own, ids, offsets = ids[:count], ids[count:], offsets[count:]
            context = _add_bos(codec, own, ids, policy) if ids else None
        if not ids:
            yield api_error(
                "boundary_empty",
                f"Encoded together with its context, target {pair.target!r} has no token of its "
                "own left; send boundary: separate to encode each alone.",
            )
            continue
        if not context:
            yield _no_context()
            continue
        if start:
            offsets = [(first - start, last - start) for first, last in offsets]
        yield Cut(context, ids, offsets, finding)


def _encode_contexts(codec: TextCodec, contexts: Sequence[str]) -> dict[str, list[int]]:
    distinct = list(dict.fromkeys(contexts))
    return dict(zip(distinct, codec.encode_ids(distinct), strict=True))


def _encode_once(codec: TextCodec, texts: Sequence[str]) -> dict[str, EncodedText]:
    distinct = list(dict.fromkeys(texts))
    return dict(zip(distinct, codec.encode(distinct), strict=True))


def _cut_separately(
    codec: TextCodec, pairs: Sequence[Pair], bos: BosPolicy
) -> Iterator[Cut | APIError]:
    """Yield pairs with each part encoded alone."""
    contexts = _encode_contexts(codec, [pair.context for pair in pairs])
    targets = _encode_once(codec, [pair.target for pair in pairs])
    for pair in pairs:
        ids, offsets = targets[pair.target]
        if not ids:
            detail = f"Target {pair.target!r} encodes to no token; leave it out."
            yield api_error("boundary_empty", detail)
            continue
        own = contexts[pair.context]
        context = _add_bos(codec, own, ids, "never" if pair.is_rendered else bos)
        yield Cut(context, ids, offsets) if context else _no_context()


def _add_bos(codec: TextCodec, context: list[int], target: list[int], bos: BosPolicy) -> list[int]:
    """Return a context with the BOS token in front of it, where it takes one."""
    front = codec.bos_ids(bos, context or target)
    return front + context if front else context


def _no_context() -> APIError:
    detail = (
        "The context has no token, so nothing precedes the target's first token; "
        "give a context, or send bos: always."
    )
    return api_error("boundary_empty", detail, param="context")


def space_variants(target: str) -> tuple[str, str]:
    """Return the target with one leading space, and without."""
    bare = target.removeprefix(" ")
    return f" {bare}", bare
