"""The model in Python around a module of the program's own: its gradients, adapters and hooks."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoTokenizer

import train_policy
from logsteer.schemas import VectorAbout
from logsteer_server.contract.jobs import Policy
from logsteer_server.embedded import FEATURES, DifferentiableRows, LocalModel
from logsteer_server.numerics.rows import PUBLIC_COLUMNS, Rows, RowSpec, read_rows
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.stores.vectors import open_vectors
from tests.conftest import DEMO_MODEL
from tests.contract.directions import load_model, save_model
from tests.contract.tlens_cases import OTHERS, draw_ids, draw_vector

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
LAYER = 2
V = draw_vector(norm=20.0)
STEERING = {"vectors": [{"data": {str(LAYER): V.tolist()}}], "positions": "completion"}
RNG = np.random.default_rng(1)
CONTEXTS = [draw_ids(RNG, n) for n in (4, 20, 9, 30, 2)]
TARGETS = [draw_ids(RNG, n) for n in (6, 1, 13, 9, 3)]
PARTS = 48
"""Tokens of a part: of the five pairs, read as 38, 21 and 20, 9 and 4."""


def make_policy() -> Any:
    return load_model(DEMO_MODEL).requires_grad_(True)


@pytest.fixture
def policy() -> Any:
    return make_policy()


@pytest.fixture
def model(policy: Any, tokenizer: Any) -> LocalModel:
    return LocalModel(policy, tokenizer)


@pytest.fixture(scope="module")
def loaded() -> LocalModel:
    return LocalModel(DEMO_MODEL, device="cpu")


def read_directly(module: Any) -> list[Tensor]:
    """log p of each target's tokens by the module's own forward, a pair at a time."""
    found = []
    for context, target in zip(CONTEXTS, TARGETS, strict=True):
        ids_T = torch.from_numpy(np.concatenate([context, target]).astype(np.int64))
        log_p_RV = module(input_ids=ids_T[None, :-1]).logits[0, -len(target) :].log_softmax(-1)
        found.append(log_p_RV.gather(-1, ids_T[-len(target) :, None])[:, 0])
    return found


def mix(logprobs: Sequence[Tensor]) -> Tensor:
    """A loss that no sequence's gradient can be had of alone: a softmax over all of them."""
    totals = torch.stack([values.sum() for values in logprobs])
    return (totals.softmax(0) * torch.arange(len(totals))).sum() - totals.mean()


def differentiate(module: Any, read: Callable[[], Sequence[Tensor]]) -> dict[str, Tensor]:
    """The gradients that the loss of what is read leaves in a module's parameters."""
    module.zero_grad()
    mix(read()).backward()  # type: ignore[no-untyped-call]
    named = dict(module.named_parameters())
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert found
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in found.items():
        assert float((gradient - wanted[name]).abs().max()) <= PER_TOKEN * scale, name


def pick(rows: list[dict[str, Tensor]], name: str = "logprob") -> list[Tensor]:
    return [row[name] for row in rows]


@pytest.mark.parametrize("batch_tokens", [None, PARTS, 1])
def test_gradients_are_those_of_transformers_in_parts_or_whole(
    model: LocalModel, policy: Any, batch_tokens: int | None
) -> None:
    wanted = differentiate(policy, lambda: read_directly(policy))
    found = differentiate(
        policy, lambda: pick(model.columns(CONTEXTS, TARGETS, batch_tokens=batch_tokens))
    )
    check_same(found, wanted)
    with torch.no_grad():
        values = pick(model.columns(CONTEXTS, TARGETS, batch_tokens=batch_tokens))
        for own, direct in zip(values, read_directly(policy), strict=True):
            assert own.numpy() == pytest.approx(direct.numpy(), abs=PER_TOKEN)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "opt"])
def test_other_architectures(name: str, tokenizer: Any, tmp_path: Path) -> None:
    module = load_model(save_model(OTHERS[name], tmp_path / "model")).requires_grad_(True)
    wanted = differentiate(module, lambda: read_directly(module))
    model = LocalModel(module, tokenizer)
    check_same(
        differentiate(module, lambda: pick(model.columns(CONTEXTS, TARGETS, batch_tokens=PARTS))),
        wanted,
    )


def test_parts_keep_little_for_the_backward_pass(model: LocalModel) -> None:
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    sizes = []
    for batch_tokens in (None, PARTS):
        kept.clear()
        with saved_tensors_hooks(count, lambda tensor: tensor):
            model.columns(CONTEXTS, TARGETS, batch_tokens=batch_tokens)
        sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 100


def test_a_step_between_reading_and_the_backward_pass_is_an_error(
    model: LocalModel, policy: Any
) -> None:
    loss = mix(pick(model.columns(CONTEXTS, TARGETS, batch_tokens=PARTS)))
    with torch.no_grad():
        policy.model.norm.weight += 1
    with pytest.raises(RuntimeError, match="written to between"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_parameters_of_ones_own_have_the_gradients_of_transformers(
    loaded: LocalModel, policy: Any
) -> None:
    wanted = differentiate(policy, lambda: read_directly(policy))
    plain = pick(loaded.columns(CONTEXTS, TARGETS))
    for batch_tokens in (None, PARTS):
        theta = {name: t.clone().requires_grad_() for name, t in loaded.parameters.items()}
        found = pick(loaded.columns(CONTEXTS, TARGETS, parameters=theta, batch_tokens=batch_tokens))
        mix(found).backward()  # type: ignore[no-untyped-call]
        check_same({name: t.grad for name, t in theta.items()}, wanted)
        for own, other in zip(found, plain, strict=True):
            assert own.detach().numpy() == pytest.approx(other.numpy(), abs=1e-5)
            assert not other.requires_grad


def steer_by_hand(module: Any) -> Any:
    """Steer what is read of each pair behind its context, as STEERING does."""

    def hook(block: Any, inputs: Any, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        length = stream.shape[1]
        first = next(
            len(c) for c, t in zip(CONTEXTS, TARGETS, strict=True) if len(c) + len(t) - 1 == length
        )
        mask_T1 = (torch.arange(length) >= first)[:, None]
        changed = stream + mask_T1 * torch.from_numpy(V)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return module.model.layers[LAYER].register_forward_hook(hook)


def test_steering_is_that_of_requests_and_in_the_gradient(
    model: LocalModel, policy: Any, loaded: LocalModel, tmp_path: Path
) -> None:
    plain = differentiate(policy, lambda: pick(model.columns(CONTEXTS, TARGETS)))
    found = differentiate(
        policy,
        lambda: pick(model.columns(CONTEXTS, TARGETS, steering=STEERING, batch_tokens=PARTS)),
    )
    handle = steer_by_hand(policy)
    wanted = differentiate(policy, lambda: read_directly(policy))
    direct = [values.detach().numpy() for values in read_directly(policy)]
    handle.remove()
    check_same(found, wanted)
    name = "model.layers.0.mlp.up_proj.weight"
    assert (found[name] - plain[name]).abs().max() > 0.1 * plain[name].abs().max()
    store = open_vectors(tmp_path, 2**20)
    about = VectorAbout(source="upload")
    store.put("mood", LayerVectors({LAYER: V}), about)
    named = {"vectors": [{"name": "mood"}], "positions": "completion"}
    stored = LocalModel(policy, AutoTokenizer.from_pretrained(DEMO_MODEL), vectors=tmp_path)
    for one, steering in ((model, STEERING), (loaded, STEERING), (stored, named)):
        with torch.no_grad():
            values = pick(one.columns(CONTEXTS, TARGETS, steering=steering))
        for own, expected in zip(values, direct, strict=True):
            assert own.numpy() == pytest.approx(expected, abs=PER_TOKEN)


@pytest.mark.parametrize("kind", ["model", "loaded"])
def test_samples_score_as_they_were_drawn(kind: str, request: pytest.FixtureRequest) -> None:
    model: LocalModel = request.getfixturevalue(kind)
    prompt = CONTEXTS[1].tolist()
    greedy = Policy(temperature=0.0)
    plain, steered = (
        model.sample([prompt, prompt[:2]], 12, greedy, steering=steering)
        for steering in (None, STEERING)
    )
    assert plain[0].tolist() != steered[0].tolist()
    for samples, steering in ((plain, None), (steered, STEERING)):
        for row in model.read([prompt, prompt[:2]], samples, steering=steering):
            assert (row.logits_RV.argmax(-1) == row.targets_R).all()


def test_a_function_in_python_acts_where_it_is_hooked(
    model: LocalModel, policy: Any, loaded: LocalModel
) -> None:
    scale = torch.full((), 0.5, requires_grad=True)
    names = []

    def shrink(activation: Tensor, hook: Any) -> Tensor:
        names.append(hook.name)
        return activation * scale

    rows = model.columns(CONTEXTS, TARGETS, hooks=[(1, "resid_post", shrink)])
    mix(pick(rows)).backward()  # type: ignore[no-untyped-call]
    assert float(scale.grad) != 0
    assert names == ["blocks.1.hook_out"]

    def by_hand(block: Any, inputs: Any, output: Any) -> Any:
        return output * 0.5

    handle = policy.model.layers[1].register_forward_hook(by_hand)
    with torch.no_grad():
        wanted = read_directly(policy)
    handle.remove()
    for one in (model, loaded):
        with torch.no_grad():
            values = pick(one.columns(CONTEXTS, TARGETS, hooks=[(1, "resid_post", shrink)]))
        for own, expected in zip(values, wanted, strict=True):
            assert own.numpy() == pytest.approx(expected.numpy(), abs=PER_TOKEN)
    prompt = CONTEXTS[1].tolist()
    for one in (model, loaded):
        drawn, same = (
            one.sample([prompt], 12, seed=1, hooks=hooks)[0].tolist()
            for hooks in ([(1, "resid_post", shrink)], [])
        )
        assert drawn != same
    inside = loaded.columns(CONTEXTS, TARGETS, hooks=[(1, "mlp_out", shrink)])
    assert (inside[0]["logprob"] != loaded.columns(CONTEXTS, TARGETS)[0]["logprob"]).any()


def test_dropout_is_left_to_the_module_but_not_in_samples(tokenizer: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(OTHERS["gpt2"])
    config.resid_pdrop = 0.5
    module = load_model(save_model(config, tmp_path / "model"))
    model = LocalModel(module, tokenizer)
    module.train()
    prompts, greedy = [[5, 6, 7]] * 2, Policy(temperature=0.0)
    first, second = model.sample(prompts, 8, greedy)
    assert first.tolist() == second.tolist()
    assert all(part.training for part in module.modules())
    noisy = [model.columns(CONTEXTS[:1], TARGETS[:1])[0]["logprob"] for _ in range(2)]
    assert (noisy[0] != noisy[1]).any()
    module.eval()
    quiet = [model.columns(CONTEXTS[:1], TARGETS[:1])[0]["logprob"] for _ in range(2)]
    assert (quiet[0] == quiet[1]).all()


CUTS = [
    Policy(),
    Policy(temperature=0.7, top_p=0.8, top_k=9, min_p=0.02),
    Policy(temperature=1.3, top_k=1),
]


@pytest.mark.parametrize("cut", CUTS, ids=["softmax", "cut", "one token"])
def test_columns_are_the_services_and_their_derivatives_finite_differences(cut: Policy) -> None:
    torch.manual_seed(0)
    logits_RV = torch.randn(6, 40, dtype=torch.float64) * 3
    targets_R, eos = torch.arange(6), (2, 7)
    expected_RW = read_rows(
        Rows(logits_RV, targets_R, None, cut, eos, double=True),
        RowSpec(PUBLIC_COLUMNS, policy=cut, eos_ids=eos, double=True),
    )
    leaf = logits_RV.clone().requires_grad_()
    found = DifferentiableRows(leaf, targets_R, eos).columns(PUBLIC_COLUMNS, cut)
    v_RV, step = torch.randn_like(logits_RV), 1e-6

    def move(sign: int) -> dict[str, Tensor]:
        rows = DifferentiableRows(logits_RV + sign * step * v_RV, targets_R, eos)
        return rows.columns(PUBLIC_COLUMNS, cut)

    ahead, behind = move(1), move(-1)
    for place, name in enumerate(PUBLIC_COLUMNS):
        assert found[name].detach().numpy() == pytest.approx(expected_RW[:, place].numpy()), name
        if not found[name].requires_grad:  # a rank, or the mass of a policy without cuts
            assert name == "rank" or cut == Policy()
            assert (ahead[name] == behind[name]).all()
            continue
        finite_R = found[name].isfinite()
        (gradient_RV,) = torch.autograd.grad(found[name][finite_R].sum(), leaf, retain_graph=True)
        slope_R = (gradient_RV * v_RV).sum(-1)[finite_R]
        wanted_R = ((ahead[name] - behind[name]) / (2 * step))[finite_R]
        assert slope_R.numpy() == pytest.approx(wanted_R.numpy(), rel=1e-5, abs=1e-7), name


def test_features_are_known_before_the_token(model: LocalModel) -> None:
    cut = Policy(temperature=0.8, top_p=0.9)
    found = model.features(CONTEXTS, TARGETS, policy=cut, max_tokens=20, batch_tokens=PARTS)
    columns = model.columns(CONTEXTS, TARGETS, ["logprob", *FEATURES[1:5], "effective_support"],
                            policy=cut)  # fmt: skip
    changed = [target.copy() for target in TARGETS]
    for target in changed:
        target[-1] = 5
    others = model.features(CONTEXTS, changed, policy=cut, max_tokens=20)
    for own, row, other, target in zip(found, columns, others, TARGETS, strict=True):
        assert own.shape == (len(target), len(FEATURES))
        assert not own.requires_grad
        by_name = dict(zip(FEATURES, own.T, strict=True))
        for name in FEATURES[1:5]:
            assert by_name[name].numpy() == pytest.approx(row[name].detach().numpy(), abs=1e-5)
        before = -row["logprob"].detach()[:-1]
        assert float(by_name["surprisal"][0]) == 0
        assert by_name["surprisal"][1:].numpy() == pytest.approx(before.numpy(), abs=1e-4)
        support = row["effective_support"].detach().log()
        assert by_name["log_effective_support"].numpy() == pytest.approx(support.numpy(), abs=1e-5)
        assert by_name["position"].numpy() == pytest.approx(np.arange(len(target)) / 20)
        assert other.numpy() == pytest.approx(own.numpy(), abs=1e-5)


def test_a_module_in_pefts_wrapper_keeps_its_adapters(policy: Any, tokenizer: Any) -> None:
    reason = "peft is not installed: adapters of the program's own are NOT tested"
    peft = pytest.importorskip("peft", reason=reason)
    modules = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(policy, config)
    model = LocalModel(wrapped, tokenizer)
    base = [values.detach() for values in pick(model.columns(CONTEXTS, TARGETS))]
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    wanted = differentiate(wrapped, lambda: read_directly(wrapped))
    assert all("lora_" in name for name in wanted)
    for batch_tokens in (None, PARTS):
        read = lambda size=batch_tokens: pick(  # noqa: E731
            model.columns(CONTEXTS, TARGETS, batch_tokens=size)
        )
        check_same(differentiate(wrapped, read), wanted)
    with torch.no_grad():
        moved = pick(model.columns(CONTEXTS, TARGETS))
        with wrapped.disable_adapter():
            again = pick(model.columns(CONTEXTS, TARGETS))
    for before, with_adapter, without in zip(base, moved, again, strict=True):
        assert (with_adapter - before).abs().max() > 1e-3
        assert without.numpy() == pytest.approx(before.numpy(), abs=PER_TOKEN)
    assert any("lora_A" in name for name in model.parameters)
    tuned = peft.get_peft_model(
        make_policy(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="do not give what it gives as a whole"):
        LocalModel(tuned, tokenizer)


def test_the_demo_trains_a_policy_and_draws_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train_policy, "STORIES", 12)
    policy, report = train_policy.train(2)
    before = dict(load_model(DEMO_MODEL).named_parameters())
    assert any((t != before[name]).any() for name, t in policy.parameters.items())
    assert report.divergence[0] == pytest.approx(0, abs=1e-3)
    assert report.divergence[1] != pytest.approx(0, abs=1e-3)
    assert np.isfinite([report.reward, report.entropy, report.explained]).all()
    train_policy.plot(report, tmp_path / "policy.png")
    assert (tmp_path / "policy.png").stat().st_size > 10_000
    assert [train_policy.judge(text) for text in ("A happy dog.", "sad, happy", "Tears!", "")] == [
        1, 0, -1, 0,
    ]  # fmt: skip


def test_blocks_narrower_than_the_embedding_are_computed_as_they_are(tokenizer: Any) -> None:
    """Embedding in float32, all else in bfloat16: without a cast nothing is rounded in secret."""
    module = load_model(DEMO_MODEL, torch.bfloat16)
    plain = read_directly(module)
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    module.model.embed_tokens.float()
    module.model.embed_tokens.register_forward_hook(lambda _, __, output: output.bfloat16())
    model = LocalModel(module, tokenizer)
    for own, direct in zip(pick(model.columns(CONTEXTS, TARGETS)), plain, strict=True):
        assert own.detach().numpy() == pytest.approx(direct.detach().float().numpy(), abs=0.1)


def test_what_does_not_fit_is_refused(model: LocalModel, policy: Any, tokenizer: Any) -> None:
    for given, reason in (
        ((nn.Linear(2, 2), tokenizer), "not a causal language model of transformers"),
        ((policy.model, tokenizer), "not a causal language model of transformers"),
        ((policy, None), "fast tokenizer"),
        ((DEMO_MODEL, tokenizer), "tokenizer of its own"),
    ):
        with pytest.raises(ValueError, match=reason):
            LocalModel(*given)
    with pytest.raises(ValueError, match="module's own"):
        LocalModel(policy, tokenizer, dtype="float32")
    with pytest.raises(ValueError, match="not a server's store_directory"):
        LocalModel(policy, tokenizer, vectors=DEMO_MODEL)
    vector = STEERING["vectors"][0]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"steering": {"vectors": [{"name": "mood"}]}}, "vectors=DIRECTORY"),
        ({"steering": {"vectors": []}}, "at least 1"),
        ({"steering": {"vectors": [vector], "positions": {"slices": [[90, 91]]}}}, "no token"),
        ({"steering": {"vectors": [vector | {"hook": "mlp_out"}]}}, "resid_pre, resid_post"),
        ({"hooks": [(9, "resid_post", print)]}, "no layer 9"),
        ({"hooks": [(1, "mlp_out", print)]}, "has no activation 'mlp_out'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"names": ["kl"]}, "unknown columns"),
    ]
    for options, reason in changes:
        with pytest.raises(ValueError, match=reason):
            model.columns(CONTEXTS, TARGETS, **options)
    with pytest.raises(ValueError, match="from 0 to 1435"):
        model.columns([[5000]], [[1]])


POLICY = Policy(temperature=0.8, top_p=0.9, top_k=200)


def test_a_policy_scores_what_it_draws(loaded: LocalModel) -> None:
    prompt = loaded.encode("Once upon a time")
    samples = loaded.sample([prompt] * 4, 12, POLICY, seed=3)
    assert [s.tolist() for s in loaded.sample([prompt] * 4, 12, POLICY, seed=3)] == [
        s.tolist() for s in samples
    ]
    for rows in loaded.read([prompt] * 4, samples):
        assert rows.columns(["log_q"], POLICY)["log_q"].isfinite().all()
        q_RV = rows.log_q_RV(POLICY).exp()
        assert q_RV.sum(-1).numpy() == pytest.approx(1.0, abs=1e-5)
        unlikely_R = rows.logits_RV.argmin(-1)
        assert (rows.log_q_RV(POLICY)[torch.arange(len(q_RV)), unlikely_R] == -torch.inf).all()
        with pytest.raises(ValueError, match="temperature 0"):
            rows.columns(["rb_entropy"], Policy(temperature=0.0))


def test_pairs_and_parameters_that_do_not_fit_are_refused(loaded: LocalModel) -> None:
    name = "model.norm.weight"
    for contexts, targets, parameters, reason in (
        ([[1]], [], {}, "give pairs"),
        ([[]], [[1]], {}, "empty"),
        ([[1] * 2000], [[1]], {}, "reads 1024"),
        ([[1]], [[1]], {"nothing": torch.ones(3)}, "no such parameter"),
        ([[1]], [[1]], {name: torch.ones(3)}, r"\[3\]"),
        ([[1]], [[1]], {name: torch.ones(128, dtype=torch.float64)}, "float64"),
    ):
        with pytest.raises(ValueError, match=reason):
            loaded.read(contexts, targets, parameters=parameters)  # type: ignore[arg-type]


def test_the_example_of_the_module_runs() -> None:
    import logsteer_server.embedded as embedded

    lines = [line[4:] for line in embedded.__doc__.splitlines() if line.startswith("    ")]
    code = "\n".join(lines).replace('"demo/model"', repr(str(DEMO_MODEL)))
    scope = {"torch": torch, "reward": lambda ids: len(set(ids.tolist()))}
    exec(code, scope)
    assert bool(scope["loss"].isfinite())  # type: ignore[attr-defined]
