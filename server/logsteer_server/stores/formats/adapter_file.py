"""LoRA adapters: PEFT's two files, stored as one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from logsteer.errors import APIError, api_error
from logsteer_server.contract.plan import CONFIG_KEY
from logsteer_server.numerics.lora import (
    AdapterConfig,
    AdapterLayoutError,
    Factors,
    pair_factors,
)
from logsteer_server.stores.formats.tensor_file import (
    TensorFileError,
    copy_with_metadata,
    read_content,
    read_header,
)


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """What an adapter is, as its card says it."""

    rank: int
    alpha: float
    modules: list[str]
    tensors: int
    norm: float


def invalid_adapter(detail: str) -> APIError:
    """Return the error for an adapter that cannot be used."""
    return api_error("invalid_adapter", f"The adapter is invalid: {detail}.")


def join_files(config: bytes, weights: IO[bytes], write: Callable[[bytes], None]) -> None:
    """Write the weights' safetensors file with the configuration in its metadata.

    Errors: APIError `invalid_adapter`.
    """
    try:
        AdapterConfig.parse(config)
        own = json.dumps(json.loads(config), sort_keys=True)
        copy_with_metadata(weights, {CONFIG_KEY: own}, write)
    except (AdapterLayoutError, TensorFileError) as error:
        raise invalid_adapter(str(error)) from error
    except RecursionError as error:  # writing goes less deep than reading
        raise invalid_adapter("its JSON is nested too deeply") from error


def read_adapter(path: Path) -> AdapterContent:
    """Return what a joined file holds. Errors: APIError `invalid_adapter`."""
    try:
        with path.open("rb") as file:
            header, _ = read_header(file)
        config = AdapterConfig.read(header.get("__metadata__", {}))
        content = read_content(path)
        updates = pair_factors(content.shapes)
        for update in updates:
            _check_shapes(update, content.shapes, config.rank)
    except (AdapterLayoutError, TensorFileError) as error:
        raise invalid_adapter(str(error)) from error
    return AdapterContent(
        config.rank,
        config.alpha,
        sorted({update.module.rsplit(".", 1)[-1] for update in updates}),
        len(content.shapes),
        content.norm,
    )


def _check_shapes(factors: Factors, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    down, up = shapes[factors.down], shapes[factors.up]
    if len(down) != 2 or len(up) != 2 or not down[0] == up[1] == rank:
        raise AdapterLayoutError(
            f"the factors of {factors.module} are {list(down)} and {list(up)}, not [r, in] and "
            f"[out, r] with r = {rank}, as the configuration says"
        )
