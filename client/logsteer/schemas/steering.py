"""Steering objects and probes: which activations of a request are changed and read, and how."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from logsteer.schemas.common import (
    MAX_COUNT,
    ByLayer,
    Count,
    Float,
    Index,
    OneForm,
    ProbeRead,
    Reply,
    Request,
    Tabled,
    TokenId,
    check_distinct,
    check_hook,
)

Operation = Literal["add", "ablate", "project", "clamp", "replace", "rotate"]
Unit = Literal["raw", "unit", "residual_norm"]
PositionName = Literal["all", "prompt", "completion", "predicting", "last_prompt"]

VectorName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^(shared/)?[A-Za-z0-9][A-Za-z0-9._-]*$")
]
"""A vector, override, adapter or autoencoder of one's own, or `shared/NAME`: of everybody's."""
CaptureName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FeatureLabel = Annotated[str, Field(min_length=1, max_length=512)]
LayerKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})$")]
HookName = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+$"),
    AfterValidator(check_hook),
]


FLOAT32_MAX = 3.4028234663852886e38
Finite = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
"""A number that float32 holds."""

Recommended = Literal["recommended"]
RECOMMENDED: Recommended = "recommended"

_FEATURE = re.compile(r"(?!shared/[0-9]+$)(?P<sae>.+)/(?P<feature>[0-9]{1,9})")
_VECTOR = re.compile(r"(?P<name>[^:@]+)(:(?P<scale>[^:@]+))?(@(?P<layers>[^:@]+)(?P<all>:all)?)?")


MAX_LAYER = 9999
"""The largest number of a layer in such a text, and how many it may name."""


def parse_layers(text: str) -> list[int]:
    """Return the layers of a list such as 2 or 2,5-7; else raise ValueError."""
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        last = int(found[2] or found[1]) if found else -1
        if found is None or last < int(found[1]) or len(layers) > MAX_LAYER:
            raise ValueError(f"{text[:80]!r} is not a list of layers such as 10,12-14")
        layers += range(int(found[1]), last + 1)
    return layers


def parse_vector(text: str) -> dict[str, Any]:
    """Return the fields of a vector written as in mood, mood:-2.5, mood:4@2 or mood:4@2,5-7.

    res8/123:4 is feature 123 of the sparse autoencoder res8. A scale or layers that are left out
    are "recommended". refusal@14:all ablates the direction of layer 14 at every layer; a scale is
    then the share that is removed, 1 where it is left out. Raises ValueError for another form.
    """
    found = _VECTOR.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} has not the form NAME[:SCALE][@LAYERS], as in mood:4@3, or "
            "NAME[:SCALE]@LAYER:all, as in refusal@14:all"
        )
    scale: float | Recommended = RECOMMENDED
    if found["scale"] is not None:
        try:
            scale = float(found["scale"])
        except ValueError as error:
            raise ValueError(f"{text!r}: the scale {found['scale']!r} is not a number") from error
    layers = RECOMMENDED if found["layers"] is None else parse_layers(found["layers"])
    named: dict[str, Any] = {"name": found["name"]}
    if feature := _FEATURE.fullmatch(found["name"]):
        named = {"sae": feature["sae"], "feature": int(feature["feature"])}
    if not found["all"]:
        return {**named, "scale": scale, "layers": layers}
    if len(layers) != 1:
        raise ValueError(f"{text!r}: :all takes one layer's direction, as in refusal@14:all")
    share = 1.0 if scale == RECOMMENDED else scale
    return {**named, "op": "ablate", "scale": share, "from_layer": layers[0]}


def _read_scale(data: Any) -> float | Recommended:
    if data == RECOMMENDED:
        return RECOMMENDED
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if not is_number or not abs(data) <= FLOAT32_MAX:
        raise ValueError(f'give a number that float32 holds, or "{RECOMMENDED}"')
    return float(data)


def _read_layers(data: Any) -> list[int] | Recommended | None:
    if data is None or data == RECOMMENDED:
        return data  # type: ignore[no-any-return]
    if not isinstance(data, list) or not data:
        raise ValueError(f'give a list of layers such as [3], or "{RECOMMENDED}"')
    if wrong := [one for one in data if type(one) is not int or not 0 <= one <= MAX_COUNT]:
        raise ValueError(f"{wrong[0]!r:.40} is not a layer: they are counted from 0")
    return check_distinct(data)


def _spell_layers(data: Any) -> Any:
    """Return numbers of layers, and numpy's and torch's vectors, as JSON has them."""
    if not isinstance(data, Mapping):
        return data
    return {str(k): v.tolist() if hasattr(v, "tolist") else v for k, v in data.items()}


class ClampBounds(Request):
    """Limits of the component along a vector, in the units of the activations."""

    min: Finite | None = None
    max: Finite | None = None

    @model_validator(mode="after")
    def _has_a_bound(self) -> "ClampBounds":
        if self.min is None and self.max is None:
            raise ValueError("clamp needs params.min, params.max, or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"params.min {self.min} is above params.max {self.max}")
        return self


HOOK = "Which activation of the layer; resid_post is the residual stream that leaves block L."


class VectorReference(OneForm):
    """A vector, stored or given, and which activations it is used at."""

    forms: ClassVar[tuple[str, ...]] = ("name", "sha256", "data", "sae")

    name: VectorName | None = None
    sha256: Sha256 | None = None
    data: Annotated[dict[LayerKey, list[Finite] | str] | None, BeforeValidator(_spell_layers)] = (
        Field(
            default=None,
            min_length=1,
            description="The vector itself: layer -> numbers, or base64 of little-endian float32.",
        )
    )
    sae: VectorName | None = Field(
        default=None,
        description="Name of a stored sparse autoencoder: the vector is one of its features, what "
        "the decoder writes for it; a probe reads what the encoder does.",
    )
    feature: Index | FeatureLabel | None = Field(
        default=None, description="Of `sae`: the feature's id, or its label."
    )
    layers: Annotated[
        list[int] | Recommended | None,
        PlainValidator(_read_layers, json_schema_input_type=list[Index] | Recommended | None),
    ] = Field(
        default=None,
        description="Layers to use it at; null: the vector's own. A vector of a single layer may "
        "be used at any layer. `recommended`: the layer that its training recommends; its own "
        "where nothing is recommended.",
    )
    from_layer: Index | None = Field(
        default=None,
        description="The vector's layer whose direction is used at all of `layers`, which is then "
        "every layer of the model where it is null or `recommended`.",
    )
    hook: HookName | None = Field(
        default=None,
        description="Which activation of the layer; null: the vector's own, resid_post unless it "
        "says otherwise. Layer L, resid_post is the residual stream that leaves block L, 0-based.",
    )

    @model_validator(mode="after")
    def _names_a_feature(self) -> Self:
        if (self.sae is None) != (self.feature is None):
            raise ValueError("sae and feature go together: name the autoencoder and its feature")
        return self


class ProbedVector(VectorReference):
    """A direction that is read: with u = v / |v|, of an activation x as it comes to be steered.

    `projection` x . u; `cosine` x . u / |x|; `probability` and `activation`, of vectors that say
    what their projection means: those trained by logistic regression, and features of sparse
    autoencoders.
    """

    read: ProbeRead = "projection"


class SteeringCondition(Request):
    """Where a vector acts: on tokens whose reading is above one number, below another, or both."""

    probe: ProbedVector
    above: Finite | None = None
    below: Finite | None = None
    of: Literal["token", "prompt"] = Field(
        default="token",
        description="`token`: each token's own reading. `prompt`: that of the prompt's last token, "
        "for this one and all tokens after it.",
    )

    @model_validator(mode="after")
    def _has_a_threshold(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError("a condition needs above, below, or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"nothing is above {self.above} and below {self.below}")
        return self


class ProbeRequest(ProbedVector):
    """A direction that is read at the tokens that are scored or generated, and what is shown."""

    context: bool = Field(
        default=False,
        description="Also at the tokens before those, which are all read again for it.",
    )


def _check_slice(pair: tuple[int, int]) -> tuple[int, int]:
    start, end = pair
    if start >= end:
        raise ValueError(f"slice [{start}, {end}] is empty; end is exclusive")
    return pair


Slice = Annotated[tuple[Index, Count], Field(strict=False), AfterValidator(_check_slice)]


class SlicePositions(Request):
    """Input tokens by position: [start, end) pairs."""

    slices: list[Slice] = Field(min_length=1, max_length=64)


class PositionRule(OneForm):
    """Tokens by place or by content, as exactly one of these says, with P the prompt's length.

    `slices`: input tokens by position; of the prompt `token_ids`: the tokens of these ids, `after`:
    the rest behind this text's first place, `last`: as many at its end; of the completion
    `completion`: tokens [start, end), `every`: the first token and every n-th after it.
    """

    forms: ClassVar[tuple[str, ...]] = (
        "slices", "token_ids", "after", "last", "completion", "every"
    )  # fmt: skip

    slices: list[Slice] | None = Field(default=None, min_length=1, max_length=64)
    token_ids: list[TokenId] | None = Field(default=None, min_length=1, max_length=1024)
    after: str | None = Field(default=None, min_length=1)
    last: Count | None = None
    completion: Slice | None = None
    every: Count | None = None


def _choose_form(data: Any) -> str:
    return "name" if isinstance(data, str) else "rule"


SteeredPositions = Annotated[
    Annotated[PositionName, Tag("name")] | Annotated[PositionRule, Tag("rule")],
    Discriminator(_choose_form),
]


class SteeringVector(VectorReference):
    """One vector and what is done with it to the activations x of each steered token.

    With v the vector, u = v / |v| and c = x . u:

    `add` x + scale v (unit: x + scale u; residual_norm: x + scale |x| u); `ablate` x - scale c u,
    so that scale 1 removes the component; `project` sets c to scale (residual_norm: scale |x|);
    `clamp` moves c into [params.min, params.max]; `replace` gives scale v (unit: scale u;
    residual_norm: scale |x| u); `rotate` turns x toward v by scale degrees, not beyond it, and
    keeps |x|.
    """

    scale: Annotated[
        float | Recommended,
        PlainValidator(_read_scale, json_schema_input_type=Finite | Recommended),
    ] = Field(
        default=1.0,
        description="`recommended`: for op add and unit raw the scale that its training "
        "recommends; 1 elsewhere, where nothing is recommended, and in a sweep. The "
        "receipt says which it was.",
    )
    unit: Unit = "raw"
    op: Operation = "add"
    params: ClampBounds | None = None
    positions: SteeredPositions | None = Field(
        default=None, description="Tokens that this vector changes; null: the steering object's."
    )
    when: SteeringCondition | None = Field(
        default=None,
        description="Act only where this holds. Its probe is read at a layer not after the "
        "vector's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_string(cls, data: Any) -> Any:
        return parse_vector(data) if isinstance(data, str) else data

    @model_validator(mode="after")
    def _fits_operation(self) -> Self:
        if (self.op == "clamp") != (self.params is not None):
            raise ValueError("op clamp takes params with min and max, and no other op does")
        if self.op in ("ablate", "clamp", "rotate") and self.unit != "raw":
            raise ValueError(f"op {self.op} has no use for unit {self.unit}; leave unit out")
        if isinstance(self.scale, str):
            return self
        if self.op == "clamp" and self.scale != 1.0:
            raise ValueError("op clamp has no scale; give params.min and params.max")
        if self.op == "rotate" and abs(self.scale) > 180:
            raise ValueError(f"op rotate turns by at most 180 degrees, got scale {self.scale}")
        return self

    def choose_scale(self, advised: float | None) -> float:
        """Return the scale to use; `advised` is what the vector's training recommends."""
        if not isinstance(self.scale, str):
            return self.scale
        is_plain = self.op == "add" and self.unit == "raw"
        return advised if advised is not None and is_plain else 1.0


class Steer(SteeringVector):
    """A vector for Python: `Steer("mood")`, `Steer("mood", 4, layer=3)`, or with other fields.

    A scale or layers that are left out are as its training recommends.
    """

    def __init__(
        self, name: str | None = None, scale: float | Recommended = RECOMMENDED, **fields: Any
    ) -> None:
        if "layer" in fields:
            fields["layers"] = [fields.pop("layer")]
        if name is not None:
            fields["name"] = name
        super().__init__(**{"scale": scale, "layers": RECOMMENDED, **fields})


class Steering(Request):
    """Vectors, applied in the order given, to the activations of some of a sequence's tokens.

    As a string, "mood:4@3" is a vector's name, scale and layer; what is left out is what training
    recommends. "refusal@14:all" ablates the direction of layer 14 at every layer, as Arditi et al.
    do (2024, arXiv 2406.11717). Several vectors are a list of strings.
    """

    vectors: list[SteeringVector] = Field(min_length=1, max_length=64)
    positions: SteeredPositions = Field(
        default="all",
        description="Of the input token whose activation is changed, with P the prompt's length: "
        "all, prompt (< P), completion (>= P), predicting (>= P - 1), last_prompt (= P - 1), or "
        "slices; or a rule, such as {'last': 3}. Where targets or texts are scored, the prompt is "
        "what stands before them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_strings(cls, data: Any) -> Any:
        vectors = [data] if isinstance(data, str | SteeringVector) else data
        return {"vectors": vectors} if isinstance(vectors, list) else data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of the object, or a string, or a list of strings."""
        text = {"type": "string", "examples": ["mood", "mood:4@3", "mood@3:all"]}
        return {"anyOf": [handler(schema), text, {"type": "array", "items": text}]}


SteeringLike: TypeAlias = (
    str | Steering | SteeringVector | Mapping[str, Any] | Sequence[str | SteeringVector]
)
"""What a client takes for a steering object: "mood:4@3", `Steer`, a list of these, or fields."""


class SteeredSite(Reply):
    """What steering did at one layer: measured in the model, not computed from the request."""

    tokens: int = Field(description="Tokens whose activation was changed there in this request.")
    relative_norm: Float = Field(
        description="Mean of |change| / |activation| over those tokens, without the first of each "
        "sequence, an attention sink in many models, unless it alone was changed; null without any."
    )


class UsedVector(Reply):
    """A vector that was used, and its digest."""

    name: str | None
    sha256: str
    scale: float
    other_weights: bool = Field(
        default=False, description="Whether it was trained on other weights than this model's."
    )
    tokens: int | None = Field(
        default=None, description="Tokens at its positions, counted as `tokens_steered` is."
    )
    passed: int | None = Field(
        default=None,
        description="Tokens at steered positions where its condition held, without those from the "
        "prefix cache; null without a condition.",
    )


class SteeringReceipt(Tabled):
    """Proof of what was applied. Tokens from the prefix cache were steered when they were read."""

    tokens_steered: int = Field(description="Input tokens that were read under steering.")
    layers: ByLayer[SteeredSite] = Field(
        description="By layer; a hook other than resid_post follows it, as in 3.attn_out."
    )
    vectors: list[UsedVector]
