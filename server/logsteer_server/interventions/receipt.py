"""The proof that steering was applied; and the refusal of steering that would reach nothing."""

from collections.abc import Generator, Sequence
from typing import Any

from logsteer.errors import api_error
from logsteer_server.contract.jobs import Job, Output
from logsteer_server.interventions.steering import ResolvedSteering


def check_reach(steering: ResolvedSteering, jobs: Sequence[Job]) -> Generator[int, None, None]:
    """Make sure that steering reaches a token of some job; look at one job a step.

    Errors: APIError `invalid_request` where no token of any job would be steered.
    """
    if not jobs:
        detail = "steering reaches no token: the model reads none for this request; leave it out."
        raise api_error("invalid_request", detail, param="steering")
    for job in jobs:
        plan, prompt = job.plan or steering.plan, job.tokens[: job.prompt_len]
        if any(
            part.positions.resolve(prompt).count(job.num_read, job.prompt_len)
            for part in plan.parts
        ):
            return
        yield 0
    raise api_error(
        "invalid_request",
        f"steering reaches no token: positions {steering.where} selects none of the tokens "
        "that the model reads here (the last token is only predicted). Choose other "
        "positions.",
        param="steering.positions",
    )


class Receipt:
    """What was measured while a request's jobs ran, summed up."""

    def __init__(self, steering: ResolvedSteering) -> None:
        self._steering = steering
        self._steered = [0] * len(steering.plan.parts)
        # By site: tokens, and the sum of their relative changes.
        self._sites = {site.name: (0, 0.0) for site in steering.plan.all_sites}
        self._passed = [0] * len(steering.plan.conditions)
        kinds = {part.positions.kind for part in steering.plan.parts}
        self._may_have_cached = not kinds <= {"completion", "predicting", "last_prompt", "every"}
        self._may_end_before = bool(kinds & {"completion", "slices", "every"})
        self._had_cached = False
        self._had_output = False

    def add(self, output: Output) -> None:
        """Count the (last) output of a job in."""
        self._had_output = True
        # Engines read the rest anew: what the prefix cache has of a prompt ends before its rows.
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

        Errors: APIError `internal` where vectors were to be added and no activation changed.
        """
        sites = self._steering.plan.all_sites
        adds = any(site.offset is not None and site.offset.any() for site in sites)
        changed = any(tokens for tokens, _ in self._sites.values())
        # A continuation may end before it has a token at positions that it might have come to.
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
                "tokens": sum(self._steered[part] for part in used.parts),
                "passed": None if used.condition is None else self._passed[used.condition],
            }
            for used in self._steering.vectors
        ]
        return {"tokens_steered": sum(self._steered), "layers": layers, "vectors": vectors}
