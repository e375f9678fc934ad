"""Where benchmarks run: their files, the model they measure with, the servers they share."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.models import DEVICE, make_model
from bench.servers import run_logsteer, run_stock

ID = "model"
"""The id of the model in a server of ours."""
MEMORY = 8 * 2**30 if DEVICE == "cuda" else 2**30
"""Bytes of cached keys and values of a server: several with weights of their own run at once."""


@dataclass
class Workplace:
    """A directory for files, and the model: the user's, or one that is made.

    `dtype` is that of the user's model; the one made is measured in float32. `stack` ends what rows
    share.
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

        All others are its defaults, as a user has them.
        """
        dtype = "float32" if self.given is None else self.dtype
        return {"dtype": dtype, "memory": f"{MEMORY >> 30}GiB"}

    def serve(
        self, path: Path, engine: str = "vllm", **settings: Any
    ) -> contextlib.AbstractContextManager[str]:
        """Return the URL of a new server of ours, which ends with the block."""
        own = self.settings if engine == "vllm" else {"dtype": self.settings["dtype"]}
        return run_logsteer({ID: path}, self.directory, engine, **(own | settings))

    def serve_stock(self, path: Path) -> contextlib.AbstractContextManager[str]:
        """Return the URL of vLLM's own server, which ends with the block: with its own defaults,
        but for dtype and memory, which are those of ours.
        """
        return run_stock(path, self.directory, self.settings["dtype"], MEMORY)

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
