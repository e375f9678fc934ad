"""The model in Python, without HTTP: numbers that carry their graph."""

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer_server.contract.jobs import Policy
from logsteer_server.embedded import LocalModel
from tests.conftest import DEMO_MODEL
from tests.contract.directions import load_model, save_model
from tests.contract.tlens_cases import OTHERS, draw_ids

pytestmark = pytest.mark.engine

POLICY = Policy(temperature=0.8, top_p=0.9, top_k=200)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(DEMO_MODEL, device="cpu")


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    path = save_model(OTHERS["gpt2"], tmp_path_factory.mktemp("fine"))
    return LocalModel(path, dtype="float64", device="cpu")


def draw_pairs() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [draw_ids(rng, n) for n in (4, 20, 9)], [draw_ids(rng, n) for n in (6, 1, 12)]


def leaves(model: LocalModel) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in model.parameters.items()}


def test_log_probabilities_and_their_gradient_are_transformers(model: LocalModel) -> None:
    contexts, targets = draw_pairs()
    theta = leaves(model)
    found = [row["logprob"] for row in model.columns(contexts, targets, parameters=theta)]
    sum(values.sum() for values in found).backward()  # type: ignore[union-attr]
    reference = load_model(DEMO_MODEL).requires_grad_(True)
    for context, target, values in zip(contexts, targets, found, strict=True):
        ids_T = torch.from_numpy(np.concatenate([context, target]).astype(np.int64))
        rows = reference(ids_T[None, :-1]).logits[0, -len(target) :].log_softmax(-1)
        wanted = rows.gather(-1, ids_T[-len(target) :, None])[:, 0]
        assert values.detach().numpy() == pytest.approx(wanted.detach().numpy(), abs=1e-4)
        wanted.sum().backward()
    wanted_gradients = dict(reference.named_parameters())
    assert theta.keys() == wanted_gradients.keys()
    for name, tensor in theta.items():
        wanted = wanted_gradients[name].grad
        assert (tensor.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max(), name
    plain = [row["logprob"] for row in model.columns(contexts, targets)]
    for values, other in zip(plain, found, strict=True):
        assert values.numpy() == pytest.approx(other.detach().numpy(), abs=1e-5)
    assert not any(values.requires_grad for values in plain)


def test_a_policy_scores_what_it_draws(model: LocalModel) -> None:
    prompt = model.encode("Once upon a time")
    samples = model.sample([prompt] * 4, 12, POLICY, seed=3)
    assert [s.tolist() for s in model.sample([prompt] * 4, 12, POLICY, seed=3)] == [
        s.tolist() for s in samples
    ]
    for rows in model.read([prompt] * 4, samples):
        assert rows.columns(["log_q"], POLICY)["log_q"].isfinite().all()
        q_RV = rows.log_q_RV(POLICY).exp()
        assert q_RV.sum(-1).numpy() == pytest.approx(1.0, abs=1e-5)
        unlikely_R = rows.logits_RV.argmin(-1)
        assert (rows.log_q_RV(POLICY)[torch.arange(len(q_RV)), unlikely_R] == -torch.inf).all()
        with pytest.raises(ValueError, match="temperature 0"):
            rows.columns(["rb_entropy"], Policy(temperature=0.0))


def test_what_does_not_fit_is_refused(model: LocalModel) -> None:
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
            model.read(contexts, targets, parameters=parameters)  # type: ignore[arg-type]


def test_the_example_of_the_module_runs() -> None:
    import logsteer_server.embedded as embedded

    lines = [line[4:] for line in embedded.__doc__.splitlines() if line.startswith("    ")]
    code = "\n".join(lines).replace('"demo/model"', repr(str(DEMO_MODEL)))
    scope = {"torch": torch, "reward": lambda ids: len(set(ids.tolist()))}
    exec(code, scope)
    assert bool(scope["loss"].isfinite())  # type: ignore[attr-defined]
