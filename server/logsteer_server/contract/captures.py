"""Captures: jobs that read the activations of a sequence, and what comes of them.

It is the one way to activations: of `/activations`, of vector training, of self-tests.
Axis letters: L layers, T tokens, D width of an activation.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.jobs import Feature, Job, Output, Scores, find_features
from logsteer_server.contract.plan import Positions

CaptureRead = Literal["each", "last", "mean"]


@dataclass(frozen=True, slots=True)
class CaptureJob(Job):
    """A sequence of tokens whose activations are wanted, at `hook` of each of `layers`.

    Of its tokens at `positions` `read` says which: `each`, the `last`, or the `mean` over them. An
    activation is what leaves its hook, steering included; for that the prompt is the first
    `num_prompt` tokens, or the whole sequence.
    """

    layers: tuple[int, ...]
    hook: str = "resid_post"
    read: CaptureRead = "last"
    positions: Positions = field(default_factory=Positions)
    num_prompt: int | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) if self.num_prompt is None else self.num_prompt

    @property
    def features(self) -> tuple[Feature, ...]:
        """What the job needs of an engine: hooks, as steering does."""
        return tuple(dict.fromkeys(("steering", *find_features(self))))

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """The tokens that are read, by their places in the sequence."""
        found: npt.NDArray[np.int64] = np.flatnonzero(
            self.positions.mask(0, len(self.tokens), self.prompt_len)
        )
        return found[-1:] if self.read == "last" else found

    @property
    def num_rows(self) -> int:
        """Activations of a layer that come of it: one, or one for each token that is read."""
        return len(self.places) if self.read == "each" else 1


@dataclass(frozen=True, slots=True)
class CaptureOutput(Output):
    """Activations [L, T, D], float32, in the order of the job's layers and of its tokens.

    T is the job's `num_rows`.
    """

    activations_LTD: Scores

    @property
    def activations_LD(self) -> Scores:
        """The first of each layer: all there is, where the job does not read each token."""
        return self.activations_LTD[:, 0]
