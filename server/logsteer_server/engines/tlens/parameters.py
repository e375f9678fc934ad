"""A model's parameters by name, parameter deltas, and calls of the model with a delta applied.

The resident parameters are never written to: `torch.func.functional_call` replaces them for one
call.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from logsteer_server.contract.jobs import CheckOverrideOutput
from logsteer_server.contract.plan import Adapter, Direction, ParameterDelta
from logsteer_server.engines.tlens.points import RefusedJobError
from logsteer_server.numerics.lora import (
    AdapterConfig,
    AdapterLayoutError,
    check_shapes,
    pair_factors,
)

T = TypeVar("T")

HALF = (torch.float16, torch.bfloat16)
SHOWN = 3
"""The most names in a message."""
PIECE = 2**22
"""The most numbers at once in float64."""


class _CallingModel(nn.Module):
    """A model whose forward is any call, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        """Return what the call returns."""
        return call()


class Parameters:
    """The parameters of a causal model by transformers' names, with the buffers of its state_dict.

    Copies by `model.copy_modules` have the same dictionaries of tensors: a tensor replaced in
    one is replaced in all. `are_replaced`: whether the current call replaces any.
    """

    are_replaced = False

    def __init__(self, plain: nn.Module) -> None:
        self._calling = _CallingModel(plain)
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        buffers = dict(plain.named_buffers(remove_duplicate=False))
        saved = set(_name_saved_buffers(plain))
        self._all: dict[str, Tensor] = parameters | buffers
        self.by_name = {n: t for n, t in self._all.items() if n in parameters or n in saved}
        # Of the names of one tensor, the first is what it is replaced by.
        self._first = {id(tensor): name for name, tensor in reversed(self._all.items())}

    def call_with(self, tensors: Mapping[str, Tensor], call: Callable[[], T]) -> T:
        """Call with these tensors in place of the parameters of their names."""
        if not tensors:
            return call()
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        self.are_replaced = True
        try:
            found: T = torch.func.functional_call(self._calling, named, (call,))
        finally:
            self.are_replaced = False
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
                raise _invalid(
                    f"{name} is {kind} in the model, quantised or a count: it cannot move"
                )
            if other := first.get(id(tensor)):
                raise _invalid(f"{name} and {other} are one parameter here; give one of them")
            first[id(tensor)] = name
        total = {id(tensor): tensor.numel() for tensor in self.by_name.values()}
        return CheckOverrideOutput(sum(total[i] for i in first), sum(total.values()))

    def widen(self) -> dict[str, Tensor]:
        """Return a float32 copy of all parameters and buffers of half precision, by name."""
        with torch.inference_mode(False), torch.no_grad():
            return {
                name: tensor.float()
                for name, tensor in self._all.items()
                if tensor.dtype in HALF and self._first[id(tensor)] == name
            }

    def resolve(self, name: str) -> str:
        """Return the name under which a parameter is replaced: its first."""
        return self._first[id(self.by_name[name])]

    def add_scaled(
        self, direction: Mapping[str, Tensor], eta: float, changed: dict[str, Tensor]
    ) -> bool:
        """Store theta + eta v of each of v's parameters in `changed`, rounded once.

        Where `changed` has the parameter already, that is theta, and gives the dtype. Returns
        whether any number differs from theta's after rounding.
        """
        has_moved = False
        # Outside of inference mode, because a gradient may be taken under them later.
        with torch.inference_mode(False), torch.no_grad():
            for name, v in direction.items():
                own = self.resolve(name)
                theta = changed.get(own, self.by_name[name])
                changed[own] = _add_scaled(theta, v, eta)
                has_moved = has_moved or not torch.equal(changed[own], theta)
        return has_moved

    def name_dtypes(self, names: Iterable[str]) -> str:
        """Return the dtypes of these parameters, for a message."""
        found = {str(self.by_name[name].dtype).removeprefix("torch.") for name in names}
        return " and ".join(sorted(found))


def _name_saved_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that transformers' state_dict has."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            yield f"{prefix}.{name}".removeprefix(".")


def _add_scaled(parameter: Tensor, v: Tensor, eta: float) -> Tensor:
    """Return theta + eta v, computed in float64 a piece at a time, to bound the memory."""
    changed = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    changed_N, theta_N, v_N = changed.view(-1), parameter.reshape(-1), v.reshape(-1)
    for start in range(0, len(v_N), PIECE):
        part = slice(start, start + PIECE)
        changed_N[part] = theta_N[part].double() + eta * v_N[part].to(theta_N.device).double()
    return changed


class DeltaCache:
    """The most recently used directions, and the parameters with recent deltas applied.

    Each kind takes at most `max_bytes`; while there is work, the newest stays whatever its size.
    With room for 8 bytes, directions of 4, 4 and 12 bytes, used in this order, leave

        4      4 4      12      nothing once there is no work
    """

    def __init__(self, parameters: Parameters, max_bytes: int) -> None:
        self._parameters = parameters
        self._max_bytes = max_bytes
        self._directions: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._applied: OrderedDict[ParameterDelta, dict[str, Tensor]] = OrderedDict()

    def load(self, direction: Direction) -> dict[str, Tensor]:
        """Return the tensors of a direction. Errors: RefusedJobError."""
        found = self._directions.pop(direction.sha256, None)
        if found is None:
            found = self._read(direction)
        self._directions[direction.sha256] = found
        _drop_oldest(self._directions, self._max_bytes, kept=1)
        return found

    def apply(self, delta: ParameterDelta) -> dict[str, Tensor]:
        """Return the changed parameters by name, with the delta added.

        With a cast these are all parameters of half precision, in float32. Errors: RefusedJobError
        where its files are damaged or do not fit the model, or where rounding leaves nothing of it.
        """
        if not delta:
            return {}
        found = self._applied.pop(delta, None)
        if found is None:
            # Before the next one takes its place, not after.
            newest = max(map(_count_bytes, self._applied.values()), default=0)
            _drop_oldest(self._applied, self._max_bytes - newest)
            found = self._add_up(delta)
        self._applied[delta] = found
        _drop_oldest(self._applied, self._max_bytes, kept=1)
        return found

    def _add_up(self, delta: ParameterDelta) -> dict[str, Tensor]:
        parameters = self._parameters
        found = parameters.widen() if delta.cast else {}
        if delta.adapter is not None:
            updates = self.read_adapter(delta.adapter)
            # An adapter that is 0, as before its first step of training, is as good as any.
            if not parameters.add_scaled(updates, 1.0, found) and _has_numbers(updates):
                rounded = delta.cast or parameters.name_dtypes(updates)
                detail = f"The adapter moves nothing: it is lost in rounding to {rounded}. "
                raise RefusedJobError("invalid_request", detail + "Serve the model in float32.")
        if delta.override is not None:
            direction, eta = self.load(delta.override.direction), delta.override.eta
            if not parameters.add_scaled(direction, eta, found) and eta:
                rounded = delta.cast or parameters.name_dtypes(direction)
                raise _moves_nothing(eta, direction, rounded)
        return found

    def trim(self) -> None:
        """Free entries beyond `max_bytes`, now that there is no work."""
        _drop_oldest(self._applied, self._max_bytes)
        _drop_oldest(self._directions, self._max_bytes)

    def _read(self, direction: Direction) -> dict[str, Tensor]:
        with _open_stored(direction.path, "override") as tensors:
            shapes = {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118
            self._parameters.check(shapes)
            return {name: tensors.get_tensor(name) for name in shapes}

    def read_adapter(self, adapter: Adapter) -> dict[str, Tensor]:
        """Return the adapter's updates by parameter name. Errors: RefusedJobError."""
        with _open_stored(adapter.path, "adapter") as tensors:
            try:
                return read_updates(tensors, self._parameters.by_name)
            except AdapterLayoutError as error:
                detail = f"the adapter does not fit the model: {error}"
                raise RefusedJobError("invalid_adapter", detail) from error


def read_updates(file: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scale * B A of every update, float64, by the name of its parameter.

    `file` is an opened safetensors file. Errors: AdapterLayoutError for one that does not fit.
    """
    config = AdapterConfig.read(file.metadata() or {})
    updates = {}
    for factors in pair_factors(file.keys()):
        name = f"{factors.module}.weight"
        parameter = parameters.get(name)
        if parameter is None:
            raise AdapterLayoutError(f"the model has no parameter {name}")
        if not parameter.is_floating_point():
            raise AdapterLayoutError(f"{name} is quantised in the model, and cannot be added to")
        # Before anything is multiplied: small factors may have a product of any size.
        down, up = (file.get_slice(key).get_shape() for key in (factors.down, factors.up))
        check_shapes(factors, down, up, parameter.shape, transposed=config.transposed)
        down_RI, up_OR = (file.get_tensor(key).double() for key in (factors.down, factors.up))
        update_OI: Tensor = config.scale * (up_OR @ down_RI)
        updates[name] = update_OI.T if config.transposed else update_OI
    return updates


@contextmanager
def _open_stored(path: str, noun: str) -> Iterator[Any]:
    """Open a stored safetensors file, whose SHA-256 was checked before.

    Errors: RefusedJobError where it is gone or cannot be read.
    """
    try:
        with safe_open(path, "pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        detail = f"the {noun} was deleted while the request waited; upload it again"
        raise RefusedJobError(f"unknown_{noun}", detail) from error
    except (OSError, SafetensorError) as error:
        raise RefusedJobError("internal", f"{path} cannot be read: {error}") from error


def _drop_oldest(
    entries: OrderedDict[Any, dict[str, Tensor]], max_bytes: int, kept: int = 0
) -> None:
    """Remove the oldest entries until the rest fit `max_bytes` or number `kept`."""
    total = sum(map(_count_bytes, entries.values()))
    while len(entries) > kept and total > max_bytes:
        total -= _count_bytes(entries.popitem(last=False)[1])


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _has_numbers(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether any number is not 0."""
    return any(bool(tensor.any()) for tensor in tensors.values())


def _moves_nothing(eta: float, direction: Mapping[str, Tensor], rounded: str) -> RefusedJobError:
    if not _has_numbers(direction):
        why = "every number of its direction is 0. Upload another direction"
    else:
        why = f"with eta {eta:g} no parameter differs after rounding to {rounded}. Use a larger eta"
        why += ', or cast: "float32"' if "float16" in rounded else ""
    return RefusedJobError("invalid_request", f"The override moves nothing: {why}.")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _invalid(detail: str) -> RefusedJobError:
    return RefusedJobError("invalid_vector", f"The direction does not fit: {detail}.")
