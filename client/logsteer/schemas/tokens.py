"""`POST /tokenize` and `POST /detokenize`."""

from pydantic import Field

from logsteer.schemas.common import BosPolicy, Reply, Request, TokenId


class TokenizeRequest(Request):
    """Texts to encode."""

    model: str | None = None
    texts: list[str] = Field(min_length=1)
    bos: BosPolicy = "auto"


class Encoded(Reply):
    """One text's tokens; offsets are [start, end) in characters, null for an added BOS."""

    token_ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int] | None]


class TokenizeAnswer(Reply):
    """One result per text, in the order given."""

    model: str
    results: list[Encoded]


class DetokenizeRequest(Request):
    """Sequences of token ids to decode."""

    model: str | None = None
    token_ids: list[list[TokenId]] = Field(min_length=1)


class DetokenizeAnswer(Reply):
    """One text per sequence, in the order given; special tokens are written out."""

    model: str
    texts: list[str]
