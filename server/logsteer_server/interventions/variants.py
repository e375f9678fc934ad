"""Expand requests to a variant of a model."""

from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from logsteer.errors import APIError, api_error
from logsteer.schemas import VariantFields
from logsteer.schemas.faults import explain
from logsteer.schemas.interventions import INTERVENED
from logsteer.schemas.steering import VectorName
from logsteer_server.interventions.interventions import Stores
from logsteer_server.stores.variants import FIELDS, VariantStore, list_names

B = TypeVar("B", bound=BaseModel)

STORED_NAME = TypeAdapter(VectorName)
"""A valid name of a variant; other names are not looked up in the store."""


def find_variant(name: str, store: VariantStore) -> VariantFields | None:
    """Look up a variant by name; None for an unknown one.

    `MODEL+mood:1@12` is a model steered with that vector, an unstored variant; each vector follows
    a `+`. Blocks. Errors: APIError `invalid_request`; those of `Store.look_up`.
    """
    base, plus, rest = name.partition("+")
    if plus:
        try:
            return VariantFields.model_validate({"model": base, "steering": rest.split("+")})
        except ValidationError as error:
            detail = f"model {name[:80]!r}: {explain(error, VariantFields)}"
            raise api_error("invalid_request", detail, param="model") from None
    try:
        STORED_NAME.validate_python(name)
    except ValidationError:
        return None
    try:
        card, _ = store.look_up(name)
    except APIError as error:
        if error.code == "unknown_model":
            return None
        raise
    return VariantFields.model_validate_json(card.model_dump_json(include=FIELDS))


def check_unused(noun: str, name: str, stores: Stores) -> None:
    """Check that no variant visible to a caller uses a content. Blocks.

    Errors: APIError `in_use`.
    """
    cards = stores.variants.list_all().cards
    if users := [card.name for card in cards if (noun, name) in list_names(card)]:
        detail = f"The {noun} {name!r} is named by the variants {', '.join(users)}: DELETE them"
        raise api_error("in_use", f"{detail} first, or PUT another {noun} in its place.")


def expand(body: B, name: str, variant: VariantFields, *, ignores: bool) -> B:
    """Return the request to the variant's model with the variant's interventions and options.

    `ignores`: the endpoint does not depend on the variant's changes. Errors: APIError
    `invalid_request` if both change the model, or the endpoint does not support such a change.
    """
    changes = {one: getattr(variant, one) for one in INTERVENED if getattr(variant, one)}
    own = {one: value for one in INTERVENED if (value := getattr(body, one, None)) is not None}
    lacks = [one for one in changes if one not in type(body).model_fields]
    detail = None
    if changes and own:
        detail = f"the request brings {_describe(own)}: leave that out"
    elif lacks and not ignores:
        detail = f"this endpoint takes no {lacks[0]}: send no variant"
    if detail:
        told = f"{name[:80]} is {variant.model} with {_describe(changes)}, and {detail}"
        raise api_error("invalid_request", f"{told}, or name {variant.model}.", param="model")
    given = {one: value for one, value in changes.items() if one not in lacks}
    if variant.chat_template_kwargs and "chat_template_kwargs" in type(body).model_fields:
        asked = getattr(body, "chat_template_kwargs", None) or {}
        given["chat_template_kwargs"] = variant.chat_template_kwargs | asked
    return body.model_copy(update={"model": variant.model, **given})


def _describe(changes: dict[str, Any]) -> str:
    """Name each change: `steering mood, adapter story`."""
    told = []
    for field, value in changes.items():
        named = list_names(VariantFields.model_construct(**{field: value}))
        told.append(" ".join([field, *(name for _, name in named)]))
    return ", ".join(told)
