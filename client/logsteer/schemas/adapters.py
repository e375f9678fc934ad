"""`/adapters`: LoRA adapters that the server keeps."""

from pydantic import Field

from logsteer.schemas.common import Reply
from logsteer.schemas.views import Tabled


class UsedAdapter(Reply):
    """The adapter that an answer was computed under, and its digest."""

    name: str
    sha256: str


class AdapterCard(Tabled):
    """One stored adapter."""

    name: str
    sha256: str = Field(description="Content address: SHA-256 of its configuration and weights.")
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
    bytes: int
    created: str = Field(description="When the name was given this content: RFC 3339, UTC.")


class AdapterList(Tabled):
    """Every stored adapter, by name."""

    adapters: list[AdapterCard]
    damaged: list[str] = Field(
        default=[],
        description="Names whose card or content is not as it was written: PUT them again, or "
        "DELETE them.",
    )
    bytes: int = Field(description="Bytes of all contents; one with several names counts once.")
    max_bytes: int = Field(description="What they may come to.")


class DeletedAdapter(Reply):
    """The name that is gone, and the content that it pointed to."""

    name: str
    sha256: str | None = Field(description="null where the card was damaged.")
