"""`POST /tokenize` and `POST /detokenize`."""

from pydantic import Field, model_validator

from logsteer.schemas.chat import CONVERSATIONS, ChatFields, Conversations
from logsteer.schemas.common import BosPolicy, Reply, Request, TokenId
from logsteer.schemas.views import Tabled


class TokenizeRequest(ChatFields):
    """Texts to encode, or conversations; or, in the form of vLLM's server, one `prompt`."""

    model: str | None = None
    texts: list[str] | None = Field(
        default=None, min_length=1, description="Texts to cut into tokens."
    )
    bos: BosPolicy = "auto"
    prompt: str | None = None
    add_special_tokens: bool = Field(
        default=True, description="For `prompt`: as bos auto or never."
    )
    messages: Conversations | None = Field(default=None, description=CONVERSATIONS)

    @model_validator(mode="after")
    def _one_form(self) -> "TokenizeRequest":
        if [self.texts, self.prompt, self.messages].count(None) != 2:
            raise ValueError("give one of texts, messages and prompt")
        return self

    @property
    def is_single(self) -> bool:
        """Whether it asks in the form of vLLM's server: for one prompt, or one conversation."""
        messages = self.messages
        return self.texts is None and (messages is None or not isinstance(messages[0], list))


class Encoded(Tabled):
    """One text's tokens; offsets are [start, end) in characters, null for an added BOS."""

    token_ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int] | None]


class TokenizeAnswer(Tabled):
    """One result per text, in the order given."""

    model: str
    results: list[Encoded]
    tokens: list[int] | None = Field(
        default=None, description="The ids of `prompt`, or of one conversation."
    )
    count: int | None = Field(default=None, description="How many they are.")
    max_model_len: int | None = None


class DetokenizeRequest(Request):
    """Sequences of token ids to decode; or, in the form of vLLM's server, one of `tokens`."""

    model: str | None = None
    token_ids: list[list[TokenId]] | None = Field(
        default=None, min_length=1, description="Sequences of token ids."
    )
    tokens: list[TokenId] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "DetokenizeRequest":
        if (self.token_ids is None) == (self.tokens is None):
            raise ValueError("give token_ids, or else tokens")
        return self


class DetokenizeAnswer(Reply):
    """One text per sequence, in the order given; special tokens are written out."""

    model: str
    texts: list[str]
    prompt: str | None = Field(default=None, description="The text of `tokens`.")
