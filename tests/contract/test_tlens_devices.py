"""A model whose blocks are spread over several devices gives what it gives on one.

The devices are pretended: placement, accelerate's hooks, and every operation's refusal to mix
devices are as on GPUs, and the numbers are the CPU's. What this cannot show: that a GPU's kernels
give these numbers, that copies between GPUs keep pace, how much memory a model takes on each. Nor
derivatives along a direction: torch has no forward mode for tensors that pretend.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logsteer_server.contract.captures import Capture
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.gradients import GradientJob
from logsteer_server.contract.jobs import CaptureJob, GenerateJob, Job, ScoreJob
from logsteer_server.contract.plan import (
    Adapter,
    Override,
    ParameterDelta,
    Positions,
    ResidualOp,
    Site,
    SteeringPlan,
)
from logsteer_server.engines.tlens.causal import find_blocks
from logsteer_server.engines.tlens.model import place_model
from logsteer_server.stores.formats.tensor_file import join_files
from tests.conftest import DEMO_MODEL
from tests.contract.directions import draw_direction, load_model, write_direction
from tests.contract.lora import write_adapter
from tests.contract.pretended_devices import KIND, pretend
from tests.contract.tlens_cases import (
    GREEDY,
    PER_TOKEN,
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
def spread(engine: Any) -> Iterator[Any]:
    """TransformerLens with the demo model on two pretended devices; `engine` is there before."""
    with pretend(2):
        yield build()


def compare(engine: Any, spread: Any, *jobs: Job) -> list[tuple[Any, Any]]:
    """Return each job's results on one device and on two, whose numbers are the same."""
    found = list(zip(run(engine, *jobs), run(spread, *jobs), strict=True))
    for one, two in found:
        assert type(one) is type(two)
    return found


def test_blocks_are_spread_and_none_is_split(spread: Any) -> None:
    model = spread._model
    devices = {name: str(tensor.device) for name, tensor in model.parameters.by_name.items()}
    blocks = [{d for name, d in devices.items() if f".layers.{layer}." in name} for layer in LAYERS]
    places = [place for (place,) in blocks]
    assert places == sorted(places)
    assert set(places) == {f"{KIND}:0", f"{KIND}:1"}
    assert spread.info.pipeline_parallel == 2
    # The shortcut is that of one device.
    assert model._fuses_attention


def test_scores_alone_and_in_a_batch(engine: Any, spread: Any) -> None:
    jobs = [ScoreJob(ids[:-1], ids[1:], ("logprob", "entropy"), top=2) for ids in TEXTS]
    for one, two in compare(engine, spread, *jobs):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=PER_TOKEN)
        assert two.columns["entropy"] == pytest.approx(one.columns["entropy"], abs=PER_TOKEN)


@pytest.mark.parametrize("hook", ["resid_pre", "resid_mid", "resid_post", "attn.hook_q", "mlp_out"])
@pytest.mark.parametrize("read", ["last", "mean"])
def test_activations_of_each_layer(engine: Any, spread: Any, hook: str, read: Any) -> None:
    jobs = [CaptureJob(ids, capture=Capture(tuple(LAYERS), hook, read)) for ids in TEXTS]
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


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    model = load_model(DEMO_MODEL)
    model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match="no list of 7 layers"):
        find_blocks(model)


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    def place(**fields: Any) -> str:
        return place_model(EngineSpec("demo", "transformer_lens", "demo", **fields))

    assert place() == "cuda:0"
    assert place(devices="cpu") == "cpu"
    with pytest.raises(ValueError, match=r"pipeline_parallel is 3, devices \[0, 1\]"):
        place(pipeline_parallel=3, devices=(0, 1))
    with pytest.raises(ValueError, match="3 GPUs are wanted, and 2 are here"):
        place(pipeline_parallel=3)
    assert place(devices=(2, 1)) == "balanced"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,1"
    assert place(pipeline_parallel=2) == "balanced"
    assert place(devices=(1,)) == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
