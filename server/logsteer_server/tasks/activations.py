"""`/activations`: the activations of a model over texts, as arrays or as a file."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import ActivationItem, ActivationsRequest, BosPolicy, OverflowPolicy, SaeCard
from logsteer_server.contract.captures import Capture, CaptureRead
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput, Ids
from logsteer_server.contract.plan import Positions
from logsteer_server.interventions.captures import find_layers
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.interventions.steering import place_positions
from logsteer_server.numerics.sae import Floats
from logsteer_server.settings import Settings
from logsteer_server.stores.store import StoredContent
from logsteer_server.tasks.planning import Cover, Planner
from logsteer_server.tasks.run import Batch, BodyTask, Collector, TensorLayout, check_count
from logsteer_server.text.chat import ChatForm, count_chars
from logsteer_server.text.tokenizer import TextCodec, check_ids

WHOLE = ChatForm(is_whole=True)
"""Rendering of conversations that are read, not answered."""


@dataclass(frozen=True, slots=True)
class CaptureSite:
    """The activations to read of texts: their capture, and how wide one is.

    A mean over all tokens leaves out `bos_id`, the tokenizer's BOS, at a text's beginning.
    """

    capture: Capture
    width: int
    bos_id: int | None = None

    @classmethod
    def resolve(
        cls,
        hook: str,
        layers: Sequence[int] | None,
        read: CaptureRead,
        info: EngineInfo,
        positions: Positions | None = None,
        bos_id: int | None = None,
    ) -> "CaptureSite":
        """Return the site of a model, of all layers if None are named. Errors: as `find_layers`."""
        capture = Capture(find_layers(hook, layers, info), hook, read, positions or Positions())
        return cls(capture, info.hook_widths.get(hook, info.hidden_size), bos_id)

    def place(self, tokens: Ids) -> Capture:
        """Return the capture of a text's tokens."""
        leaves_bos = self.capture.read == "mean" and self.capture.positions.kind == "all"
        if leaves_bos and len(tokens) > 1 and tokens[0] == self.bos_id:
            return replace(self.capture, positions=Positions("slices", ((1, len(tokens)),)))
        return self.capture


def read_items(
    items: Sequence[str | ActivationItem],
    bos: BosPolicy,
    codec: TextCodec,
    vocab_size: int,
    form: ChatForm = WHOLE,
) -> Iterator[list[int]]:
    """Yield the tokens of a request's items, with BOS; ids are used unchanged.

    A conversation has the BOS of its template. Errors: APIError `invalid_request`.
    """
    encoded = codec.encode_prompts([item for item in items if isinstance(item, str)], bos)
    for index, item in enumerate(items):
        if isinstance(item, str):
            yield next(encoded)
            continue
        if item.token_ids is None:
            yield codec.encode_ids([codec.render_chat(item.messages or [], form)])[0]
            continue
        check_ids(item.token_ids, vocab_size, f"items[{index}]")
        yield item.token_ids


def plan_captures(
    sequences: Iterable[list[int]],
    places: Iterable[str],
    site: CaptureSite,
    info: EngineInfo,
    cover: Cover,
    on_overflow: OverflowPolicy = "error",
) -> tuple[list[CaptureJob], list[int]]:
    """Plan one job per sequence, in order; errors name the item in the request.

    Return with them how many tokens at the left of each sequence are not read.

    Errors: APIError `invalid_request`, `context_too_long`, and
    `payload_too_large` if the engine has no room for a sequence's activations.
    """
    jobs: list[CaptureJob] = []
    truncated: list[int] = []
    num_planned = 0
    for place, tokens in zip(places, sequences, strict=True):
        if not tokens:
            raise api_error("invalid_request", f"{place} has no token.", param=place)
        excess = max(0, len(tokens) - info.context_length)
        if excess and on_overflow == "error":
            detail = (
                f"{place} has {len(tokens)} tokens; this model's context holds "
                f"{info.context_length}: shorten the text."
            )
            raise api_error("context_too_long", detail, param=place)
        read = np.array(tokens[excess:], dtype=np.int32)
        job = CaptureJob(read, capture=site.place(read))
        if not len(job.places):
            detail = f"{place}: positions select none of its {len(read)} tokens; choose others."
            raise api_error("invalid_request", detail, param="positions")
        if failure := info.refuse(job):
            raise api_error(failure.code, f"{place}: {failure.detail}.", param=place)
        jobs.append(job)
        truncated.append(excess)
        num_planned += len(read)
        cover(num_planned)
    return jobs, truncated


def count_numbers(jobs: Sequence[CaptureJob], width: int) -> int:
    """Return the count of numbers in all jobs' activations of this width."""
    return width * sum(job.num_rows * len(job.capture.layers) for job in jobs)


Array = npt.NDArray[Any]

ENCODED_AT_ONCE = 8192
"""Tokens encoded before other requests may use the thread."""


@dataclass(frozen=True, slots=True)
class ChosenSae:
    """The autoencoder of a request: its card under the requested name, its content."""

    card: SaeCard
    content: StoredContent

    def count_features(self, top: int, width: int) -> int:
        """Return the number of features shown of each token's activation, so wide.

        Errors: APIError `invalid_sae` for a model of another width.
        """
        if width != self.card.width:
            detail = (
                f"The sparse autoencoder {self.card.name!r} encodes activations of "
                f"{self.card.width} numbers, this model's have {width}: serve the model that it "
                "was trained on."
            )
            raise api_error("invalid_sae", detail, param="sae")
        return min(top, self.card.features, self.card.k or top)


class ActivationsTask(BodyTask[ActivationsRequest]):
    """The activations of texts at a hook: of each token, of the last one, or their mean."""

    kind = "activations"
    has_file = True

    _jobs: Sequence[CaptureJob]
    _outputs: Sequence[CaptureOutput]
    _sae: ChosenSae | None = None
    _features: list[tuple[Ids, Floats]]

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of items. Errors: APIError `payload_too_large`."""
        check_count("items", len(self._body.items), settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture all activations in one batch, and encode their features if requested."""
        body, info = self._body, self.info
        texts = (item if isinstance(item, str) else item.messages or () for item in body.items)
        planner.cover_text(max(len(t) if isinstance(t, str) else count_chars(t) for t in texts))
        hook, layers = body.hook, body.layers
        if body.sae is not None:
            look_up = self._stores.saes.look_up
            self._sae = ChosenSae(*await planner.capacity.call_long(look_up, body.sae))
            hook, layers = self._sae.card.hook, [self._sae.card.layer]
        where = place_positions(body.positions)
        site = CaptureSite.resolve(hook, layers, body.read, info, where, self.codec.bos_id)
        jobs = self._jobs = await planner.run(self._plan, site, planner)
        shown = held = count_numbers(jobs, site.width)
        if self._sae is not None:
            features = self._sae.count_features(body.top, site.width)
            planner.hold_activations(held)
            shown = 2 * features * sum(job.num_rows for job in jobs)
        planner.expect_arrays(shown + sum(len(job.tokens) + len(job.places) for job in jobs))
        collector = Collector()
        yield Batch(jobs, collector.take)
        self._outputs = collector.outputs
        if self._sae is not None:
            self._features = []
            for part in _cut_outputs(self._outputs):
                self._features += await planner.capacity.call_long(self._encode, part, self._sae)
            found = {str(i) for ids_TK, _ in self._features for i in np.unique(ids_TK)}
            self._labels = await planner.capacity.call_long(self._read_labels, found, self._sae)

    def _encode(self, outputs: Sequence[CaptureOutput], sae: ChosenSae) -> list[tuple[Ids, Floats]]:
        """Return the strongest features of each output's tokens, ids and activations [T, K]."""
        x_ND = np.concatenate([output.activations_LTD[0] for output in outputs])
        with self._stores.saes.open(sae.content) as file:
            ids_NK, found_NK = file.encoder.encode(x_ND, self._body.top)
        ends = np.cumsum([output.activations_LTD.shape[1] for output in outputs])[:-1]
        return list(zip(np.split(ids_NK, ends), np.split(found_NK, ends), strict=True))

    def _read_labels(self, found: set[str], sae: ChosenSae) -> dict[str, str]:
        with self._stores.saes.open(sae.content) as file:
            return {feature: file.labels[feature] for feature in found & file.labels.keys()}

    def _plan(self, site: CaptureSite, planner: Planner) -> Sequence[CaptureJob]:
        body, info = self._body, self.info
        self.interventions = Interventions.resolve(body, self._stores, info, self.codec)
        form = ChatForm.of(body, is_whole=True)
        sequences = read_items(body.items, body.bos, self.codec, info.vocab_size, form)
        places = [f"items[{index}]" for index in range(len(body.items))]
        jobs, self._truncated = plan_captures(
            sequences, places, site, info, planner.cover, body.on_overflow
        )
        return self.interventions.apply(jobs)

    def report(self) -> dict[str, Any]:
        """Return the activations of each item, by layer."""
        results = list(map(_describe, self._jobs, self._truncated, self._outputs))
        found = {"hook": self._body.hook, "read": self._body.read, "results": results}
        if self._sae is None:
            return found
        for result, (ids_TK, found_TK) in zip(results, self._features, strict=True):
            del result["activations"]
            result["features"] = {"ids": ids_TK, "activations": found_TK}
        card = self._sae.card
        used = {"name": card.name, "sha256": card.sha256, "layer": card.layer}
        return found | {"hook": card.hook, "sae": used | {"labels": self._labels}}

    def lay_out(self, document: dict[str, Any]) -> TensorLayout:
        """Return the answer as the tensors of a file, described in `ActivationsAnswer`."""
        results = document["results"]
        hook, is_mean = document["hook"], self._body.read == "mean"
        rows = [job.num_rows for job in self._jobs]
        if self._sae is not None:
            tensors = {
                f"feature_{name}": [result["features"][name] for result in results]
                for name in ("ids", "activations")
            }
        else:
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
        arrays = ("activations", "features", "token_ids", *(() if is_mean else ("positions",)))
        described = [
            {name: value for name, value in result.items() if name not in arrays}
            for result in results
        ]
        return TensorLayout(tensors, {"answer": document | {"results": described}})


def _cut_outputs(outputs: Sequence[CaptureOutput]) -> Iterator[list[CaptureOutput]]:
    """Yield outputs in parts of about `ENCODED_AT_ONCE` tokens."""
    part: list[CaptureOutput] = []
    for output in outputs:
        part.append(output)
        if sum(one.activations_LTD.shape[1] for one in part) >= ENCODED_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _find_starts(sizes: Sequence[int]) -> Array:
    return np.cumsum([0, *sizes], dtype=np.int32)


def _describe(job: CaptureJob, truncated: int, output: CaptureOutput) -> dict[str, Any]:
    found_LTD = output.activations_LTD
    finite = bool(np.isfinite(found_LTD).all())
    return {
        "token_ids": job.tokens,
        "truncated_tokens": truncated,
        "positions": job.places.astype(np.int32),
        "activations": dict(zip(map(str, job.capture.layers), found_LTD, strict=True)),
        "sinks": {str(layer): places for layer, places in output.sinks.items()},
        "flags": [] if finite else ["non_finite"],
    }
