"""Interventions: what a request changes of the model for itself, and what an answer says of it.

`/overrides` stores directions of the parameters, `/adapters` LoRA adapters.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from logsteer.schemas.common import (
    OVERWRITE,
    Layers,
    NamedContent,
    Reply,
    Request,
)
from logsteer.schemas.steering import (
    HOOK,
    Finite,
    HookName,
    ProbeRequest,
    SteeredPositions,
    Steering,
    SteeringReceipt,
    VectorName,
)
from logsteer.schemas.stored import StoredCard, StoredList


class UsedAdapter(NamedContent):
    """The adapter that an answer was computed under, and its digest."""


class AdapterCard(StoredCard):
    """One stored adapter."""

    model: str = Field(description="Id of the model that it was checked against.")
    weights_digest: str
    rank: int
    alpha: float = Field(description="As its configuration says; what updates are scaled by.")
    modules: list[str] = Field(description="Last names of the modules that it updates.")
    tensors: int
    updated: int | None = Field(
        default=None,
        description="Weights of the model that it changes, as the engine counted when it was sent; "
        "null: sent to an older server.",
    )
    norm: float = Field(description="Euclidean norm of all its factors together.")


class AdapterList(StoredList):
    """Every stored adapter, by name."""

    adapters: list[AdapterCard]


class ParameterOverride(Request):
    """The model's parameters are theta + eta v for this request alone; v is the stored direction.

    Each sum is computed in float64 and rounded once: to the parameter's own type, where an eta v
    far below the parameter's last place is lost, or with `cast` to float32. Where no parameter
    differs after that, though eta is not 0, the request is refused.
    """

    name: VectorName
    eta: Finite = Field(description="0 is the model as it is.")
    cast: Literal["float32"] | None = Field(
        default=None,
        description="float32: for this request a model in half precision is computed in float32, "
        "parameters and activations alike. It then has a second copy of its parameters, of twice "
        "their bytes, and takes the time of a float32 model. Its log-probabilities differ from "
        "those in its own dtype at eta 0, too: compare with eta 0 under the same cast. Without "
        "effect on a model in float32; quantised models refuse it.",
    )


class UsedOverride(NamedContent):
    """The override that an answer was computed under, and its digest."""

    eta: float
    cast: Literal["float32"] | None = Field(
        default=None, description="What the model was computed in; null: its own dtype."
    )


class OverrideCard(StoredCard):
    """One stored direction."""

    model: str = Field(description="Id of the model whose parameters it was checked against.")
    weights_digest: str
    tensors: int
    moved: int = Field(description="How many of the model's numbers it moves.")
    total: int = Field(description="How many numbers the model's parameters are.")
    norm: float = Field(description="Euclidean norm of the whole direction.")


class OverrideList(StoredList):
    """Every stored direction, by name."""

    overrides: list[OverrideCard]


class ParameterFields(Request):
    """Other parameters, for one request alone."""

    override: ParameterOverride | None = Field(
        default=None,
        description="A stored direction v by name, and eta: the parameters are theta + eta v.",
    )
    adapter: VectorName | None = Field(
        default=None, description="Name of a stored LoRA adapter that is added to the parameters."
    )


class InterventionFields(ParameterFields):
    """Other parameters and other activations, for one request alone."""

    steering: Steering | None = Field(
        default=None,
        description="Steer the model. Tokens before the first scored one are the prompt.",
    )


INTERVENED = ("steering", "adapter", "override")
"""Fields of a request that change the model."""


class VariantFields(InterventionFields):
    """A resident model, and what every request to it is computed under."""

    model: str | None = Field(
        default=None, description="Id of a resident model; may be left out where there is only one."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, below those of a request."
    )
    description: str | None = Field(
        default=None, max_length=1000, description="What it is, for people who choose a model."
    )


class VariantRequest(VariantFields):
    """A steered model as a model of its own, whose name is a model in every endpoint."""

    overwrite: bool = Field(default=False, description=OVERWRITE)


class VariantCard(StoredCard):
    """One variant of a model."""

    model: str = Field(description="Id of the model that it is a variant of.")
    steering: dict[str, Any] | None = None
    adapter: str | None = None
    override: ParameterOverride | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    description: str | None = None


class VariantList(StoredList):
    """Every variant that a caller sees: those of the server's file, then stored ones, by name."""

    variants: list[VariantCard]


ActivationRead = Literal["each", "last", "mean"]


STORED_CAPTURE = r"^store://[A-Za-z0-9][A-Za-z0-9._-]*$"


class CaptureOptions(Request):
    """Activations to give with an answer, of the very pass that it came from.

    The last token generated is never read by the model, so it has none.
    """

    layers: Layers = Field(description="Layers to read, 0-based.")
    hook: HookName = Field(default="resid_post", description=HOOK)
    positions: SteeredPositions = Field(
        default="all",
        description='Tokens to read, as in steering. Such as {"completion": [0, 100]}: of a '
        "continuation room is taken for all that it may come to.",
    )
    read: ActivationRead = Field(
        default="each",
        description="Each of those tokens' activation, the last one's, or their mean, which leaves "
        "out BOS where positions is all, and attention sinks.",
    )
    dtype: Literal["float32", "float16"] = Field(
        default="float32", description="Of the arrays in the answer."
    )
    point: Literal["after", "before"] = Field(
        default="after", description="After or before the steering at that hook."
    )
    to: Annotated[str, Field(max_length=136, pattern=STORED_CAPTURE)] | None = Field(
        default=None,
        description="`store://NAME`: write them to the store, as `/captures` does, and not to the "
        "answer. A document is a target (with `space` both: a variant), a completion (a "
        "baseline's are the last) or a window, in the answer's order. Scope `write`.",
    )
    overwrite: bool = Field(default=False, description=OVERWRITE)


class ActivationFields(InterventionFields):
    """Other parameters and activations, and what is read of the activations."""

    capture: CaptureOptions | None = Field(
        default=None,
        description="Activations to give with each result, which is then never taken from the "
        "result cache; prompt tokens that are captured never come from the prefix cache.",
    )

    probes: list[ProbeRequest] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Directions to read at every token that is scored or generated. Results with "
        "readings are never taken from the result cache.",
    )


class AppliedParameters(Reply):
    """The parameters that an answer was computed under, where they are not the model's own."""

    override: UsedOverride | None = None
    adapter: UsedAdapter | None = None


class AppliedInterventions(AppliedParameters):
    """What an answer was computed under."""

    steering: SteeringReceipt | None = None


class StoredActivations(Reply):
    """A data set of activations that was written: `GET /captures/NAME` shows it."""

    name: str
    documents: int
    rows: int
    num_shards: int
    bytes: int


class CapturingAnswer(AppliedInterventions):
    """What an answer was computed under, and what was captured to the store."""

    captured: StoredActivations | None = Field(
        default=None, description="What `to` of `capture` has written."
    )
