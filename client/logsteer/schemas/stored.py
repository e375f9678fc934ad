"""What every kind of stored content has in common: its card, its list, its deletion."""

from pydantic import Field

from logsteer.schemas.common import Reply, Tabled


class StoredCard(Tabled):
    """One stored content under its name."""

    name: str
    sha256: str = Field(description="Content address: SHA-256 of what the name stands for.")
    bytes: int
    created: str = Field(
        description="When the name was given this content: RFC 3339, UTC; empty for a variant of "
        "the server's own file."
    )


class StoredList(Tabled):
    """Every stored content of a kind, by name."""

    damaged: list[str] = Field(
        default=[],
        description="Names whose card or content is not as it was written: PUT them again, or "
        "DELETE them.",
    )
    bytes: int = Field(description="Bytes of all contents; one with several names counts once.")
    max_bytes: int = Field(description="What they may come to.")


class Deleted(Reply):
    """The name that is gone, and the content that it stood for."""

    name: str
    sha256: str | None = Field(
        description="Of a data set of activations that of its documents; null where the card was "
        "damaged."
    )
