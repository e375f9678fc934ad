"""OpenAI's shape on every engine: completions, chats, streams, an unmodified `openai` client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from logsteer import Client
from tests.contract.agreement import PER_TOKEN

PROMPT = "Once upon a time"


@pytest.fixture
def outside(client: Client) -> Iterator[openai.OpenAI]:
    """The `openai` client, as it comes."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_models_are_listed(outside: openai.OpenAI, model: str) -> None:
    assert model in [card.id for card in outside.models.list()]


def test_an_echoed_prompt_has_the_log_probabilities_of_logprob(
    client: Client, outside: openai.OpenAI, model: str
) -> None:
    ids = client.tokenize([PROMPT], model=model).results[0].token_ids
    item = {"context_ids": ids[:1], "target_ids": [ids[1:]]}
    scored = client.logprob([item], top=2, model=model).results[0].targets[0]
    for max_tokens in (0, 1):
        answer = outside.completions.create(
            model=model, prompt=PROMPT, max_tokens=max_tokens, echo=True, logprobs=2, temperature=0
        )
        choice = answer.choices[0]
        values = choice.logprobs.token_logprobs or []
        assert len(values) == len(ids) + max_tokens
        assert values[0] is None
        assert values[1 : len(ids)] == pytest.approx(scored.logprobs, abs=PER_TOKEN)
        assert choice.text.startswith(PROMPT)
        top = choice.logprobs.top_logprobs or []
        assert len(top) == len(values)
        for found, tokens in zip(top[1 : len(ids)], scored.top.tokens, strict=True):
            assert set(tokens) <= set(found)
        assert answer.usage.completion_tokens == max_tokens


def test_prompts_as_text_ids_and_lists(outside: openai.OpenAI, model: str, client: Client) -> None:
    ids = client.tokenize([PROMPT], model=model).results[0].token_ids
    texts = []
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = outside.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0)
        assert len(answer.choices) == 1
        texts.append(answer.choices[0].text)
    assert len(set(texts)) == 1
    both = outside.completions.create(
        model=model, prompt=[PROMPT, "The capital of France is"], max_tokens=3, temperature=0, n=2
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text


def test_a_stream_is_the_answer_in_pieces(outside: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = outside.completions.create(**arguments).choices[0]
    pieces = [part.choices[0] for part in outside.completions.create(**arguments, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert len(pieces) > 3
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason


def test_a_stream_ends_as_the_answer_does(outside: openai.OpenAI, model: str) -> None:
    """As in ggml-org/llama.cpp#9867, where text before a stop string was lost; in
    huggingface/text-generation-inference#1254, where a part of one was shown; and in
    ggml-org/llama.cpp#20226, where each choice of several ended as the first.
    """
    asked: Any = {"model": model, "prompt": PROMPT, "max_tokens": 24, "n": 3, "seed": 4}
    said = outside.completions.create(**asked).choices
    texts = [choice.text for choice in said]
    stops = [texts[0][5:9], texts[1][:1], texts[2][-3:], texts[0][-1:] + "never", texts[1][7:8]]
    for stop in [[stop] for stop in stops if stop] + [stops[2:4]]:
        whole = outside.completions.create(**asked, stop=stop).choices
        cut = [min([text.find(s) for s in stop if s in text], default=len(text)) for text in texts]
        if model != "fake":  # which writes on
            assert [c.text for c in whole] == [t[:n] for t, n in zip(texts, cut, strict=True)]
        pieces, reasons = ["", "", ""], dict[int, list[str]]()
        for chunk in outside.completions.create(**asked, stop=stop, stream=True):
            for choice in chunk.choices:
                pieces[choice.index] += choice.text
                if choice.finish_reason:
                    reasons.setdefault(choice.index, []).append(choice.finish_reason)
        assert pieces == [choice.text for choice in whole]
        assert reasons == {choice.index: [choice.finish_reason] for choice in whole}


def test_offsets_count_the_characters_that_were_sent(outside: openai.OpenAI, model: str) -> None:
    """Not those of pieces: bytes of one character are tokens, and a BOS is none of the text."""
    prompt = "Café was 日本 🙂 here."
    arguments: Any = {
        "model": model,
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    for given in (prompt, outside.completions.create(**arguments, prompt=prompt).choices[0].text):
        logprobs = outside.completions.create(**arguments, prompt=given).choices[0].logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.text_offset
        for token, start in zip(logprobs.tokens[1:-1], logprobs.text_offset[1:-1], strict=True):
            is_part = "\ufffd" in token or token.startswith("bytes:")
            assert is_part or given[start:].startswith(token), (token, start)
        assert logprobs.text_offset[-1] == len(given)


def test_chats_and_their_streams(outside: openai.OpenAI, model: str) -> None:
    arguments = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = outside.chat.completions.create(**arguments, logprobs=True, top_logprobs=2).choices[0]
    pieces = list(outside.chat.completions.create(**arguments, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.message.content
    assert all(len(token.top_logprobs) == 2 for token in whole.logprobs.content or [])


def test_errors_have_openais_shape(outside: openai.OpenAI, model: str, client: Client) -> None:
    with pytest.raises(openai.NotFoundError, match="resident"):
        outside.completions.create(model="gpt", prompt=PROMPT)
    for bad, param, hint in (
        ({"prompt": ""}, "prompt", "empty"),
        ({"max_tokens": 10**6}, "prompt", "max_tokens|context"),
        ({"prompt": [10**6]}, "prompt", "vocabulary|token ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"temperature": -1}, "temperature", "0.0 or more"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"extra_body": {"sterring": {}}}, "sterring", "did you mean `steering`"),
        ({"extra_body": {"zzz": None}}, "zzz", "no such field; remove it"),
        ({"extra_body": {"cache": False}}, "cache", "send /logprob or /generate"),
    ):
        arguments: Any = {"model": model, "prompt": PROMPT} | bad
        with pytest.raises(openai.BadRequestError, match=hint) as caught:
            outside.completions.create(**arguments)
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)
    body = httpx.post(f"{client.base_url}/v1/completions", json={}).json()
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_the_tokenizer_of_vllms_server(client: Client, model: str) -> None:
    info = httpx.get(f"{client.base_url}/tokenizer_info", params={"model": model}).json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert "assistant" in info["chat_template"]
    for special, bos in ((True, "auto"), (False, "never")):
        request = {"model": model, "prompt": PROMPT, "add_special_tokens": special}
        answer = httpx.post(f"{client.base_url}/tokenize", json=request).json()
        ids = client.tokenize([PROMPT], model=model, bos=bos).results[0].token_ids
        assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    back = httpx.post(f"{client.base_url}/detokenize", json={"model": model, "tokens": ids}).json()
    assert back["prompt"] == PROMPT


def test_the_paths_of_vllms_server(client: Client, model: str) -> None:
    def get(path: str, **query: str) -> Any:
        return httpx.get(f"{client.base_url}{path}", params=query).raise_for_status().json()

    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = httpx.request(method, f"{client.base_url}{path}")
        assert (answer.status_code, answer.content) == (200, b"")
    assert get("/version")["version"] == "0.32.0"
    assert get(f"/v1/models/{model}")["id"] == model
    assert get("/get_world_size", model=model) == {"world_size": 1}
    config = get("/server_info", model=model, config_format="json")["vllm_config"]
    assert config["parallel_config"]["world_size"] == 1
    assert config["model_config"]["max_model_len"] == client.model(model).context_length
    assert isinstance(get("/server_info", model=model)["vllm_config"], str)


@pytest.mark.engine
class TestOnVllm:
    """What only a model can show."""

    def test_a_reset_leaves_no_prefix(self, vllm_client: Client) -> None:
        def count_cached() -> int:
            return vllm_client.generate(
                [100 * "so "], max_tokens=1, model="demo"
            ).usage.cached_tokens

        count_cached()
        assert count_cached() > 0
        answer = httpx.post(f"{vllm_client.base_url}/reset_prefix_cache").raise_for_status()
        assert answer.json() == {"success": True}
        assert count_cached() == 0 < count_cached()

    def test_metrics_have_vllms_names_too(self, vllm_client: Client) -> None:
        for _ in range(2):  # the second finds the first one's prompt in the prefix cache
            list(vllm_client.generate_events([100 * "so "], max_tokens=4, model="demo"))
        text = httpx.get(f"{vllm_client.base_url}/metrics").text
        found = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if 'model="demo"' in line or 'model_name="demo"' in line
        }
        for own, other in (
            ("prompt_tokens_total", "prompt_tokens_total"),
            ("prefix_cached_tokens_total", "prompt_tokens_cached_total"),
            ("generated_tokens_total", "generation_tokens_total"),
            ("answer_seconds_count", "e2e_request_latency_seconds_count"),
            ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
            ("time_between_tokens_seconds_count", "inter_token_latency_seconds_count"),
        ):
            assert found[f"logsteer_{own}"] == found[f"vllm:{other}"] > 0, own

    def test_the_token_read_from_the_last_row_is_the_one_generated(
        self, vllm_client: Client
    ) -> None:
        url = f"{vllm_client.base_url}/v1/completions"
        request = {
            "model": "demo", "prompt": PROMPT, "logprobs": 3, "temperature": 0, "max_tokens": 1,
        }  # fmt: skip
        read, made = (
            httpx.post(url, json={**request, "echo": echo}, timeout=60).json()["choices"][0]
            for echo in (True, False)
        )
        assert read["text"] == PROMPT + made["text"]
        assert read["finish_reason"] == made["finish_reason"] == "length"
        last = read["logprobs"]["token_logprobs"][-1]
        assert last == pytest.approx(made["logprobs"]["token_logprobs"][0], abs=PER_TOKEN)


def test_neighbours_that_want_other_numbers_of_alternatives_change_nothing(
    client: Client, model: str
) -> None:
    """A step of vLLM's reads as many alternatives as the widest of its requests wants."""
    url = f"{client.base_url}/v1/completions"

    def complete(wanted: int | None) -> Any:
        body: Any = {"model": model, "prompt": PROMPT, "max_tokens": 60, "seed": 7}
        body |= {} if wanted is None else {"logprobs": wanted}
        return httpx.post(url, json=body, timeout=60).json()["choices"][0]

    wanted = [0, 4, None, 2, 0, 4, None, 2]
    alone = {count: complete(count) for count in set(wanted)}
    assert len({choice["text"] for choice in alone.values()}) == 1
    with ThreadPoolExecutor(len(wanted)) as pool:
        together = list(pool.map(complete, wanted))
    for count, choice in zip(wanted, together, strict=True):
        assert choice["text"] == alone[count]["text"]
        if count is None:
            assert choice["logprobs"] is None
            continue
        found, expected = choice["logprobs"], alone[count]["logprobs"]
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
        assert [top.keys() for top in found["top_logprobs"]] == [
            top.keys() for top in expected["top_logprobs"]
        ]
