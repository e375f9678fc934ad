"""What `logsteer.lm_eval` makes of the arguments that a run of the harness gives it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from logsteer._calls import checked
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.json_files import load_steering
from logsteer.schemas import ModelCard, Steering, UsedAdapter

SteeringLike: TypeAlias = Steering | Mapping[str, Any]
"""A steering object, or its fields."""

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


def read_steering(client: Client, given: SteeringLike | str | Path) -> dict[str, Any]:
    """Return a steering object as JSON has it, its vectors by content.

    So a run has one steering, whatever becomes of the vectors' names meanwhile.

    Errors: LogsteerError for what is no steering object, and for an unknown vector.
    """
    fields = given.model_dump() if isinstance(given, Steering) else load_steering(given)
    steering = checked(Steering, fields).model_copy(deep=True)
    for vector in steering.vectors:
        if vector.name is not None:
            vector.sha256, vector.name = client.vectors.get(vector.name).sha256, None
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
