"""Captures of a batch: the activations of chosen tokens of each row, pass by pass.

Axis letters: T tokens, L layers, N captured tokens of a pass, W width of an activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.captures import Capture, CapturedActivations, Places
from logsteer_server.contract.jobs import Job
from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.points import HookFunction, PassTokens, Point, RefusedJobError
from logsteer_server.numerics.sinks import finish_capture


@dataclass(slots=True, eq=False)
class CapturedRow:
    """One job's capture: the activation of each layer, and what was captured so far."""

    capture: Capture
    prompt_len: int
    points: tuple[Point, ...]
    places: list[Places]
    parts_L: list[list[Tensor]]

    @classmethod
    def place(cls, model: CausalModel, job: Job) -> "CapturedRow | None":
        """Return the capture of a job; None without one. Errors: RefusedJobError."""
        capture = job.capture
        if capture is None:
            return None
        points = tuple(model.points.find(layer, capture.hook) for layer in capture.layers)
        if len({point.width for point in points}) > 1:
            detail = f"{capture.hook} is not equally wide in layers {list(capture.layers)}; "
            raise RefusedJobError("invalid_request", detail + "ask apart")
        if job.delta:
            model.check_delta(list(points))
        return cls(capture, job.prompt_len, points, [], [[] for _ in points])

    def begin(self, tokens: PassTokens, row: int) -> Places:
        """Begin a forward pass with these tokens of a row; return the places of captured ones."""
        own = tokens.of_row(row)
        position_n = tokens.position_N[own]
        chosen_n = np.flatnonzero(self.capture.positions.contain(position_n, self.prompt_len))
        if self.capture.read == "last" and len(chosen_n):
            chosen_n = chosen_n[-1:]
            self.places = []
            self.parts_L = [[] for _ in self.points]
        self.places.append(position_n[chosen_n])
        return tokens.place_N[own][chosen_n]

    def take(self) -> CapturedActivations:
        """Return and clear the capture's result for the tokens read since the last call."""
        places = np.concatenate([np.zeros(0, np.int64), *self.places])
        none_0W = torch.zeros((0, self.points[0].width))
        found_LTW = torch.stack([torch.cat([none_0W, *parts]) for parts in self.parts_L])
        self.places, self.parts_L = [], [[] for _ in self.points]
        return finish_capture(self.capture, places, found_LTW.numpy())


def hook_captures(
    rows: Sequence[CapturedRow | None], tokens: PassTokens, *, before: bool
) -> list[tuple[Point, HookFunction]]:
    """Return the hooks that capture activations before or after steering in a forward pass."""
    points: dict[str, Point] = {}
    asked: dict[str, list[tuple[list[Tensor], Places]]] = {}
    for b, row in enumerate(rows):
        if row is None or row.capture.before != before:
            continue
        place_n = row.begin(tokens, b)
        for point, parts in zip(row.points, row.parts_L if len(place_n) else (), strict=False):
            points[point.key] = point
            asked.setdefault(point.key, []).append((parts, place_n))
    return [(points[key], partial(_capture, own)) for key, own in asked.items()]


@torch.no_grad()
def _capture(asked: list[tuple[list[Tensor], Places]], activation: Tensor, hook: object) -> None:  # noqa: ARG001
    place_N = torch.from_numpy(np.concatenate([place_n for _, place_n in asked]))
    wide_TW = activation.detach().flatten(2).flatten(0, 1)
    captured_NW = wide_TW[place_N.to(activation.device)].float().cpu()
    counts = [len(place_n) for _, place_n in asked]
    for (parts, _), own_nW in zip(asked, torch.split(captured_NW, counts), strict=True):
        parts.append(own_nW)
