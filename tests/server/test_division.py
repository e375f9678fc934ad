"""Where texts are divided: what the two parts give is what the whole gives, for every tokenizer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from logsteer_server.text.boundaries import Cut, cut_pairs
from logsteer_server.text.division import _list_clauses, divides_at_spaces, may_divide
from logsteer_server.text.tokenizer import split_sizes
from tests.server.scripted_model import load_codec

CODEC = load_codec()
SAMPLES = [
    "Once upon a time there was a cat. It's 12345 days, they'll say: \n\n  \tnever\r\n mind!!  ",
    "def f(x):\n    return x  # \u00e9t\u00e9, na\u00efve; \u65e5\u672c\u8a9e 3.1 \u2581 \u00a0",
] * 8
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = st.text(st.sampled_from("ab 1.'s\n\t\u00e9\u0301\u2581\u00a0\u65e5<s>!\r\x1c"), max_size=12)


def train(cuts: Any = None, normalizer: Any = None, byte_fallback: bool = True) -> Tokenizer:
    """A small tokenizer that has learnt the samples."""
    backend = Tokenizer(models.BPE(byte_fallback=byte_fallback))
    backend.pre_tokenizer, backend.normalizer = cuts, normalizer
    given = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(SAMPLES, given)
    return backend


def cut_bytes(pattern: str) -> Any:
    apart = pre_tokenizers.Split(Regex(pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([apart, as_bytes])


def make_sign() -> Any:
    return normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")])


def gpt2(*, trims: bool = False) -> Tokenizer:
    backend = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    return backend


def gemma() -> Tokenizer:
    """One that has learnt within words, and cuts none."""
    backend = train(pre_tokenizers.Metaspace(prepend_scheme="never"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.normalizer = make_sign()
    return add_bytes(backend)


def add_bytes(backend: Tokenizer) -> Tokenizer:
    """The tokenizer with a token for each byte."""
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    vocab.update({f"<0x{n:02X}>": len(vocab) + n for n in range(256)})
    return Tokenizer.from_str(json.dumps(content))


BACKENDS = {
    "demo": CODEC._backend,
    "gpt2": gpt2(),
    "llama3": train(cut_bytes(LLAMA_3), normalizers.NFC()),
    "gemma": gemma(),
}


def test_a_bar_in_a_group_or_a_class_ends_no_clause() -> None:
    clauses = ["a(b|c)", "[|(]", r"\|", r"[\]|]d", ""]
    assert _list_clauses("|".join(clauses)) == clauses


def read(backend: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    found = backend.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


@pytest.mark.parametrize("name", BACKENDS)
@given(front=TEXTS, rest=TEXTS)
@settings(max_examples=400, deadline=None)
def test_the_parts_give_the_tokens_and_offsets_of_the_whole(
    name: str, front: str, rest: str
) -> None:
    backend, rest = BACKENDS[name], f" {rest}"
    assert divides_at_spaces(backend)
    if not may_divide(front, rest):
        return
    (own, first), (others, second) = read(backend, front), read(backend, rest)
    moved = [(start + len(front), end + len(front)) for start, end in second]
    assert read(backend, front + rest) == (own + others, first + moved)


@pytest.mark.parametrize(
    ("front", "rest", "wanted"),
    [
        ("a", " b", True),
        ("a", "b", False),
        ("a ", " b", False),
        ("a\n", " b", False),
        ("\u2581", " b", False),
        ("", " b", False),
        ("a", "\nb", False),
        ("a", "", False),
    ],
)
def test_a_text_is_divided_at_a_space_behind_what_is_none(
    front: str, rest: str, wanted: bool
) -> None:
    assert may_divide(front, rest) is wanted


def add_token(backend: Tokenizer, content: str, **options: bool) -> Tokenizer:
    backend.add_special_tokens([AddedToken(content, **options)])
    return backend


REFUSED: dict[str, Callable[[], Tokenizer]] = {
    "a space is put in front": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "tokens go across spaces": lambda: add_bytes(train(None)),
    "signs without a token": lambda: train(pre_tokenizers.Split(" ", "isolated"), make_sign()),
    "an unknown pattern": lambda: train(cut_bytes(r"\w+ \w+|.")),
    "it looks behind": lambda: train(cut_bytes(r"(?<=a) b|\s+|\p{L}+")),
    "spaces are cut off offsets": lambda: gpt2(trims=True),
    "an added token takes what follows": lambda: add_token(gpt2(), "<mask>", rstrip=True),
    "an added token is a word": lambda: add_token(gpt2(), "<w>", single_word=True),
    "an added token has a space": lambda: add_token(gpt2(), "a b"),
    "another normalizer": lambda: train(None, normalizers.NFKC()),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0, " ": 1}, "a")),
    "dropout": lambda: Tokenizer(models.BPE({" ": 0}, [], dropout=0.5)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_told_is_not_divided(why: str) -> None:
    assert not divides_at_spaces(REFUSED[why]())


@given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_pairs_are_cut_as_their_joint_texts_are(given: list[tuple[str, str, bool]]) -> None:
    texts = [(f"a{context}", f"{' ' * spaced}{target}b") for context, target, spaced in given]
    wholes = CODEC.encode([context + target for context, target in texts])
    contexts = CODEC.encode_ids([context.rstrip() for context, _ in texts])
    assume(all(len(a.ids) > len(b) for a, b in zip(wholes, contexts, strict=True)))
    pairs = [(context, target, False) for context, target in texts]
    cuts = list(cut_pairs(CODEC, pairs, "joint", "never"))
    for (context, _), cut, whole, own in zip(texts, cuts, wholes, contexts, strict=True):
        assert isinstance(cut, Cut)
        count, start = len(own), len(context)
        assert cut.context_ids == whole.ids[:count]
        assert cut.target_ids == whole.ids[count:]
        assert cut.offsets == [(a - start, b - start) for a, b in whole.offsets[count:]]
        assert cut.finding == ("exact" if whole.ids[:count] == own else "merged")


def test_entries_go_together_until_they_come_to_the_limit() -> None:
    assert list(split_sizes([3, 3, 6, 1], 5)) == [range(2), range(2, 3), range(3, 4)]
    assert list(split_sizes([2, 3, 5], 5)) == [range(2), range(2, 3)]
