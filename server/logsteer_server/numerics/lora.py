"""PEFT's layout of a LoRA adapter: its configuration, and the names of its tensors.

An update of a weight W [out, in] is scale * B A with A [r, in] and B [out, r]; the scale is
alpha / r, or alpha / sqrt(r) with `use_rslora`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logsteer_server.contract.plan import CONFIG_KEY

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

MAX_RANK = 2**16
MAX_NUMBER = 3e38

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (None, False),
}
"""PEFT's unsupported options, with the values that leave them off."""


class AdapterLayoutError(ValueError):
    """The adapter cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA configuration.

    `by_root`: the scale is alpha / sqrt(rank); `transposed`: the model has weights [in, out].
    """

    rank: int
    alpha: float
    by_root: bool
    transposed: bool

    @classmethod
    def parse(cls, data: str | bytes) -> "AdapterConfig":
        """Return the configuration in PEFT's JSON. Errors: AdapterLayoutError."""
        try:
            found: Any = json.loads(data)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise AdapterLayoutError(f"its configuration is not JSON: {reason}") from error
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            raise AdapterLayoutError(
                "its configuration is not that of a LoRA; send PEFT's adapter_config.json"
            )
        for name, neutral in _NEUTRAL.items():
            if found.get(name) not in neutral:
                raise AdapterLayoutError(
                    f"{name} is {found[name]!r}; only plain LoRA updates of weights are served"
                )
        rank, alpha = found.get("r"), found.get("lora_alpha")
        if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise AdapterLayoutError(f"r must be a whole number from 1 to {MAX_RANK}")
        if not isinstance(alpha, int | float) or not abs(alpha) <= MAX_NUMBER:
            raise AdapterLayoutError("lora_alpha must be a number that float32 holds")
        by_root, transposed = (bool(found.get(n)) for n in ("use_rslora", "fan_in_fan_out"))
        return cls(rank, float(alpha), by_root, transposed)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "AdapterConfig":
        """Return the configuration in the metadata of a stored file. Errors: AdapterLayoutError."""
        return cls.parse(metadata.get(CONFIG_KEY, ""))

    @property
    def scale(self) -> float:
        """The factor of an update's product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.by_root else self.rank)


@dataclass(frozen=True, slots=True)
class Factors:
    """The names of one update's tensors, and of the module whose weight it is added to."""

    module: str
    down: str
    up: str


def check_shapes(
    factors: Factors,
    down: Sequence[int],
    up: Sequence[int],
    weight: Sequence[int],
    *,
    transposed: bool,
) -> None:
    """Check that factors' shapes fit a weight's shape. Errors: AdapterLayoutError."""
    found = [up[0], down[1]] if len(down) == len(up) == 2 and down[0] == up[1] else []
    if transposed:
        found.reverse()
    if found != list(weight):
        raise AdapterLayoutError(
            f"the factors of {factors.module}.weight are {list(down)} and {list(up)}, which make "
            f"no update of a parameter {list(weight)}"
        )


def pair_factors(names: Iterable[str]) -> list[Factors]:
    """Pair the names of tensors to updates. Errors: AdapterLayoutError."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterLayoutError(
                f"{name} is not a factor of a weight's update (lora_A, lora_B); embeddings and "
                "whole modules are not served"
            )
        found.setdefault(match["module"], {})[match["factor"]] = name
    for module, factors in found.items():
        if len(factors) < 2:
            raise AdapterLayoutError(f"{module} has one factor of two (lora_A, lora_B)")
        if module.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens"):
            raise AdapterLayoutError(f"{module}: updates of embeddings and head are not served")
    return [Factors(module, factors["A"], factors["B"]) for module, factors in found.items()]
