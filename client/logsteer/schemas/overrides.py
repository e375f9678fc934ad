"""`/overrides`: directions of the parameters, and requests under theta + eta v."""

from typing import Literal

from pydantic import Field

from logsteer.schemas.common import Reply, Request
from logsteer.schemas.steering import Finite, VectorName
from logsteer.schemas.views import Tabled


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


class UsedOverride(Reply):
    """The override that an answer was computed under, and its digest."""

    name: str
    sha256: str
    eta: float
    cast: Literal["float32"] | None = Field(
        default=None, description="What the model was computed in; null: its own dtype."
    )


class OverrideCard(Tabled):
    """One stored direction."""

    name: str
    sha256: str = Field(description="Content address: SHA-256 of the file as it was uploaded.")
    model: str = Field(description="Id of the model whose parameters it was checked against.")
    weights_digest: str
    tensors: int
    moved: int = Field(description="How many of the model's numbers it moves.")
    total: int = Field(description="How many numbers the model's parameters are.")
    norm: float = Field(description="Euclidean norm of the whole direction.")
    bytes: int
    created: str = Field(description="When the name was given this content: RFC 3339, UTC.")


class OverrideList(Tabled):
    """Every stored direction, by name."""

    overrides: list[OverrideCard]
    damaged: list[str] = Field(
        default=[],
        description="Names whose card or content is not as it was written: PUT them again, or "
        "DELETE them.",
    )
    bytes: int = Field(description="Bytes of all contents; one with several names counts once.")
    max_bytes: int = Field(description="What they may come to.")


class DeletedOverride(Reply):
    """The name that is gone, and the content that it pointed to."""

    name: str
    sha256: str | None = Field(description="null where the card was damaged.")
