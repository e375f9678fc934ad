"""Resolve a request's interventions (steering, probes, override, adapter, capture) for its jobs.

The receipt in the answer reports that steering was applied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from cachetools import LRUCache

from logsteer.errors import api_error
from logsteer.schemas import (
    ActivationFields,
    AdapterCard,
    InterventionFields,
    OverrideCard,
    ParameterFields,
)
from logsteer_server.contract.batches import change_all
from logsteer_server.contract.captures import CapturedActivations
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job, Output
from logsteer_server.contract.plan import Kept, Readings, SteeringPlan
from logsteer_server.interventions.captures import (
    ResolvedCapture,
    resolve_capture,
    show_activations,
)
from logsteer_server.interventions.probes import (
    ResolvedProbe,
    check_room,
    resolve_probes,
    show_readings,
)
from logsteer_server.interventions.references import (
    ResolvedAdapter,
    ResolvedOverride,
    resolve_adapter,
    resolve_override,
)
from logsteer_server.interventions.steering import ResolvedSteering, resolve_steering
from logsteer_server.keys.caller import Requester
from logsteer_server.settings import Settings
from logsteer_server.stores.captures import CaptureStore
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import PREFIX, Namespace, name_prefix, open_all
from logsteer_server.stores.upkeep import SHARED_BYTES
from logsteer_server.stores.variants import VariantStore, make_card
from logsteer_server.stores.vectors import ParsedVectors, SaeStore, VectorStore
from logsteer_server.text.tokenizer import TextCodec


def check_reach(steering: ResolvedSteering, jobs: Sequence[Job]) -> None:
    """Check that steering reaches a token of some job.

    Errors: APIError `invalid_request` if no token of any job would be steered.
    """
    for job in jobs:
        plan, prompt = job.plan or steering.plan, job.tokens[: job.prompt_len]
        if any(
            part.positions.resolve(prompt).count(job.num_read, job.prompt_len)
            for part in plan.parts
        ):
            return
    raise api_error(
        "invalid_request",
        "steering reaches no token: its positions select none of the tokens that the model reads "
        "here (the last token is only predicted). Choose other positions.",
        param="steering.positions",
    )


class Receipt:
    """Measurements from a request's jobs, summed up."""

    def __init__(self, steering: ResolvedSteering) -> None:
        self._steering = steering
        self._steered = [0] * len(steering.plan.parts)
        # By site: tokens, and the sum of their relative changes.
        self._sites = {site.name: (0, 0.0) for site in steering.plan.all_sites}
        self._passed = [0] * len(steering.plan.conditions)
        kinds = {part.positions.kind for part in steering.plan.parts}
        self._may_end_before = bool(kinds & {"completion", "slices", "every", "window"})
        computed = {"completion", "predicting", "last_prompt", "every", "window"}
        self._may_have_cached = not kinds <= computed
        self._had_cached = False
        self._had_output = False

    def add(self, output: Output) -> None:
        """Add the (last) output of a job."""
        self._had_output = True
        # Otherwise no steered token comes from the prefix cache: hits end before the first row.
        if self._may_have_cached:
            self._had_cached = self._had_cached or bool(output.cached_tokens)
        if output.trace is None:
            return
        for number, tokens in enumerate(output.trace.tokens):
            self._steered[number] += tokens
        for number, passed in enumerate(output.trace.passed):
            self._passed[number] += passed
        for name, (count, mean) in output.trace.sites.items():
            tokens, total = self._sites[name]
            self._sites[name] = (tokens + count, total + count * mean)

    def write(self) -> dict[str, Any]:
        """Return the fields of `SteeringReceipt`.

        Errors: APIError `internal` if vectors were to be added and no activation changed.
        """
        sites = self._steering.plan.all_sites
        adds = any(site.offset is not None and site.offset.any() for site in sites)
        changed = any(tokens for tokens, _ in self._sites.values())
        # A continuation may end before it reaches the steered positions.
        reached = self._had_output and (any(self._steered) or not self._may_end_before)
        if adds and reached and not changed and not self._had_cached:
            detail = "The engine did not apply the steering; report this model and engine as a bug."
            raise api_error("internal", detail)
        layers = {
            name: {"tokens": tokens, "relative_norm": total / tokens if tokens else None}
            for name, (tokens, total) in self._sites.items()
        }
        vectors = [
            {
                "name": used.name,
                "sha256": used.sha256,
                "scale": used.scale,
                "other_weights": used.other_weights,
                "tokens": sum(self._steered[part] for part in used.parts),
                "passed": None if used.condition is None else self._passed[used.condition],
            }
            for used in self._steering.vectors
        ]
        return {"tokens_steered": sum(self._steered), "layers": layers, "vectors": vectors}


J = TypeVar("J", bound=Job)

INTERVENTIONS = ("steering", "override", "adapter", "probes", "capture")
"""Fields of a request that change a model, or read its activations."""
OPEN_NAMESPACES = 256
"""Callers' stores kept open, with the cards that they have read."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores in which a request's names are looked up; `may_steer`: the caller's scope."""

    vectors: VectorStore
    overrides: Namespace[OverrideCard]
    adapters: Namespace[AdapterCard]
    saes: SaeStore
    variants: VariantStore
    captures: CaptureStore
    may_steer: bool = True
    may_write: bool = True

    def check_use(self, asked: ParameterFields) -> None:
        """Refuse interventions to callers without the scope. Errors: APIError `forbidden`."""
        if self.may_steer:
            return
        for name in INTERVENTIONS:
            if getattr(asked, name, None) is not None:
                detail = f"{name} needs a key with the scope steer, which this one lacks."
                raise api_error("forbidden", detail, param=name)


class NamespaceRegistry:
    """Open the stores that each caller sees. Use it from one event loop.

    vectors, overrides, adapters, saes, variants    shared; with keys named `shared/NAME`
    keys/<name>/vectors, …                          the key's own
    """

    def __init__(self, settings: Settings, objects: Objects, files: ContentFiles) -> None:
        self._settings = settings
        self._objects = objects
        self._files = files
        self._parsed = ParsedVectors()
        self._opened: LRUCache[tuple[object, ...], Stores] = LRUCache(OPEN_NAMESPACES)
        grace_s = settings.store_grace_s
        self._open = open_all(objects, SHARED_BYTES, "", grace_s)
        self._shared = open_all(objects, SHARED_BYTES, "", grace_s, PREFIX)

    async def find(self, caller: Requester) -> Stores:
        """Return a caller's stores."""
        quota = caller.allowance.limits.stored_bytes
        place = caller.namespace, quota, caller.scopes
        if (known := self._opened.get(place)) is not None:
            return known
        own = shared = self._open
        captures = self.find_captures(caller)
        if caller.namespace is not None:
            grace_s = self._settings.store_grace_s
            own = open_all(self._objects, captures.max_bytes, captures.prefix, grace_s)
            shared = self._shared
        may_share = "admin" in caller.scopes
        configured = [make_card(variant.name, variant) for variant in self._settings.variants]
        vectors, overrides, adapters, sparse, variants = zip(own, shared, strict=True)
        saes = SaeStore(*sparse, files=self._files, may_share=may_share)
        stores = self._opened[place] = Stores(
            VectorStore(
                *vectors, files=self._files, parsed=self._parsed, saes=saes, may_share=may_share
            ),
            Namespace(*overrides, may_share=may_share),
            Namespace(*adapters, may_share=may_share),
            saes,
            VariantStore(*variants, configured=configured, may_share=may_share),
            captures,
            may_steer="steer" in caller.scopes,
            may_write="write" in caller.scopes,
        )
        return stores

    def find_captures(self, caller: Requester) -> CaptureStore:
        """Return the store of a caller's own data sets of activations."""
        if caller.namespace is None:
            return CaptureStore(self._objects)
        quota = caller.allowance.limits.stored_bytes
        limit = self._settings.max_key_bytes if quota is None else quota
        return CaptureStore(self._objects, name_prefix(caller.namespace), limit)


@dataclass(frozen=True)
class Interventions:
    """The changes and readings of a model that a request asks for."""

    steering: ResolvedSteering | None = None
    override: ResolvedOverride | None = None
    adapter: ResolvedAdapter | None = None
    probes: tuple[ResolvedProbe, ...] = ()
    capture: ResolvedCapture | None = None

    @classmethod
    def resolve(
        cls, asked: ParameterFields, stores: Stores, info: EngineInfo, codec: TextCodec
    ) -> "Interventions":
        """Resolve the fields of a request for a model; it blocks.

        Errors: APIError `forbidden`, `unknown_vector`, `invalid_vector`, `unknown_override`,
        `unknown_adapter`, `unsupported_by_engine`.
        """
        if asked.model_fields_set.isdisjoint(INTERVENTIONS):
            return UNCHANGED
        stores.check_use(asked)
        steering = asked.steering if isinstance(asked, InterventionFields) else None
        reads = asked if isinstance(asked, ActivationFields) else ActivationFields()
        decode = codec.decode
        found = cls(
            None if steering is None else resolve_steering(steering, stores.vectors, info, decode),
            resolve_override(asked.override, stores.overrides, info),
            resolve_adapter(asked.adapter, stores.adapters, info),
            resolve_probes(reads.probes, stores.vectors, info),
            resolve_capture(reads, info, codec, stores.captures if stores.may_write else None),
        )
        if found.plan is not None:
            check_room(len(found.plan.probes), info, "probes")
        return found

    @cached_property
    def plan(self) -> SteeringPlan | None:
        """The plan of the jobs: the steering, with the request's probes before its conditions'."""
        plan = None if self.steering is None else self.steering.plan
        if not self.probes:
            return plan
        own, shift = tuple(probe.probe for probe in self.probes), len(self.probes)
        kept: Kept = "all" if any(probe.context for probe in self.probes) else "scored"
        if plan is None:
            return SteeringPlan((), probes=own, kept=kept)
        shifted = tuple(replace(c, probe=c.probe + shift) for c in plan.conditions)
        first, *more = (
            replace(part, probes=own + plan.probes, conditions=shifted, kept=kept)
            for part in plan.parts
        )
        return replace(first, more=tuple(more))

    def show_readings(
        self, readings: Readings | None, first: int, *, is_steered: bool = True
    ) -> dict[str, Any]:
        """Return an answer's fields for readings, as `probes.show_readings`."""
        is_steered = is_steered and self.steering is not None
        return show_readings(self.probes, readings, first, is_steered)

    def show_activations(self, found: CapturedActivations | None) -> dict[str, Any]:
        """Return an answer's fields for an output's activations."""
        return show_activations(self.capture, found)

    @property
    def stored(self) -> ResolvedCapture | None:
        """The capture that is written to the store instead of the answer, if any."""
        return self.capture if self.capture and self.capture.target else None

    def count_readings(self, tokens: int, context_tokens: int) -> int:
        """Return the count of readings in an answer, for its tokens and those of the context."""
        shown = tokens * len(self.probes)
        shown += context_tokens * sum(probe.context for probe in self.probes)
        return shown * (1 if self.steering is None else 2)

    @property
    def unsteered(self) -> "Interventions":
        """These interventions without steering."""
        return replace(self, steering=None)

    def shares_head(self, other: "Interventions") -> bool:
        """Return whether both leave the model's head as it is."""
        changes = self.override, self.adapter, other.override, other.adapter
        return all(change is None for change in changes)

    def check_reach(self, jobs: Sequence[Job]) -> None:
        """Check that steering, if any, reaches a token of some job.

        Errors: APIError `invalid_request`.
        """
        if self.steering is not None:
            check_reach(self.steering, jobs)

    def apply(self, jobs: Sequence[J]) -> Sequence[J]:
        """Return the jobs with these interventions; positions that depend on a prompt's tokens are
        resolved for each job. Errors: as `check_reach`.
        """
        if self is UNCHANGED:
            return jobs
        changed: Sequence[J]
        if not self._knows_tokens:
            changed = change_all(jobs, self.change)
        else:
            changed = list(map(self.change, jobs))
        self.check_reach(changed)
        return changed

    @property
    def _knows_tokens(self) -> bool:
        """Whether positions depend on a prompt's tokens."""
        captured = self.capture and self.capture.capture.positions.knows_tokens
        return bool(captured or (self.plan and self.plan.knows_tokens))

    def change(self, job: J) -> J:
        """Return the job with these interventions."""
        plan, capture = self.plan, self.capture.capture if self.capture else job.capture
        if self._knows_tokens:
            prompt = job.tokens[: job.prompt_len]
            plan = plan and plan.resolve(prompt)
            capture = capture and capture.resolve(prompt)
        return replace(
            job,
            plan=plan,
            capture=capture,
            override=self.override.override if self.override else None,
            adapter=self.adapter.adapter if self.adapter else None,
        )


UNCHANGED = Interventions()
"""No interventions."""


class AppliedReport:
    """The report of an answer on its interventions."""

    def __init__(self, interventions: Interventions) -> None:
        self._interventions = interventions
        steering = interventions.steering
        self._receipt = Receipt(steering) if steering else None

    def add(self, output: Output) -> None:
        """Add the (last) output of a job."""
        if self._receipt is not None:
            self._receipt.add(output)

    def write(self) -> dict[str, Any]:
        """Return the fields of `AppliedInterventions`. Errors: as `Receipt.write`."""
        override, adapter = self._interventions.override, self._interventions.adapter
        return {
            "steering": self._receipt.write() if self._receipt else None,
            "override": override.used if override else None,
            "adapter": adapter.used if adapter else None,
        }
