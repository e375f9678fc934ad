"""What is added to a model's parameters for one job: overrides and LoRA adapters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction v in the space of parameters: the safetensors file with this SHA-256."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Override:
    """For one job, the model's parameters are theta + eta v."""

    direction: Direction
    eta: float


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
