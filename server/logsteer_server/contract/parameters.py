"""What is added to a model's parameters for one job: overrides and LoRA adapters."""

from dataclasses import dataclass
from typing import Literal

Cast = Literal["float32"]
"""What a model of half precision may be computed in for one job."""


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction v in the space of parameters: the safetensors file with this SHA-256."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Override:
    """For one job, the model's parameters are theta + eta v.

    With `cast` the whole model is computed in that precision for the job, so that a change below
    the last place of its own dtype acts.
    """

    direction: Direction
    eta: float
    cast: Cast | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What it does, wherever its file lies: equal ones give equal results."""
        return (self.direction.sha256, self.eta, *((self.cast,) if self.cast else ()))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the safetensors file with this SHA-256.

    Its metadata has the configuration that PEFT writes beside weights, as JSON, under CONFIG_KEY.
    """

    path: str
    sha256: str


CONFIG_KEY = "adapter_config"


@dataclass(frozen=True, slots=True)
class ParameterDelta:
    """What is added to the model's parameters: an adapter's product first, then an override."""

    override: Override | None = None
    adapter: Adapter | None = None

    def __bool__(self) -> bool:
        return self.override is not None or self.adapter is not None

    @property
    def files(self) -> tuple[Adapter | Direction, ...]:
        """The stored files that it is made of."""
        adapter = () if self.adapter is None else (self.adapter,)
        return adapter if self.override is None else (*adapter, self.override.direction)

    @property
    def cast(self) -> Cast | None:
        """What the model is computed in; None for its own dtype."""
        return self.override.cast if self.override else None
