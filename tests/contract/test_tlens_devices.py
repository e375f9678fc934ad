"""A model on several devices gives what it gives on one; what overflows in it fails its job.

The devices are pretended: placement, accelerate's hooks, and every operation's refusal to mix
devices are as on GPUs, and the numbers are the CPU's. What this cannot show: that a GPU's kernels
give these numbers, that copies between GPUs keep pace, how much memory a model takes on each. Nor
derivatives along a direction: torch has no forward mode for tensors that pretend.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import (
    CaptureJob,
    GenerateJob,
    GradientJob,
    Job,
    JobFailure,
    ScoreJob,
)
from logsteer_server.contract.plan import (
    Adapter,
    Direction,
    Override,
    ParameterDelta,
    Positions,
    ResidualOp,
    Site,
    SteeringPlan,
)
from logsteer_server.engines.tlens.decode_step import NextTokens
from logsteer_server.engines.tlens.overflow import CheckedAttention
from logsteer_server.engines.tlens.placement import place_model, spread_blocks
from logsteer_server.stores.formats.tensor_file import join_files
from tests.conftest import DEMO_MODEL
from tests.contract.directions import at, draw_direction, load_model, write_direction
from tests.contract.lora import write_adapter
from tests.contract.pretended_devices import KIND, pretend
from tests.contract.test_overrides import store_adapter
from tests.contract.tlens_cases import (
    GREEDY,
    PER_TOKEN,
    U,
    add_plan,
    build,
    draw_ids,
    draw_vector,
    run,
    score,
    whole,
)
from tests.families.checkpoints import FAMILIES

pytestmark = pytest.mark.engine

LAYERS = range(5)
TEXTS = [draw_ids(np.random.default_rng(n), length) for n, length in enumerate((30, 9, 17))]


@pytest.fixture(scope="module")
def spread() -> Iterator[Any]:
    """TransformerLens with the demo model on two pretended devices."""
    with pretend(2):
        yield build()


def compare(engine: Any, spread: Any, *jobs: Job) -> list[tuple[Any, Any]]:
    """Return each job's results on one device and on two, whose numbers are the same."""
    found = list(zip(run(engine, *jobs), run(spread, *jobs), strict=True))
    for one, two in found:
        assert type(one) is type(two)
    return found


def test_blocks_are_on_their_devices_and_all_else_on_the_first(spread: Any) -> None:
    model = spread._model
    devices = {name: str(tensor.device) for name, tensor in model.parameters.by_name.items()}
    blocks = [{d for name, d in devices.items() if f".layers.{layer}." in name} for layer in LAYERS]
    assert blocks == [{f"{KIND}:{int(layer > 1)}"} for layer in LAYERS]
    assert {d for name, d in devices.items() if ".layers." not in name} == {f"{KIND}:0"}
    assert spread.info.pipeline_parallel == 2
    # The shortcuts are those of one device.
    assert model._plain_forward is not None
    assert model._fuses_attention


def test_scores_alone_and_in_a_batch(engine: Any, spread: Any) -> None:
    jobs = [ScoreJob(ids[:-1], ids[1:], ("logprob", "entropy"), top=2) for ids in TEXTS]
    for one, two in compare(engine, spread, *jobs):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=PER_TOKEN)
        assert two.columns["entropy"] == pytest.approx(one.columns["entropy"], abs=PER_TOKEN)


@pytest.mark.parametrize("hook", ["resid_pre", "resid_mid", "resid_post", "attn.hook_q", "mlp_out"])
@pytest.mark.parametrize("read", ["last", "mean"])
def test_activations_of_each_layer(engine: Any, spread: Any, hook: str, read: Any) -> None:
    jobs = [CaptureJob(ids, tuple(LAYERS), hook, read) for ids in TEXTS]
    for one, two in compare(engine, spread, *jobs):
        assert two.activations_LD == pytest.approx(one.activations_LD, abs=PER_TOKEN)


def plans(hook: str, width: int) -> list[SteeringPlan]:
    """Plans that change layers on both devices, or one."""
    adds = [Site(layer, hook, draw_vector(width, seed=layer, norm=2.0)) for layer in LAYERS]
    ablates = Site(1, hook, None, (ResidualOp(draw_vector(width, norm=1.0)),))
    return [
        SteeringPlan(tuple(adds)),
        SteeringPlan((ablates, adds[3]), Positions("slices", ((2, 7),))),
        SteeringPlan((adds[2],), Positions("last_prompt")),
    ]


@pytest.mark.parametrize(("hook", "width"), [("resid_post", 128), ("resid_pre", 128),
                                             ("mlp_out", 128), ("attn.hook_z", 128)])  # fmt: skip
def test_steered_scores(engine: Any, spread: Any, hook: str, width: int) -> None:
    jobs = [whole(ids, plan=plan) for ids in TEXTS for plan in plans(hook, width)]
    bare = score(engine, *map(whole, TEXTS))
    for i, (one, two) in enumerate(compare(engine, spread, *jobs)):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=PER_TOKEN)
        assert two.trace.sites == {
            name: (count, pytest.approx(ratio, rel=1e-3))
            for name, (count, ratio) in one.trace.sites.items()
        }
        assert np.abs(one.columns["logprob"] - bare[i // 3]).max() > 1e-2


def test_continuations_and_their_cache(engine: Any, spread: Any) -> None:
    jobs = [
        GenerateJob(ids, 6, policy=GREEDY, ignore_eos=True, plan=plan)
        for ids in TEXTS
        for plan in (None, add_plan(), *plans("mlp_out", 128)[:1])
    ]
    # Rows that end early leave the cache of those that go on.
    jobs.append(GenerateJob(TEXTS[0], 2, policy=GREEDY, ignore_eos=True))
    for job, (one, two) in zip(jobs, compare(engine, spread, *jobs), strict=True):
        assert two.token_ids.tolist() == one.token_ids.tolist()
        assert two.logprobs == pytest.approx(one.logprobs, abs=PER_TOKEN)
        both = np.concatenate([job.tokens, two.token_ids])
        again = score(spread, ScoreJob(both[:-1], two.token_ids, plan=job.plan))[0]
        assert again == pytest.approx(two.logprobs, abs=PER_TOKEN)


def test_keys_and_values_stay_with_their_layer(spread: Any) -> None:
    cache = spread._model.new_cache()
    with torch.inference_mode():
        spread._model.read(torch.tensor([[1, 2, 3]]), cache=cache)
    assert [str(layer.keys.device) for layer in cache.layers] == [
        f"{KIND}:{int(layer > 1)}" for layer in LAYERS
    ]


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParameterDelta]:
    """A direction over all parameters, and an adapter of all layers."""
    directory = tmp_path_factory.mktemp("deltas")
    direction = write_direction(directory, draw_direction(load_model(DEMO_MODEL), size=0.2))
    files = write_adapter(directory / "adapter")
    stored = directory / "adapter.safetensors"
    config = (files / "adapter_config.json").read_bytes()
    with (files / "adapter_model.safetensors").open("rb") as weights, stored.open("wb") as file:
        join_files(config, weights, file.write)
    adapter = Adapter(str(stored), hashlib.sha256(stored.read_bytes()).hexdigest())
    override = Override(direction, 0.5)
    return {
        "override": ParameterDelta(override),
        "adapter": ParameterDelta(adapter=adapter),
        "both": ParameterDelta(override, adapter),
    }


@pytest.mark.parametrize("name", ["override", "adapter", "both"])
def test_parameter_deltas(
    engine: Any, spread: Any, deltas: dict[str, ParameterDelta], name: str
) -> None:
    changed = {"override": deltas[name].override, "adapter": deltas[name].adapter}
    jobs = [whole(TEXTS[0], plan=plan, **changed) for plan in (None, add_plan())]
    for one, two in compare(engine, spread, *jobs):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=PER_TOKEN)
    bare = score(engine, whole(TEXTS[0]))[0]
    assert np.abs(score(spread, jobs[0])[0] - bare).max() > 1e-2


@pytest.mark.parametrize("hook", ["resid_post", "attn_out"])
def test_gradients(engine: Any, spread: Any, deltas: dict[str, ParameterDelta], hook: str) -> None:
    ids, override = TEXTS[0], deltas["override"].override
    sites = tuple((layer, hook) for layer in LAYERS)
    jobs = [
        GradientJob(ids[:-1], ids[-9:], sites, plan=plan, override=override)
        for plan in (None, add_plan())
    ]
    for one, two in compare(engine, spread, *jobs):
        assert two.logprobs == pytest.approx(one.logprobs, abs=PER_TOKEN)
        for ours, theirs in zip(two.gradients, one.gradients, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "falcon", "gemma2", "cohere", "phi3", "bloom"])
def test_families(name: str, tmp_path: Path) -> None:
    """Norms with weights that the bridge reads, blocks that it changes, two kinds of masks."""
    FAMILIES[name].make(tmp_path)
    ids = draw_ids(np.random.default_rng(4), 40, 600)
    plan = SteeringPlan(tuple(Site(n, "resid_post", draw_vector(64, seed=n)) for n in range(4)))
    inside = SteeringPlan((Site(3, "mlp_out", draw_vector(64)),))
    jobs = [whole(ids, plan=plan) for plan in (None, plan, inside)]
    one = build(tmp_path)
    wanted = score(one, *jobs)
    with pretend(3):
        three = build(tmp_path)
        assert score(three, *jobs) == [pytest.approx(values, abs=PER_TOKEN) for values in wanted]
    assert three._model._fuses_attention == one._model._fuses_attention
    assert (three._model._plain_forward is None) == (one._model._plain_forward is None)


class _Toy(nn.Module):
    """Embeddings of 3 numbers and 6 blocks of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(3, 1)
        self.body.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(6))
        text = SimpleNamespace(num_hidden_layers=6)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_decoder(self) -> nn.Module:
        return self.body


@pytest.mark.parametrize(
    ("free", "firsts"), [((1, 1), 2), ((1, 3), 0), ((3, 1), 4), ((1, 1, 10**6), 0)]
)
def test_free_memory_decides_how_many_blocks_a_device_has(
    free: tuple[int, ...], firsts: int
) -> None:
    devices = ["a", "b", "c"][: len(free)]
    found = spread_blocks(_Toy(), devices, free)
    assert found.pop("body.embed") == "a"
    assert list(found) == [f"body.layers.{n}" for n in range(6)]
    assert list(found.values()) == ["a"] * firsts + [devices[-1]] * (6 - firsts)


def test_a_model_without_a_list_of_blocks_is_not_spread() -> None:
    toy = _Toy()
    toy.config.get_text_config().num_hidden_layers = 7
    with pytest.raises(ValueError, match="use one GPU"):
        spread_blocks(toy, ["a", "b"], [1, 1])


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def place(**fields: Any) -> tuple[str, ...]:
        return place_model(EngineSpec("demo", "transformer_lens", "demo", **fields))

    assert place() == ("cuda:0",)
    assert place(pipeline_parallel=2) == ("cuda:0", "cuda:1")
    assert place(devices="cpu") == ("cpu",)
    with pytest.raises(ValueError, match="3 GPUs are wanted, and 2 are here"):
        place(pipeline_parallel=3)
    with pytest.raises(ValueError, match=r"pipeline_parallel is 3, devices \[0, 1\]"):
        place(pipeline_parallel=3, devices=(0, 1))


# ------------------------------------------------------------------ overflow


QUERIED = [draw_ids(np.random.default_rng(1), length) for length in (9, 30)]
"""Of so few keys as the first has, torch's fused attention on CPUs hides that scores are NaN."""
QUERIES = "model.layers.0.self_attn.q_proj.weight"
INSIDE = SteeringPlan((Site(2, "mlp_out", 0.001 * U),))
"""Has a block computed in parts."""


def draw_queries(directory: Path) -> Direction:
    torch.manual_seed(0)
    return write_direction(directory, {QUERIES: torch.randn(128, 128)})


def list_jobs(**changes: Any) -> list[Job]:
    return [
        job
        for ids in QUERIED
        for plan in (None, INSIDE)
        for job in (
            whole(ids, plan=plan, **changes),
            GenerateJob(ids, 3, policy=GREEDY, plan=plan, **changes),
        )
    ]


def check_failed(results: list[Any]) -> None:
    found = [r.code if isinstance(r, JobFailure) else r for r in results]
    assert found == ["non_finite"] * len(results)


@pytest.mark.parametrize(
    ("dtype", "eta"), [("float16", 3e3), ("float16", 1e4), ("float32", 1e37), ("float32", 1e38)]
)
def test_queries_beyond_the_dtype(dtype: str, eta: float, tmp_path: Path) -> None:
    engine = build(dtype=dtype)
    override = at(draw_queries(tmp_path), eta)
    *failed, beside = run(engine, *list_jobs(override=override), whole(QUERIED[0]))
    check_failed(failed)
    assert np.isfinite(beside.columns["logprob"]).all()


def test_an_adapter_of_queries(tmp_path: Path) -> None:
    adapter = store_adapter(write_adapter(tmp_path / "a"), 8e38, only="q_proj")
    check_failed(run(build(), *list_jobs(adapter=adapter)))


def test_the_decode_step_shows_it_where_the_model_is_steered() -> None:
    model = build()._model
    with torch.no_grad():
        model.parameters.by_name[QUERIES].mul_(1e38)
    point = model.points.find(0, "resid_pre")
    found = []
    for hooks in ([], [(point, lambda activation, hook: None)]):
        token_11, cache = torch.tensor([[7]]), model.new_cache()
        with torch.inference_mode():
            tokens = NextTokens(token_11, None, torch.zeros(1, 1).long(), cache, hooks)
            found.append(bool(model.read_next(tokens).isfinite().all()))
    assert found == [True, False]


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["causal", "bool", "added", "grouped"])
def test_which_queries_are_lost(count: int, dtype: torch.dtype, way: str) -> None:
    """One query overflows, and one key: that query is lost, and all that see that key."""
    torch.manual_seed(0)
    heads = 2 if way == "grouped" else 4
    queries = torch.randn(2, 4, count, 8).to(dtype)
    keys, values = (torch.randn(2, heads, count, 8).to(dtype) for _ in range(2))
    visible = torch.ones(count, count).tril().bool()
    options: dict[str, Any] = {
        "bool": {"attn_mask": visible},
        "added": {
            "attn_mask": torch.zeros(count, count, dtype=dtype).masked_fill(
                ~visible, torch.finfo(dtype).min
            )
        },
        "grouped": {"is_causal": True, "enable_gqa": True},
    }.get(way, {"is_causal": True})
    plain = functional.scaled_dot_product_attention(queries, keys, values, **options)
    with CheckedAttention(None, shows_overflow=True):
        shown = functional.scaled_dot_product_attention(queries, keys, values, **options)
    assert torch.equal(shown, plain)
    for value in (NAN, INF, -INF):
        broken, seen = queries.clone(), keys.clone()
        broken[0, 0, count // 2, 0] = value
        seen[1, heads - 1, 0, 0] = value
        with CheckedAttention(None, shows_overflow=True):
            found = functional.scaled_dot_product_attention(broken, seen, values, **options)
        is_lost_BHT = found.isnan().any(-1)
        wanted_BHT = torch.zeros(2, 4, count, dtype=torch.bool)
        wanted_BHT[0, 0, count // 2] = True
        wanted_BHT[1, 4 - 4 // heads :] = True
        assert torch.equal(is_lost_BHT, wanted_BHT)


def test_attention_in_parts_of_a_query_that_sees_nothing_finite() -> None:
    least = torch.finfo(torch.float32).min
    scores = torch.tensor([[-INF, least, least], [1.0, -INF, least], [least, least, least]])
    padding = torch.tensor([[1, 1, 0]])
    with CheckedAttention(padding, shows_overflow=True):
        pattern = functional.softmax(scores[None, None], dim=-1)[0, 0]
    assert pattern.isnan().all(-1).tolist() == [True, False, False]
    assert pattern[2].tolist() == [0, 0, 0]


def test_prompts_of_two_lengths_in_float64() -> None:
    engine = build(dtype="float64")
    jobs = [GenerateJob(ids, 4, policy=GREEDY, ignore_eos=True) for ids in QUERIED]
    for job, found in zip(jobs, run(engine, *jobs), strict=True):
        (alone,) = run(engine, job)
        assert found.token_ids.tolist() == alone.token_ids.tolist()
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-6)
