"""LoRA adapters through HTTP on both engines, against transformers with merged weights."""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from logsteer import APIError, Client
from logsteer.errors import NotFoundError
from tests.conftest import DEMO_MODEL, ServerFactory, tlens_model, uncached
from tests.contract.agreement import check_agreement, check_sweep
from tests.contract.directions import load_model, read_logprobs
from tests.contract.lora import merge_adapter, write_adapter
from tests.contract.steering import DATA, LAYER, HookedReference, V
from tests.contract.tlens_cases import draw_ids
from tests.refusals import refused

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
SLOTS = 2
COUNT = 5
CONTEXT = draw_ids(np.random.default_rng(1), 40).tolist()
TARGET = draw_ids(np.random.default_rng(2), 7).tolist()
ITEM = {"context_ids": CONTEXT, "target_ids": [TARGET]}
IDS = np.array(CONTEXT + TARGET, np.int32)
STEERING = {"vectors": [{**DATA, "scale": 1.5}]}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters `a0`, `a1`, …; the last one counts ranks by their roots."""
    directory = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(directory / f"a{n}", seed=n, use_rslora=n == COUNT - 1) for n in range(COUNT)
    ]


@pytest.fixture(scope="module", params=["vllm_adapters", "tlens"])
def client(request: pytest.FixtureRequest, directories: list[Path]) -> Iterator[Client]:
    """A client of a server that keeps all of them and, on vLLM, has room for SLOTS."""
    server = request.getfixturevalue(f"{request.param}_server")
    with Client(server.url, max_retries=0, timeout=300) as client:
        for directory in directories:
            client.adapters.put(directory.name, directory)
        yield client


@pytest.fixture(scope="module")
def merged(directories: list[Path]) -> list[np.ndarray]:
    """What transformers says of the item's tokens under each adapter."""
    models = (merge_adapter(load_model(DEMO_MODEL), directory) for directory in directories)
    return [read_logprobs(model, IDS)[len(CONTEXT) - 1 :] for model in models]


def score(client: Client, **options: Any) -> np.ndarray:
    target = client.logprob([ITEM], **options).results[0].targets[0]
    return np.array(target.logprobs)


def test_an_adapter_goes_up_and_goes_again(client: Client, tmp_path: Path) -> None:
    card = client.adapters.get("a0")
    assert (card.model, card.rank, card.alpha, card.tensors) == ("demo", 4, 6.0, 50)
    assert card.updated == 25
    assert card.modules == ["down_proj", "gate_proj", "o_proj", "q_proj", "v_proj"]
    again = client.adapters.put("again", write_adapter(tmp_path / "again", seed=0))
    assert (again.sha256, again.norm) == (card.sha256, card.norm)
    assert [c.name for c in client.adapters.list().adapters] == [
        "a0",
        "a1",
        "a2",
        "a3",
        "a4",
        "again",
    ]
    assert client.adapters.delete("again").sha256 == card.sha256
    with refused("unknown_adapter"):
        client.adapters.get("again")
    with pytest.raises(NotFoundError, match="a0, a1"):
        score(client, adapter="again")


def test_scores_are_those_of_merged_weights(client: Client, merged: list[np.ndarray]) -> None:
    plain = score(client)
    for n, wanted in enumerate(merged):
        assert score(client, adapter=f"a{n}") == pytest.approx(wanted, abs=PER_TOKEN)
        assert np.abs(wanted - plain).max() > 0.1
    # The context is in the prefix cache of every one of them by now.
    assert score(client) == pytest.approx(plain, abs=PER_TOKEN)
    assert score(client, adapter="a0") == pytest.approx(merged[0], abs=PER_TOKEN)


def test_a_variant_is_computed_with_its_adapter(client: Client, merged: list[np.ndarray]) -> None:
    client.variants.put("adapted", adapter="a1")
    try:
        found = client.logprob([ITEM], model="adapted")
        assert found.results == client.logprob([ITEM], adapter="a1").results
        assert found.adapter is not None and found.adapter.name == "a1"
        assert found.results[0].targets[0].logprobs == pytest.approx(merged[1], abs=PER_TOKEN)
        with refused("in_use", "'a1' is named by the variants adapted"):
            client.adapters.delete("a1")
    finally:
        client.variants.delete("adapted")


def test_a_name_is_given_to_another_adapter(
    client: Client, directories: list[Path], merged: list[np.ndarray]
) -> None:
    """As in vllm-project/vllm#30931: keys and values of a name's former adapter were read again."""
    for number in (0, 1, 0):
        client.adapters.put("renamed", directories[number], overwrite=True)
        for cache in (False, False, True):
            scores = score(client, adapter="renamed", cache=cache)
            assert scores == pytest.approx(merged[number], abs=PER_TOKEN)
    client.adapters.delete("renamed")


def test_many_adapters_at_once_share_the_slots(client: Client, merged: list[np.ndarray]) -> None:
    plain = score(client)

    def ask(n: int) -> np.ndarray:
        return score(client, adapter=f"a{n % COUNT}") if n % 3 else score(client)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for n, found in enumerate(pool.map(ask, range(60))):
            wanted = merged[n % COUNT] if n % 3 else plain
            assert found == pytest.approx(wanted, abs=PER_TOKEN), n


def test_steered_generation_scores_as_it_was_sampled(
    client: Client, directories: list[Path]
) -> None:
    options: dict[str, Any] = {"prompt_ids": [CONTEXT], "max_tokens": 10, "n": 2, "seed": 5}
    answer = client.steer(None, STEERING, adapter="a1", baseline=True, ignore_eos=True, **options)
    plain = client.generate(None, adapter="a1", ignore_eos=True, **options)
    assert answer.adapter.sha256 == client.adapters.get("a1").sha256
    (result,) = answer.results
    own = [completion.token_ids for completion in plain.results[0].completions]
    assert [completion.token_ids for completion in result.baseline] == own
    reference = HookedReference(DEMO_MODEL)
    merge_adapter(reference.model, directories[1])
    for completion in result.completions:
        ids = completion.token_ids
        item = {"context_ids": CONTEXT, "target_ids": [ids]}
        again = client.logprob([item], adapter="a1", steering=STEERING).results[0].targets[0]
        assert again.logprobs == pytest.approx(completion.logprobs, abs=PER_TOKEN)
        wanted = reference.logprobs(CONTEXT, ids, lambda x: x + 1.5 * V, layer=LAYER)
        assert completion.logprobs == pytest.approx(wanted, abs=PER_TOKEN)


def test_activations_are_those_of_merged_weights(client: Client, directories: list[Path]) -> None:
    reference = HookedReference(DEMO_MODEL)
    merge_adapter(reference.model, directories[1])
    wanted = reference.activations(CONTEXT)
    item = {"token_ids": CONTEXT}
    found = client.activations([item, item], [LAYER, 4], adapter="a1")
    assert found.answer.adapter is not None and found.answer.adapter.name == "a1"
    steered = client.activations([item], [LAYER], adapter="a1", steering=STEERING)
    for one in found:
        assert one.layers[LAYER] == pytest.approx(wanted[LAYER], abs=PER_TOKEN)
        assert one.layers[4] == pytest.approx(wanted[4], abs=PER_TOKEN)
    assert steered.layers[LAYER] == pytest.approx(wanted[LAYER] + 1.5 * V.numpy(), abs=PER_TOKEN)
    plain = client.activations([item], [4]).layers[4]
    assert np.abs(plain - wanted[4]).max() > 0.1


def test_every_endpoint_takes_an_adapter(client: Client) -> None:
    check_agreement(client, adapter="a2")
    check_agreement(client, adapter="a2", steering=STEERING)
    check_sweep(client, STEERING, adapter="a2")


def bad_adapters(directory: Path) -> dict[str, tuple[Path, str]]:
    """Directories that are refused, each with what the refusal says."""

    def change(name: str, rename: Any = None, **config: Any) -> Path:
        path = write_adapter(directory / name, **config)
        if rename is not None:
            file = path / "adapter_model.safetensors"
            save_file({rename(key): tensor for key, tensor in load_file(file).items()}, file)
        return path

    torn = change("torn")
    weights = torn / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    dropped = change("dropped")
    tensors = load_file(dropped / "adapter_model.safetensors")
    tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    save_file(tensors, dropped / "adapter_model.safetensors")
    narrow = {}
    for factor, axis in (("lora_A", 1), ("lora_B", 0)):
        path = narrow[factor] = change(factor)
        file = path / "adapter_model.safetensors"
        tensors = load_file(file)
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{factor}.weight"
        tensors[name] = tensors[name].narrow(axis, 0, tensors[name].shape[axis] - 1).contiguous()
        save_file(tensors, file)
    return {
        "dora": (change("dora", use_dora=True), "use_dora"),
        "other kind": (change("other", peft_type="IA3"), "not that of a LoRA"),
        "another rank": (change("rank", r=3), "r = 3"),
        "head": (change("head", lambda key: key.replace("q_proj", "lm_head")), "head"),
        "embedding": (change("embedding", lambda key: f"{key}.magnitude"), "not a factor"),
        "one factor": (dropped, "one factor of two"),
        "torn": (torn, "safetensors"),
        "no such module": (
            change("module", lambda key: key.replace("q_proj", "query")), "does not fit",
        ),
        "a column too few": (narrow["lora_A"], "make no update of a parameter"),
        "a row too few": (narrow["lora_B"], "make no update of a parameter"),
    }  # fmt: skip


def test_what_does_not_fit_is_refused(client: Client, tmp_path: Path) -> None:
    before = client.adapters.list()
    for directory, reason in bad_adapters(tmp_path).values():
        with refused("invalid_adapter", reason):
            client.adapters.put("bad", directory)
    assert client.adapters.list() == before
    url = f"{client.base_url}/adapters/bad"
    files = {"config": b"{}", "weights": b"x" * 2**23}
    assert httpx.put(url, files=files).json()["code"] == "payload_too_large"
    assert "Send the files" in httpx.put(url, files={"config": b"{}"}).json()["detail"]
    assert httpx.put(url, content=b"{}").json()["code"] == "invalid_request"
    assert client.adapters.list() == before
    assert score(client).shape == (len(TARGET),)


UNTAKEN = {
    "no such layer": (lambda key: key.replace("layers.1.", "layers.99."), "model.layers.99."),
    "another tower": (
        lambda key: key.replace("model.layers.", "model.vision.layers."), "model.vision.layers.0.",
    ),
}  # fmt: skip
"""How tensors are renamed, all of them or those of one layer, and what a refusal then names."""


@pytest.mark.parametrize("case", UNTAKEN)
@pytest.mark.parametrize("is_alone", [True, False])
def test_tensors_that_no_module_takes_are_refused_by_name(
    client: Client, tmp_path: Path, case: str, is_alone: bool
) -> None:
    rename, named = UNTAKEN[case]
    directory = write_adapter(tmp_path / "untaken")
    file = directory / "adapter_model.safetensors"
    tensors = {rename(key): tensor for key, tensor in load_file(file).items()}
    if is_alone:
        tensors = {key: tensor for key, tensor in tensors.items() if named in key}
    else:
        tensors |= {key: tensor for key, tensor in load_file(file).items() if ".layers.2." in key}
    save_file(tensors, file)
    with refused("invalid_adapter", named.replace(".", r"\.")):
        client.adapters.put("untaken", directory)
    assert score(client).shape == (len(TARGET),)


def test_a_rank_beyond_the_room_is_refused(client: Client, tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", rank=16)
    if client.model("demo").engine == "transformer_lens":
        assert client.adapters.put("wide", wide).rank == 16
        client.adapters.delete("wide")
        return
    with pytest.raises(APIError, match="raise adapter_rank"):
        client.adapters.put("wide", wide)


def test_a_model_without_slots_says_what_to_set(
    vllm_client: Client, directories: list[Path]
) -> None:
    with refused("unsupported_by_engine", "adapter_slots"):
        vllm_client.adapters.put("a0", directories[0])


def test_an_adapter_and_an_override_add_up(
    start_server: ServerFactory, directories: list[Path], tmp_path: Path
) -> None:
    """On a server of its own: of the shared one another file says which overrides it has."""
    model = load_model(DEMO_MODEL)
    parameters = dict(model.named_parameters())
    moved = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight")
    direction = {name: parameters[name].clone() for name in moved}
    save_file(direction, tmp_path / "v.safetensors")
    merge_adapter(model, directories[0])
    for name, v in direction.items():
        parameters[name] += 0.1 * v
    wanted = read_logprobs(model, IDS)[len(CONTEXT) - 1 :]
    with Client(start_server(uncached(tlens_model("demo"))).url, timeout=300) as client:
        client.overrides.put("v", tmp_path / "v.safetensors")
        client.adapters.put("a0", directories[0])
        found = score(client, adapter="a0", override={"name": "v", "eta": 0.1})
    assert found == pytest.approx(wanted, abs=PER_TOKEN)
