r"""The boundary between context and target: encode pairs of texts to tokens.

Joint encoding follows lm-evaluation-harness (`TemplateLM._encode_pair`): it moves white space at
the context's end to the target, and encodes both together; the target's tokens are those after the
first n, with n the number of tokens of the context alone.

    context "The capital is "   target "Paris"
    encoded  [The][ capital][ is]  |  [ Paris]

A conversation keeps the white space at the end of its template, as in generation.

    context "<|assistant|>\n\n"  target "Paris"
    encoded  [<|assistant|>][\n\n]  |  [Paris]
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from logsteer.errors import APIError, api_error
from logsteer.schemas import BosPolicy, Boundary, BoundaryFinding
from logsteer_server.text.tokenizer import ENCODED_AT_ONCE, Offsets, TextCodec, split_sizes

Pair = tuple[str, str, bool]
"""A context, a target, and whether the context came from a chat template.

A context from a template already has its BOS, and ends where a generated answer would begin.
"""


class Cut(NamedTuple):
    """A pair as tokens. `offsets`: characters from the start of the target.

    Pairs with equal contexts or targets may share the lists.
    """

    context_ids: list[int]
    target_ids: list[int]
    offsets: Offsets | None
    finding: BoundaryFinding = "exact"

    def read_first(self) -> "Cut":
        """Return the cut with the target's first token as its context, for an empty context.

        Errors: APIError `boundary_empty` if the target has no other token.
        """
        if len(self.target_ids) == 1:
            detail = (
                "The target is one token, and nothing precedes it: give a context, or send "
                "bos: always."
            )
            raise api_error("boundary_empty", detail)
        offsets = self.offsets and self.offsets[1:]
        return Cut(self.target_ids[:1], self.target_ids[1:], offsets, "no_context")


def cut_pairs(
    codec: TextCodec, pairs: Sequence[Pair], boundary: Boundary, bos: BosPolicy
) -> Iterator[Cut | APIError]:
    """Yield each pair as tokens, in order, encoding a limited number of characters at a time.

    A pair that cannot be cut yields an error: `boundary_empty` if the target has no token of its
    own. Errors: as `TextCodec.bos_ids`.
    """
    sizes = [len(context) + len(target) for context, target, _ in pairs]
    for part in split_sizes(sizes, ENCODED_AT_ONCE):
        yield from _cut(codec, pairs[part.start : part.stop], boundary, bos)


def _cut(
    codec: TextCodec, pairs: Sequence[Pair], boundary: Boundary, bos: BosPolicy
) -> Iterator[Cut | APIError]:
    """Yield pairs as tokens; encode each distinct text once.

    If context and target encoded separately are sure to give the joint tokens, they are encoded
    separately.
    """
    is_joint = boundary == "joint"
    contexts: list[tuple[str, BosPolicy]] = []
    read: list[str] = []
    are_apart: list[bool] = []
    for context, target, is_rendered in pairs:
        front = context.rstrip() if is_joint and not is_rendered else context
        rest = context[len(front) :] + target
        apart = not is_joint or codec.divides(front, rest)
        contexts.append((front, "never" if is_rendered else bos))
        read.append(rest if apart else front + rest)
        are_apart.append(apart)
    distinct = list(dict.fromkeys(contexts))
    alone = codec.encode_ids([front for front, _ in distinct])
    encoded_contexts = {
        (front, policy): (ids, ids and codec.bos_ids(policy, ids) + ids)
        for (front, policy), ids in zip(distinct, alone, strict=True)
    }
    texts = list(dict.fromkeys(read))
    encoded = dict(zip(texts, codec.encode(texts), strict=True))
    for pair, key, text, apart in zip(pairs, contexts, read, are_apart, strict=True):
        own, context_ids = encoded_contexts[key]
        ids, offsets = encoded[text]
        start = len(pair[0])
        finding: BoundaryFinding = "exact"
        if apart:
            start -= len(key[0])
        else:
            count = len(own)
            if ids[:count] != own:
                finding = "merged"
                context_ids = codec.bos_ids(key[1], ids[:count]) + ids[:count]
            ids, offsets = ids[count:], offsets[count:]
        if not ids:
            detail = f"Target {pair[1]!r} encodes to no token; leave it out."
            if is_joint:
                detail = (
                    f"Encoded together with its context, target {pair[1]!r} has no token of its "
                    "own left; send boundary: separate to encode each alone."
                )
            yield api_error("boundary_empty", detail)
            continue
        # Without a context, the target itself may begin with BOS.
        context_ids = context_ids or codec.bos_ids(key[1], ids)
        if start:
            offsets = [(first - start, last - start) for first, last in offsets]
        yield Cut(context_ids, ids, offsets, finding)
