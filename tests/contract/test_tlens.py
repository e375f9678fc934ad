"""The TransformerLens engine against transformers and against TransformerLens itself."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GPT2Config,
    OPTConfig,
)

from logsteer_server.engines.base import (
    CaptureJob,
    CaptureOutput,
    EngineSpec,
    GenerateJob,
    GenerateOutput,
    Job,
    JobFailure,
    JobResult,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.engines.plan import Positions, Site, SteeringPlan, StreamOp
from tests.conftest import DEMO_MODEL

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
BATCH = 1e-5
PROMPT = "Once upon a time"
LAYER = 2
GREEDY = Policy(temperature=0.0)


def build(path: Path = DEMO_MODEL, dtype: str = "float32", **fields: Any) -> Any:
    from logsteer_server.engines.tlens.engine import TransformerLensEngine

    spec = EngineSpec("demo", "transformer_lens", str(path), dtype=dtype, devices="cpu", **fields)
    return TransformerLensEngine(spec)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    found = build()
    yield found
    assert not found.busy
    found.close()


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> np.ndarray:
    return np.array(tokenizer(PROMPT)["input_ids"], dtype=np.int32)


@pytest.fixture(scope="module")
def bridge() -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(str(DEMO_MODEL), device="cpu", dtype=torch.float32)


def run_pieces(engine: Any, jobs: dict[int, Job]) -> dict[int, list[JobResult]]:
    """All results of each job, in order."""
    engine.add(list(jobs.items()))
    found: dict[int, list[JobResult]] = {i: [] for i in jobs}
    while engine.busy:
        for job_id, result in engine.step():
            found[job_id].append(result)
    return found


def run(engine: Any, *jobs: Job) -> list[Any]:
    """The one result of each job."""
    found = run_pieces(engine, dict(enumerate(jobs)))
    assert all(len(results) == 1 for results in found.values())
    return [found[i][0] for i in range(len(jobs))]


def score(engine: Any, *jobs: ScoreJob) -> list[np.ndarray]:
    return [output.columns["logprob"] for output in run(engine, *jobs)]


def draw_ids(rng: np.random.Generator, count: int, vocab: int = 1400) -> np.ndarray:
    return rng.integers(5, vocab, count).astype(np.int32)


def whole(ids: np.ndarray, **fields: Any) -> ScoreJob:
    """The job that scores every token but the first."""
    return ScoreJob(ids[:-1], ids[1:], **fields)


@torch.inference_mode()
def read_logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    """What transformers says about every token but the first."""
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    log_p_TV = model(ids_1T).logits[0, :-1].float().log_softmax(-1)
    return log_p_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].numpy()


def draw_vector(width: int = 128, seed: int = 0, norm: float = 5.0) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=width)
    return (vector * norm / np.linalg.norm(vector)).astype(np.float32)


def add_plan(
    kind: str = "all", scale: float = 1.0, seed: int = 0, slices: Any = (), layer: int = LAYER
) -> SteeringPlan:
    site = Site(layer, "resid_post", draw_vector(seed=seed) * np.float32(scale))
    return SteeringPlan((site,), Positions(kind, slices))


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


def test_scores_are_transformers_alone_and_in_any_batch(engine: Any, reference: Any) -> None:
    rng = np.random.default_rng(1)
    texts = [draw_ids(rng, int(n)) for n in rng.integers(2, 300, 30)]
    jobs = [
        ScoreJob(ids[:-1], ids[-k:], ("logprob", "rank", "entropy"), top=i % 3)
        for i, ids in enumerate(texts)
        for k in [1 + i % (len(ids) - 1)]
    ]
    together = run(engine, *jobs)
    for job, output, ids in zip(jobs, together, texts, strict=True):
        expected = read_logprobs(reference, ids)[-len(job.targets) :]
        assert output.columns["logprob"] == pytest.approx(expected, abs=PER_TOKEN)
        assert output.trace is None
        if job.top:
            assert output.top_logprobs.shape == (len(job.targets), job.top)
            assert (output.top_logprobs[:, 0] >= output.columns["logprob"] - BATCH).all()
        alone = run(engine, job)[0]
        for name, values in output.columns.items():
            assert alone.columns[name] == pytest.approx(values, abs=BATCH), name


def test_alternatives_are_read_from_the_last_row(engine: Any, prompt: np.ndarray) -> None:
    targets = np.arange(5, 90, dtype=np.int32)
    output = run(engine, ScoreJob(prompt, targets, alternatives=True))[0]
    apart = score(engine, *(ScoreJob(prompt, np.array([t], np.int32)) for t in targets))
    assert output.columns["logprob"] == pytest.approx(np.concatenate(apart), abs=BATCH)


def test_exported_rows_compare_with_themselves(engine: Any, tmp_path: Path) -> None:
    ids = draw_ids(np.random.default_rng(3), 30)
    path = str(tmp_path / "rows")
    np.zeros((29, engine.info.vocab_size), np.float32).tofile(path)
    run(engine, whole(ids, export=path))
    columns = ("kl", "top1_agrees")
    same, steered = run(
        engine,
        whole(ids, reference=path, columns=columns),
        whole(ids, reference=path, columns=columns, plan=add_plan()),
    )
    assert np.abs(same.columns["kl"]).max() < BATCH
    assert same.columns["top1_agrees"].all()
    assert steered.columns["kl"].max() > 0.1


def test_greedy_is_transformers_generate_with_prompts_of_any_length(
    engine: Any, reference: Any
) -> None:
    rng = np.random.default_rng(4)
    prompts = [draw_ids(rng, n) for n in (1, 60, 7, 33)]
    outputs = run(engine, *(GenerateJob(ids, 30, policy=GREEDY, top=2) for ids in prompts))
    for ids, output in zip(prompts, outputs, strict=True):
        ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
        expected = reference.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=30, do_sample=False
        )
        assert output.token_ids.tolist() == expected[0, len(ids) :].tolist()
        assert (output.top_ids[:, 0] == output.token_ids).all()
        assert output.top_logprobs[:, 0] == pytest.approx(output.logprobs, abs=BATCH)
        scored = read_logprobs(reference, np.concatenate([ids, output.token_ids]))
        assert output.logprobs == pytest.approx(scored[-len(output.token_ids) :], abs=PER_TOKEN)


def test_a_seed_decides_whatever_else_is_in_the_batch(engine: Any, prompt: np.ndarray) -> None:
    jobs = [
        GenerateJob(prompt[: 2 + i % 3], 40, seed=i, policy=Policy(1.0, 200, 0.95, 0.01), top=i % 3)
        for i in range(9)
    ]
    together = run(engine, *jobs)
    assert len({tuple(output.token_ids.tolist()) for output in together}) == 9
    for job, output in zip(jobs, together, strict=True):
        alone = run(engine, job)[0]
        assert alone.token_ids.tolist() == output.token_ids.tolist()
        assert alone.text == output.text
        assert alone.logprobs == pytest.approx(output.logprobs, abs=BATCH)
    unseeded = run(engine, *[GenerateJob(prompt, 40)] * 2)
    assert unseeded[0].text != unseeded[1].text


KINDS = ["all", "prompt", "completion", "predicting", "last_prompt", "slices"]


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_a_steered_sample_gives_what_it_was_sampled_with(
    engine: Any, prompt: np.ndarray, kind: str
) -> None:
    plan = add_plan(kind, slices=((1, 3), (8, 12)) if kind == "slices" else ())
    jobs = [GenerateJob(prompt[-n:], 30, seed=n, plan=plan) for n in (5, 2, 4)]
    samples = run(engine, *jobs)
    scorings = [
        ScoreJob(np.concatenate([j.tokens, s.token_ids])[:-1], s.token_ids, plan=plan)
        for j, s in zip(jobs, samples, strict=True)
    ]
    scored = run(engine, *scorings)
    bare = score(engine, *(ScoreJob(job.tokens, job.targets) for job in scorings))
    for job, sample, output, plain in zip(jobs, samples, scored, bare, strict=True):
        assert output.columns["logprob"] == pytest.approx(sample.logprobs, abs=PER_TOKEN)
        assert np.abs(plain - sample.logprobs).max() > 10 * PER_TOKEN
        read = len(job.tokens) + len(sample.token_ids) - 1
        count = plan.positions.count(read, len(job.tokens))
        for trace in (sample.trace, output.trace):
            assert trace.tokens == trace.sites["2"][0] == count
        assert sample.trace.sites["2"][1] == pytest.approx(output.trace.sites["2"][1], rel=1e-4)


def test_half_a_batch_steered_leaves_the_other_half_alone(engine: Any, prompt: np.ndarray) -> None:
    plans = [None, add_plan(), None, add_plan("completion", seed=1), add_plan(layer=0, seed=2)]
    generate = [GenerateJob(prompt[: 3 + i], 30, seed=i, plan=p) for i, p in enumerate(plans)]
    together = run(engine, *generate)
    for job, output in zip(generate, together, strict=True):
        alone = run(engine, job)[0]
        assert alone.token_ids.tolist() == output.token_ids.tolist()
        assert alone.logprobs == pytest.approx(output.logprobs, abs=BATCH)
        assert (output.trace is None) == (job.plan is None)
    rng = np.random.default_rng(5)
    scorings = [whole(draw_ids(rng, 20 + 9 * i), plan=plan) for i, plan in enumerate(plans)]
    for job, values in zip(scorings, score(engine, *scorings), strict=True):
        assert values == pytest.approx(score(engine, job)[0], abs=BATCH)
        unsteered = score(engine, whole(np.append(job.tokens, job.targets[-1])))[0]
        assert (np.abs(values - unsteered).max() < BATCH) == (job.plan is None)


U = draw_vector(norm=1.0)
UNIT = torch.from_numpy(U)


def turn(x: Tensor, degrees: float) -> Tensor:
    """x turned toward U in their plane, its norm kept."""
    norm = x.norm(dim=-1, keepdim=True)
    across = x - (x @ UNIT)[..., None] * UNIT
    side = across / across.norm(dim=-1, keepdim=True)
    angle = torch.arccos((x @ UNIT)[..., None] / norm) - np.deg2rad(degrees)
    angle = angle.clamp(min=0.0)
    return norm * (angle.cos() * UNIT + angle.sin() * side)


def along(x: Tensor) -> Tensor:
    return (x @ UNIT)[..., None]


OPS: dict[str, tuple[np.ndarray | None, tuple[StreamOp, ...], Callable[[Tensor], Tensor]]] = {
    "add": (4 * U, (), lambda x: x + 4 * UNIT),
    "ablate": (None, (StreamOp(U),), lambda x: x - along(x) * UNIT),
    "project": (None, (StreamOp(U, base=3.0),), lambda x: x + (3 - along(x)) * UNIT),
    "clamp": (
        None,
        (StreamOp(U, per_component=1.0, low=-0.5, high=0.25),),
        lambda x: x + (along(x).clamp(-0.5, 0.25) - along(x)) * UNIT,
    ),
    "replace": (
        None, (StreamOp(U, base=6.0, keep=0.0),), lambda x: (6 * UNIT).expand_as(x),
    ),
    "rotate": (None, (StreamOp(U, degrees=25.0),), lambda x: turn(x, 25.0)),
    "residual norm": (
        None,
        (StreamOp(U, per_norm=0.4, per_component=1.0),),
        lambda x: x + 0.4 * x.norm(dim=-1, keepdim=True) * UNIT,
    ),
    "add, then ablate": (
        draw_vector(seed=9), (StreamOp(U),),
        lambda x: (y := x + torch.from_numpy(draw_vector(seed=9))) - along(y) * UNIT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_every_operation_is_a_plain_hook_in_transformers(
    engine: Any, reference: Any, name: str
) -> None:
    offset, ops, change = OPS[name]
    ids = draw_ids(np.random.default_rng(6), 50)
    changes: list[Tensor] = []

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        changed = change(x)
        # The engine does not read the last token, which nothing follows.
        changes.append(((changed - x).norm(dim=-1) / x.norm(dim=-1))[0, :-1].mean())
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = reference.model.layers[LAYER].register_forward_hook(hook)
    expected = read_logprobs(reference, ids)
    handle.remove()
    job = whole(ids, plan=SteeringPlan((Site(LAYER, "resid_post", offset, ops),)))
    output = run(engine, job)[0]
    assert output.columns["logprob"] == pytest.approx(expected, abs=PER_TOKEN)
    assert np.abs(expected - read_logprobs(reference, ids)).max() > 0.01
    assert output.trace.tokens == 49
    assert output.trace.sites["2"] == (49, pytest.approx(float(changes[0]), rel=1e-4))


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

        # Not all tokens: the same change of all keys would change nothing.
        def add(activation: Tensor, hook: Any, v: np.ndarray = vector) -> Tensor:
            changed = activation.clone()
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
    rng = np.random.default_rng(8)
    texts = [draw_ids(rng, n) for n in (9, 30, 4)]
    asked = [
        (ids, hook, full, read)
        for hook, full in (("resid_post", "hook_resid_post"), ("attn.hook_z", "attn.hook_z"))
        for read in ("last", "mean")
        for ids in texts
    ]
    outputs = run(engine, *(CaptureJob(ids, (3, 0), hook, read) for ids, hook, _, read in asked))
    for (ids, _, full, read), output in zip(asked, outputs, strict=True):
        with torch.inference_mode():
            _, cache = bridge.run_with_cache(torch.from_numpy(ids.astype(np.int64))[None])
        assert isinstance(output, CaptureOutput)
        for row, layer in enumerate((3, 0)):
            activation_TD = cache[f"blocks.{layer}.{full}"][0].flatten(1)
            expected = activation_TD[-1] if read == "last" else activation_TD.mean(0)
            assert output.activations_LD[row] == pytest.approx(expected.numpy(), abs=PER_TOKEN)


def test_bfloat16_offsets_are_added_as_a_plain_hook_adds_them() -> None:
    from transformer_lens.model_bridge import TransformerBridge

    engine = build(dtype="bfloat16")
    assert (engine.info.dtype, engine.info.logits_dtype) == ("bfloat16", "bfloat16")
    bridge = TransformerBridge.boot_transformers(
        str(DEMO_MODEL), device="cpu", dtype=torch.bfloat16
    )
    ids = draw_ids(np.random.default_rng(9), 20)
    vector = torch.from_numpy(draw_vector()).bfloat16()
    hooks = [(f"blocks.{LAYER}.hook_resid_post", lambda x, hook: x + vector)]
    ids_1T = torch.from_numpy(ids[:-1].astype(np.int64))[None]
    with torch.inference_mode(), bridge.hooks(fwd_hooks=hooks):
        log_p_TV = bridge(ids_1T)[0].float().log_softmax(-1)
    expected = log_p_TV.gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    values = score(engine, whole(ids, plan=add_plan()))[0]
    assert values == pytest.approx(expected.numpy(), abs=BATCH)


def test_stop_strings_and_streams(engine: Any, prompt: np.ndarray) -> None:
    plain = GenerateJob(prompt, 40, policy=GREEDY)
    output = run(engine, plain)[0]
    assert output.finish_reason == "length"
    stop = output.text[21:25]
    for stream in (False, True):
        job = GenerateJob(prompt, 40, policy=GREEDY, stop=(stop, "never"), stream=stream)
        pieces = run_pieces(engine, {0: job, 1: plain})[0]
        text = "".join(piece.text for piece in pieces if isinstance(piece, GenerateOutput))
        assert text == output.text[: output.text.index(stop)]
        ids = [i for p in pieces if isinstance(p, GenerateOutput) for i in p.token_ids.tolist()]
        assert ids == output.token_ids[: len(ids)].tolist()
        assert len(ids) < 40
        reasons = [p.finish_reason for p in pieces if isinstance(p, GenerateOutput)]
        assert reasons == [None] * (len(ids) - 1 if stream else 0) + ["stop"]


def test_the_text_is_what_the_tokens_say(tokenizer: Any) -> None:
    from logsteer_server.engines.tlens.text import GrowingText

    backend = tokenizer.backend_tokenizer
    said = " naïve 😀 — ok\n  日本語, then… again 👩‍🚀!"
    before = tokenizer("Once")["input_ids"]
    ids = backend.encode("Once" + said, add_special_tokens=False).ids[len(before) - 1 :]
    assert len(ids) > len(said)  # else no character takes several tokens
    text = GrowingText(backend, before, (), include_stop=False)
    pieces = []
    for token in ids:
        assert not text.add(token)
        pieces.append(text.take(False))
    assert not text.end()
    assert "".join(pieces) + text.take(True) == said
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    cut = GrowingText(backend, before, ("語, t", "zzz"), include_stop=False)
    taken = [token for token in ids if not cut.add(token)]
    assert cut.take(True).startswith(" naïve 😀 — ok\n  日本")
    assert len(taken) < len(ids)


def test_spaces_between_words_are_kept_where_a_text_may_not_begin_with_one() -> None:
    from logsteer_server.engines.tlens.text import GrowingText

    pieces = ["<unk>", "▁a", "▁b", "c", "<0xC3>", "<0xA9>"]
    model = models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>")
    sentencepiece = Tokenizer(model)
    sentencepiece.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert sentencepiece.decode([1, 2]) == "a b"
    text = GrowingText(sentencepiece, [1], (), include_stop=False)
    taken = []
    for token in (2, 3, 1, 4, 5, 2, 4):
        text.add(token)
        taken.append(text.take(False))
    assert taken == [" b", "c", " a", "", "é", " b", ""]
    text.end()
    assert text.take(True) == "\N{REPLACEMENT CHARACTER}"  # a character that nothing completed


def test_the_end_of_sequence_ends_unless_ignored(engine: Any, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    ends, goes_on = run(
        engine,
        GenerateJob(ids, 60, policy=GREEDY),
        GenerateJob(ids, 60, policy=GREEDY, ignore_eos=True),
    )
    assert ends.finish_reason == "stop"
    assert ends.token_ids[-1] == tokenizer.eos_token_id
    assert "Paris" in ends.text
    assert "</s>" not in ends.text
    assert goes_on.finish_reason == "length"
    assert len(goes_on.token_ids) == 60
    assert goes_on.text.startswith(ends.text)


def test_cancelled_jobs_go_at_once_and_leave_the_others_as_they_are(
    engine: Any, prompt: np.ndarray
) -> None:
    plans = [None, add_plan()]
    jobs = {i: GenerateJob(prompt[: 2 + i], 40, seed=i, plan=plans[i % 2]) for i in range(4)}
    alone = {i: run(engine, job)[0] for i, job in jobs.items()}
    engine.add(list(jobs.items()))
    found: dict[int, JobResult] = {}
    for _ in range(10):
        found |= dict(engine.step())
    engine.cancel([0, 3, 77])
    engine.add([(9, GenerateJob(prompt, 40, seed=9)), (10, whole(prompt))])
    engine.cancel([9, 10])
    while engine.busy:
        found |= dict(engine.step())
    assert found.keys() == {1, 2}
    for i, output in found.items():
        assert isinstance(output, GenerateOutput)
        assert output.token_ids.tolist() == alone[i].token_ids.tolist()
        assert output.logprobs == pytest.approx(alone[i].logprobs, abs=BATCH)
        assert (output.trace and output.trace.tokens) == (alone[i].trace and alone[i].trace.tokens)
    engine.add([(5, jobs[1])])
    engine.step()
    engine.cancel([5])
    assert not engine.busy
    assert engine.step() == []


def test_nobody_waits_for_a_long_continuation(engine: Any, prompt: np.ndarray) -> None:
    engine.add([(0, GenerateJob(prompt, 500, ignore_eos=True))])
    for _ in range(5):
        assert engine.step() == []
    engine.add([(1, GenerateJob(prompt, 3, ignore_eos=True)), (2, whole(prompt))])
    engine.add([(3, CaptureJob(prompt, (0,)))])
    found = {i for _ in range(10) for i, _ in engine.step()}
    assert found == {1, 2, 3}
    engine.cancel([0])


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


def bad_jobs(ids: np.ndarray) -> list[tuple[str, Job, str, str]]:
    def steered(*sites: Site) -> ScoreJob:
        return whole(ids, plan=SteeringPlan(sites))

    nan = np.full(128, np.nan, np.float32)
    v = draw_vector()
    return [
        ("width", steered(Site(1, "resid_post", v[:64])), "invalid_vector", "128 wide"),
        ("mixed", steered(Site(1, "resid_post", v, (StreamOp(U[:9]),))), "invalid_vector", "9"),
        ("nan", steered(Site(1, "resid_post", nan)), "invalid_vector", "finite"),
        ("nothing", steered(Site(1, "resid_post", None)), "invalid_vector", "nothing"),
        ("twice", steered(Site(1, "resid_pre", v), Site(1, "hook_in", v)), "invalid_vector", "two"),
        ("hook", steered(Site(1, "resid", v)), "unsupported_by_engine", "resid_post"),
        ("layer", steered(Site(5, "resid_post", v)), "invalid_request", "0 to 4"),
        ("capture", CaptureJob(ids, (0, 7)), "invalid_request", "layer 7"),
        ("no layers", CaptureJob(ids, ()), "invalid_request", "at least one"),
        ("long", GenerateJob(ids, 1024), "context_too_long", "1024"),
        ("id", whole(np.append(ids, [9999, 3]).astype(np.int32)), "invalid_request", "1435"),
        ("empty", GenerateJob(ids[:0], 3), "invalid_request", "no tokens"),
        ("none", GenerateJob(ids, 0), "invalid_request", "max_tokens"),
    ]  # fmt: skip


def test_a_job_that_does_not_fit_fails_alone(engine: Any, prompt: np.ndarray) -> None:
    cases = bad_jobs(prompt)
    good = whole(prompt)
    *failures, output = run(engine, *(job for _, job, _, _ in cases), good)
    assert isinstance(output, ScoreOutput)
    for (name, _, code, hint), failure in zip(cases, failures, strict=True):
        assert isinstance(failure, JobFailure), name
        assert failure.code == code, name
        assert hint in failure.detail, name


def test_steering_that_overflows_fails_alone(engine: Any, prompt: np.ndarray) -> None:
    huge = np.full(128, 3e38, np.float32)
    sites = tuple(Site(layer, "resid_post", huge) for layer in (1, 2))
    broken = GenerateJob(prompt, 20, seed=1, plan=SteeringPlan(sites, Positions("completion")))
    fine = GenerateJob(prompt, 20, seed=2)
    failure, output = run(engine, broken, fine)
    assert isinstance(failure, JobFailure)
    assert failure.code == "invalid_vector"
    assert "smaller scale" in failure.detail
    assert output.token_ids.tolist() == run(engine, fine)[0].token_ids.tolist()


def test_running_out_of_memory_costs_one_batch(
    engine: Any, prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    jobs: list[Job] = [whole(prompt, plan=add_plan()), GenerateJob(prompt, 5)]
    jobs += [CaptureJob(prompt, (1,))]
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "read", fail)
        failures = run(engine, *jobs)
    assert [failure.code for failure in failures] == ["out_of_memory"] * 3
    # No hook is left behind: the next ones are not steered.
    assert score(engine, whole(prompt))[0] == pytest.approx(score(engine, whole(prompt))[0], abs=0)
    assert not any(isinstance(result, JobFailure) for result in run(engine, *jobs))
    assert not engine._model.points.find(LAYER, "resid_post").hook.has_hooks()


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


SMALL = {
    "vocab_size": 1436, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OTHERS = {
    # Learned positions; a cap on logits and a sliding window; a body that is called by its part.
    "gpt2": GPT2Config(
        vocab_size=1436, n_embd=64, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    ),
    "gemma2": Gemma2Config(
        **SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=8,
        final_logit_softcapping=5.0, query_pre_attn_scalar=16, initializer_range=0.3,
    ),
    "opt": OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, init_std=0.2),
}  # fmt: skip


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
