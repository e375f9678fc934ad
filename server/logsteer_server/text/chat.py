"""Render conversations as text with a model's chat template."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from logsteer.errors import api_error
from logsteer.schemas import ChatFields, Message


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Options for rendering conversations, from `ChatFields`.

    `is_whole`: the conversation is scored or read, not answered, so after an assistant's turn no
    new one begins unless requested.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    continues: bool = False
    begins_turn: bool | None = None
    tools: list[dict[str, Any]] | None = None
    is_whole: bool = False
    template: str | None = None
    """A template to use instead of the model's."""

    @classmethod
    def of(cls, request: ChatFields, *, is_whole: bool = False) -> "ChatForm":
        """Return the options of a request."""
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        documents = getattr(request, "documents", None)
        return cls(
            (request.chat_template_kwargs or {}) | ({"documents": documents} if documents else {}),
            request.continue_final_message,
            request.add_generation_prompt,
            tools or None,
            is_whole,
            getattr(request, "chat_template", None),
        )

    def ends_in_answer(self) -> "ChatForm":
        """Return options with which the text ends at the end of the last turn's content."""
        return replace(self, continues=True, begins_turn=False)


def count_chars(messages: Sequence[Message]) -> int:
    """Return the characters of a conversation."""
    return sum(message.num_chars for message in messages)


def list_templates(tokenizer: Any) -> dict[str, str]:
    """Return a tokenizer's chat templates by name; an unnamed one is `default`."""
    found = tokenizer.chat_template or {}
    return {"default": found} if isinstance(found, str) else found


def find_template(tokenizer: Any, *, has_tools: bool = False) -> tuple[str, str]:
    """Return name and text of the template to use: with tools, the one for tools if it exists.

    Errors: APIError `invalid_request` without a template.
    """
    templates = list_templates(tokenizer)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        named = f"chat templates named {', '.join(sorted(templates))}, and none named default"
        detail = (
            f"This model has {named if templates else 'no chat template'}: write the conversation "
            "as text, as the model was trained to read it, and send that: prompts, context, texts "
            "or items."
        )
        raise api_error("invalid_request", detail, param="messages")
    return name, templates[name]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    form: ChatForm,
    write: Callable[[str], str] | None = None,
) -> str:
    """Render a conversation as text, with the template.

    With `write`, it is applied to each of the caller's strings first.

    Errors: APIError `invalid_request` without a chat template, if the template raises, or if it
    would ignore a part of the conversation.
    """
    from jinja2 import TemplateError

    template = form.template or find_template(tokenizer, has_tools=bool(form.tools))[1]
    _check_is_read(tokenizer, template, form)
    begins_turn = form.begins_turn
    if begins_turn is None:
        begins_turn = not form.continues and not (
            form.is_whole and messages[-1].role == "assistant"
        )
    given: list[Any] = [
        [_write_turn(message, template) for message in messages],
        form.tools,
        form.variables,
    ]
    turns, tools, variables = given if write is None else _rewrite(given, write)
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=begins_turn,
            continue_final_message=form.continues,
            **variables,
        )
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error)[:400].removesuffix(".")
        owner, param = ("request", "chat_template") if form.template else ("model", "messages")
        detail = f"The {owner}'s chat template refuses these messages: {reason}."
        raise api_error("invalid_request", detail, param=param) from error
    return str(text)


def _rewrite(value: Any, write: Callable[[str], str]) -> Any:
    """Return a JSON value with `write` applied to all its strings, including names."""
    if isinstance(value, dict):
        return {write(name): _rewrite(entry, write) for name, entry in value.items()}
    if isinstance(value, list):
        return [_rewrite(entry, write) for entry in value]
    return write(value) if isinstance(value, str) else value


def _check_is_read(tokenizer: Any, template: str, form: ChatForm) -> None:
    """Refuse parts that the template would ignore. Errors: APIError `invalid_request`."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
    own -= {"documents"}
    for name in form.variables:
        if name in own:
            detail = (
                f"chat_template_kwargs has {name[:80]}, which is not a variable of the template."
            )
            raise api_error("invalid_request", detail, param="chat_template_kwargs")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            detail = (
                f"chat_template_kwargs has {name[:80]}, which the chat template does not "
                "read: it would change nothing; leave it out. /tokenizer_info gives the template."
            )
            raise api_error("invalid_request", detail, param="chat_template_kwargs")
    if form.tools and not re.search(r"\btools\b", template):
        detail = (
            "This model's chat template does not read tools: describe them in a message, and leave "
            "tools out; response_format forces the form of a reply."
        )
        raise api_error("invalid_request", detail, param="tools")


def _write_turn(message: Message, template: str) -> dict[str, Any]:
    """Return a turn as templates expect it: arguments of calls as objects."""
    turn = message.model_dump(include={"role", "content", "name", "tool_call_id"})
    turn = {name: value for name, value in turn.items() if value is not None}
    if message.role == "developer" and "developer" not in template:
        turn["role"] = "system"
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.read_arguments(),
                },
            }
            for call in message.tool_calls
        ]
    return turn
