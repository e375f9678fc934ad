"""Penalties, biases and bans: vLLM's own processors say what they do to a row of logits."""

import numpy as np
import pytest
import torch

from logsteer.schemas import SamplingPolicy
from logsteer_server.contract.jobs import Adjustments, Policy
from logsteer_server.numerics.adjustments import TokenHistory, adjust_rows, place_targets
from logsteer_server.numerics.drawing import RowSampler
from logsteer_server.numerics.rows import Rows, RowSpec
from logsteer_server.tasks.policies import plan_policy, refuse_adjustments
from tests.refusals import refused
from tests.server.scripted_model import INFO, load_codec

SIZE = 40
CPU = torch.device("cpu")
CODEC = load_codec()
PENALTIES = [(1.3, 0.4, -0.7), (0.6, -1.5, 2.0), (1.0, 0.0, 0.5), (1.0, 0.25, 0.0), (1.0, 0.0, 0.0)]
BAD_WORDS = ((3,), (7, 9), (7, 8, 9), (9, 9))


def draw_case(
    seed: int,
) -> tuple[torch.Tensor, list[np.ndarray], list[np.ndarray]]:
    """Logits, prompts and continuations of a row for each of PENALTIES; many tokens come twice."""
    numbers = np.random.default_rng(seed)
    logits_RV = torch.from_numpy(numbers.normal(0, 3, (len(PENALTIES), SIZE))).float()
    prompts = [numbers.integers(0, SIZE, size) for size in (1, 5, 30, 3, 8)]
    outputs = [numbers.integers(5, 12, size) for size in (0, 1, 20, 7, 2)]
    return logits_RV, prompts, outputs


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("seed", range(5))
def test_the_definitions_are_those_of_vllm(seed: int) -> None:
    from vllm.v1.sample.ops.bad_words import apply_bad_words
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    logits_RV, prompts, outputs = draw_case(seed)
    adjustments = [
        Adjustments(*penalties, bad_words=BAD_WORDS, bias=((1, 4.0), (2, -100.0)))
        for penalties in PENALTIES
    ]
    histories = [TokenHistory.of(p, o, CPU) for p, o in zip(prompts, outputs, strict=True)]
    found_RV = adjust_rows(logits_RV, adjustments, histories, [len(o) for o in outputs])

    wanted_RV = logits_RV.clone()
    listed = [o.tolist() for o in outputs]
    words = {row: [list(word) for word in BAD_WORDS] for row in range(len(listed))}
    apply_bad_words(wanted_RV, words, listed)
    wanted_RV[:, 1] += 4.0
    wanted_RV[:, 2] -= 100.0
    padded = torch.full((len(prompts), 30), SIZE)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.from_numpy(prompt)
    repetition, frequency, presence = torch.tensor(PENALTIES).T
    apply_all_penalties(wanted_RV, padded, presence, frequency, repetition, listed)
    assert torch.equal(found_RV.isinf(), wanted_RV.isinf())
    assert found_RV.isinf().any()
    torch.testing.assert_close(found_RV, wanted_RV, atol=1e-5, rtol=1e-6)
    assert not torch.equal(found_RV, logits_RV)


def test_what_may_come_and_what_may_not_end() -> None:
    logits_RV = torch.zeros(3, SIZE)
    own = [
        Adjustments(allowed=(3, 5)),
        Adjustments(min_tokens=2, end_ids=(4, 6)),
        Adjustments(min_tokens=2, end_ids=(4, 6)),
    ]
    history = TokenHistory.of(np.zeros(1), np.zeros(4), CPU)
    found_RV = adjust_rows(logits_RV, own, [history] * 3, [0, 1, 2])
    assert found_RV[0].isfinite().nonzero().ravel().tolist() == [3, 5]
    assert found_RV[1].isinf().nonzero().ravel().tolist() == [4, 6]
    assert found_RV[2].isfinite().all()


def test_drawn_tokens_are_those_whose_rows_are_scored_so() -> None:
    """A row drawn beside others, one step after the other, is what its history says."""
    adjustments = Adjustments(repetition=1.5, frequency=0.8, bad_words=((2, 3),))
    policies = [Policy(0.9), Policy(0.9, adjustments=adjustments), Policy(0.0)]
    specs = [RowSpec(("log_q",), policy=policy) for policy in policies]
    prompt = np.array([1, 2, 5])
    history = TokenHistory.of(prompt, np.zeros(12), CPU)
    sampler = RowSampler(specs, [1, 2, 3], histories=[None, history, None])
    steps = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (12, 3, 8))).float()
    drawn = [sampler.draw(logits, np.full(3, n)) for n, logits in enumerate(steps)]
    ids = torch.stack([step.ids_R[1] for step in drawn])
    assert history.following_N.equal(ids)
    before = place_targets(prompt, ids.numpy(), False, CPU)
    rows = Rows(steps[:, 1], ids, policy=policies[1], before=before)
    found = torch.stack([step.values_RW[1, 0] for step in drawn])
    torch.testing.assert_close(rows.shaped.log_q(ids), found, atol=1e-6, rtol=0)
    plain = Rows(steps[:, 1], ids, policy=policies[0])
    assert (plain.shaped.log_q(ids) - found).abs().max() > 0.1


def test_a_policy_of_a_request() -> None:
    asked = SamplingPolicy(logit_bias={"7": 1.5}, bad_words=["cat", "a"], min_tokens=3)
    found = plan_policy(asked, CODEC, INFO).adjustments
    assert found is not None
    assert found.bias == ((7, 1.5),)
    assert found.end_ids == INFO.eos_ids
    bare, a, spaced = (tuple(ids) for ids in CODEC.encode_ids(["cat", "a", " a"]))
    assert found.bad_words == (bare, a, spaced), "as vLLM: ' cat' has fewer tokens than 'cat'"
    assert plan_policy(SamplingPolicy(top_p=0.5), CODEC, INFO) == Policy(top_p=0.5)
    for field in ({"logit_bias": {"99999": 1.0}}, {"allowed_token_ids": [99_999]}):
        with refused("invalid_request", "99999"):
            plan_policy(SamplingPolicy.model_validate(field), CODEC, INFO)
    with refused("invalid_request", "/diagnostics"):
        refuse_adjustments(Policy(adjustments=found))
