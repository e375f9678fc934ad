"""A model's parameters by name, and the model under other ones.

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
from logsteer_server.engines.tlens.shortcut import unwrap
from logsteer_server.numerics.lora import AdapterLayoutError

T = TypeVar("T")

SHOWN = 3
"""Names that a message lists."""
PIECE = 2**22
"""Numbers that are computed together in float64."""


class UnfitParametersError(Exception):
    """A direction or adapter cannot be used with the model: code and detail of the failure."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class _Work(nn.Module):
    """A model whose forward is whatever is to be done with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """What the work gives."""
        return work()


class Parameters:
    """The parameters of a bridged causal model, by the names that transformers gives them.

    The modules of transformers and the bridge's hold their tensors in the same dictionaries, and
    so does every `unwrap`ped copy: what is put into one is seen in all.
    """

    def __init__(self, causal: nn.Module) -> None:
        plain = unwrap(causal)
        self._work = _Work(plain)
        self.by_name: dict[str, Tensor] = dict(plain.named_parameters(remove_duplicate=False))
        known = {id(tensor) for tensor in self.by_name.values()}
        # The bridge's blocks may hold parts of a parameter as parameters of their own.
        self.are_shared = all(id(tensor) in known for tensor in causal.parameters())

    def under(self, tensors: Mapping[str, Tensor], work: Callable[[], T]) -> T:
        """What `work` gives while these tensors stand in for the parameters of their names."""
        if not tensors:
            return work()
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        found: T = torch.func.functional_call(self._work, named, (work,))
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> CheckOverrideOutput:
        """How much a direction of these shapes delta. Errors: UnfitParametersError."""
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

    def shift(
        self, direction: Mapping[str, Tensor], eta: float, moved: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """theta + eta v of each parameter that v has, rounded once to the parameter's dtype.

        `moved` are parameters that take theta's place, and stay in the result.
        """
        # Outside of inference mode, because a gradient may be taken under them later.
        with torch.inference_mode(False), torch.no_grad():
            return dict(moved) | {
                name: _shift(moved.get(name, self.by_name[name]), v, eta)
                for name, v in direction.items()
            }


def _shift(parameter: Tensor, v: Tensor, eta: float) -> Tensor:
    """theta + eta v; in float64 a piece at a time, which takes memory beside the result."""
    moved = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    moved_N, theta_N, v_N = moved.view(-1), parameter.reshape(-1), v.reshape(-1)
    for start in range(0, len(v_N), PIECE):
        part = slice(start, start + PIECE)
        moved_N[part] = theta_N[part].double() + eta * v_N[part].to(theta_N.device).double()
    return moved


class Directions:
    """Directions that were read lately, of at most about `max_bytes`; and the last sum with theta.

    The newest of each is kept whatever its size while there is work, and no larger than that for
    work that may come.
    """

    def __init__(self, parameters: Parameters, max_bytes: int) -> None:
        self._parameters = parameters
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._shifted: tuple[ParameterDelta, dict[str, Tensor]] | None = None

    def load(self, direction: Direction) -> dict[str, Tensor]:
        """The tensors of a direction. Errors: UnfitParametersError."""
        found = self._kept.pop(direction.sha256, None)
        if found is None:
            found = self._read(direction)
        self._kept[direction.sha256] = found
        while len(self._kept) > 1 and sum(map(_count_bytes, self._kept.values())) > self._max_bytes:
            self._kept.popitem(last=False)
        return found

    def shift(self, delta: ParameterDelta) -> dict[str, Tensor]:
        """What is moved of theta, by name; nothing without delta. Errors: UnfitParametersError."""
        if not delta:
            return {}
        if self._shifted is None or self._shifted[0] != delta:
            self._shifted = None  # before the next one takes its place, not after
            found: dict[str, Tensor] = {}
            if delta.adapter is not None:
                found = self._parameters.shift(self.read_adapter(delta.adapter), 1.0, found)
            if delta.override is not None:
                direction = self.load(delta.override.direction)
                found = self._parameters.shift(direction, delta.override.eta, found)
            self._shifted = (delta, found)
        return self._shifted[1]

    def rest(self) -> None:
        """Let go of what is too large to be kept without work."""
        if self._shifted and _count_bytes(self._shifted[1]) > self._max_bytes:
            self._shifted = None
        if sum(map(_count_bytes, self._kept.values())) > self._max_bytes:
            self._kept.clear()

    def _read(self, direction: Direction) -> dict[str, Tensor]:
        with _open_kept(direction.path, direction.sha256, "override") as tensors:
            shapes = {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
            self._parameters.check(shapes)
            return {name: tensors.get_tensor(name) for name in shapes}

    def read_adapter(self, adapter: Adapter) -> dict[str, Tensor]:
        """What the adapter adds to parameters, by name. Errors: UnfitParametersError."""
        with _open_kept(adapter.path, adapter.sha256, "adapter") as tensors:
            try:
                return read_updates(tensors, self._parameters.by_name)
            except AdapterLayoutError as error:
                detail = f"the adapter does not fit the model: {error}"
                raise UnfitParametersError("invalid_adapter", detail) from error


@contextmanager
def _open_kept(path: str, sha256: str, noun: str) -> Iterator[Any]:
    """A kept safetensors file, opened. Errors: UnfitParametersError."""
    try:
        with Path(path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                detail = f"{path} is damaged; DELETE the {noun} and upload it again"
                raise UnfitParametersError("internal", detail)
        with safe_open(path, "pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        detail = f"the {noun} was deleted while the request waited; upload it again"
        raise UnfitParametersError(f"unknown_{noun}", detail) from error
    except (OSError, SafetensorError) as error:
        raise UnfitParametersError("internal", f"{path} cannot be read: {error}") from error


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _invalid(detail: str) -> UnfitParametersError:
    return UnfitParametersError("invalid_vector", f"The direction does not fit: {detail}.")
