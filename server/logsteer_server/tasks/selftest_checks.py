"""The checks of a self-test: each yields the batches that it needs, and returns what it measured.

They run in the order of CHECKS, because later ones compare with what earlier ones have scored:

    draw        continuations, steered and not, in one batch; those unsteered become texts
    repeated    each text alone, twice: what all others are compared with
    ...         the same values in another way
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logsteer.schemas.operations import PromiseName
from logsteer_server.contract.jobs import GenerateOutput, Job, ScoreJob, ScoreOutput
from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.stores.layer_vectors import RESID_POST
from logsteer_server.tasks.run import Batch, Collector
from logsteer_server.tasks.selftest_trial import (
    CUT_POLICY,
    SEED,
    CheckEndedError,
    Discrepancy,
    DrawnTexts,
    Finding,
    Logprobs,
    Measurement,
    Noise,
    Steps,
    Trial,
    TrialPlans,
    capture_norm,
    plan_samples,
    read_logprobs,
    score_all,
)

PROMISES: Mapping[PromiseName, str] = {
    "repeated": "A text scores the same a second time.",
    "batched": "A text scores in a batch as it does alone.",
    "shuffled": "A text scores the same in another order, among other texts.",
    "target_rows": "A target scores the same as within its whole text.",
    "sampled": "A continuation scores as it was sampled.",
    "steered_sampled": "A steered continuation scores as it was sampled.",
    "drawn": "A token drawn under top_k is one that the policy gives a probability.",
    "zero_scale": "Steering by nothing changes nothing.",
    "steered_neighbour": "Steered texts in a batch do not change an unsteered one.",
    "prefix_cached": "A text scores from the prefix cache as it does without.",
    "chunked": "A text scores the same where it is read in several steps.",
    "replicas": "Each replica gives the same tokens the same scores, steered and not.",
    "against": "The other model gives the same tokens the same scores.",
    "against_steered": "The other model gives the same tokens the same steered scores.",
}
"""What each check shows, in their order."""

SCALE_COLUMNS = ("logprob", "logit_mean", "logit_std")
CACHED_ROWS = 8
"""Rows that are scored behind a prefix that may come from the cache."""
TARGET_ROW = 8
"""The first row of a target: no block of a prefix cache is so short."""
MAX_CHUNKED = 120
"""Texts of a kind in flight at once; vLLM has 128 in a step."""


def draw(trial: Trial, context: int) -> Iterator[Batch]:
    """Draw continuations, all kinds in one batch; those unsteered become texts."""
    if not trial.why_unsteered:
        captured = Collector()
        yield Batch([capture_norm(trial)], captured.take)
        norm = float(np.linalg.norm(captured.outputs[0].activations_LD))
        trial.plans = TrialPlans.make(trial.info, norm)
    kinds = plan_samples(trial, context)
    jobs: list[Job] = [job for kind in kinds.values() for job in kind]
    collector = Collector()
    yield Batch(jobs, collector.take)
    found: Iterator[GenerateOutput] = iter(collector.outputs)
    for name, own in kinds.items():
        outputs = [next(found) for _ in own]
        ids = [output.token_ids for output in outputs]
        trial.samples[name] = DrawnTexts(own, ids, [output.logprobs for output in outputs])
    plain = trial.samples["sampled"]
    sampled = [
        np.concatenate([job.tokens, ids])
        for job, ids in zip(plain.jobs, plain.completions, strict=True)
    ]
    trial.texts = [*trial.given, *sampled]


def repeat(trial: Trial) -> Steps:
    """Score each text alone, twice; from the first come the values and the noise."""
    runs: list[list[ScoreOutput]] = []
    for _ in range(2):
        runs.append([])
        for job in trial.jobs():
            collector = Collector()
            yield Batch([replace(job, columns=SCALE_COLUMNS)], collector.take)
            runs[-1].append(collector.outputs[0])
    trial.plain, again = map(read_logprobs, runs)
    squares = [
        run.columns["logit_mean"].astype(np.float64) ** 2 + run.columns["logit_std"] ** 2
        for run in runs[0]
    ]
    trial.logit_scale = float(np.sqrt(np.concatenate(squares).mean()))
    trial.noise = Noise.measure(trial.logit_scale, trial.info)
    discrepancy = Discrepancy.of(again, trial.plain)
    return Measurement(discrepancy, f"{len(again)} texts, each alone, twice")


def batched(trial: Trial) -> Steps:
    """Score all texts in one batch."""
    found = yield from score_all(trial.jobs())
    evidence = f"{len(found)} texts in one batch against each alone"
    return Measurement(Discrepancy.of(read_logprobs(found), trial.plain), evidence)


def shuffled(trial: Trial) -> Steps:
    """Score the texts in another order, with pieces of them in between."""
    draws = np.random.default_rng(SEED)
    jobs = trial.jobs()
    strangers = [_cut(job, int(draws.integers(1, len(job.tokens) + 1))) for job in jobs]
    order = draws.permutation(2 * len(jobs))
    both = [*jobs, *strangers]
    found = yield from score_all([both[n] for n in order])
    by_place = dict(zip(order.tolist(), read_logprobs(found), strict=True))
    own = [by_place[n] for n in range(len(jobs))]
    evidence = f"{len(jobs)} texts among {len(strangers)} others, in another order"
    return Measurement(Discrepancy.of(own, trial.plain), evidence)


def _cut(job: ScoreJob, length: int) -> ScoreJob:
    return ScoreJob(job.tokens[:length], job.targets[:length])


def target_rows(trial: Trial) -> Steps:
    """Score the last part of each text alone, behind a context that no cache can hold."""
    jobs = trial.jobs(first_row=TARGET_ROW)
    found = yield from score_all(jobs)
    wanted = [whole[TARGET_ROW:] for whole in trial.plain if len(whole) > TARGET_ROW]
    evidence = f"{len(jobs)} texts, scored after their first {TARGET_ROW + 1} tokens"
    return Measurement(Discrepancy.of(read_logprobs(found), wanted), evidence)


def sampled(trial: Trial) -> Steps:
    """Score the unsteered continuations."""
    samples = trial.samples["sampled"]
    found = yield from score_all(samples.reread())
    evidence = f"{len(found)} continuations, drawn beside steered ones and scored again"
    if trial.plans is None:
        evidence = f"{len(found)} continuations, scored again"
    return _compare_drawn(samples, found, evidence)


def _compare_drawn(samples: DrawnTexts, found: Sequence[ScoreOutput], evidence: str) -> Measurement:
    """Compare what continuations were drawn with and what they score."""
    apart = Discrepancy.of(samples.logprobs, read_logprobs(found), "continuation")
    return Measurement(apart, evidence)


def steered_sampled(trial: Trial) -> Steps:
    """Score the steered continuations under their steering; and without, to see that it acts."""
    trial.require_plans()
    samples = trial.samples["steered_sampled"]
    found = yield from score_all(samples.reread())
    plain = yield from score_all(samples.reread(steered=False))
    effect = Discrepancy.of(read_logprobs(found), read_logprobs(plain)).largest
    if effect <= trial.noise.tolerance:
        reason = f"steering moves no log-probability by more than {effect:.3g} nats"
        raise CheckEndedError("failed", reason)
    evidence = f"{len(found)} continuations; steering moves them by up to {effect:.3g} nats"
    return _compare_drawn(samples, found, evidence)


def drawn(trial: Trial) -> Steps:
    """Look how far drawn tokens are from the edge of what the policy draws.

    A token that q leaves out is as many nats off as it lacks to the k-th most probable.
    """
    if "drawn" not in trial.samples:
        raise CheckEndedError("not_run", "the engine does not read the column log_q")
    count = min(CUT_POLICY.top_k, trial.info.vocab_size)
    options: dict[str, Any] = {"columns": ("logprob", "log_q"), "policy": CUT_POLICY, "top": count}
    found = yield from score_all(trial.samples["drawn"].reread(**options))
    lacking, outside = [], 0
    for output in found:
        assert output.top_logprobs is not None
        logprobs, is_out = output.columns["logprob"], ~np.isfinite(output.columns["log_q"])
        edge = output.top_logprobs[:, -1]
        lacking.append(np.where(is_out, np.maximum(0.0, edge - logprobs), 0.0))
        outside += int(is_out.sum())
    evidence = f"{outside} tokens drawn with top_k {count} lie outside when they are scored again"
    wanted = [np.zeros_like(own) for own in lacking]
    return Measurement(Discrepancy.of(lacking, wanted, "continuation"), evidence)


def zero_scale(trial: Trial) -> Steps:
    """Steer the texts, at every layer, by a vector of scale 0 and an operation that keeps all."""
    jobs = trial.jobs(trial.require_plans().nothing)
    found = yield from score_all(jobs)
    wanted = sum(len(job.tokens) for job in jobs)
    steered = sum(sum(output.trace.tokens) for output in found if output.trace is not None)
    evidence = (
        f"{steered} of {wanted} tokens went through steering, at {trial.info.num_layers} layers"
    )
    apart = Discrepancy.of(read_logprobs(found), trial.plain)
    return Measurement(apart, evidence, has_reached=steered == wanted)


def steered_neighbour(trial: Trial) -> Steps:
    """Score each text unsteered beside steered ones, in batches that one step reads."""
    plain: list[ScoreOutput] = []
    steered: list[ScoreOutput] = []
    pairs = list(zip(trial.jobs(trial.require_plans().whole), trial.jobs(), strict=True))
    for group in _group(pairs, trial.info.step_tokens):
        found = yield from score_all([job for pair in group for job in pair])
        steered += found[::2]
        plain += found[1::2]
    trial.steered = read_logprobs(steered)
    effect = Discrepancy.of(trial.steered, trial.plain).largest
    evidence = f"steering moves their neighbours by up to {effect:.3g} nats"
    if effect <= trial.noise.tolerance:
        raise CheckEndedError("not_run", f"it could not show: {evidence}")
    return Measurement(Discrepancy.of(read_logprobs(plain), trial.plain), evidence)


def _group(
    pairs: Sequence[tuple[ScoreJob, ScoreJob]], step_tokens: int | None
) -> Iterator[list[tuple[ScoreJob, ScoreJob]]]:
    """Yield runs of pairs that a step has room for, or one pair alone."""
    group: list[tuple[ScoreJob, ScoreJob]] = []
    size = 0
    for pair in pairs:
        own = 2 * len(pair[0].tokens)
        if group and step_tokens is not None and size + own > step_tokens:
            yield group
            group, size = [], 0
        group.append(pair)
        size += own
    yield group


def prefix_cached(trial: Trial) -> Steps:
    """Score the ends of the texts, whose beginnings the checks so far have left in the cache."""
    plain = _tails(trial, None, trial.plain)
    steered = _tails(trial, trial.plans.whole, trial.steered) if trial.plans else []
    found = yield from score_all([job for job, _ in (*plain, *steered)])
    cached = sum(output.cached_tokens for output in found)
    if not cached:
        reason = "no token came from a prefix cache: the engine has none, or its blocks are longer "
        raise CheckEndedError("not_run", f"{reason}than the texts")
    hits = [n for n, output in enumerate(found) if output.cached_tokens]
    wanted = [values for _, values in (*plain, *steered)]
    evidence = f"{cached} tokens of {len(hits)} texts came from the prefix cache"
    own = read_logprobs(found)
    return Measurement(Discrepancy.of([own[n] for n in hits], [wanted[n] for n in hits]), evidence)


def _tails(
    trial: Trial, plan: SteeringPlan | None, whole: Sequence[Logprobs]
) -> list[tuple[ScoreJob, Logprobs]]:
    """Return a job for the end of each text, and the values that are wanted of it."""
    jobs = trial.jobs(plan)
    return [
        (replace(job, targets=job.targets[-CACHED_ROWS:]), values[-CACHED_ROWS:])
        for job, values in zip(jobs, whole, strict=True)
    ]


def chunked(trial: Trial) -> Steps:
    """Score so many texts at once that a step has no room for all, and splits some."""
    limit = trial.info.step_tokens
    if limit is None:
        raise CheckEndedError("not_run", "this engine reads every text in one step")
    kinds = [list(zip(trial.jobs(), trial.plain, strict=True))]
    if trial.plans is not None:
        kinds.append(list(zip(trial.jobs(trial.plans.whole), trial.steered, strict=True)))
    needed = limit + max(len(job.tokens) for job, _ in kinds[0])
    if len(kinds) * needed > trial.max_tokens:
        reason = f"a step reads {limit} tokens and a self-test at most {trial.max_tokens}; "
        raise CheckEndedError("not_run", f"{reason}lower max_num_batched_tokens to see it")
    # Each kind fills more than a step, so that texts are split of both.
    taken = [pair for kind in kinds for pair in _fill(kind, needed)]
    found = yield from score_all([job for job, _ in taken])
    split = [n for n, output in enumerate(found) if output.was_split]
    if not split:
        reason = f"none of {len(taken)} texts was split, at {limit} tokens a step; send longer ones"
        raise CheckEndedError("not_run", reason)
    own = read_logprobs(found)
    evidence = f"{len(split)} of {len(taken)} texts were read in several steps of {limit} tokens"
    wanted = [taken[n][1] for n in split]
    return Measurement(Discrepancy.of([own[n] for n in split], wanted), evidence)


def _fill(
    pairs: list[tuple[ScoreJob, Logprobs]], num_tokens: int
) -> list[tuple[ScoreJob, Logprobs]]:
    """Return the pairs, longest first and again and again, until they have so many tokens."""
    ordered = sorted(pairs, key=lambda pair: len(pair[0].tokens), reverse=True)
    ordered = [pair for pair in ordered if 2 * len(pair[0].tokens) > len(ordered[0][0].tokens)]
    taken: list[tuple[ScoreJob, Logprobs]] = []
    while sum(len(job.tokens) for job, _ in taken) < num_tokens and len(taken) < MAX_CHUNKED:
        taken.append(ordered[len(taken) % len(ordered)])
    return taken


def replicas(trial: Trial) -> Steps:
    """Score the texts on each replica that answers, steered and not."""
    cards = trial.model.handle.read()
    numbers = [number for number, card in enumerate(cards) if card.state == "ready"]
    if len(numbers) < 2:
        raise CheckEndedError("not_run", f"the model has {len(numbers)} replica that answers")
    jobs, wanted = trial.jobs(), [*trial.plain]
    if trial.plans is not None:
        jobs += trial.jobs(trial.plans.whole)
        wanted += trial.steered
    discrepancy = Discrepancy()
    for number in numbers:
        found = yield from score_all(jobs, replica=number)
        discrepancy.add_all(read_logprobs(found), wanted)
    evidence = f"{len(jobs)} texts on each of {len(numbers)} replicas"
    return Measurement(discrepancy, evidence)


def against(trial: Trial) -> Steps:
    """Score the texts on the other model."""
    if trial.other is None:
        raise CheckEndedError("not_run", "no second model is named; name one as against")
    _, info = trial.other.require()
    found = yield from score_all(trial.jobs(), trial.other)
    noise = Noise.measure(trial.logit_scale, trial.info, info)
    apart = Discrepancy.of(read_logprobs(found), trial.plain)
    return Measurement(apart, _describe_other(trial), noise)


def against_steered(trial: Trial) -> Steps:
    """Score the texts on both models under plans of each kind."""
    own_plans = trial.require_plans()
    if trial.other is None:
        raise CheckEndedError("not_run", "no second model is named as against")
    _, info = trial.other.require()
    sizes = [(one.num_layers, one.hidden_size) for one in (trial.info, info)]
    if RESID_POST not in info.hooks or "steering" in info.lacks or sizes[0] != sizes[1]:
        reason = f"{trial.other.id} has no such layers to be steered, or no hook for them"
        raise CheckEndedError("not_run", reason)
    plans = (own_plans.add, own_plans.turn, own_plans.ablate)
    jobs = [job for plan in plans for job in trial.jobs(plan)]
    own = yield from score_all(jobs)
    found = yield from score_all(jobs, trial.other)
    noise = Noise.measure(trial.logit_scale, trial.info, info)
    evidence = f"added, turned and ablated at layer {trial.info.num_layers // 2}; "
    apart = Discrepancy.of(read_logprobs(found), read_logprobs(own))
    return Measurement(apart, evidence + _describe_other(trial), noise)


def _describe_other(trial: Trial) -> str:
    assert trial.other is not None
    _, info = trial.other.require()
    text = f"{trial.other.id} is {info.engine} in {info.dtype}"
    same = trial.info.weights_digest == info.weights_digest
    return text if same else f"{text}, of other weights"


CHECKS: tuple[Callable[[Trial], Steps], ...] = (
    repeat, batched, shuffled, target_rows, sampled, steered_sampled, drawn, zero_scale,
    steered_neighbour, prefix_cached, chunked, replicas, against, against_steered,
)  # fmt: skip
"""The check of each of PROMISES, in their order."""


def run_checks(trial: Trial) -> Iterator[Batch | Finding]:
    """Yield the batches of one check after the other, and behind them what it has found."""
    for name, check in zip(PROMISES, CHECKS, strict=True):
        try:
            measured = yield from check(trial)
        except CheckEndedError as ended:
            yield Finding(name, ended.verdict, str(ended), trial.noise)
            continue
        noise = measured.noise or trial.noise
        finding = measured.discrepancy.judge(name, noise, measured.evidence)
        is_unreached = finding.verdict == "passed" and not measured.has_reached
        yield replace(finding, verdict="failed") if is_unreached else finding
