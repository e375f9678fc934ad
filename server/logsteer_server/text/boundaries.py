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

from logsteer.errors import api_error
from logsteer.schemas import BosPolicy, Boundary, BoundaryFinding
from logsteer_server.text.tokenizer import (
    ENCODED_AT_ONCE,
    Offsets,
    TextCodec,
    split_sizes,
)


class Pair(NamedTuple):
    """A context and a target as text. `is_rendered`: the context came from a chat template.

    It then has its BOS already, and its end is where a generated answer would begin.
    """

    context: str
    target: str
    is_rendered: bool = False


class Cut(NamedTuple):
    """A pair as tokens. `offsets` count characters from the target's first one."""

    context_ids: list[int]
    target_ids: list[int]
    offsets: Offsets | None
    finding: BoundaryFinding = "exact"


def cut_pairs(
    codec: TextCodec, pairs: Sequence[Pair], boundary: Boundary, bos: BosPolicy
) -> Iterator[Cut]:
    """Cut each pair into tokens, in order, of so many pairs at once that no call takes long.

    Errors: APIError `boundary_empty` where no token is left for a target, or none before it.
    """
    cut = _cut_jointly if boundary == "joint" else _cut_separately
    sizes = [len(pair.context) + len(pair.target) for pair in pairs]
    for part in split_sizes(sizes, ENCODED_AT_ONCE):
        own = pairs[part.start : part.stop]
        for pair, found in zip(own, cut(codec, own), strict=True):
            yield _with_bos(codec, found, "never" if pair.is_rendered else bos)


def _cut_jointly(codec: TextCodec, pairs: Sequence[Pair]) -> list[Cut]:
    contexts = [pair.context if pair.is_rendered else pair.context.rstrip() for pair in pairs]
    distinct = {context: index for index, context in enumerate(dict.fromkeys(contexts))}
    context_ids = codec.encode_ids(list(distinct))
    joint = codec.encode([pair.context + pair.target for pair in pairs])
    cuts = []
    for pair, context, whole in zip(pairs, contexts, joint, strict=True):
        own = context_ids[distinct[context]]
        count = len(own)
        if count >= len(whole.ids):
            raise api_error("boundary_empty", _empty_detail(pair))
        start = len(pair.context)
        offsets = [(first - start, last - start) for first, last in whole.offsets[count:]]
        finding: BoundaryFinding = "exact" if whole.ids[:count] == own else "merged"
        cuts.append(Cut(whole.ids[:count], whole.ids[count:], offsets, finding))
    return cuts


def _empty_detail(pair: Pair) -> str:
    return (
        f"Encoded together with its context, target {pair.target!r} has no token of its own left; "
        "send boundary: separate to encode each alone."
    )


def _cut_separately(codec: TextCodec, pairs: Sequence[Pair]) -> list[Cut]:
    contexts = codec.encode_ids([pair.context for pair in pairs])
    targets = codec.encode([pair.target for pair in pairs])
    for pair, target in zip(pairs, targets, strict=True):
        if not target.ids:
            detail = f"Target {pair.target!r} encodes to no token; leave it out."
            raise api_error("boundary_empty", detail)
    return [
        Cut(context, target.ids, target.offsets)
        for context, target in zip(contexts, targets, strict=True)
    ]


def _with_bos(codec: TextCodec, cut: Cut, bos: BosPolicy) -> Cut:
    front = codec.bos_ids(bos, cut.context_ids or cut.target_ids)
    if not front and not cut.context_ids:
        detail = (
            "The context has no token, so nothing precedes the target's first token; "
            "give a context, or send bos: always."
        )
        raise api_error("boundary_empty", detail)
    if not front:
        return cut
    return Cut(front + cut.context_ids, cut.target_ids, cut.offsets, cut.finding)


def space_variants(target: str) -> tuple[str, str]:
    """Return the target with one leading space, and without."""
    bare = target.removeprefix(" ")
    return f" {bare}", bare
