"""Where a text may be divided so that its parts, encoded separately, have the tokens of the whole.

Byte pair encoding merges characters within a word, and common tokenizers start a new word at a
space after anything except white space:

    "The capital of France is" + " Paris."    [The][ capital][ of][ France][ is] [ Paris][.]

So the common context of many targets is encoded once, and each target once. Whether a tokenizer
behaves so follows from its parts. Each part must treat either side of such a position independently
of the other: the normalizers, the pre-tokenizers, and the vocabulary, in which no token may have a
space after anything except white space.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

SPACE_SIGN = "\u2581"
"""The character for a space in SentencePiece vocabularies."""
BYTE_SPACE = "\u0120"
BYTE_BLANKS = "\u0109\u010a\u010b\u010c\u010d\u0120"
"""The characters for a space, and for all white space, in byte-level vocabularies."""

SAFE_CLAUSES = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *(r" ?\p{L}+", r" ?\p{N}+", r" ?\p{N}", r"\p{N}", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    }
)
"""Alternatives in the pre-tokenizer patterns of GPT-2, Llama 3, Qwen, GPT-4o and similar models.

None matches a space after anything except white space, and none looks beyond its match, except
`(?!\\S)`, after white space. So each matches the same whether or not the text ends there.
"""


def divides_at_spaces(backend: Any) -> bool:
    """Return whether a tokenizer surely divides texts at spaces, as `may_divide` defines it.

    `backend`: a `tokenizers.Tokenizer`.
    """
    model = backend.model
    normalizers, cutters, processors = (
        list(list_parts(part, name))
        for part, name in (
            (backend.normalizer, "normalizers"),
            (backend.pre_tokenizer, "pretokenizers"),
            (backend.post_processor, "processors"),
        )
    )
    is_plain = (
        type(model).__name__ == "BPE"
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and backend.truncation is None
        and backend.padding is None
    )
    if not is_plain or not all(map(_keeps_offsets, processors)):
        return False
    has_sign = any(part["type"] == "Replace" for part in normalizers)
    has_bytes = any(part["type"] == "ByteLevel" for part in cutters)
    if has_sign and has_bytes:
        return False
    space, blanks = (SPACE_SIGN, rf"\s{SPACE_SIGN}") if has_sign else (" ", r"\s")
    if has_bytes:
        space, blanks = BYTE_SPACE, BYTE_BLANKS
    return (
        all(map(_normalizes_apart, normalizers))
        and all(_cuts_apart(part, has_sign) for part in cutters)
        and _joins_apart(backend, space, blanks)
    )


def may_divide(front: str, rest: str) -> bool:
    """Return whether a tokenizer that divides texts at spaces divides between these two parts."""
    return rest[:1] == " " and not (front[-1:].isspace() or front[-1:] in ("", SPACE_SIGN))


def list_parts(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of a tokenizer component's parts, in order."""
    described = [] if part is None else [json.loads(part.__getstate__())]
    while described:
        first = described.pop(0)
        if first["type"] == "Sequence":
            described = first[name] + described
        else:
            yield first


def _normalizes_apart(part: dict[str, Any]) -> bool:
    """Return whether a normalizer keeps spaces and treats the text around each independently."""
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SIGN}
    return part["type"] == "NFC" or part == replaces


def _cuts_apart(part: dict[str, Any], has_sign: bool) -> bool:
    """Return whether a pre-tokenizer splits each side of such a space as if it were alone."""
    kind = part["type"]
    if kind == "Split":
        if "String" in part["pattern"]:  # normalizers have replaced all spaces
            return has_sign and part["pattern"]["String"] == " "
        whole = (part["behavior"], part["invert"]) in {("Isolated", False), ("Removed", True)}
        return whole and SAFE_CLAUSES.issuperset(_list_clauses(part["pattern"]["Regex"]))
    return kind == "Digits" or (kind == "ByteLevel" and part["add_prefix_space"] is False)


def _list_clauses(pattern: str) -> list[str]:
    """Return the top-level alternatives of a regular expression.

    `a(b|c)|[|]|d` has `a(b|c)`, `[|]` and `d`.
    """
    clauses, depth, in_class = [""], 0, False
    for sign in re.findall(r"\\.|.", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(sign, 0) * (not in_class)
        in_class = sign == "[" or (in_class and sign != "]")
        if sign == "|" and not depth and not in_class:
            clauses.append("")
        else:
            clauses[-1] += sign
    return clauses


def _keeps_offsets(part: dict[str, Any]) -> bool:
    """Return whether a post-processor leaves offsets as they are."""
    plain = part["type"] == "ByteLevel" and part["trim_offsets"] is False
    return plain or part["type"] == "TemplateProcessing"


def _joins_apart(backend: Any, space: str, blanks: str) -> bool:
    """Return whether no token, including added ones, has a space after anything except white space.

    Also, no added token may strip the text after it, and every character must have tokens.
    """
    crossing = re.compile(f"[^{blanks}]{space}")
    vocab = backend.get_vocab(with_added_tokens=False)
    signs = _list_byte_signs(backend.model, space)
    if signs is None or not vocab.keys() >= {space, *signs} or any(map(crossing.search, vocab)):
        return False
    crosses_as_text = re.compile(rf"[^\s{SPACE_SIGN}][ {SPACE_SIGN}]").search
    return not any(
        token.rstrip or token.single_word or crosses_as_text(token.content)
        for token in backend.get_added_tokens_decoder().values()
    )


def _list_byte_signs(model: Any, space: str) -> list[str] | None:
    """Return tokens with which any text can be written; None if the model has no such tokens."""
    if space == BYTE_SPACE:
        from tokenizers.pre_tokenizers import ByteLevel

        return list(ByteLevel.alphabet())
    return [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else None
