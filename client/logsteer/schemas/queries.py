"""Query parameters of endpoints whose body is a file, or that have none."""

from pydantic import BaseModel, ConfigDict, Field

from logsteer.schemas.vectors import OVERWRITE, ContentFormat, VectorFormat


class ModelQuery(BaseModel):
    """The model that an upload is checked against."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(
        default=None, description="Id of a resident model; may be left out where there is only one."
    )


class StoreQuery(ModelQuery):
    """The model that an upload is checked against, and whether it replaces another."""

    overwrite: bool = Field(default=False, description=OVERWRITE)


class WaitQuery(BaseModel):
    """How long an answer may wait for its change."""

    model_config = ConfigDict(extra="forbid")

    wait_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Wait at most this many seconds for the change, which continues after.",
    )


class UploadQuery(BaseModel):
    """The format of an uploaded vector, and whether it replaces another."""

    model_config = ConfigDict(extra="forbid")

    format: VectorFormat | None = Field(
        default=None, description="Of the file; left out: what it looks like."
    )
    overwrite: bool = Field(default=False, description=OVERWRITE)


class ContentQuery(BaseModel):
    """The format of a downloaded vector."""

    model_config = ConfigDict(extra="forbid")

    format: ContentFormat = Field(
        default="safetensors",
        description="Of the file. The SHA-256 of the safetensors file is the vector's own.",
    )
