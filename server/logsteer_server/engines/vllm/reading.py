"""A vLLM model runner that reads scored rows. It touches these internals of vLLM's V1 runner:

* `GPUModelRunner._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)`, called in every
  step on the last pipeline rank, before the step's requests advance;
* `requests[id].num_computed_tokens`, `.prompt_token_ids`, `.sampling_params.extra_args`;
* `input_batch.req_id_to_index`, `query_start_loc.np`: where a request's tokens lie in the step;
* `input_batch.generators`, `discard_request_mask`: seeds, and requests in the middle of prefill;
* `ModelRunnerOutput.prompt_token_id_logprobs_dict`: the way back to the request's output;
* `load_lora_model(model, vllm_config, device)`, and `embedding_modules` of the model's modules.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from logsteer_server.engines.vllm.extra_args import SCORE
from logsteer_server.numerics.rows import ReferenceFile, RowFiles, RowSpec, read_hidden


class PartialRows:
    """The rows of one request, gathered over the steps of a chunked or preempted prefill."""

    def __init__(self, num_rows: int, reading: RowSpec) -> None:
        self.values_RW = torch.zeros((num_rows, reading.width), dtype=reading.dtype)
        self.present_R = np.zeros(num_rows, dtype=bool)

    def put(self, first: int, values_rW: Tensor) -> None:
        """Store rows `first` onward; a row that is read again replaces its equal."""
        self.values_RW[first : first + len(values_rW)] = values_rW
        self.present_R[first : first + len(values_rW)] = True


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one request wants: the targets of its last rows, and what is read from them."""

    targets: np.ndarray
    alternatives: bool
    reading: RowSpec
    export: str | None
    reference: str | None

    @classmethod
    def parse(cls, wanted: dict[str, Any]) -> "RowRequest":
        """The request that the engine put into `SamplingParams.extra_args`."""
        return cls(
            np.frombuffer(wanted["targets"], dtype=np.int32),
            wanted["alternatives"],
            wanted["reading"],
            wanted["export"],
            wanted["reference"],
        )

    def find_rows(self, begin: int, end: int, prompt_len: int) -> tuple[int, np.ndarray]:
        """Which rows lie in [begin, end): the first one's place, and each one's position."""
        if self.alternatives:
            count = len(self.targets) if end == prompt_len else 0
            return 0, np.full(count, prompt_len - 1)
        first_row = prompt_len - len(self.targets)
        first = max(begin, first_row)
        return first - first_row, np.arange(first, max(first, end))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows from `first` on of a request, which lie at `index_R` in this step's tokens."""

    req_id: str
    wanted: RowRequest
    first: int
    index_R: np.ndarray
    ends_prompt: bool

    @property
    def count(self) -> int:
        """How many rows of the request this step has."""
        return len(self.index_R)

    @property
    def group(self) -> tuple[Any, ...]:
        """Requests of one group are read together; one that exchanges files is read alone."""
        alone = self.wanted.export or self.wanted.reference
        return (self.wanted.reading, self.req_id if alone else None)

    @property
    def targets(self) -> np.ndarray:
        """The targets of these rows."""
        return self.wanted.targets[self.first : self.first + self.count]


class ScoringRunner(GPUModelRunner):  # type: ignore[misc]
    """A model runner that also reads the rows which score requests ask for.

    It is never constructed: the worker gives an existing runner this class in front of its own, so
    the same code serves vLLM's GPU and CPU runners.
    """

    chunk_bytes: int
    partial_rows: dict[str, PartialRows]
    finished_rows: dict[str, Tensor]

    def prepare_reading(self, chunk_bytes: int) -> None:
        """Make ready to read rows, in chunks of so many bytes."""
        self.chunk_bytes = chunk_bytes
        self.partial_rows = {}
        self.finished_rows = {}

    def load_lora_model(self, model: Any, vllm_config: Any, device: torch.device) -> Any:
        """The model with vLLM's LoRA layers, but none around embeddings and head.

        A head with one takes the rows that are sampled from and no others.
        """
        for module in model.modules():
            if hasattr(module, "embedding_modules"):
                module.embedding_modules = {}
        return super().load_lora_model(model, vllm_config, device)

    def _get_prompt_logprobs_dict(
        self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        self.finished_rows = {}
        steps = self._find_rows(num_scheduled_tokens)
        # In order of appearance: every tensor-parallel rank must call the head alike.
        for group in dict.fromkeys(step.group for step in steps):
            self._read([step for step in steps if step.group == group], hidden_states)
        for req_id in self.partial_rows.keys() - self.requests.keys():
            del self.partial_rows[req_id]
        prompt_logprobs: dict[str, Any] = super()._get_prompt_logprobs_dict(
            hidden_states, num_scheduled_tokens
        )
        return prompt_logprobs

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's own output of the step, with the rows of requests whose prompt it finished."""
        self.finished_rows = {}
        held = self._hold_generators() if self.device.type == "cpu" else {}
        output = super().sample_tokens(grammar_output)
        self.input_batch.generators.update(held)
        if self.finished_rows:
            if not isinstance(output, ModelRunnerOutput):
                raise TypeError(f"rows need synchronous scheduling, got {type(output).__name__}")
            output.prompt_token_id_logprobs_dict = self.finished_rows
        return output

    def _hold_generators(self) -> dict[int, torch.Generator]:
        """Take away the generators of requests whose prefill goes on, so that they stay in place.

        vLLM samples for these too and winds their generators back after, which one on the CPU
        cannot be.
        """
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        generators = self.input_batch.generators
        return {i: generators.pop(i) for i in map(int, unfinished) if i in generators}

    def _find_rows(self, num_scheduled_tokens: dict[str, int]) -> list[StepRows]:
        steps = []
        for req_id, num_tokens in num_scheduled_tokens.items():
            request = self.requests[req_id]
            extra_args = request.sampling_params and request.sampling_params.extra_args
            if not extra_args or SCORE not in extra_args:
                continue
            begin, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
            if begin >= prompt_len:
                continue
            wanted = RowRequest.parse(extra_args[SCORE])
            end = min(begin + num_tokens, prompt_len)
            first, positions_R = wanted.find_rows(begin, end, prompt_len)
            offset = int(self.query_start_loc.np[self.input_batch.req_id_to_index[req_id]])
            index_R = positions_R + (offset - begin)
            steps.append(StepRows(req_id, wanted, first, index_R, end == prompt_len))
        return steps

    def _read(self, steps: list[StepRows], hidden_TD: Tensor) -> None:
        """Read the rows of all requests of a group together, and file them by request."""
        with_rows = [step for step in steps if step.count]
        if with_rows:
            device = hidden_TD.device
            index_R = np.concatenate([step.index_R for step in with_rows])
            targets_R = np.concatenate([step.targets for step in with_rows])
            values_RW = read_hidden(
                hidden_TD[torch.from_numpy(index_R).to(device)],
                torch.from_numpy(targets_R).to(device, torch.int64),
                self.model.compute_logits,
                self.model_config.get_vocab_size(),
                with_rows[0].wanted.reading,
                self.chunk_bytes,
                self._find_files(with_rows[0]),
            ).cpu()
            start = 0
            for step in with_rows:
                self._file(step, values_RW[start : start + step.count])
                start += step.count
        for step in steps:
            if step.ends_prompt and step.req_id not in self.finished_rows:
                self._finish(step)

    def _find_files(self, step: StepRows) -> RowFiles:
        shape = (len(step.wanted.targets), self.model_config.get_vocab_size())
        export, reference = step.wanted.export, step.wanted.reference
        if get_tensor_model_parallel_rank() != 0:
            export = None  # every rank has the same logits; one writes them
        return RowFiles(
            ReferenceFile(export, *shape) if export else None,
            ReferenceFile(reference, *shape) if reference else None,
            step.first,
        )

    def _file(self, step: StepRows, values_rW: Tensor) -> None:
        if step.ends_prompt and step.count == len(step.wanted.targets):
            self.finished_rows[step.req_id] = values_rW.flatten()
            self.partial_rows.pop(step.req_id, None)
            return
        partial = self.partial_rows.get(step.req_id)
        if partial is None:
            partial = PartialRows(len(step.wanted.targets), step.wanted.reading)
            self.partial_rows[step.req_id] = partial
        partial.put(step.first, values_rW)

    def _finish(self, step: StepRows) -> None:
        """Hand over a request's rows; none of them where the prefix cache has hidden some."""
        partial = self.partial_rows.pop(step.req_id, None)
        whole = partial is not None and bool(partial.present_R.all())
        self.finished_rows[step.req_id] = (
            partial.values_RW.flatten() if partial is not None and whole else torch.empty(0)
        )
