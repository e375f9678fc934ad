"""`/activations`: the activations of a model over texts, as arrays or as a file."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.schemas import ActivationsRequest
from logsteer_server.contract.captures import CaptureJob, CaptureOutput
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.interventions.steering import place_positions
from logsteer_server.settings import Settings
from logsteer_server.tasks.captures import (
    CaptureSite,
    PlannedCapture,
    count_numbers,
    plan_captures,
    read_items,
)
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.run import Batch, BodyTask, Collector, TensorLayout, check_count
from logsteer_server.text.chat import ChatForm, count_chars

Array = npt.NDArray[Any]


class ActivationsTask(BodyTask[ActivationsRequest]):
    """The activations of texts at a hook: of each token, of the last one, or their mean."""

    kind = "activations"
    has_file = True

    _planned: list[PlannedCapture]
    _outputs: Sequence[CaptureOutput]

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of items. Errors: APIError `payload_too_large`."""
        check_count("items", len(self._body.items), settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture all activations in one batch."""
        planner.cover_text(max(map(_count_chars, self._body.items)))
        site = CaptureSite(
            self._body.hook,
            self._body.layers,
            self._body.read,
            place_positions(self._body.positions),
        )
        self._planned = await planner.advance(self._plan(site))
        jobs = [capture.job for capture in self._planned]
        planner.expect_arrays(count_numbers(jobs, site.find_width(self.info)) + _count_ids(jobs))
        collector = Collector()
        yield Batch(jobs, collector.take)
        self._outputs = collector.outputs

    def _plan(self, site: CaptureSite) -> Steps[list[PlannedCapture]]:
        body, info = self._body, self.info
        self.interventions = Interventions.resolve(body, self._stores, info)
        form = ChatForm.of(body, is_whole=True)
        sequences = read_items(body.items, body.bos, self.codec, info.vocab_size, form)
        places = [f"items[{index}]" for index in range(len(body.items))]
        planned = yield from plan_captures(sequences, places, site, info, body.on_overflow)
        jobs = self.interventions.apply([capture.job for capture in planned])
        return [
            PlannedCapture(job, capture.truncated)
            for job, capture in zip(jobs, planned, strict=True)
        ]

    def report(self) -> dict[str, Any]:
        """Return the activations of each item, by layer."""
        pairs = zip(self._planned, self._outputs, strict=True)
        results = [_describe(capture, output) for capture, output in pairs]
        return {"hook": self._body.hook, "read": self._body.read, "results": results}

    def lay_out(self, document: dict[str, Any]) -> TensorLayout:
        """Return the answer as the tensors of a file, as `ActivationsAnswer` says."""
        results = document["results"]
        hook, is_mean = document["hook"], self._body.read == "mean"
        rows = [capture.job.num_rows for capture in self._planned]
        tensors = {
            f"{hook}.{layer}": [result["activations"][layer] for result in results]
            for layer in results[0]["activations"]
        }
        read = [result["token_ids"] for result in results]
        tensors["row_starts"] = [_find_starts(rows)]
        tensors["token_ids"] = read
        tensors["token_starts"] = [_find_starts([len(ids) for ids in read])]
        if not is_mean:
            tensors["positions"] = [result["positions"] for result in results]
        arrays = ("activations", "token_ids", *(() if is_mean else ("positions",)))
        described = [
            {name: value for name, value in result.items() if name not in arrays}
            for result in results
        ]
        return TensorLayout(tensors, {"answer": document | {"results": described}})


def _count_chars(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    return count_chars(item.messages or ())


def _count_ids(jobs: Sequence[CaptureJob]) -> int:
    """Return the numbers of the answer that say which tokens were read, and where."""
    return sum(len(job.tokens) + len(job.places) for job in jobs)


def _find_starts(sizes: Sequence[int]) -> Array:
    return np.cumsum([0, *sizes], dtype=np.int32)


def _describe(capture: PlannedCapture, output: CaptureOutput) -> dict[str, Any]:
    job, found_LTD = capture.job, output.activations_LTD
    finite = bool(np.isfinite(found_LTD).all())
    return {
        "token_ids": job.tokens,
        "truncated_tokens": capture.truncated,
        "positions": job.places.astype(np.int32),
        "activations": dict(zip(map(str, job.layers), found_LTD, strict=True)),
        "flags": [] if finite else ["non_finite"],
    }
