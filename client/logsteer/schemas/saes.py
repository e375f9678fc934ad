"""`/saes`: sparse autoencoders that the server keeps, whose features steer and are read."""

from pydantic import BaseModel, ConfigDict, Field

from logsteer.schemas.common import Index, Reply
from logsteer.schemas.vectors import OVERWRITE
from logsteer.schemas.views import Tabled


class SaeQuery(BaseModel):
    """What SAELens' files may leave open, and whether an upload replaces another."""

    model_config = ConfigDict(extra="forbid")

    layer: Index | None = Field(
        default=None,
        description="The block whose activation is read, where the hook in the configuration names "
        "none, or another.",
    )
    activation_scale: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="SAELens' norm_scaling_factor, where normalize_activations is "
        "expected_average_only_in; 1 where it was folded in.",
    )
    overwrite: bool = Field(default=False, description=OVERWRITE)


class SaeCard(Tabled):
    """One stored sparse autoencoder."""

    name: str
    sha256: str = Field(description="Content address: SHA-256 of its configuration and weights.")
    architecture: str
    hook: str
    layer: int = Field(description="Its activations are those of this layer's hook.")
    width: int = Field(description="Numbers of an activation.")
    features: int
    k: int | None = Field(default=None, description="Features of a token at most, of topk alone.")
    model_hint: str | None = Field(
        default=None, description="What its configuration says of its model."
    )
    labels: int = Field(description="Features that have a label.")
    bytes: int
    created: str = Field(description="When the name was given this content: RFC 3339, UTC.")


class SaeList(Tabled):
    """Every stored sparse autoencoder, by name."""

    saes: list[SaeCard]
    damaged: list[str] = Field(
        default=[],
        description="Names whose card or content is not as it was written: PUT them again, or "
        "DELETE them.",
    )
    bytes: int = Field(description="Bytes of all contents; one with several names counts once.")
    max_bytes: int = Field(description="What they may come to.")


class DeletedSae(Reply):
    """The name that is gone, and the content that it pointed to."""

    name: str
    sha256: str | None = Field(description="null where the card was damaged.")
