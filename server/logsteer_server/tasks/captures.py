"""Sequences as capture jobs: where activations are read, and what of a request cannot be."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import ActivationItem, BosPolicy, OverflowPolicy
from logsteer_server.contract.captures import CaptureJob, CaptureRead
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import Positions
from logsteer_server.tasks.planning import Steps
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.tokenizer import TextCodec

WHOLE = ChatForm(is_whole=True)
"""Conversations as they are read, and not answered."""


@dataclass(frozen=True, slots=True)
class CaptureSite:
    """Which activations are read: `hook` of some layers (None: all), as in `CaptureJob`."""

    hook: str
    layers: Sequence[int] | None
    read: CaptureRead
    positions: Positions = field(default_factory=Positions)

    def find_layers(self, info: EngineInfo) -> tuple[int, ...]:
        """Return the layers in order. Errors: APIError where the model lacks hook or layer."""
        if self.hook not in info.hooks:
            detail = (
                f"There are no activations of {self.hook} here: {info.explain_hook(self.hook)}."
            )
            raise api_error("unsupported_by_engine", detail, param="hook")
        layers = tuple(sorted(self.layers)) if self.layers else tuple(range(info.num_layers))
        if layers[-1] >= info.num_layers:
            detail = f"layers has {layers[-1]}; this model's layers are 0 to {info.num_layers - 1}."
            raise api_error("invalid_request", detail, param="layers")
        return layers

    def find_width(self, info: EngineInfo) -> int:
        """Return the numbers of one activation."""
        return info.hook_widths.get(self.hook, info.hidden_size)


def read_items(
    items: Sequence[str | ActivationItem],
    bos: BosPolicy,
    codec: TextCodec,
    vocab_size: int,
    form: ChatForm = WHOLE,
) -> Iterator[list[int]]:
    """Yield the tokens of a request's items, BOS included; ids are taken as they are.

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
        if max(item.token_ids) >= vocab_size:
            place = f"items[{index}]"
            detail = f"{place}.token_ids has id {max(item.token_ids)}; this model's vocabulary "
            detail += f"ends at {vocab_size - 1}."
            raise api_error("invalid_request", detail, param=place)
        yield item.token_ids


@dataclass(frozen=True, slots=True)
class PlannedCapture:
    """A job, and how many tokens were dropped at the left of its sequence."""

    job: CaptureJob
    truncated: int


def plan_captures(
    sequences: Iterable[list[int]],
    places: Iterable[str],
    site: CaptureSite,
    info: EngineInfo,
    on_overflow: OverflowPolicy = "error",
) -> Steps[list[PlannedCapture]]:
    """Plan one job a sequence, in their order; errors name its place in the request.

    Errors: APIError `unsupported_by_engine`, `invalid_request`, `context_too_long`, and
    `payload_too_large` for one whose activations the engine has no room for.
    """
    layers = site.find_layers(info)
    planned: list[PlannedCapture] = []
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
        job = CaptureJob(read, layers, site.hook, site.read, site.positions)
        if not len(job.places):
            detail = f"{place}: positions select none of its {len(read)} tokens; choose others."
            raise api_error("invalid_request", detail, param="positions")
        if failure := info.refuse(job):
            raise api_error(failure.code, f"{place}: {failure.detail}.", param=place)
        planned.append(PlannedCapture(job, excess))
        num_planned += len(read)
        yield num_planned
    return planned


def count_numbers(jobs: Sequence[CaptureJob], width: int) -> int:
    """Return the numbers of all the jobs' activations, each so wide."""
    return width * sum(job.num_rows * len(job.layers) for job in jobs)
