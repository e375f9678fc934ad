"""What `logsteer.lm_eval` makes of the arguments of a run, and of a chat template."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from logsteer._calls import checked
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.json_files import load_steering
from logsteer.schemas import ModelCard, Steering, SteeringLike, UsedAdapter
from logsteer.schemas.openai import TokenizerInfo
from logsteer.schemas.steering import RECOMMENDED


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


DEFAULT_BATCH_SIZE = 1024


def find_card(client: Client, model: str | None) -> ModelCard:
    """Return the card of a model; of the only one where none is named. Errors: LogsteerError."""
    if model is not None:
        return client.model(model)
    cards = client.models().models
    if len(cards) != 1:
        names = ", ".join(card.id for card in cards) or "none"
        raise LogsteerError(f"give model: {client.base_url} has {names}")
    return cards[0]


def read_batch_size(given: int | str) -> int:
    """Return the sequences in one request; the default for "auto" and 1. Errors: ValueError."""
    if str(given) == "1" or str(given).startswith("auto"):
        return DEFAULT_BATCH_SIZE
    if not str(given).isdecimal() or int(given) == 0:
        raise ValueError(f"batch_size is {given!r}; give a number of sequences, or auto")
    return int(given)


def read_max_length(given: int | None, card: ModelCard) -> int:
    """Return how many tokens are read at once.

    Errors: LogsteerError before the model answers; ValueError.
    """
    limit = card.context_length
    if limit is None:
        raise LogsteerError(
            f"model {card.id} is {card.state}: {card.detail}; wait until it answers"
        )
    if given is not None and not 2 <= given <= limit:
        raise ValueError(f"max_length is {given}; model {card.id} reads 2 to {limit} tokens")
    return given or limit


def read_steering(client: Client, given: SteeringLike | Path) -> dict[str, Any]:
    """Return a steering object as JSON has it, its vectors by content, as they are recommended.

    So a run has one steering, whatever becomes of the vectors' names meanwhile. A string is JSON,
    a file of that, or vectors as in "mood:4@3".

    Errors: LogsteerError for an invalid steering object, and for an unknown vector.
    """
    is_file = isinstance(given, Path) or (isinstance(given, str) and Path(given).exists())
    if is_file or str(given).lstrip().startswith("{") or str(given).endswith(".json"):
        given = load_steering(given)  # type: ignore[arg-type]
    steering = checked(Steering, given).model_copy(deep=True)
    for vector in steering.vectors:
        if vector.name is not None:
            card = client.vectors.get(vector.name)
            advice = card.about.recommendation
            vector.sha256, vector.name = card.sha256, None
            vector.scale = vector.choose_scale(advice.scales if advice else ())
            if vector.layers == RECOMMENDED:
                vector.layers = None if advice is None else [advice.layer]
    return steering.model_dump(mode="json", exclude_none=True)


def find_adapter(client: Client, name: str) -> UsedAdapter:
    """Return the adapter that a name stands for now. Errors: LogsteerError for an unknown one."""
    card = client.adapters.get(name)
    return UsedAdapter(name=card.name, sha256=card.sha256)


def check_adapter(asked: UsedAdapter | None, used: UsedAdapter | None) -> None:
    """Check that an answer is under the adapter asked for. Errors: LogsteerError."""
    # Requests name an adapter, and a name may be given another content while a run lasts.
    if asked is not None and (used is None or used.sha256 != asked.sha256):
        found = "none" if used is None else f"one of content {used.sha256[:12]}"
        raise LogsteerError(
            f"adapter {asked.name} was {asked.sha256[:12]} when the run began, and an answer was "
            f"computed under {found}: keep the name as it is, and begin again"
        )
