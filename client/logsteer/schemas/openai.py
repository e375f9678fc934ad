"""The shapes of OpenAI's interface that the server answers in, for clients that exist already.

Unlike logsteer's own requests these ignore fields that they do not know, as such clients expect;
fields that would change the answer and are not supported are named and refused.
"""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from logsteer.schemas.common import (
    MIN_P,
    TEMPERATURE,
    TOP_P,
    Float,
    Message,
    NamedRefusals,
    Reply,
    TokenId,
)
from logsteer.schemas.interventions import AppliedInterventions, InterventionFields

FinishReason = Literal["stop", "length"]
REFUSED = ("suffix", "logit_bias", "tools", "response_format", "presence_penalty",
           "frequency_penalty")  # fmt: skip
NEUTRAL: tuple[object, ...] = (None, {}, [], 0, 0.0, {"type": "text"})


COMMON_ELSEWHERE = "OpenAI's shape has no place for it; send /logprob or /generate"


class SamplingRequest(InterventionFields, NamedRefusals):
    """Fields that completions and chat completions share; interventions are logsteer's."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        ("columns", "policy", "precision", "on_overflow", "cache", "bos"), COMMON_ELSEWHERE
    )

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=2, description=TEMPERATURE)
    top_p: float = Field(default=1.0, gt=0, le=1, description=TOP_P)
    top_k: int = Field(default=0, ge=0, description="0: every token.")
    min_p: float = Field(default=0.0, ge=0, le=1, description=MIN_P)
    n: int = Field(default=1, ge=1, le=1024)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    ignore_eos: bool = Field(default=False, description="Go on after the end of sequence.")
    stream: bool = False

    @model_validator(mode="after")
    def _refuse_what_would_change_the_answer(self) -> "SamplingRequest":
        given = self.model_extra or {}
        refused = [name for name in REFUSED if given.get(name) not in NEUTRAL]
        if refused:
            raise ValueError(f"{', '.join(refused)}: not supported here; leave it out")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end a completion, empty ones left out."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of chunks."""
        return self.stream


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`: prompts as text or token ids, one or several."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int = Field(default=16, ge=0)
    echo: bool = Field(default=False, description="Give the prompt back before the completion.")
    logprobs: int | None = Field(default=None, ge=0, le=1000, description="Alternatives a token.")

    @model_validator(mode="after")
    def _has_something_to_do(self) -> "CompletionRequest":
        if not self.prompt or (isinstance(self.prompt, list) and "" in self.prompt):
            raise ValueError("prompt is empty: give text or token ids")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 without echo asks for nothing; set one of them")
        return self

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of chunks: an echo is answered whole."""
        return self.stream and not self.echo


class ChatCompletionRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=1000)


class CompletionLogprobs(Reply):
    """Columns of a completion's tokens; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[Float]
    top_logprobs: list[dict[str, Float] | None] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class OpenAIUsage(Reply):
    """Tokens that a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(AppliedInterventions):
    """The answer of `/v1/completions`, or one piece of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage | None = None


class ChatChoice(Reply):
    """One reply: `message` in an answer, `delta` in a stream."""

    index: int
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReason | None


class ChatCompletionAnswer(AppliedInterventions):
    """The answer of `/v1/chat/completions`, or one piece of its stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage | None = None


class TokenizerInfo(Reply):
    """What a client needs to render chats and find special tokens."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int
