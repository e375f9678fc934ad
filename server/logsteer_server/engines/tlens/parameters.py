"""A model's parameters by name, parameter deltas, and calls of the model with both added up.

The resident parameters are never written to: `torch.func.functional_call` puts other tensors in
their places for one call and takes them out again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from logsteer_server.contract.jobs import CheckOverrideOutput
from logsteer_server.contract.parameters import Adapter, Direction, ParameterDelta
from logsteer_server.engines.tlens.adapters import read_updates
from logsteer_server.engines.tlens.plain_forward import unwrap
from logsteer_server.engines.tlens.points import RefusedJobError
from logsteer_server.numerics.lora import AdapterLayoutError

T = TypeVar("T")

SHOWN = 3
"""Names that a message lists."""
PIECE = 2**22
"""Numbers that are computed together in float64."""


class _CallingModel(nn.Module):
    """A model whose forward is any call, so that `functional_call` serves for all of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        """Return what the call returns."""
        return call()


class Parameters:
    """The parameters of a bridged causal model, by the names that transformers gives them.

    The modules of transformers and the bridge's hold their tensors in the same dictionaries, and
    so does every `unwrap`ped copy: what is put into one is seen in all.
    """

    def __init__(self, causal: nn.Module) -> None:
        plain = unwrap(causal)
        self._calling = _CallingModel(plain)
        self.by_name: dict[str, Tensor] = dict(plain.named_parameters(remove_duplicate=False))
        known = {id(tensor) for tensor in self.by_name.values()}
        # The bridge's blocks may hold parts of a parameter as parameters of their own.
        self.are_shared = all(id(tensor) in known for tensor in causal.parameters())

    def call_with(self, tensors: Mapping[str, Tensor], call: Callable[[], T]) -> T:
        """Return what `call` returns while these tensors replace the parameters of their names."""
        if not tensors:
            return call()
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        found: T = torch.func.functional_call(self._calling, named, (call,))
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> CheckOverrideOutput:
        """Count the numbers that a direction of these shapes changes. Errors: RefusedJobError."""
        unknown = [name for name in shapes if name not in self.by_name]
        if unknown:
            raise _invalid(
                f"the model has no parameter {_list(unknown)}; it has {_list(list(self.by_name))}. "
                "Use the names of transformers' state_dict"
            )
        first: dict[int, str] = {}
        for name, shape in shapes.items():
            tensor = self.by_name[name]
            if tuple(tensor.shape) != tuple(shape):
                raise _invalid(f"{name} is {list(shape)}, the parameter {list(tensor.shape)}")
            if not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise _invalid(f"{name} is {kind} in the model: a quantised parameter cannot move")
            if other := first.get(id(tensor)):
                raise _invalid(f"{name} and {other} are one parameter here; give one of them")
            first[id(tensor)] = name
        total = {id(tensor): tensor.numel() for tensor in self.by_name.values()}
        return CheckOverrideOutput(sum(total[i] for i in first), sum(total.values()))

    def add_scaled(
        self, direction: Mapping[str, Tensor], eta: float, changed: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return theta + eta v of each parameter that v has, rounded once to the parameter's dtype.

        `changed` are parameters that take theta's place, and stay in the result.
        """
        # Outside of inference mode, because a gradient may be taken under them later.
        with torch.inference_mode(False), torch.no_grad():
            return dict(changed) | {
                name: _add_scaled(changed.get(name, self.by_name[name]), v, eta)
                for name, v in direction.items()
            }


def _add_scaled(parameter: Tensor, v: Tensor, eta: float) -> Tensor:
    """Return theta + eta v, computed in float64 a piece at a time, to bound the memory."""
    changed = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    changed_N, theta_N, v_N = changed.view(-1), parameter.reshape(-1), v.reshape(-1)
    for start in range(0, len(v_N), PIECE):
        part = slice(start, start + PIECE)
        changed_N[part] = theta_N[part].double() + eta * v_N[part].to(theta_N.device).double()
    return changed


class DeltaCache:
    """Directions that were used last, and the parameters that the last delta gave.

    While there is work, the newest of each stays in memory whatever its size; without work, only
    what takes at most `max_bytes`. With room for 8 bytes, directions of 4, 4 and 12 bytes that are
    used in this order leave

        4      4 4      12      nothing once there is no work
    """

    def __init__(self, parameters: Parameters, max_bytes: int) -> None:
        self._parameters = parameters
        self._max_bytes = max_bytes
        self._directions: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._applied: tuple[ParameterDelta, dict[str, Tensor]] | None = None

    def load(self, direction: Direction) -> dict[str, Tensor]:
        """Return the tensors of a direction. Errors: RefusedJobError."""
        found = self._directions.pop(direction.sha256, None)
        if found is None:
            found = self._read(direction)
        self._directions[direction.sha256] = found
        while len(self._directions) > 1 and self._count_direction_bytes() > self._max_bytes:
            self._directions.popitem(last=False)
        return found

    def apply(self, delta: ParameterDelta) -> dict[str, Tensor]:
        """Return the parameters that a delta changes, by name, with it added.

        Errors: RefusedJobError where its files are damaged or do not fit the model.
        """
        if not delta:
            return {}
        if self._applied is None or self._applied[0] != delta:
            self._applied = None  # before the next one takes its place, not after
            found: dict[str, Tensor] = {}
            if delta.adapter is not None:
                found = self._parameters.add_scaled(self.read_adapter(delta.adapter), 1.0, found)
            if delta.override is not None:
                direction = self.load(delta.override.direction)
                found = self._parameters.add_scaled(direction, delta.override.eta, found)
            self._applied = (delta, found)
        return self._applied[1]

    def trim(self) -> None:
        """Free what is too large to stay in memory without work."""
        if self._applied and _count_bytes(self._applied[1]) > self._max_bytes:
            self._applied = None
        if self._count_direction_bytes() > self._max_bytes:
            self._directions.clear()

    def _count_direction_bytes(self) -> int:
        return sum(map(_count_bytes, self._directions.values()))

    def _read(self, direction: Direction) -> dict[str, Tensor]:
        with _open_stored(direction.path, direction.sha256, "override") as tensors:
            shapes = {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
            self._parameters.check(shapes)
            return {name: tensors.get_tensor(name) for name in shapes}

    def read_adapter(self, adapter: Adapter) -> dict[str, Tensor]:
        """Return what the adapter adds to parameters, by name. Errors: RefusedJobError."""
        with _open_stored(adapter.path, adapter.sha256, "adapter") as tensors:
            try:
                return read_updates(tensors, self._parameters.by_name)
            except AdapterLayoutError as error:
                detail = f"the adapter does not fit the model: {error}"
                raise RefusedJobError("invalid_adapter", detail) from error


@contextmanager
def _open_stored(path: str, sha256: str, noun: str) -> Iterator[Any]:
    """Open a stored safetensors file. Errors: RefusedJobError where it is gone or damaged."""
    try:
        with Path(path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                detail = f"{path} is damaged; DELETE the {noun} and upload it again"
                raise RefusedJobError("internal", detail)
        with safe_open(path, "pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        detail = f"the {noun} was deleted while the request waited; upload it again"
        raise RefusedJobError(f"unknown_{noun}", detail) from error
    except (OSError, SafetensorError) as error:
        raise RefusedJobError("internal", f"{path} cannot be read: {error}") from error


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _invalid(detail: str) -> RefusedJobError:
    return RefusedJobError("invalid_vector", f"The direction does not fit: {detail}.")
