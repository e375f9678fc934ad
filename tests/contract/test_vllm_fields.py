"""Fields of vLLM's requests beside OpenAI's: each at its neutral value, and what they ask for."""

from typing import Any

import httpx
import pytest

from logsteer import Client
from logsteer.schemas.openai import ChatCompletionRequest, CompletionRequest
from tests.contract.conftest import PROMPT, clients_of

client = clients_of("vllm", "tlens")

pytestmark = pytest.mark.engine
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def post(client: Client, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The answer of an endpoint for the server's first model."""
    asked = {"model": client.models().models[0].id} | fields
    answer = httpx.post(f"{client.base_url}{path}", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(client: Client, **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/completions", fields)


def chat(client: Client, **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/chat/completions", fields)


def choose(client: Client, **fields: Any) -> dict[str, Any]:
    """The first completion of PROMPT."""
    found: dict[str, Any] = complete(client, prompt=PROMPT, **GREEDY | fields)["choices"][0]
    return found


@pytest.mark.filterwarnings("ignore")
def test_every_field_of_vllms_requests_is_taken_at_its_default() -> None:
    from vllm.entrypoints.openai.chat_completion import protocol as chats
    from vllm.entrypoints.openai.completion import protocol as completions

    whole = completions.CompletionRequest(prompt=PROMPT).model_dump()
    assert len(whole) > 45
    for name, value in whole.items():
        CompletionRequest.model_validate({"prompt": PROMPT, name: value})
    CompletionRequest.model_validate(whole)
    talk = chats.ChatCompletionRequest(messages=MESSAGES)
    with_defaults = talk.model_dump(exclude={"messages"})
    assert len(with_defaults) > 50
    ChatCompletionRequest.model_validate(with_defaults | {"messages": MESSAGES})


def test_stops(client: Client) -> None:
    plain = choose(client, return_token_ids=True)
    ids = plain["token_ids"]
    stopped = choose(client, stop_token_ids=[ids[3]], return_token_ids=True)
    assert (stopped["token_ids"], stopped["finish_reason"]) == (ids[:4], "stop")
    kept = choose(client, stop_token_ids=[ids[3]], include_stop_str_in_output=True)
    assert plain["text"].startswith(kept["text"])
    assert len(kept["text"]) > len(stopped["text"])
    later = choose(client, stop_token_ids=[ids[3]], min_tokens=6, return_token_ids=True)
    assert ids[3] not in later["token_ids"][:6]
    word = choose(client, stop=[stopped["text"]], min_tokens=6)
    assert word["text"].startswith(stopped["text"]), "it came before six tokens had"


def test_ids_are_those_of_the_prompt_and_of_the_completion(client: Client) -> None:
    prompts = [result.token_ids for result in client.tokenize(["The cat", PROMPT]).results]
    answer = complete(
        client, prompt=["The cat", PROMPT], n=2, max_tokens=8, ignore_eos=True,
        return_token_ids=True,
    )  # fmt: skip
    shown = [(one["prompt_token_ids"], len(one["token_ids"])) for one in answer["choices"]]
    assert shown == [(ids, 8) for ids in prompts for _ in range(2)]
    talk = chat(client, messages=MESSAGES, return_token_ids=True, **GREEDY)
    assert talk["usage"]["prompt_tokens"] == len(talk["prompt_token_ids"])
    assert talk["choices"][0]["token_ids"]


@pytest.mark.parametrize("shown", [0, 3, -1])
def test_log_probabilities_of_a_prompt(client: Client, shown: int) -> None:
    ids = client.tokenize(PROMPT).results[0].token_ids
    answer = complete(client, prompt=[ids], prompt_logprobs=shown, **GREEDY | {"max_tokens": 1})
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(ids)
    item = {"context_ids": ids[:1], "target_ids": [ids[1:]]}
    target = client.logprob([item]).results[0].targets[0]
    for row, token in enumerate(ids[1:]):
        entry = found[row + 1][str(token)]
        assert entry["logprob"] == pytest.approx(target.logprobs[row], abs=1e-4)
        assert entry["rank"] == target.ranks[row]
        assert entry["decoded_token"] == target.tokens[row]
        if shown >= 0:
            assert shown <= len(found[row + 1]) <= shown + 1
    if shown < 0:
        assert len({len(entries) for entries in found[1:]}) == 1
        assert len(found[1]) == client.models().models[0].vocab_size
    talk = chat(client, messages=MESSAGES, prompt_logprobs=1, **GREEDY)
    assert len(talk["prompt_logprobs"]) == talk["usage"]["prompt_tokens"]


def test_log_probabilities_of_tokens_that_are_named(client: Client) -> None:
    prompt_ids = client.tokenize(PROMPT).results[0].token_ids
    listed = [300, 5, 900]
    fields: dict[str, Any] = {
        "logprob_token_ids": listed, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    found = choose(client, logprobs=0, temperature=1.2, seed=1, **fields)
    drawn = found["token_ids"]
    item = {"context_ids": prompt_ids, "target_ids": [drawn], "alternatives": listed}
    wanted = client.logprob([item]).results[0].targets[0]
    assert wanted.alternatives is not None
    for row, token in enumerate(drawn):
        entries = found["logprobs"]["top_logprobs"][row]
        assert entries.keys() == {f"token_id:{one}" for one in [*listed, token]}
        for one, value in zip(listed, wanted.alternatives.logprobs[row], strict=True):
            assert entries[f"token_id:{one}"] == pytest.approx(value, abs=1e-4)
    talk = chat(client, messages=MESSAGES, logprobs=True, stop=[], **fields | GREEDY)
    for entry in talk["choices"][0]["logprobs"]["content"]:
        own = {one["token"] for one in entry["top_logprobs"]}
        assert own | {entry["token"]} == {f"token_id:{one}" for one in listed} | {entry["token"]}
        assert len(own) >= len(listed)


def test_what_a_prompt_is_read_as(client: Client) -> None:
    ids = client.tokenize(PROMPT).results[0].token_ids
    bare = choose(client, add_special_tokens=False, return_token_ids=True)["prompt_token_ids"]
    assert bare == client.tokenize(PROMPT, bos="never").results[0].token_ids
    cut = choose(client, truncate_prompt_tokens=2, return_token_ids=True)
    assert cut["prompt_token_ids"] == ids[-2:]
    assert choose(client, truncate_prompt_tokens=-1)["text"] == choose(client)["text"]
    assert choose(client, top_k=-1)["text"] == choose(client)["text"]


def test_special_tokens_are_written_where_that_is_asked_for(client: Client) -> None:
    fields: dict[str, Any] = {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 2}
    assert choose(client, **fields)["text"] == ""
    assert choose(client, skip_special_tokens=False, **fields)["text"].count("<") == 2


def test_a_reply_that_goes_on_with_the_last_turn(client: Client) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    fields: dict[str, Any] = {"messages": turns, "continue_final_message": True, **GREEDY}
    plain = chat(client, **fields)["choices"][0]["message"]["content"]
    assert chat(client, echo=True, **fields)["choices"][0]["message"]["content"] == (
        "Once upon" + plain
    )


def test_salts_keep_prefixes_apart(client: Client) -> None:
    story = PROMPT + " there was a little girl" * 20
    fields: dict[str, Any] = {"prompt": story, "request_id": "mine", **GREEDY}
    assert complete(client, priority=1, **fields)["id"] == "cmpl-mine"
    texts = {complete(client, cache_salt=salt, **fields)["choices"][0]["text"] for salt in "ab"}
    assert len(texts) == 1


def test_a_json_schema_in_vllms_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in (schema, '{"type": "object"}'):
        asked = CompletionRequest.model_validate(
            {"prompt": "a", "structured_outputs": {"json": form, "regex": None}}
        )
        assert asked.response_format is not None
        assert asked.response_format.type == "json_schema"
    for wrong in ({"grammar": "a"}, {"regex": "a", "json_object": True}, {}, {"choice": []}):
        with pytest.raises(ValueError, match=r"json_object|at least 1"):
            CompletionRequest.model_validate({"prompt": "a", "structured_outputs": wrong})
