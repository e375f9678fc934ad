"""The model of `logsteer_server.embedded`: loaded from a path, or the program's own module.

The columns of its rows carry the graph of their logits. Axis letters: B sequences, T tokens, R
rows, V vocabulary, F features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from logsteer.errors import APIError
from logsteer.schemas import Steering, SteeringLike
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import (
    NEUTRAL,
    GenerateJob,
    GenerateOutput,
    Job,
    Policy,
    ScoreJob,
    draw_seed,
)
from logsteer_server.engines.tlens.causal import CausalModel, describe_model
from logsteer_server.engines.tlens.generation import GenerationRow, RunningBatch
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.points import Point, RefusedJobError
from logsteer_server.engines.tlens.queue import Entry, accept_row, read_batch
from logsteer_server.engines.tlens.steering import SteeredRow
from logsteer_server.engines.weights import locate_model
from logsteer_server.interventions.interventions import check_reach
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.numerics.rows import COLUMNS, POLICY_COLUMNS, PUBLIC_COLUMNS, Rows
from logsteer_server.numerics.sampling import is_greedy, log_softmax
from logsteer_server.stores.store import VECTORS
from logsteer_server.stores.vectors import StoredVectors, VectorStore, open_vectors

FEATURES = (
    "surprisal", "rb_entropy", "top1_prob", "margin", "head_mass", "log_effective_support",
    "position",
)  # fmt: skip
"""What `baseline_features` are, in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class DifferentiableRows:
    """The logits [R, V] that predict the R tokens of one target, and numbers computed from them.

    Float32, or float64 where the model is. All of it carries the graph of the parameters; the set
    of tokens that a policy draws is held fixed. `eos_ids` are the tokens that end a sequence.
    """

    logits_RV: Tensor
    targets_R: Tensor
    eos_ids: tuple[int, ...] = ()

    def columns(self, names: Sequence[str], policy: Policy = NEUTRAL) -> dict[str, Tensor]:
        """Return columns [R] by name, those of `PUBLIC_COLUMNS`; ranks carry no graph.

        Errors: ValueError for an unknown name, and for a column of a greedy policy, which has no
        derivative.
        """
        if unknown := [name for name in names if name not in PUBLIC_COLUMNS]:
            raise ValueError(f"unknown columns {unknown}; known are {', '.join(PUBLIC_COLUMNS)}")
        if not POLICY_COLUMNS.keys().isdisjoint(names):
            _check_derivative(policy)
        rows = self._read(policy)
        return {name: COLUMNS[name](rows).to(self.logits_RV.dtype) for name in names}

    def log_q_RV(self, policy: Policy) -> Tensor:
        """Return log q of every token, q what the policy draws from; -inf where it draws nothing.

        Errors: ValueError for a greedy policy, which has no derivative.
        """
        _check_derivative(policy)
        return log_softmax(self._read(policy).shaped.logits_RV)

    def _read(self, policy: Policy) -> Rows:
        is_double = self.logits_RV.dtype == torch.float64
        return Rows(self.logits_RV, self.targets_R, None, policy, self.eos_ids, is_double)


def _check_derivative(policy: Policy) -> None:
    if policy.adjustments is not None:
        raise ValueError("penalties, biases and bans have no derivative here: leave them out")
    if is_greedy(policy):
        raise ValueError("temperature 0 draws one token for certain: there is no derivative")


FEATURE_COLUMNS = ("logprob", *FEATURES[1:5], "effective_support")


def baseline_features(columns: Mapping[str, Tensor], max_tokens: int | None = None) -> Tensor:
    """Return FEATURES [R, F] of a sequence's R steps, from FEATURE_COLUMNS of its rows.

    They are known before the step's token is drawn, so that a baseline that is computed from them
    leaves a policy's gradient unbiased: `surprisal` is -log p of the token drawn the step before, 0
    at the first. `position` is the step's number over `max_tokens`, from 0 on; None: over R, which
    is unbiased only where no sequence ends early. `log_effective_support` is log exp(rb_entropy),
    which is `rb_entropy` again: a regression needs a ridge, or the least norm.
    """
    surprisal_R = -columns["logprob"].detach()
    count = len(surprisal_R)
    steps_R = torch.arange(count, device=surprisal_R.device, dtype=surprisal_R.dtype)
    found = [
        torch.cat([torch.zeros_like(surprisal_R[:1]), surprisal_R[:-1]]),
        *(columns[name].detach() for name in FEATURES[1:5]),
        columns["effective_support"].detach().log(),
        steps_R / (max_tokens or count),
    ]
    return torch.stack(found, dim=-1)


Ids = Sequence[int] | np.ndarray
Parameters = Mapping[str, Tensor]
Function = Callable[..., Tensor | None]
Hook = tuple[int, str, Function]
J = TypeVar("J", bound=Job)


class Changes(TypedDict, total=False):
    """What a call changes of the model for itself.

    `parameters`: tensors in the places of the model's own of their names, any part of them; results
    carry their graph. `steering`: as in a request. `hooks`: (layer, name of the activation,
    function); the function is called with the activation [B, T, ...] and `hook=`, after steering,
    and what it returns takes the activation's place, unless it is None. Rows are padded on the
    right where they are read, and on the left where a prompt is continued.
    """

    parameters: Parameters | None
    steering: SteeringLike | None
    hooks: Sequence[Hook]


class LocalModel:
    """A causal model in this process.

    Args:
        model: a directory, or an id that the hub's cache has; or a causal model of transformers, or
            one in PEFT's wrapper, which is used as it is: with its parameters, its adapters, and
            dropout where it is in training mode (samples are drawn without).
        tokenizer: the module's; a directory has its own.
        dtype: of a directory's model: auto, float32 (the default), float64, bfloat16, float16.
        device: of a directory's model: auto (the default) or cpu.
        vectors: a server's `store_directory`, in which steering finds vectors by name.

    Errors: ValueError for a model that cannot be read so, here and of all methods.

    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        dtype: str | None = None,
        device: str | None = None,
        vectors: str | Path | None = None,
    ) -> None:
        self._model: CausalModel
        if isinstance(model, nn.Module):
            if dtype is not None or device is not None:
                raise ValueError("dtype and device are the module's own; leave them out")
            self._model = CausalModel(model, tokenizer)
        else:
            if tokenizer is not None:
                raise ValueError(f"{model} has a tokenizer of its own; leave yours out")
            wanted, place = dtype or "float32", device or "auto"
            spec = EngineSpec("local", "transformer_lens", str(model), dtype=wanted, devices=place)
            self._model = BridgeModel(spec, locate_model(str(model)))
        self._info = describe_model(self._model)
        self._vectors = _NoVectors() if vectors is None else _open_vectors(Path(vectors))

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's own parameters under its names; tied ones have one name."""
        tensors = self._model.parameters.by_name.items()
        named = [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter)]
        by_id = {id(tensor): name for name, tensor in reversed(named)}
        return MappingProxyType({n: t.detach() for n, t in named if by_id[id(t)] == n})

    @property
    def hooks(self) -> tuple[str, ...]:
        """The names of activations that steering and hooks can change."""
        return self._model.points.names

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with what the tokenizer adds."""
        return list(self._model.tokenizer.encode(text).ids)

    def decode(self, ids: Ids) -> str:
        """Return the text of tokens."""
        return str(self._model.tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))

    def read(
        self, contexts: Sequence[Ids], targets: Sequence[Ids], **changes: Unpack[Changes]
    ) -> list[DifferentiableRows]:
        """Return the rows that predict each target's tokens, logits included, read in one pass.

        Errors: ValueError for an empty context or target, for changes that do not fit, and for more
        tokens than the model reads.
        """
        with _refusals():
            return self._read(self._accept(contexts, targets, changes), changes)

    def columns(
        self,
        contexts: Sequence[Ids],
        targets: Sequence[Ids],
        names: Sequence[str] = ("logprob",),
        *,
        policy: Policy = NEUTRAL,
        batch_tokens: int | None = None,
        **changes: Unpack[Changes],
    ) -> list[dict[str, Tensor]]:
        """Return columns [R] by name, for each target; see `DifferentiableRows.columns`.

        With `batch_tokens` sequences are read in parts of at most so many tokens with their
        padding, or of one sequence, and each part is read again when gradients are computed
        (hooks, too, then run again). A loss of all of them has the gradients that it has without,
        up to rounding. Errors: as `read`; and RuntimeError of the backward pass where a parameter
        was written to since.
        """
        with _refusals():
            entries = self._accept(contexts, targets, changes)
            parts, writes = _split(entries, batch_tokens), self._count_writes(changes)
            found: dict[int, dict[str, Tensor]] = {}
            for part in parts:
                call = partial(self._read_columns, part, names, policy, changes, writes)
                again = len(parts) > 1 and torch.is_grad_enabled()
                values = checkpoint(call, use_reentrant=False) if again else call()
                for entry, own in zip(part, values, strict=True):
                    found[entry.job_id] = dict(zip(names, own, strict=True))
        return [found[index] for index in range(len(entries))]

    def features(
        self,
        contexts: Sequence[Ids],
        targets: Sequence[Ids],
        *,
        policy: Policy = NEUTRAL,
        max_tokens: int | None = None,
        batch_tokens: int | None = None,
        **changes: Unpack[Changes],
    ) -> list[Tensor]:
        """Return FEATURES [R, 7] of each target's steps, without a graph; see `baseline_features`.

        Errors: as `read`.
        """
        options: dict[str, Any] = {"policy": policy, "batch_tokens": batch_tokens, **changes}
        with torch.no_grad():
            found = self.columns(contexts, targets, FEATURE_COLUMNS, **options)
        return [baseline_features(columns, max_tokens) for columns in found]

    def sample(
        self,
        prompts: Sequence[Ids],
        max_tokens: int,
        policy: Policy = NEUTRAL,
        seed: int | None = None,
        **changes: Unpack[Changes],
    ) -> list[np.ndarray]:
        """Return continuations that the policy draws, int32, without a graph.

        The k-th has the seed `seed` + k; without a seed one is drawn. Each ends after a token that
        ends the sequence. Errors: as `read`.
        """
        start = draw_seed() if seed is None else seed
        with _refusals(), self._model.evaluating():
            jobs = []
            for index, prompt in enumerate(prompts):
                ids = np.array(prompt, np.int32)
                self._check_length(ids, np.zeros(max_tokens, np.int32))
                jobs.append(GenerateJob(ids, max_tokens, policy, seed=start + index))
            rows = [
                GenerationRow.start(index, job, steered, self._model)
                for index, (job, steered) in enumerate(self._steer(jobs, changes))
            ]
            detached = {name: tensor.detach() for name, tensor in self._fit(changes).items()}
            batch = RunningBatch(self._model, rows, detached, self._find_hooks(changes))
            found: dict[int, np.ndarray] = {}
            while batch.rows:
                for index, output in batch.run():
                    if not isinstance(output, GenerateOutput):
                        raise ValueError(f"sample {index}: {output}")
                    found[index] = output.token_ids
        return [found[index] for index in range(len(prompts))]

    def _accept(
        self, contexts: Sequence[Ids], targets: Sequence[Ids], changes: Changes
    ) -> list[Entry]:
        """Return a job for each pair, with how it is steered."""
        if len(contexts) != len(targets) or not contexts:
            raise ValueError(f"{len(contexts)} contexts and {len(targets)} targets; give pairs")
        jobs = []
        for context, target in zip(contexts, targets, strict=True):
            before, scored = np.array(context, np.int32), np.array(target, np.int32)
            self._check_length(before, scored)
            jobs.append(ScoreJob(np.concatenate([before, scored[:-1]]), scored))
        return [Entry(index, *each) for index, each in enumerate(self._steer(jobs, changes))]

    def _steer(self, jobs: Sequence[J], changes: Changes) -> list[tuple[J, SteeredRow | None]]:
        """Return each job with its plan, and how its row is steered, once all changes fit."""
        if (given := changes.get("steering")) is not None:
            asked = Steering.model_validate(given)
            steering = resolve_steering(asked, self._vectors, self._info)
            jobs = [
                replace(job, plan=steering.plan.resolve(job.tokens[: job.prompt_len]))
                for job in jobs
            ]
            check_reach(steering, jobs)
        rows = [accept_row(self._model, job) for job in jobs]
        hooked = [point for point, _ in self._find_hooks(changes)]
        if self._fit(changes):  # they are to act everywhere, whatever is hooked
            steered = [point for row in rows if row for point in row.points]
            self._model.check_delta([*steered, *hooked])
        return list(zip(jobs, rows, strict=True))

    def _read(self, entries: Sequence[Entry], changes: Changes) -> list[DifferentiableRows]:
        model, hooks = self._model, self._find_hooks(changes)

        def call() -> list[Tensor]:
            hidden_BTD = read_batch(model, entries, hooks)
            return [model.project(hidden_BTD[b, entry.job.rows]) for b, entry in enumerate(entries)]

        found = model.parameters.call_with(self._fit(changes), call)
        return [
            DifferentiableRows(
                logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float(),
                torch.from_numpy(entry.job.targets.astype(np.int64)).to(logits_RV.device),
                model.eos_ids,
            )
            for logits_RV, entry in zip(found, entries, strict=True)
        ]

    def _read_columns(
        self,
        entries: Sequence[Entry],
        names: Sequence[str],
        policy: Policy,
        changes: Changes,
        writes: int,
    ) -> list[list[Tensor]]:
        if self._count_writes(changes) != writes:
            raise RuntimeError(
                "a parameter was written to between `columns` and the backward pass, which would "
                "compute the gradients of another model: take the optimizer's step after it"
            )
        rows = self._read(entries, changes)
        return [list(row.columns(names, policy).values()) for row in rows]

    def _count_writes(self, changes: Changes) -> int:
        """Return a number that grows with each change in place of a parameter."""
        tensors = [*self._model.parameters.by_name.values(), *self._fit(changes).values()]
        return sum(tensor._version for tensor in tensors)

    def _find_hooks(self, changes: Changes) -> list[tuple[Point, Function]]:
        hooks = changes.get("hooks", ())
        return [(self._model.points.find(layer, name), function) for layer, name, function in hooks]

    def _fit(self, changes: Changes) -> dict[str, Tensor]:
        """Return the parameters as they are. Errors: ValueError where they do not fit."""
        given = dict(changes.get("parameters") or {})
        for name, tensor in given.items():
            own = self._model.parameters.by_name.get(name)
            if own is None:
                raise ValueError(f"{name}: the model has no such parameter; see `parameters`")
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                wanted, found = (f"{list(t.shape)} {t.dtype}" for t in (own, tensor))
                raise ValueError(f"{name} is {found}, the model's own {wanted}")
        return given

    def _check_length(self, context: np.ndarray, target: np.ndarray) -> None:
        if not len(context) or not len(target):
            raise ValueError("a context or target is empty; give at least one token of each")
        count, limit = len(context) + len(target) - 1, self._model.context_length
        if count > limit:
            raise ValueError(f"{count} tokens are to be read, the model reads {limit}")


class _NoVectors(VectorStore):
    """The vectors of a model that was given no store."""

    def __init__(self) -> None:
        pass

    def find(self, name: str, *_: object, **__: object) -> StoredVectors:
        """Refuse a name."""
        raise ValueError(f"vector {name!r}: give the model vectors=DIRECTORY, or data inline")

    find_content = find_feature = find  # type: ignore[assignment]  # mypy looks for no `self`


def _open_vectors(directory: Path) -> VectorStore:
    """Return the vectors of a server's `store_directory`. Errors: ValueError for others."""
    if not (directory / VECTORS.plural).is_dir():
        raise ValueError(f"vectors: {directory} is not a server's store_directory; it has none")
    return open_vectors(directory)  # it only reads


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise what the service refuses as ValueError, in its words."""
    try:
        yield
    except RefusedJobError as error:
        raise ValueError(error.failure.detail) from error
    except APIError as error:
        raise ValueError(error.detail) from error


def _split(entries: Sequence[Entry], batch_tokens: int | None) -> list[list[Entry]]:
    """Return the sequences in parts of at most so many tokens, neighbours of like length.

    Five of 6, 2, 5, 3 and 2 tokens, at most 10 a part, are read as

        6      5 3      2 2
    """
    if batch_tokens is None:
        return [list(entries)]
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; give at least 1, or leave it out")
    parts: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: len(entry.job.tokens), reverse=True):
        longest = len(parts[-1][0].job.tokens) if parts else 0
        if not parts or longest * (len(parts[-1]) + 1) > batch_tokens:
            parts.append([])
        parts[-1].append(entry)
    return parts
