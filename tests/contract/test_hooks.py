"""Every point of a layer on both engines: what transformers has there, and does when it is changed.

A point is read by `/activations` and by probes, steered, asked by conditions, and trained at.
"""

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from logsteer import Client
from tests.conftest import HOOKS, Server
from tests.contract.agreement import PER_TOKEN
from tests.contract.steering import LAYER, OPERATIONS, VECTOR, HookedReference, V
from tests.contract.tlens_cases import draw_ids
from tests.refusals import refused

pytestmark = pytest.mark.engine

ENGINES = ("vllm", "tlens")
EACH = [(hook, engine) for hook in HOOKS for engine in ENGINES]
LAYERS = [0, 2, 4]
CONTEXT, TARGET = (draw_ids(np.random.default_rng(3), n).tolist() for n in (30, 12))


@pytest.fixture(scope="module")
def client(parity_server: Server) -> Any:
    with Client(parity_server.url, max_retries=0, timeout=300) as found:
        yield found


def data(hook: str, **more: Any) -> dict[str, Any]:
    return {"data": {str(LAYER): VECTOR.tolist()}, "hook": hook, **more}


def score(client: Client, engine: str, **options: Any) -> Any:
    item = {"context_ids": CONTEXT, "target_ids": [TARGET]}
    return client.logprob([item], model=engine, **options)


@pytest.mark.parametrize(("hook", "engine"), EACH)
def test_a_point_is_read(client: Client, hooked: HookedReference, hook: str, engine: str) -> None:
    ids = CONTEXT + TARGET
    wanted_LTD = hooked.activations(ids, hook)
    found = client.activations([{"token_ids": ids}], LAYERS, hook=hook, read="each", model=engine)
    for layer in LAYERS:
        assert np.abs(found[0].layers[layer] - wanted_LTD[layer]).max() < PER_TOKEN
    answer = score(client, engine, probes=[data(hook, layers=LAYERS)])
    rows = slice(len(CONTEXT), len(ids))
    for probe in answer.results[0].targets[0].probes:
        assert probe.hook == hook
        wanted = wanted_LTD[probe.layer, rows] @ (VECTOR / np.linalg.norm(VECTOR))
        assert np.abs(np.array(probe.before) - wanted).max() < PER_TOKEN


@pytest.mark.parametrize("name", ["add", "ablate", "rotate"])
@pytest.mark.parametrize(("hook", "engine"), EACH)
def test_a_point_is_steered(
    client: Client, hooked: HookedReference, hook: str, engine: str, name: str
) -> None:
    options, change = OPERATIONS[name]
    where = {"slices": [[2, 20], [33, 36]]}
    steering = {"vectors": [data(hook, **options)], "positions": where}
    answer = score(client, engine, steering=steering, cache=False)
    wanted = hooked.logprobs(CONTEXT, TARGET, change, where, LAYER, hook)
    found = np.array(answer.results[0].targets[0].logprobs)
    assert np.abs(found - wanted).max() < PER_TOKEN
    assert np.abs(wanted - hooked.logprobs(CONTEXT, TARGET)).max() > 10 * PER_TOKEN
    site = str(LAYER) if hook == "resid_post" else f"{LAYER}.{hook}"
    assert {at: got.tokens for at, got in answer.steering.layers.items()} == {site: 21}


@pytest.mark.parametrize(("hook", "engine"), EACH)
def test_a_condition_reads_a_point_for_those_behind_it(
    client: Client, hooked: HookedReference, hook: str, engine: str
) -> None:
    """In the same layer, too; what comes before it is refused."""
    ids = CONTEXT + TARGET[:-1]
    reading_T = hooked.activations(ids, hook)[LAYER] @ (VECTOR / np.linalg.norm(VECTOR))
    middle = float(np.sort(reading_T)[20:22].mean())  # rounding puts no token on the other side
    when = {"probe": data(hook), "above": middle}
    steering = {"vectors": [data("resid_post", scale=1.5, when=when)]}
    answer = score(client, engine, steering=steering, cache=False)
    held = np.flatnonzero(reading_T > middle)
    where = {"slices": [[int(n), int(n) + 1] for n in held]}
    wanted = hooked.logprobs(CONTEXT, TARGET, lambda x: x + 1.5 * V, where, LAYER)
    assert np.abs(np.array(answer.results[0].targets[0].logprobs) - wanted).max() < PER_TOKEN
    assert answer.steering.vectors[0].passed == len(held)
    if hook != "resid_pre":
        early = {"vectors": [data("resid_pre", when=when)]}
        with refused("invalid_request", "before"):
            score(client, engine, steering=early)


def test_two_points_of_a_layer_at_once(client: Client) -> None:
    """The sum of attention's and the MLP's changes is that of the stream's, on both engines."""
    for engine in ENGINES:
        vectors = [data("resid_mid", scale=1.0), data("attn_out", scale=-1.0)]
        both = score(client, engine, steering={"vectors": vectors}, cache=False)
        plain = score(client, engine)
        found, wanted = (np.array(a.results[0].targets[0].logprobs) for a in (both, plain))
        assert np.abs(found - wanted).max() < PER_TOKEN
        assert set(both.steering.layers) == {f"{LAYER}.attn_out", f"{LAYER}.resid_mid"}


def test_a_patch_at_a_point_is_that_of_the_other_engine(client: Client) -> None:
    pair = {
        name: {"context": f"The capital of {country} is", "targets": [" Paris"]}
        for name, country in (("clean", "France"), ("corrupted", "Spain"))
    }
    for hook in HOOKS[:-1]:
        ours, theirs = (
            np.array(client.patch([pair], hook=hook, model=engine).results[0].matrix)
            for engine in ENGINES
        )
        assert np.abs(ours - theirs).max() < 3 * PER_TOKEN, hook
        assert np.ptp(ours) > 100 * PER_TOKEN, hook


def test_vectors_trained_at_a_point_are_the_same(client: Client) -> None:
    pairs = [{"positive": f"{a} was happy.", "negative": f"{a} was sad."} for a in ("Tom", "Lily")]
    for hook in HOOKS[:-1]:
        vectors = []
        for engine in ENGINES:
            card = client.vectors.train(f"{hook}-{engine}", pairs, hook=hook, model=engine).vector
            assert card.hook == hook
            vectors.append(load(client.vectors.download(card.name)))
        for name, vector_D in vectors[0].items():
            assert np.abs(vector_D - vectors[1][name]).max() < PER_TOKEN, name
        assert len(vectors[0]) == len(card.layers) == 5


def test_what_is_not_compiled_in_names_the_setting(vllm_client: Client) -> None:
    card = vllm_client.models().models[0]
    assert card.hooks == ["resid_post"]
    line = rf"set hooks: \[resid_post, attn_out\] for the model {card.id}"
    for ask in (
        lambda: vllm_client.activations(["a"], [1], hook="attn_out", model=card.id),
        lambda: score(vllm_client, card.id, steering={"vectors": [data("attn_out")]}),
        lambda: score(vllm_client, card.id, probes=[data("attn_out")]),
    ):
        with refused("unsupported_by_engine", line):
            ask()
