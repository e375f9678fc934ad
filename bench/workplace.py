"""Where benchmarks run: their files, the model they measure with, the servers they share."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import DEVICE, make_model, read_vocab
from servers import run_logsteer, run_stock

ID = "model"
"""The id of the model in a server of ours."""
GPU_CACHE = 8 * 2**30
"""Bytes of cached keys and values on a GPU: several servers with weights of their own share it."""


@dataclass
class Workplace:
    """A directory for files, and the model: the user's, or one that is made.

    `dtype` is that of the user's model; the one made is measured in float32, eagerly where it says
    nothing else. `stack` ends what rows share.
    """

    directory: Path
    stack: contextlib.ExitStack
    given: Path | None = None
    dtype: str = "auto"
    _shared: list[str] = field(default_factory=list)

    def find_model(self, **shape: Any) -> Path:
        """Return the user's checkpoint, else one of 18 M random weights or of the shape given."""
        return self.given or make_model(self.directory, **shape)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of an engine of ours, under the names of `EngineSpec` and of the configuration.

        The user's model runs as it would be served: compiled.
        """
        found: dict[str, Any] = {"dtype": "float32", "compile": False, "memory": "1GiB"}
        if self.given is not None:
            found |= {"dtype": self.dtype, "compile": True}
        if DEVICE == "cuda":
            found["memory"] = f"{GPU_CACHE >> 30}GiB"
        return found

    def serve(
        self, path: Path, engine: str = "vllm", **settings: Any
    ) -> contextlib.AbstractContextManager[str]:
        """Return the URL of a new server of ours, which ends with the block."""
        own = self.settings if engine == "vllm" else {"dtype": self.settings["dtype"]}
        return run_logsteer({ID: path}, self.directory, engine, **(own | settings))

    def serve_stock(
        self, path: Path, compiled: bool = False
    ) -> contextlib.AbstractContextManager[str]:
        """Return the URL of vLLM's own server with the same settings, which ends with the block."""
        return run_stock(
            path,
            self.directory,
            dtype=self.settings["dtype"],
            compiled=compiled or self.settings["compile"],
            memory=str(GPU_CACHE) if DEVICE == "cuda" else None,
        )

    def share(self) -> str:
        """Return the URL of a server of the model, which is started once for all rows."""
        if not self._shared:
            self._shared.append(self.stack.enter_context(self.serve(self.find_model())))
        return self._shared[0]

    def stop_shared(self) -> None:
        """End the server that rows share, which would take from a row that it has no part in."""
        self.stack.close()
        self._shared.clear()

    def describe(self) -> dict[str, Any]:
        """Return what of this belongs beside a result."""
        found = {"device": DEVICE}
        if self.given is not None:
            found |= {"model": self.given.name, "dtype": self.dtype}
        return found


def read_size(path: Path) -> tuple[int, int]:
    """Return the vocabulary and the hidden size of a checkpoint."""
    config = json.loads((path / "config.json").read_text())
    return read_vocab(path), int(config["hidden_size"])
