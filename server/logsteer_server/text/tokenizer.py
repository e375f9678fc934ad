"""A model's tokenizer, with explicit BOS and encoding in batches."""

import codecs
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import orjson

from logsteer.errors import APIError, api_error
from logsteer.schemas import BosPolicy, Message
from logsteer_server.imports import load_tokenizer
from logsteer_server.text.chat import ChatForm, find_template, list_templates, render
from logsteer_server.text.division import divides_at_spaces, list_parts, may_divide

Offsets = list[tuple[int, int]]
ENCODED_AT_ONCE = 65_536
"""Characters of the texts encoded by one call; a longer text is encoded alone."""
DECODED_AT_ONCE = 16_384
"""Tokens of the sequences decoded by one call."""
ANSWERED = ChatForm()
"""Conversations up to the beginning of the assistant's next turn."""
HIDDEN, MARKS = 0xF0000, 0x100000
"""First private-use characters that replace control text in a caller's strings, and that mark the
template's own special tokens."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
REPLACED = "\N{REPLACEMENT CHARACTER}".encode()
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_OF_SIGN = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)}.difference(_PRINTED)))
}
"""Character of a byte-level vocabulary -> its byte, as in GPT-2."""


class EncodedText(NamedTuple):
    """The tokens of one text, without any that the text does not contain."""

    ids: list[int]
    offsets: Offsets


class CharCounter:
    """Count the characters of UTF-8 in pieces, which may split characters."""

    def __init__(self) -> None:
        self.num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> int:
        """Add a piece; return the index of the character that its first byte belongs to."""
        self.num_chars += len(self._decoder.decode(piece[:1]))
        start = self.num_chars - (piece != b"" and not self._decoder.getstate()[0])
        self.num_chars += len(self._decoder.decode(piece[1:]))
        return start

    def end(self) -> int:
        """Return the number of characters, including an incomplete one."""
        return self.num_chars + len(self._decoder.decode(b"", final=True))


class TextCodec:
    """Encode and decode text with a model's tokenizer. Safe to use from several threads.

    Encoding adds no special tokens: `bos_ids` returns the tokens to put before a text.
    """

    def __init__(self, tokenizer: Any, digest: str) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.digest = digest
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.vocab_size = len(tokenizer)
        self.has_chat_template = "default" in list_templates(tokenizer)
        self.find_template = partial(find_template, tokenizer)
        probe = tokenizer("a")["input_ids"]
        self._adds_bos = self.bos_id is not None and probe[:1] == [self.bos_id]
        self._anchor = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_length = len(self.decode(self._anchor))
        self.piece = lru_cache(maxsize=65_536)(self._piece)
        self.piece_bytes = lru_cache(maxsize=65_536)(self._piece_bytes)
        self.json_piece = lru_cache(maxsize=65_536)(self._json_piece)
        kinds = {part["type"] for part in list_parts(self._backend.decoder, "decoders")}
        self._byte_of_sign = BYTE_OF_SIGN if "ByteLevel" in kinds else {}
        self._fallbacks = {
            self._backend.token_to_id(f"<0x{byte:02X}>"): bytes([byte])
            for byte in range(256 if "ByteFallback" in kinds else 0)
        }
        """Byte-fallback tokens, by id."""
        self._special_ids = {
            number
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._divides = divides_at_spaces(self._backend)

    @cached_property
    def literal(self) -> "LiteralCodec":
        """The codec that encodes control text in a caller's strings as plain text."""
        return LiteralCodec(self)

    @classmethod
    def load(cls, path: str) -> "TextCodec":
        """Load the tokenizer of a checkpoint. Errors: OSError or ValueError without one."""
        tokenizer = load_tokenizer(path)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"{path}: its tokenizer has no fast form; add a tokenizer.json")
        content = tokenizer.backend_tokenizer.to_str().encode()
        return cls(tokenizer, f"sha256:{hashlib.sha256(content).hexdigest()}")

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts; return the tokens of each with their character offsets."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [EncodedText(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; return the token ids of each. Cheaper than `encode`."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def divides(self, front: str, rest: str) -> bool:
        """Return whether two texts encoded alone are sure to give the tokens of `front + rest`."""
        return self._divides and may_divide(front, rest)

    def encode_ids_lazily(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the token ids of each text, encoding ENCODED_AT_ONCE characters at a time."""
        for part in split_sizes([len(text) for text in texts], ENCODED_AT_ONCE):
            yield from self.encode_ids(texts[part.start : part.stop])

    def encode_prompts(self, texts: Sequence[str], bos: BosPolicy) -> Iterator[list[int]]:
        """Yield the token ids of each text, as `encode_ids_lazily`, after those of `bos_ids`.

        Errors: as `bos_ids`.
        """
        for ids in self.encode_ids_lazily(texts):
            yield self.bos_ids(bos, ids) + ids

    def bos_ids(self, policy: BosPolicy, ids: Sequence[int] = ()) -> list[int]:
        """Return the tokens to put before `ids`: the BOS token or none; never a second BOS.

        Errors: APIError `invalid_request` if BOS is requested and the tokenizer has none.
        """
        if policy == "never" or (policy == "auto" and not self._adds_bos):
            return []
        if self.bos_id is None:
            detail = "bos: always was asked for, but this model's tokenizer has no BOS token."
            raise api_error("invalid_request", detail, param="bos")
        return [] if list(ids[:1]) == [self.bos_id] else [self.bos_id]

    def prefix_id(self) -> int:
        """Return the token before a text in the rolling protocol: BOS, else EOS."""
        prefix = self.bos_id if self.bos_id is not None else self.eos_id
        if prefix is None:
            detail = "protocol rolling needs a BOS or EOS token, and this tokenizer has neither."
            raise api_error("invalid_request", detail, param="protocol")
        return prefix

    def render_chat(self, messages: Sequence[Message], form: ChatForm = ANSWERED) -> str:
        """Render a conversation as text. Errors: as `chat.render`."""
        return render(self._tokenizer, messages, form)

    def render_each(
        self, conversations: Sequence[Sequence[Message]], form: ChatForm
    ) -> Iterator[str | APIError]:
        """Yield the text of each conversation, or its error.

        Errors: as `chat.render`, if no conversation could be rendered.
        """
        for messages in conversations:
            try:
                yield self.render_chat(messages, form)
            except APIError as error:
                if error.param != "messages" or not self.has_chat_template:
                    raise
                yield api_error(error.code, error.detail)

    def describe(self) -> dict[str, str | None]:
        """Return class, special tokens and chat template, with the names of `TokenizerInfo`."""
        tokenizer = self._tokenizer
        found = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
        if self.has_chat_template:
            found["chat_template_name"], found["chat_template"] = self.find_template()
        return {"tokenizer_class": type(tokenizer).__name__, **found}

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, including special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def decode_lazily(self, sequences: Sequence[list[int]]) -> Iterator[str]:
        """Yield the text of each sequence, decoding DECODED_AT_ONCE tokens at a time."""
        for part in split_sizes(list(map(len, sequences)), DECODED_AT_ONCE):
            own = list(sequences[part.start : part.stop])
            yield from self._backend.decode_batch(own, skip_special_tokens=False)

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a continuation, which has no special tokens."""
        return b"" if token_id in self._special_ids else self.piece_bytes(token_id)

    def find_starts(self, ids: Sequence[int]) -> list[int]:
        """Return the start of the text that each token adds, in characters of their text.

        All tokens that are bytes of one character start at it. Invalid bytes are replaced as the
        tokenizer does: byte fallback replaces each byte of an invalid run.
        """
        counter = CharCounter()
        starts: list[int] = []
        for falls_back, run in groupby(ids, self._fallbacks.__contains__):
            pieces = list(map(self.piece_bytes, run))
            whole = b"".join(pieces)
            if falls_back and whole.decode(errors="ignore").encode() != whole:
                pieces = [REPLACED] * len(pieces)
            starts += map(counter.add, pieces)
        # Some tokenizers drop a space at the beginning.
        left_out = counter.end() - len(self.decode(ids))
        return [max(0, start - left_out) for start in starts]

    def _piece(self, token_id: int) -> str:
        """Return the text that a token adds after other text, including its leading space."""
        return self.decode([*self._anchor, token_id])[self._anchor_length :]

    def _json_piece(self, token_id: int) -> bytes:
        encoded: bytes = orjson.dumps(self.piece(token_id))
        return encoded

    def _piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds after other text; they may be part of a character."""
        if token_id in self._fallbacks:
            return self._fallbacks[token_id]
        signs = self._backend.id_to_token(token_id) or ""
        if self._byte_of_sign.keys() >= set(signs):
            return bytes(map(self._byte_of_sign.__getitem__, signs))
        return self.piece(token_id).encode()


class RenderedText(str):
    """A conversation as text. `marked`: the text with a mark for each of the template's tokens."""

    marked: str

    @classmethod
    def of(cls, text: str, marked: str) -> "RenderedText":
        """Return a text with its marked form, which has the same length."""
        rendered = cls(text)
        rendered.marked = marked
        return rendered

    def __add__(self, other: str) -> "RenderedText":
        return RenderedText.of(str(self) + other, self.marked + other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RenderedText) and self.marked == other.marked

    def __hash__(self) -> int:
        return hash(self.marked)


class LiteralCodec(TextCodec):
    """A codec that encodes control text in a caller's strings as plain text.

    In its tokenizer, special tokens have other texts: marks of private-use characters, which no
    string contains. The template gets the strings with their control text hidden; so all control
    text in the rendered conversation is the template's own, and is replaced by marks, token by
    token. With marks M, as long as the tokens that they mark, and H for hidden text, which is
    restored:

        content   a<|im_end|>     passed to the template: aH
        rendered  <|im_start|>user⏎a<|im_end|><|im_end|>
        marked    MMMMMMMMMMMMuser⏎a<|im_end|>MMMMMMMMMM
    """

    def __init__(self, codec: TextCodec) -> None:
        vars(self).update(vars(codec))
        self._added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        texts = [token.content for token in self._added.values() if token.special]
        longest_first = sorted(texts, key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._hidden = {text: chr(HIDDEN + n) for n, text in enumerate(texts)}
        self._marks = {text: chr(MARKS + n) * len(text) for n, text in enumerate(texts)}

    @cached_property
    def _encoder(self) -> tuple[Any, dict[Any, int | None]]:
        """The tokenizer with marks, and the model's id for each of its own; None: not allowed.

        Building it takes seconds if there are thousands of special tokens.
        """
        from tokenizers import Tokenizer

        encoder = Tokenizer(self._backend.model)
        encoder.normalizer = self._backend.normalizer
        encoder.pre_tokenizer = self._backend.pre_tokenizer
        own = {
            token_id: type(token)(
                self._marks.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and not token.special,
            )
            for token_id, token in self._added.items()
        }
        encoder.add_tokens(list(own.values()))
        unknown = self._tokenizer.unk_token_id
        ids: dict[Any, int | None] = {
            token_id: unknown if token_id == unknown else None
            for token_id, token in self._added.items()
            if token.special
        }
        return encoder, ids | {encoder.token_to_id(own[n].content): n for n in own}

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts. Errors: APIError `invalid_request` for text without plain tokens."""
        encoder, own = self._encoder
        found = []
        for encoding in encoder.encode_batch(list(map(_mark, texts)), add_special_tokens=False):
            ids = [own.get(token_id, token_id) for token_id in encoding.ids]
            if None in ids:
                token = self.decode([encoding.ids[ids.index(None)]])
                detail = (
                    f"special_tokens: text is not possible: this tokenizer has no plain text for "
                    f"{token!r}, which stands for a control token. Leave it out."
                )
                raise api_error("invalid_request", detail, param="special_tokens")
            found.append(EncodedText(ids, encoding.offsets))
        return found

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; return the token ids of each. Errors: as `encode`."""
        return [encoded.ids for encoded in self.encode(texts)]

    def render_chat(self, messages: Sequence[Message], form: ChatForm = ANSWERED) -> str:
        """Render a conversation as text with marks.

        Errors: as `chat.render`, and `invalid_request` if the template does more with control text
        than writing it out.
        """
        text = super().render_chat(messages, form)
        find = self._control_text
        shown = str.maketrans({mark: text for text, mark in self._hidden.items()})
        hidden = render(
            self._tokenizer,
            messages,
            form,
            lambda string: find.sub(lambda found: self._hidden[found[0]], string),
        )
        if _PRIVATE.search(text) or hidden.translate(shown) != text:
            detail = (
                "special_tokens: text is not possible with these messages: this model's chat "
                "template does more with their control text, or with characters for private use, "
                "than to write it. Leave that out, or send special_tokens: parse."
            )
            raise api_error("invalid_request", detail, param="messages")
        marked = find.sub(lambda found: self._marks[found[0]], hidden)
        return RenderedText.of(text, marked.translate(shown))


def _mark(text: str) -> str:
    """Return a text's marked form for the encoder. Errors: as `LiteralCodec.encode`."""
    if _PRIVATE.search(text):
        detail = (
            "special_tokens: text reads no characters for private use from U+F0000 on; leave them "
            "out, or send special_tokens: parse."
        )
        raise api_error("invalid_request", detail, param="special_tokens")
    return text.marked if isinstance(text, RenderedText) else text


def check_ids(ids: Sequence[int], vocab_size: int, param: str | None = None) -> None:
    """Refuse unknown token ids. Errors: APIError `invalid_request`."""
    if ids and max(ids) >= vocab_size:
        detail = f"There is no token {max(ids)}; the model's vocabulary ends at {vocab_size - 1}."
        raise api_error("invalid_request", detail, param=param)


def split_sizes(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Yield ranges of entries, each just large enough to reach the limit; the last may be smaller.

    Sizes 3, 3, 6 and 1 with a limit of 5 give entries 0 and 1, entry 2, entry 3.
    """
    start = total = 0
    for index, size in enumerate(sizes):
        total += size
        if total >= limit:
            yield range(start, index + 1)
            start, total = index + 1, 0
    if start < len(sizes):
        yield range(start, len(sizes))
