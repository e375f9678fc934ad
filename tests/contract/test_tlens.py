"""The TransformerLens engine against transformers and against TransformerLens itself."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import (
    CaptureJob,
    GenerateJob,
    Job,
    JobFailure,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from tests.conftest import DEMO_MODEL, VOCAB_SIZE
from tests.contract import engine_probe
from tests.contract.directions import load_model, read_logprobs
from tests.contract.tlens_cases import (
    BATCH,
    GREEDY,
    LAYER,
    OTHERS,
    PER_TOKEN,
    U,
    add_plan,
    build,
    check_failure,
    check_trace,
    draw_ids,
    draw_vector,
    run,
    score,
    whole,
)
from tests.probes import recapture

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bridge() -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(str(DEMO_MODEL), device="cpu", dtype=torch.float32)


def test_the_engine_says_what_it_is(engine: Any) -> None:
    info = engine.info
    assert (info.engine, info.engine_version, info.dtype) == (
        "transformer_lens",
        "4.3.0",
        "float32",
    )
    assert (info.num_layers, info.hidden_size, info.context_length) == (5, 128, 1024)
    assert info.hooks[:5] == ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
    assert {"attn.hook_z", "attn.hook_q", "mlp.hook_pre", "mlp.hook_post"} <= set(info.hooks)
    # Patterns have no axis of activations; a point that never fires cannot be steered.
    assert not {"attn.hook_pattern", "attn.hook_result", "hook_resid_post"} & set(info.hooks)


def test_jobs_of_a_batch_get_what_each_asked_for(engine: Any, prompt: np.ndarray) -> None:
    jobs = [
        whole(prompt, columns=columns, top=top)
        for columns, top in ((("logprob",), 0), (("rank", "entropy"), 2), (("logprob",), 3))
    ]
    for job, output in zip(jobs, run(engine, *jobs), strict=True):
        (alone,) = run(engine, job)
        for name in job.columns:
            assert output.columns[name] == pytest.approx(alone.columns[name], abs=BATCH), name
        if job.top:
            own, other = (one.columns["top_logprobs"] for one in (output, alone))
            assert own == pytest.approx(other, abs=BATCH)


@pytest.mark.parametrize("whole_width", [True, False], ids=["whole", "last axis"])
def test_every_hook_is_transformerlenss_own(engine: Any, bridge: Any, whole_width: bool) -> None:
    from logsteer_server.engines.tlens.points import SHORT_NAMES

    ids = draw_ids(np.random.default_rng(7), 12)
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    bare = score(engine, whole(ids))[0]
    for name in engine.info.hooks:
        point = engine._model.points.find(LAYER, name)
        width = point.width if whole_width else point.shape[-1]
        vector = draw_vector(width, norm=3.0)

        # Not all tokens: the same change of all keys would change nothing. The bridge's resid_mid
        # is what the MLP's norm is given, and the stream beside it only if changed in place.
        def add(
            activation: Tensor, hook: Any, v: np.ndarray = vector, mid: bool = point.is_shared
        ) -> Tensor:
            changed = activation if mid else activation.clone()
            shape = activation.shape[2:] if whole_width else (-1,)
            changed[:, 2:7] += torch.from_numpy(v).view(shape)
            return changed

        full = f"blocks.{LAYER}.{SHORT_NAMES.get(name, name)}"
        with torch.inference_mode(), bridge.hooks(fwd_hooks=[(full, add)]):
            log_p_TV = bridge(ids_1T)[0, :-1].log_softmax(-1)
        expected = log_p_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].numpy()
        for asked in (name, full):
            plan = SteeringPlan((Site(LAYER, asked, vector),), Positions("slices", ((2, 7),)))
            values = score(engine, whole(ids, plan=plan))[0]
            assert values == pytest.approx(expected, abs=PER_TOKEN), name
        assert np.abs(values - bare).max() > 1e-3, name


def test_captures_are_transformerlenss_cache(engine: Any, bridge: Any) -> None:
    """Whole sequences and parts, at hooks of any width."""
    rng = np.random.default_rng(8)
    where = Positions("slices", ((0, 2), (3, 20)))
    own = {"resid_post": "hook_resid_post", "resid_mid": "hook_resid_mid"}
    jobs = [
        CaptureJob(draw_ids(rng, count), capture=Capture((3, 0), hook, read, positions))
        for hook in ("resid_post", "resid_mid", "attn.hook_z", "attn.hook_q", "mlp.hook_pre")
        for read, positions in (("last", Positions()), ("mean", Positions()), ("each", where))
        for count in (9, 30, 4)
    ]
    for job, output in zip(jobs, run(engine, *jobs), strict=True):
        with torch.inference_mode():
            _, cache = bridge.run_with_cache(torch.from_numpy(job.tokens.astype(np.int64))[None])
        hook, read = job.capture.hook, job.capture.read
        for row, layer in enumerate(job.capture.layers):
            activation_TD = cache[f"blocks.{layer}.{own.get(hook, hook)}"][0].flatten(1)
            wanted_TD = activation_TD[job.places].numpy()
            if read == "mean":
                norms_T = np.linalg.norm(wanted_TD, axis=-1)
                wanted_TD = wanted_TD[norms_T <= 3 * np.median(norms_T)].mean(0, keepdims=True)
            assert output.activations_LTD[row] == pytest.approx(wanted_TD, abs=PER_TOKEN)


def test_captures_in_flight_are_those_of_the_finished_text(engine: Any) -> None:
    """Scored and generated, of all kinds of positions, steered and not, together and alone."""
    jobs = dict(enumerate(job for job in engine_probe.make_jobs(VOCAB_SIZE, 128) if job.capture))
    jobs[0] = replace(jobs[0], capture=replace(jobs[0].capture, hook="attn.hook_z"))
    alone = max(recapture(engine, {number: job}) for number, job in jobs.items())
    worst = max(alone, recapture(engine, jobs))
    print(f"captures in flight and of the finished text differ by {worst:.2e}")
    assert worst < BATCH


def test_small_bounds_only_make_more_batches(engine: Any) -> None:
    small = build(engine_args={"max_batch_tokens": 64, "max_batch_rows": 3})
    rng = np.random.default_rng(10)
    texts = [draw_ids(rng, int(n)) for n in rng.integers(3, 100, 12)]
    jobs: list[Job] = [*map(whole, texts), *(GenerateJob(i, 8, policy=GREEDY) for i in texts)]
    for ours, theirs in zip(run(small, *jobs), run(engine, *jobs), strict=True):
        if isinstance(ours, ScoreOutput):
            expected = theirs.columns["logprob"]
            assert ours.columns["logprob"] == pytest.approx(expected, abs=BATCH)
        else:
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_bfloat16_offsets_are_added_as_a_plain_hook_adds_them() -> None:
    engine = build(dtype="bfloat16")
    assert (engine.info.dtype, engine.info.logits_dtype) == ("bfloat16", "float32")
    model = load_model(DEMO_MODEL, torch.bfloat16)
    ids = draw_ids(np.random.default_rng(9), 20)
    vector = torch.from_numpy(draw_vector()).bfloat16()
    model.model.layers[LAYER].register_forward_hook(lambda block, args, x: x + vector)
    ids_1T = torch.from_numpy(ids[:-1].astype(np.int64))[None]
    with torch.inference_mode():
        hidden_TD = model.model(ids_1T).last_hidden_state[0].float()
        log_p_TV = (hidden_TD @ model.lm_head.weight.float().T).log_softmax(-1)
    expected = log_p_TV.gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    values = score(engine, whole(ids, plan=add_plan()))[0]
    assert values == pytest.approx(expected.numpy(), abs=BATCH)


def bad_jobs(ids: np.ndarray) -> list[tuple[Job, str, str]]:
    def steered(*sites: Site) -> ScoreJob:
        return whole(ids, plan=SteeringPlan(sites))

    v = draw_vector()
    return [
        (steered(Site(1, "resid_post", v[:64])), "invalid_vector", "128 wide"),
        (steered(Site(1, "resid_post", v, (ResidualOp(U[:9]),))), "invalid_vector", "9"),
        (steered(Site(1, "resid_pre", v), Site(1, "hook_in", v)), "invalid_vector", "two"),
        (steered(Site(1, "resid", v)), "unsupported_by_engine", "resid_post"),
        (steered(Site(5, "resid_post", v)), "invalid_request", "0 to 4"),
        (CaptureJob(ids, capture=Capture((0, 7))), "invalid_request", "layer 7"),
        (GenerateJob(ids, 1024), "context_too_long", "1024"),
        (whole(np.append(ids, [9999, 3]).astype(np.int32)), "invalid_request", "1435"),
        (GenerateJob(ids[:0], 3), "invalid_request", "no tokens"),
    ]  # fmt: skip


def test_a_job_that_does_not_fit_fails_alone(engine: Any, prompt: np.ndarray) -> None:
    cases = bad_jobs(prompt)
    good = whole(prompt)
    *failures, output = run(engine, *(job for job, _, _ in cases), good)
    assert isinstance(output, ScoreOutput)
    for (_, code, hint), failure in zip(cases, failures, strict=True):
        check_failure(failure, code, hint)


def test_running_out_of_memory_costs_one_batch(
    engine: Any, prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    jobs: list[Job] = [whole(prompt, plan=add_plan()), GenerateJob(prompt, 5)]
    jobs += [CaptureJob(prompt, capture=Capture((1,)))]
    block = engine._model._edges[f"blocks.{LAYER}.hook_out"].block
    before = dict(block._forward_hooks)
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "read", fail)
        failures = run(engine, *jobs)
    assert [failure.code for failure in failures] == ["out_of_memory"] * 3
    # No hook is left behind: the next ones are not steered.
    assert score(engine, whole(prompt))[0] == pytest.approx(score(engine, whole(prompt))[0], abs=0)
    assert not any(isinstance(result, JobFailure) for result in run(engine, *jobs))
    assert block._forward_hooks == before


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"engine_args": {"max_rows": 3}}, "max_batch_tokens, max_batch_rows"),
        ({"engine_args": {"max_batch_rows": 0}}, "from 1 on"),
        ({"tensor_parallel": 2}, "pipeline_parallel"),
        ({"pipeline_parallel": 2}, "leave it out"),
        ({"quantization": "awq"}, "leave it out"),
        ({"memory": "1GiB"}, "leave it out"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        build(**fields)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_transformers_too(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Eager attention, as in the bridge: only it has Gemma 2's caps.
    model = AutoModelForCausalLM.from_config(OTHERS[name], attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, tmp_path)
    engine = build(tmp_path)
    rng = np.random.default_rng(11)
    texts = [draw_ids(rng, n) for n in (3, 40, 17, 90)]
    for ids, values in zip(texts, score(engine, *map(whole, texts)), strict=True):
        assert values == pytest.approx(read_logprobs(model, ids), abs=PER_TOKEN)
    plan = add_plan(layer=1)
    plan = SteeringPlan((Site(1, "resid_post", draw_vector(64)),), plan.positions)
    jobs = [GenerateJob(i, 30, policy=GREEDY, ignore_eos=True) for i in texts]
    jobs += [GenerateJob(i, 30, seed=1, ignore_eos=True, plan=plan) for i in texts]
    for job, output in zip(jobs, run(engine, *jobs), strict=True):
        both = np.concatenate([job.tokens, output.token_ids])
        rescored = score(engine, ScoreJob(both[:-1], output.token_ids, plan=job.plan))[0]
        assert rescored == pytest.approx(output.logprobs, abs=PER_TOKEN)
        if job.plan is None:
            with torch.inference_mode():
                logits_TV = model(torch.from_numpy(both.astype(np.int64))[None]).logits[0]
            best = logits_TV[len(job.tokens) - 1 : -1].argmax(-1)
            assert output.token_ids.tolist() == best.tolist()


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each fused attention."""
    calls: list[int] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def count(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return fused(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    return calls


def test_attention_is_fused_where_nothing_looks_inside(engine: Any, fused_calls: list[int]) -> None:
    ids = draw_ids(np.random.default_rng(12), 20)
    score(engine, whole(ids), whole(ids, plan=add_plan()))
    assert len(fused_calls) == engine.info.num_layers
    inside = SteeringPlan((Site(LAYER, "attn_out", draw_vector()),))
    score(engine, whole(ids, plan=inside))
    assert len(fused_calls) == engine.info.num_layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_is_fused_in_half_precision(dtype: str, fused_calls: list[int]) -> None:
    half = build(dtype=dtype)
    ids = draw_ids(np.random.default_rng(13), 40)
    fused_calls.clear()
    found = score(half, whole(ids))[0]
    assert len(fused_calls) == half.info.num_layers
    # As near to float32 as attention that is not fused.
    wanted = score(build(), whole(ids))[0]
    half._model._fuses_attention = False
    eager = score(half, whole(ids))[0]
    assert np.abs(found - wanted).mean() < 2 * np.abs(eager - wanted).mean()


@pytest.mark.parametrize(("name", "dtype"), [("gemma2", "float32"), ("gpt2", "float64")])
def test_attention_is_not_fused_where_that_would_change_scores(
    name: str, dtype: str, fused_calls: list[int], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(OTHERS[name]).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, tmp_path)
    engine = build(tmp_path, dtype)
    fused_calls.clear()
    score(engine, whole(draw_ids(np.random.default_rng(13), 20)))
    assert not fused_calls


RNG = np.random.default_rng(6)
CONTEXTS = [draw_ids(RNG, length, 600) for length in (60, 47, 60)]
TARGETS = [draw_ids(RNG, length, 600) for length in (1, 6, 3)]


def make_jobs(plan: SteeringPlan | None = None) -> list[ScoreJob]:
    return [
        ScoreJob(np.concatenate([context, target[:-1]]), target, plan=plan)
        for context in CONTEXTS
        for target in TARGETS
    ]


PLANS = {
    "plain": None,
    "all": add_plan(),
    "prompt": add_plan("prompt"),
    "last_prompt": add_plan("last_prompt"),
    "completion": add_plan("completion"),
    "predicting": add_plan("predicting"),
    "slices": SteeringPlan(
        (Site(1, "resid_pre", draw_vector()), Site(3, "resid_post", draw_vector(seed=1))),
        Positions("slices", ((3, 48),)),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_batch_gives_what_each_job_gives_alone(engine: Any, name: str) -> None:
    jobs = [*make_jobs(PLANS[name]), ScoreJob(TARGETS[1][:-1], TARGETS[1][1:])]
    alone = [run(engine, job)[0] for job in jobs]
    for one, two in zip(alone, run(engine, *jobs), strict=True):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=BATCH)
        check_trace(two.trace, one.trace)
