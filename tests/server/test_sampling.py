"""Sampling policies against their definition, a row at a time."""

import math
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics import sampling
from logsteer_server.numerics.sampling import GROWTH, HEAD, shape_rows

NUMBERS = st.floats(-8, 8, width=32) | st.sampled_from([-1.0, 0.0, 1.0])
LOGITS = st.lists(NUMBERS, min_size=2, max_size=12)
POLICIES = st.builds(
    Policy,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
)


def define(logits: list[float], policy: Policy) -> list[float]:
    """q by the definition: temperature, min_p, top_k, top_p, renormalised."""
    weights = [math.exp((z - max(logits)) / policy.temperature) for z in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= policy.min_p * weights[order[0]]]
    order = order[: policy.top_k or len(order)]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= policy.top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def is_close_call(logits: list[float], policy: Policy) -> bool:
    """Whether rounding decides what is cut."""
    weights = sorted(math.exp((z - max(logits)) / policy.temperature) for z in logits)[::-1]
    if any(0 < a - b < 1e-6 for a, b in pairwise(weights)):  # float32 may call them equal
        return True
    if any(abs(w - policy.min_p * weights[0]) < 1e-5 for w in weights):
        return True
    kept = [w for w in weights if w >= policy.min_p * weights[0]][: policy.top_k or None]
    masses = np.cumsum(kept) / sum(kept)
    return bool((abs(masses - policy.top_p) < 1e-5).any()) and policy.top_p < 1


@given(st.lists(st.tuples(LOGITS, POLICIES), min_size=1, max_size=5), st.sampled_from([1, 4, 512]))
def test_the_policy_is_its_definition_whatever_the_other_rows(
    rows: list[tuple[list[float], Policy]], head: int
) -> None:
    size = max(len(logits) for logits, _ in rows)
    logits_RV = torch.tensor([z + [-math.inf] * (size - len(z)) for z, _ in rows])
    with mock.patch.object(sampling, "HEAD", head):
        q_RV = shape_rows(logits_RV, [policy for _, policy in rows]).q_RV
    assert q_RV.dtype == torch.float32
    for q_V, (logits, policy) in zip(q_RV.tolist(), rows, strict=True):
        if not is_close_call(logits, policy):
            assert q_V[: len(logits)] == pytest.approx(define(logits, policy), abs=1e-5)


def test_a_likely_head_is_cut_as_the_whole_is() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = 4 * torch.randn(30, 5000, generator=generator)
    logits_RV[:4] = logits_RV[:4].round()  # many are equally probable
    cuts = [{"top_p": 0.9}, {"top_p": 0.9999}, {"top_k": 40}, {"top_k": 900}, {"min_p": 0.05},
            {"min_p": 1e-7, "top_p": 0.99}, {"top_k": 60, "top_p": 0.8}, {}]  # fmt: skip
    # At the end of the head, and of the next one.
    cuts += [{"top_k": HEAD, "top_p": 0.7}, {"top_k": GROWTH * HEAD, "top_p": 0.98}]
    policies = [Policy(**cut) for cut in cuts] * 3
    found = shape_rows(logits_RV, policies)
    with mock.patch.object(sampling, "HEAD", 5000):
        wanted = shape_rows(logits_RV, policies)
    assert torch.equal(found.q_RV > 0, wanted.q_RV > 0)
    assert (found.head_mass_R - wanted.head_mass_R).abs().max() < 1e-6


def test_the_example_of_the_cut() -> None:
    p_V = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    shaped = shape_rows(p_V.log()[None], [Policy(min_p=0.2, top_p=0.7)])
    assert shaped.q_RV[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0, 0])
    assert shaped.head_mass_R.tolist() == pytest.approx([7 / 9])


def test_greedy_is_certain_and_the_first_of_equals() -> None:
    logits_RV = torch.tensor([[1.0, 5.0, 5.0], [9.0, 0.0, 1.0]])
    q_RV = shape_rows(logits_RV, [Policy(temperature=0.0), Policy(temperature=1e-9, top_k=2)]).q_RV
    assert q_RV.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_small_temperature_does_not_overflow() -> None:
    q_RV = shape_rows(torch.tensor([[3e4, 2.9e4, -3e4]]), [Policy(temperature=2e-5)]).q_RV
    assert q_RV.tolist() == [[1, 0, 0]]


def test_without_cuts_nothing_is_lost() -> None:
    logits_RV = torch.linspace(-30, 30, 5000)[None]
    q_RV = shape_rows(logits_RV, [Policy()]).q_RV
    assert torch.equal(q_RV, logits_RV.sub(30).softmax(-1))
    assert (shape_rows(logits_RV, [Policy(top_k=5000)]).q_RV > 0).sum() == (q_RV > 0).sum()


def test_a_row_that_is_not_a_number_is_no_error() -> None:
    logits_RV = torch.full((3, 2000), math.nan)
    for policy in (Policy(), Policy(top_p=0.9), Policy(top_k=5), Policy(min_p=0.1)):
        assert shape_rows(logits_RV, [policy] * 3).q_RV.isnan().any()


@pytest.mark.parametrize("top_k", [2000, 2001, 10**30])
def test_a_top_k_of_the_vocabulary_or_more_cuts_nothing(top_k: int) -> None:
    logits_RV = torch.linspace(-3, 3, 2000)[None]
    assert (shape_rows(logits_RV, [Policy(top_k=top_k)]).q_RV > 0).all()


@pytest.mark.parametrize("head", [2, 16, 512])
def test_of_equally_probable_tokens_the_first_are_drawn_from(head: int) -> None:
    """Ties cross the edge of the cut and the edge of what is looked at first."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randint(0, 4, (40, 900), generator=generator).float()
    logits_RV[:, 5] = 9.0
    policies = [Policy(top_k=k) for k in range(1, 400, 40)] * 2
    policies += [Policy(top_p=p) for p in (0.2, 0.5, 0.8, 0.93)] * 5
    with mock.patch.object(sampling, "HEAD", head):
        q_RV = shape_rows(logits_RV, policies).q_RV
    for q_V, logits_V, policy in zip(q_RV, logits_RV.tolist(), policies, strict=True):
        assert q_V.tolist() == pytest.approx(define(logits_V, policy), abs=1e-6)
