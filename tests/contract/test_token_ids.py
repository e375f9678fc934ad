"""Tokens that are no text by themselves: any ids on every endpoint, and names of alternatives."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from logsteer import Client
from logsteer_server.text.sums import count_ids
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL, STORIES_MODEL, Server, fake_model, needs_shared
from tests.contract.agreement import PER_TOKEN
from tests.contract.conftest import REAL, clients_of
from tests.trained import convert_smollm2, needs_smollm2

CHECKPOINTS = {
    "byte_level": convert_smollm2,
    "byte_fallback": lambda: DEMO_MODEL,
    "sentencepiece": lambda: STORIES_MODEL,
}
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
ABLATE = {"vectors": [{"data": {"1": [1.0] + [0.0] * 15}, "op": "ablate"}]}
client = clients_of(*REAL)
anything = partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("byte_level", marks=needs_smollm2),
        "byte_fallback",
        pytest.param("sentencepiece", marks=needs_shared),
    ],
)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return CHECKPOINTS[request.param]()


@pytest.fixture(scope="module")
def codec(checkpoint: Path) -> TextCodec:
    return TextCodec.load(str(checkpoint))


@pytest.fixture(scope="module")
def service(
    checkpoint: Path, codec: TextCodec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """The fake engine with the tokenizer."""
    model = fake_model(vocab_size=codec.vocab_size) | {"path": str(checkpoint)}
    server = Server.start({"models": [model]}, tmp_path_factory.mktemp("fake"))
    server.wait_until_ready()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
    server.stop()


@cache
def ids_of(codec: TextCodec) -> st.SearchStrategy[list[int]]:
    """Ids, half of them parts of characters."""
    parts = [n for n in range(codec.vocab_size) if UNKNOWN in codec.piece(n)]
    one = st.one_of(st.sampled_from(parts), st.integers(0, codec.vocab_size - 1))
    return st.lists(one, min_size=1, max_size=12)


@anything(max_examples=300)
@given(st.data())
def test_every_token_begins_where_its_text_does(codec: TextCodec, data: st.DataObject) -> None:
    ids = data.draw(ids_of(codec))
    text, starts = codec.decode(ids), codec.find_starts(ids)
    assert len(starts) == len(ids) and starts == sorted(starts)
    for token_id, start in zip(ids, starts, strict=True):
        assert start <= len(text)
        piece = codec.piece(token_id)
        assert (
            UNKNOWN in piece
            or text.startswith((piece, UNKNOWN), start)
            or (not start and f" {text}".startswith(piece))
        )
    covered = text if ids[:1] != [codec.bos_id] else codec.decode(ids[1:])
    counts = count_ids(ids, codec)
    assert counts.shape == (len(ids), 3)
    assert counts.sum(axis=0)[:2].tolist() == [len(covered.encode()), len(covered)]


def test_a_tokenizers_own_limits_change_no_text(tmp_path: Path) -> None:
    """deepjavalibrary/djl, issue 2669: a tokenizer.json may say what batches it was trained in."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["truncation"] = {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    document["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    texts = ["Once upon a time there was a cat.", "a"]
    plain, limited = TextCodec.load(str(DEMO_MODEL)), TextCodec.load(str(tmp_path))
    assert limited.encode(texts) == plain.encode(texts)
    assert limited.encode_ids(texts) == plain.encode_ids(texts)


@anything(max_examples=20)
@given(st.data())
def test_any_ids_are_answered(service: httpx.Client, codec: TextCodec, data: st.DataObject) -> None:
    ids = data.draw(ids_of(codec))
    item = {"context_ids": ids, "target_ids": [ids]}
    bodies: dict[str, Any] = {
        "/logprob": {"items": [item], "top": 3},
        "/diagnostics": {"items": [item]},
        "/perplexity": {"texts": [ids, []], "tokens": True, "protocol": "rolling"},
        "/generate": {"prompt_ids": [ids], "max_tokens": 2},
        "/steer": {"prompt_ids": [ids], "max_tokens": 2, "steering": ABLATE},
        "/sweep": {"items": [item], "steering": ABLATE, "scales": [1.0]},
        "/activations": {"items": [{"token_ids": ids}], "layers": [1]},
        "/lens": {"items": [item], "layers": [1]},
        "/patch": {"pairs": [{"clean": item, "corrupted": item}]},
        "/detokenize": {"token_ids": [ids]},
        "/v1/completions": {"prompt": ids, "echo": True, "logprobs": 3, "max_tokens": 2},
        "/v1/score": {"query": ids, "items": [ids], "label_token_ids": ids[:1]},
    }
    for path, body in bodies.items():
        answer = service.post(path, json=body)
        assert answer.status_code == 200, (path, ids, answer.text)


def complete(client: Client, model: str, **fields: Any) -> Any:
    url = f"{client.base_url}/v1/completions"
    answer = httpx.post(url, json={"model": model, "logprobs": 1000, **fields}, timeout=300).json()
    return answer["choices"][0]


def test_alternatives_that_look_alike_have_names_of_their_own(client: Client, model: str) -> None:
    """Bytes of characters are one sign, and a letter's byte is that letter."""
    ids = [1, 100, 201, 365]  # no UTF-8
    item = {"context_ids": ids[:1], "target_ids": [ids[1:]]}
    wanted = client.logprob([item], top=1000, model=model).results[0].targets[0].top
    options: Any = {"prompt": ids, "echo": True, "max_tokens": 0}
    named = complete(client, model, **options)["logprobs"]
    by_id = complete(client, model, **options, return_tokens_as_token_ids=True)["logprobs"]
    assert by_id["tokens"] == [f"token_id:{n}" for n in ids]
    assert by_id["text_offset"] == named["text_offset"]  # vllm-project/vllm, issue 19368
    for place in range(1, len(ids)):
        row, numbers = wanted.logprobs[place - 1], wanted.token_ids[place - 1]
        names, exact = named["top_logprobs"][place], by_id["top_logprobs"][place]
        assert list(exact)[:1000] == [f"token_id:{n}" for n in numbers]
        assert list(names.values())[:1000] == pytest.approx(row, abs=PER_TOKEN)
        first = {}
        for piece, value in zip(wanted.tokens[place - 1], row, strict=True):
            first.setdefault(piece, value)
        assert {name: names[name] for name in first} == pytest.approx(first, abs=PER_TOKEN)
        assert names[named["tokens"][place]] == named["token_logprobs"][place]
        assert exact[by_id["tokens"][place]] == by_id["token_logprobs"][place]
        assert {"bytes:\\xf0", "bytes:\\xe2"} & names.keys()


def test_bytes_of_a_chats_alternatives_are_those_of_the_tokens(client: Client, model: str) -> None:
    """vllm-project/vllm, issue 9463: and the end of a text is named, not empty."""
    signs = TextCodec.load(str(DEMO_MODEL))._backend.id_to_token
    asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2,
             "logprobs": True, "top_logprobs": 1000}  # fmt: skip
    url, seen = f"{client.base_url}/v1/chat/completions", Counter[str]()
    by_text, by_id = (
        httpx.post(url, json=asked | more, timeout=300).json()["choices"][0]["logprobs"]["content"]
        for more in ({"temperature": 0}, {"temperature": 0, "return_tokens_as_token_ids": True})
    )
    for one, other in zip(by_text, by_id, strict=True):
        for entry, numbered in zip(
            [one, *one["top_logprobs"]], [other, *other["top_logprobs"]], strict=True
        ):
            sign = signs(int(numbered["token"].removeprefix("token_id:")))
            byte = re.fullmatch("<0x(..)>", sign)
            own = list(bytes.fromhex(byte[1])) if byte else list(sign.encode())
            assert entry["bytes"] == numbered["bytes"] == own
            assert entry["token"] == bytes(own).decode(errors="replace")
            seen[entry["token"]] += 1
    assert seen[UNKNOWN] > 50 and seen["</s>"]


def test_offsets_of_a_completion_count_the_characters_of_its_text(
    client: Client, model: str
) -> None:
    """abetlen/llama-cpp-python, issue 1037: a character of several tokens counts once."""
    options: Any = {"prompt": "Once", "max_tokens": 60, "temperature": 2.0, "ignore_eos": True}
    num_parts = 0
    for seed in range(8):
        choice = complete(client, model, **options, seed=seed)
        shown, text = choice["logprobs"], choice["text"]
        num_parts += text.count(UNKNOWN)
        for token, start in zip(shown["tokens"], shown["text_offset"], strict=True):
            is_part = UNKNOWN in token or token.startswith(("bytes:", "<", "token_id"))
            assert is_part or text.startswith((token, UNKNOWN), start), (text, token, start)
    assert num_parts


@pytest.mark.engine
@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_text_is_that_of_the_checkpoints_own_tokenizer(
    byte_level_server: Server, model: str
) -> None:
    """huggingface/transformers, issue 45488: the class that a configuration names replaces it."""
    path = byte_level_server.directory / "byte-level" / "tokenizer.json"
    own = Tokenizer.from_file(str(path))
    with Client(byte_level_server.url, max_retries=0, timeout=300) as client:
        options: Any = {"model": model, "max_tokens": 40, "n": 8, "seed": 5}
        (result,) = client.generate("The model", **options).results
        assert own.encode("The model", add_special_tokens=False).ids == result.prompt_ids
        texts = [
            (own.decode([*result.prompt_ids, *each.token_ids]), each.text)
            for each in result.completions
        ]
        assert all(whole.endswith(text) for whole, text in texts), texts
        (stopped,) = client.generate("The model", **options, stop=[" "]).results
        assert [each.text for each in stopped.completions] == [
            text.split(" ")[0] for _, text in texts
        ]
    if model == "vllm":
        form = {"name": "f", "schema": {"const": "a b"}}
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20,
                "response_format": {"type": "json_schema", "json_schema": form}}  # fmt: skip
        url = f"{byte_level_server.url}/v1/chat/completions"
        (choice,) = httpx.post(url, json=body, timeout=300).json()["choices"]
        assert choice["message"]["content"] == '"a b"'
