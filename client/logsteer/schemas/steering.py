"""The steering object: which vectors change which activations of a request, and how."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from logsteer.schemas.common import Count, Float, Index, Reply, Request

Operation = Literal["add", "ablate", "project", "clamp", "replace", "rotate"]
Unit = Literal["raw", "unit", "residual_norm"]
PositionName = Literal["all", "prompt", "completion", "predicting", "last_prompt"]

VectorName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^(shared/)?[A-Za-z0-9][A-Za-z0-9._-]*$")
]
"""A vector, override or adapter of one's own, or `shared/NAME`: of everybody's."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LayerKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})$")]
HookName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+$")]


FLOAT32_MAX = 3.4028234663852886e38
Finite = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
"""A number that float32 holds."""


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


class SteeringVector(Request):
    """One vector and what is done with it to the activations x of each steered token.

    With v the vector, u = v / |v| and c = x . u:

    `add` x + scale v (unit: x + scale u; residual_norm: x + scale |x| u); `ablate` x - scale c u,
    so that scale 1 removes the component; `project` sets c to scale (residual_norm: scale |x|);
    `clamp` moves c into [params.min, params.max]; `replace` gives scale v (unit: scale u;
    residual_norm: scale |x| u); `rotate` turns x toward v by scale degrees, not beyond it, and
    keeps |x|.
    """

    name: VectorName | None = None
    sha256: Sha256 | None = None
    data: dict[LayerKey, list[Finite] | str] | None = Field(
        default=None,
        min_length=1,
        description="The vector itself: layer -> numbers, or base64 of little-endian float32.",
    )
    scale: Finite = 1.0
    unit: Unit = "raw"
    op: Operation = "add"
    params: ClampBounds | None = None
    layers: list[Index] | None = Field(
        default=None,
        min_length=1,
        description="Layers to steer; null: the vector's own. A vector of a single layer may be "
        "used at any layer.",
    )
    hook: HookName | None = Field(
        default=None,
        description="Which activation of the layer; null: the vector's own, resid_post unless it "
        "says otherwise. Layer L, resid_post is the residual stream that leaves block L, 0-based.",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> "SteeringVector":
        given = [n for n in ("name", "sha256", "data") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of name, sha256, data; got {given or 'none'}")
        if (self.op == "clamp") != (self.params is not None):
            raise ValueError("op clamp takes params with min and max, and no other op does")
        if self.op in ("ablate", "clamp", "rotate") and self.unit != "raw":
            raise ValueError(f"op {self.op} has no use for unit {self.unit}; leave unit out")
        if self.op == "clamp" and self.scale != 1.0:
            raise ValueError("op clamp has no scale; give params.min and params.max")
        if self.op == "rotate" and abs(self.scale) > 180:
            raise ValueError(f"op rotate turns by at most 180 degrees, got scale {self.scale}")
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers has an entry twice: {self.layers}; name each layer once")
        return self


Slice = tuple[Index, Count]


class SlicePositions(Request):
    """Input tokens by position: [start, end) pairs."""

    slices: list[Annotated[Slice, Field(strict=False)]] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _slices_have_content(self) -> "SlicePositions":
        for start, end in self.slices:
            if start >= end:
                raise ValueError(f"slice [{start}, {end}] is empty; end is exclusive")
        return self


class Steering(Request):
    """Vectors, applied in the order given, to the activations of some of a sequence's tokens."""

    vectors: list[SteeringVector] = Field(min_length=1, max_length=64)
    positions: PositionName | SlicePositions = Field(
        default="all",
        description="Of the input token whose activation is changed, with P the prompt's length: "
        "all, prompt (< P), completion (>= P), predicting (>= P - 1), last_prompt (= P - 1), or "
        "slices. Where targets or texts are scored, the prompt is what stands before them.",
    )


class SteeredSite(Reply):
    """What steering did at one layer: measured in the model, not computed from the request."""

    tokens: int = Field(description="Tokens whose activation was changed there in this request.")
    relative_norm: Float = Field(
        description="Mean of |change| / |activation| over those tokens; null where there are none."
    )


class UsedVector(Reply):
    """A vector that was used, by its content."""

    name: str | None
    sha256: str
    scale: float


class SteeringReceipt(Reply):
    """Proof of what was applied. Tokens from the prefix cache were steered when they were read."""

    tokens_steered: int = Field(description="Input tokens that were read under steering.")
    layers: dict[str, SteeredSite] = Field(
        description="By layer; a hook other than resid_post stands behind it, as in 3.attn_out."
    )
    vectors: list[UsedVector]
