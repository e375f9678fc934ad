"""A model in this process, without a server, whose numbers carry their graph.

For losses of one's own: log-probabilities and entropies can be differentiated with respect to the
parameters that they were computed with. The model's own parameters are never written to.

    from logsteer_server.embedded import LocalModel

    model = LocalModel("demo/model")
    theta = {name: p.clone().requires_grad_() for name, p in model.parameters.items()}
    optimizer = torch.optim.SGD(theta.values(), lr=1e-3)

    prompts = [model.encode("Once upon a time")] * 8
    samples = model.sample(prompts, max_tokens=16, seed=0, parameters=theta)
    rows = model.read(prompts, samples, parameters=theta)
    rewards = torch.tensor([float(reward(ids)) for ids in samples])
    weights = rewards - rewards.mean()
    loss = -sum(w * row.logprobs_R.sum() for w, row in zip(weights, rows))
    loss = loss - 0.01 * sum(row.entropies_R.sum() for row in rows)
    loss.backward()
    optimizer.step()

It needs the extra `tlens`. Axis letters: B sequences, T tokens, R rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput, Policy, draw_seed
from logsteer_server.engines.tlens.batch import pad_right
from logsteer_server.engines.tlens.generation import GenerationRow, RunningBatch
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.weights import locate_model
from logsteer_server.numerics.rows import NEUTRAL
from logsteer_server.numerics.sampling import is_greedy, shape_rows

Ids = Sequence[int] | np.ndarray
Parameters = Mapping[str, Tensor]


@dataclass(eq=False)
class DifferentiableRows:
    """The logits [R, V] in front of the R tokens of one target, and numbers computed from them.

    Float32, or float64 where the model is. All of it carries the graph of the parameters.
    """

    logits_RV: Tensor
    targets_R: Tensor
    _supports: dict[Policy, Tensor] = field(default_factory=dict)

    @cached_property
    def log_probs_RV(self) -> Tensor:
        """log p of every token, p = softmax of the logits."""
        return self.logits_RV.log_softmax(-1)

    @property
    def logprobs_R(self) -> Tensor:
        """log p of the targets, in nats."""
        return self._pick(self.log_probs_RV)

    @property
    def entropies_R(self) -> Tensor:
        """-sum p log p, in nats."""
        return _find_entropy(self.log_probs_RV)

    def log_q_RV(self, policy: Policy) -> Tensor:
        """Return log q of every token, q what the policy draws from; -inf where it draws nothing.

        Derivatives are those of q with the set of tokens that are drawn held fixed: it changes in
        jumps. Errors: ValueError for a greedy policy, which has no derivative.
        """
        if is_greedy(policy):
            raise ValueError("temperature 0 draws one token for certain: there is no derivative")
        if policy not in self._supports:
            rows = [policy] * len(self.logits_RV)
            with torch.no_grad():
                self._supports[policy] = shape_rows(self.logits_RV.detach(), rows).q_RV > 0
        cut_RV = self.logits_RV.masked_fill(~self._supports[policy], -torch.inf)
        return (cut_RV / policy.temperature).log_softmax(-1)

    def policy_logprobs_R(self, policy: Policy) -> Tensor:
        """Return log q of the targets, -inf for one that the policy would not draw."""
        return self._pick(self.log_q_RV(policy))

    def policy_entropies_R(self, policy: Policy) -> Tensor:
        """Return -sum q log q of each row, in nats."""
        return _find_entropy(self.log_q_RV(policy))

    def _pick(self, values_RV: Tensor) -> Tensor:
        return values_RV.gather(-1, self.targets_R[:, None])[:, 0]


def _find_entropy(log_p_RV: Tensor) -> Tensor:
    # A token with p = 0 adds nothing, and its derivative is 0, too; minus infinity gives neither.
    finite_RV = log_p_RV.masked_fill(log_p_RV == -torch.inf, 0.0)
    return -(log_p_RV.exp() * finite_RV).sum(-1)


class LocalModel:
    """A causal model resident in this process: a directory, or an id that the hub's cache has.

    `dtype`: auto, float32, float64, bfloat16, float16. Errors: ValueError where it cannot be
    served by TransformerLens.
    """

    def __init__(self, path: str | Path, dtype: str = "float32", device: str = "auto") -> None:
        spec = EngineSpec("local", "transformer_lens", str(path), dtype=dtype, devices=device)
        self._model = BridgeModel(spec, locate_model(str(path)))

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's own parameters by transformers' names, one name for those that are tied."""
        by_id = {id(tensor): name for name, tensor in reversed(self._named)}
        return MappingProxyType({n: t.detach() for n, t in self._named if by_id[id(t)] == n})

    @property
    def _named(self) -> list[tuple[str, Tensor]]:
        return list(self._model.parameters.by_name.items())

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with what the tokenizer adds."""
        return list(self._model.tokenizer.encode(text).ids)

    def decode(self, ids: Ids) -> str:
        """Return the text of tokens."""
        return str(self._model.tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))

    def read(
        self,
        contexts: Sequence[Ids],
        targets: Sequence[Ids],
        parameters: Parameters | None = None,
    ) -> list[DifferentiableRows]:
        """Return the rows in front of each target's tokens, read in one forward pass.

        `parameters` replace the model's own of their names (any part of them), and the rows carry
        their graph. Errors: ValueError for an empty context or target, for parameters
        that do not fit, and for more tokens than the model reads.
        """
        if len(contexts) != len(targets) or not contexts:
            raise ValueError(f"{len(contexts)} contexts and {len(targets)} targets; give pairs")
        both = [
            (np.array(context, np.int32), np.array(target, np.int32))
            for context, target in zip(contexts, targets, strict=True)
        ]
        for context, target in both:
            self._check_length(context, target)
        tokens_BT = pad_right([np.concatenate([c, t[:-1]]) for c, t in both])
        places = [slice(len(c) - 1, len(c) + len(t) - 1) for c, t in both]

        def call() -> list[Tensor]:
            hidden_BTD = self._model.read(tokens_BT)
            return [self._model.project(hidden_BTD[b, place]) for b, place in enumerate(places)]

        found = self._model.parameters.call_with(self._fit(parameters), call)
        return [
            DifferentiableRows(
                logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float(),
                torch.from_numpy(target.astype(np.int64)).to(logits_RV.device),
            )
            for logits_RV, (_, target) in zip(found, both, strict=True)
        ]

    def token_logprobs(
        self,
        contexts: Sequence[Ids],
        targets: Sequence[Ids],
        parameters: Parameters | None = None,
    ) -> list[Tensor]:
        """Return log p of each target's tokens [R], in nats; see `read`."""
        return [rows.logprobs_R for rows in self.read(contexts, targets, parameters)]

    def entropies(
        self,
        contexts: Sequence[Ids],
        targets: Sequence[Ids],
        parameters: Parameters | None = None,
        policy: Policy = NEUTRAL,
    ) -> list[Tensor]:
        """Return the policy's entropy at each token of each target [R], in nats; see `read`."""
        found = self.read(contexts, targets, parameters)
        if policy == NEUTRAL:
            return [rows.entropies_R for rows in found]
        return [rows.policy_entropies_R(policy) for rows in found]

    def sample(
        self,
        prompts: Sequence[Ids],
        max_tokens: int,
        policy: Policy = NEUTRAL,
        seed: int | None = None,
        parameters: Parameters | None = None,
    ) -> list[np.ndarray]:
        """Return continuations that the policy draws, int32, without a graph.

        The k-th has the seed `seed` + k; without a seed one is drawn. One ends behind a token that
        ends the sequence.
        """
        rows, start = [], draw_seed() if seed is None else seed
        for index, prompt in enumerate(prompts):
            ids = np.array(prompt, np.int32)
            self._check_length(ids, np.zeros(max_tokens, np.int32))
            job = GenerateJob(ids, max_tokens, policy, seed=start + index)
            rows.append(GenerationRow.start(index, job, None, self._model))
        given = {name: tensor.detach() for name, tensor in self._fit(parameters).items()}
        batch = RunningBatch(self._model, rows, given)
        found: dict[int, np.ndarray] = {}
        while batch.has_work:
            for index, output in batch.step():
                if not isinstance(output, GenerateOutput):
                    raise ValueError(f"sample {index}: {output}")
                found[index] = output.token_ids
        return [found[index] for index in range(len(prompts))]

    def _check_length(self, context: np.ndarray, target: np.ndarray) -> None:
        if not len(context) or not len(target):
            raise ValueError("a context or target is empty; give at least one token of each")
        count, limit = len(context) + len(target) - 1, self._model.context_length
        if count > limit:
            raise ValueError(f"{count} tokens are to be read, the model reads {limit}")

    def _fit(self, parameters: Parameters | None) -> dict[str, Tensor]:
        """Return the parameters as they are. Errors: ValueError where they do not fit."""
        given = dict(parameters or {})
        for name, tensor in given.items():
            own = self._model.parameters.by_name.get(name)
            if own is None:
                raise ValueError(f"{name}: the model has no such parameter; see `parameters`")
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                wanted, found = (f"{list(t.shape)} {t.dtype}" for t in (own, tensor))
                raise ValueError(f"{name} is {found}, the model's own {wanted}")
        return given
