"""A model's chat template, applied where the client runs."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from logsteer.errors import LogsteerError
from logsteer.schemas.openai import TokenizerInfo


def render_chat(
    info: TokenizerInfo, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    """Write a conversation as text, up to the assistant's next turn or the end of its last one.

    Needs jinja2. Raises LogsteerError without a chat template, or where it refuses.
    """
    # The template comes from the server: it must not reach the caller's Python.
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if info.chat_template is None:
        raise LogsteerError("this model has no chat template: leave --apply_chat_template out")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
    tokens = {"bos_token": info.bos_token or "", "eos_token": info.eos_token or ""}
    try:
        text: str = environment.from_string(info.chat_template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **tokens
        )
    except TemplateError as error:
        raise LogsteerError(f"the chat template refuses these messages: {error}") from error
    return text if add_generation_prompt else _cut_after(text, messages[-1]["content"])


def _cut_after(text: str, turn: str) -> str:
    """Return the text up to the end of its last turn, which is to be continued."""
    start = text.rfind(turn.strip())
    if start < 0:
        raise LogsteerError("the chat template changes the last message: it cannot be continued")
    # Some templates strip a turn's white space.
    own = turn.lstrip() if text.startswith(turn.lstrip(), start) else turn.strip()
    return text[: start + len(own)]


def _refuse(message: Any) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))
