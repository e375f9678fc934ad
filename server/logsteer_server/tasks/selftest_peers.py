"""The checks of a self-test that compare replicas with each other, and two models."""

from logsteer.schemas.selftest import PromiseName
from logsteer_server.stores.layer_vectors import RESID_POST
from logsteer_server.tasks.selftest_trial import (
    Discrepancy,
    Noise,
    Steps,
    Trial,
    read_logprobs,
    score_all,
    skip,
)


def replicas(trial: Trial) -> Steps:
    """Score the texts on each replica that answers, steered and not."""
    cards = trial.model.handle.read()
    numbers = [number for number, card in enumerate(cards) if card.state == "ready"]
    if len(numbers) < 2:
        yield skip(trial, "replicas", f"the model has {len(numbers)} replica that answers")
        return
    jobs, wanted = trial.jobs(), [*trial.plain]
    if trial.plans is not None:
        jobs += trial.jobs(trial.plans.whole)
        wanted += trial.steered
    discrepancy = Discrepancy()
    for number in numbers:
        found = yield from score_all(jobs, replica=number)
        discrepancy.add_all(read_logprobs(found), wanted)
    evidence = f"{len(jobs)} texts on each of {len(numbers)} replicas"
    yield discrepancy.judge("replicas", trial.noise, evidence)


def against(trial: Trial) -> Steps:
    """Score the texts on the other model."""
    if trial.other is None:
        yield skip(trial, "against", "no second model is named; name one as against")
        return
    _, info = trial.other.require()
    found = yield from score_all(trial.jobs(), trial.other)
    discrepancy = Discrepancy()
    discrepancy.add_all(read_logprobs(found), trial.plain)
    noise = Noise.measure(trial.logit_scale, trial.info, info)
    yield discrepancy.judge("against", noise, _describe_other(trial))


def against_steered(trial: Trial) -> Steps:
    """Score the texts on both models under plans of each kind."""
    name: PromiseName = "against_steered"
    if trial.other is None or trial.plans is None:
        yield skip(trial, name, trial.why_unsteered or "no second model is named as against")
        return
    _, info = trial.other.require()
    sizes = [(one.num_layers, one.hidden_size) for one in (trial.info, info)]
    if RESID_POST not in info.hooks or "steering" in info.lacks or sizes[0] != sizes[1]:
        reason = f"{trial.other.id} has no such layers to be steered, or no hook for them"
        yield skip(trial, name, reason)
        return
    plans = (trial.plans.add, trial.plans.turn, trial.plans.ablate)
    jobs = [job for plan in plans for job in trial.jobs(plan)]
    own = yield from score_all(jobs)
    found = yield from score_all(jobs, trial.other)
    discrepancy = Discrepancy()
    discrepancy.add_all(read_logprobs(found), read_logprobs(own))
    noise = Noise.measure(trial.logit_scale, trial.info, info)
    evidence = f"added, turned and ablated at layer {trial.info.num_layers // 2}; "
    yield discrepancy.judge(name, noise, evidence + _describe_other(trial))


def _describe_other(trial: Trial) -> str:
    assert trial.other is not None
    _, info = trial.other.require()
    text = f"{trial.other.id} is {info.engine} in {info.dtype}"
    same = trial.info.weights_digest == info.weights_digest
    return text if same else f"{text}, of other weights"
