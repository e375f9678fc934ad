"""Conversations, what a model's chat template is given besides them, and `POST /tokenize`.

Wherever text is taken, a conversation is taken: `messages`, one or a list of them.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, TypeAdapter, WrapValidator, model_validator

from logsteer.schemas.common import (
    BosPolicy,
    OneForm,
    Reply,
    Request,
    SpecialTokens,
    Tabled,
    TokenId,
    name_refusal,
)

CHAT_FIELDS = ("chat_template_kwargs", "continue_final_message", "add_generation_prompt", "tools")
_ECHOED = (
    "refusal", "audio", "annotations", "function_call", "reasoning", "reasoning_content", "name",
    "tool_calls", "tool_call_id", "content",
)  # fmt: skip
"""What OpenAI's client has in a reply, and sends back as null in the next request."""
MAX_DESCRIBED = 2**24
"""Characters of tools and variables of the template, in all conversations of a request together."""


class CalledFunction(Request):
    """A function that the assistant calls."""

    name: str = Field(min_length=1)
    arguments: str = Field(description="A JSON object, as text.")

    def read_arguments(self) -> Any:
        """Return the arguments as an object; as text where they are no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


class ToolCall(Request):
    """One call of a tool by the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Request):
    """One turn of a conversation.

    `content` may be sent as OpenAI's parts of type text. A `developer` is the `system` to a
    template that knows no developer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(
        default=None, min_length=1, description="What the assistant calls in this turn."
    )
    tool_call_id: str | None = Field(default=None, description="Which call a tool answers.")

    @model_validator(mode="before")
    @classmethod
    def _read_as_sent(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if len(data) == 2 and isinstance(data.get("content"), str):  # most turns, by far
            return data
        given = {n: v for n, v in data.items() if not (n in _ECHOED and v in (None, []))}
        if isinstance(given.get("content"), list):
            given["content"] = "".join(map(_read_part, given["content"]))
        if "content" not in given and "tool_calls" not in given:
            raise name_refusal({"content": "a turn has content, or else tool_calls"})
        return given

    @property
    def num_chars(self) -> int:
        """Characters of the turn."""
        called = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.content) + called


def _read_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        reason = f"a part of type {kind!r:.60} is not read; send parts of type text"
        raise name_refusal({"content": reason})
    return text


CONVERSATION = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
_CONVERSATIONS = TypeAdapter(list[Annotated[list[Message], Field(min_length=1)]])
_TEXT = TypeAdapter(Annotated[str, Field(min_length=1, strict=True)])


def _read_conversations(value: Any, _read: Any) -> Any:
    """Check one conversation, or several; an error tells of the form that was meant alone."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return (_CONVERSATIONS if several else CONVERSATION).validate_python(value)


def _read_text_or_turns(value: Any, _read: Any) -> Any:
    return (CONVERSATION if isinstance(value, list) else _TEXT).validate_python(value)


Conversations = Annotated[list[Message] | list[list[Message]], WrapValidator(_read_conversations)]
"""One conversation, or a list of them."""
TextOrTurns = Annotated[str | list[Message], WrapValidator(_read_text_or_turns)]
"""A text, or a conversation."""

CONVERSATIONS = "One conversation or a list of them, through the model's chat template."


def list_conversations(messages: Any) -> list[list[Message]]:
    """Return one conversation, or a list of them, as a list of them."""
    return messages if messages and isinstance(messages[0], list) else [messages]


class ToolFunction(Request):
    """A function that a model may call: its arguments are described by a JSON Schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Request):
    """A tool, in OpenAI's shape."""

    type: Literal["function"]
    function: ToolFunction


class ChatFields(Request):
    """What the chat template is given besides the conversations of a request."""

    reads_rows: ClassVar[bool] = False
    """Whether conversations may be in an uploaded data set."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description='Variables of the template, such as `{"enable_thinking": false}`; one that '
        "the model's template does not read is refused.",
    )
    continue_final_message: bool = Field(
        default=False,
        description="Leave the last turn open: what is generated or scored continues it.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Whether to append the head of the assistant's next turn. null: yes, except "
        "after an assistant's turn where whole conversations are read (/perplexity, /activations, "
        "pairs).",
    )
    tools: list[Tool] | None = Field(
        default=None, description="Functions that the template describes."
    )

    @model_validator(mode="after")
    def _goes_with_conversations(self) -> "ChatFields":
        if self.continue_final_message and self.add_generation_prompt:
            reason = "with continue_final_message no turn begins; leave out one of them"
            raise name_refusal({"add_generation_prompt": reason})
        asked = self.model_fields_set.intersection(CHAT_FIELDS)
        if asked and not (self.reads_rows or _count_conversations(self)):
            reason = "goes with messages; leave it out, or send messages"
            raise name_refusal({min(asked, key=CHAT_FIELDS.index): reason})
        described = len(str(self.tools or "")) + len(str(self.chat_template_kwargs or ""))
        if described and described * _count_conversations(self) > MAX_DESCRIBED:
            reason = (
                f"{described} characters are written into each conversation, {MAX_DESCRIBED} into "
                "all of a request at most; shorten them, or send fewer conversations"
            )
            raise name_refusal({"tools" if self.tools else "chat_template_kwargs": reason})
        return self


def _count_conversations(value: Any) -> int:
    if isinstance(value, list):
        is_one = bool(value) and isinstance(value[0], Message)
        return 1 if is_one else sum(map(_count_conversations, value))
    if isinstance(value, BaseModel):
        return sum(_count_conversations(part) for _, part in value)
    return 0


class TokenizeRequest(ChatFields, OneForm):
    """Texts to encode, or conversations; or, in the form of vLLM's server, one `prompt`."""

    forms: ClassVar[tuple[str, ...]] = ("texts", "messages", "prompt")

    model: str | None = None
    texts: list[str] | None = Field(
        default=None, min_length=1, description="Texts to cut into tokens."
    )
    bos: BosPolicy = "auto"
    special_tokens: SpecialTokens = "parse"
    prompt: str | None = None
    add_special_tokens: bool = Field(
        default=True, description="For `prompt`: as bos auto or never."
    )
    messages: Conversations | None = Field(default=None, description=CONVERSATIONS)

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


class DetokenizeRequest(OneForm):
    """Sequences of token ids to decode; or, in the form of vLLM's server, one of `tokens`."""

    forms: ClassVar[tuple[str, ...]] = ("token_ids", "tokens")

    model: str | None = None
    token_ids: list[list[TokenId]] | None = Field(
        default=None, min_length=1, description="Sequences of token ids."
    )
    tokens: list[TokenId] | None = None


class DetokenizeAnswer(Reply):
    """One text per sequence, in the order given; special tokens are written out."""

    model: str
    texts: list[str]
    prompt: str | None = Field(default=None, description="The text of `tokens`.")
