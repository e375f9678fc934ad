"""Captures of a batch: the activations of each row's tokens that are wanted, pass by pass.

Axis letters: B rows, T tokens, L layers, N captured tokens of a pass, W width of an activation.
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
from logsteer_server.engines.tlens.points import HookFunction, Point, RefusedJobError
from logsteer_server.engines.tlens.probes import TokenRange
from logsteer_server.numerics.sinks import finish_capture


@dataclass(slots=True, eq=False)
class CapturedRow:
    """One job's capture: the activation of each layer, and what was read of it so far."""

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
        if not capture.layers:
            raise RefusedJobError("invalid_request", "layers: name at least one")
        points = tuple(model.points.find(layer, capture.hook) for layer in capture.layers)
        if len({point.width for point in points}) > 1:
            detail = f"{capture.hook} is not equally wide in layers {list(capture.layers)}; "
            raise RefusedJobError("invalid_request", detail + "ask apart")
        if job.delta:
            model.check_delta(list(points))
        return cls(capture, job.prompt_len, points, [], [[] for _ in points])

    def begin(self, read: TokenRange) -> Places:
        """Begin a forward pass over some tokens; return the columns of those that are captured."""
        mask = self.capture.positions.mask(read.begin, read.end, self.prompt_len)
        columns: Places = np.flatnonzero(mask)
        if self.capture.read == "last" and len(columns):
            columns = columns[-1:]
            self.places = []
            self.parts_L = [[] for _ in self.points]
        self.places.append(columns + read.begin)
        return columns + read.first

    def finish(self) -> CapturedActivations:
        """Return what the capture gives of the tokens that were read."""
        places = np.concatenate([np.zeros(0, np.int64), *self.places])
        none_0W = torch.zeros((0, self.points[0].width))
        found_LTW = torch.stack([torch.cat([none_0W, *parts]) for parts in self.parts_L])
        return finish_capture(self.capture, places, found_LTW.numpy())


def hook_captures(
    rows: Sequence[CapturedRow | None],
    ranges: Sequence[TokenRange],
    num_columns: int,
    *,
    before: bool,
) -> list[tuple[Point, HookFunction]]:
    """Return the hooks that capture before or after steering in a forward pass [B, num_columns]
    with these tokens of each row.
    """
    points: dict[str, Point] = {}
    wanted: dict[str, list[tuple[list[Tensor], Places]]] = {}
    for b, (row, read) in enumerate(zip(rows, ranges, strict=True)):
        if row is None or row.capture.before != before:
            continue
        index_n = row.begin(read) + b * num_columns
        for point, parts in zip(row.points, row.parts_L if len(index_n) else (), strict=False):
            points[point.key] = point
            wanted.setdefault(point.key, []).append((parts, index_n))
    return [(points[key], partial(_capture, own)) for key, own in wanted.items()]


@torch.no_grad()
def _capture(wanted: list[tuple[list[Tensor], Places]], activation: Tensor, hook: object) -> None:  # noqa: ARG001
    index_N = torch.from_numpy(np.concatenate([index_n for _, index_n in wanted]))
    wide_TW = activation.detach().flatten(2).flatten(0, 1)
    read_NW = wide_TW[index_N.to(activation.device)].float().cpu()
    end = 0
    for parts, index_n in wanted:
        start, end = end, end + len(index_n)
        parts.append(read_NW[start:end])
