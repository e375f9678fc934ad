"""Jobs that read no token: whether overrides and adapters fit the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from logsteer_server.contract.jobs import Feature, Ids, Job, Output


def _no_tokens() -> Ids:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class CheckOverrideJob(Job):
    """The shape of each tensor of a direction, to be compared with the model's parameters."""

    tokens: Ids = field(default_factory=_no_tokens, init=False)
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def features(self) -> tuple[Feature, ...]:
        """What the job needs of an engine."""
        return ("override",)


@dataclass(frozen=True, slots=True)
class CheckOverrideOutput(Output):
    """The direction fits: it moves so many of the model's so many numbers."""

    moved: int
    total: int


@dataclass(frozen=True, slots=True)
class CheckAdapterJob(Job):
    """An adapter that is to be loaded, to see whether it fits the model."""

    tokens: Ids = field(default_factory=_no_tokens, init=False)


@dataclass(frozen=True, slots=True)
class CheckAdapterOutput(Output):
    """The adapter fits: it changes so many of the model's weights."""

    updated: int
