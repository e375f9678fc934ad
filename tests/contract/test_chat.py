"""Conversations on real engines, by a template that ends in white space: what is scored is what was
generated."""

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load

from logsteer import Client
from logsteer.errors import InvalidRequestError, LogsteerError
from tests.conftest import Server
from tests.contract.steering import DATA
from tests.refusals import refused

pytestmark = pytest.mark.engine

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
STEERED = {"vectors": [DATA | {"scale": 1.5}], "positions": "completion"}
PER_TOKEN = 1e-4


@pytest.fixture
def client(chat_server: Server) -> Iterator[Client]:
    with Client(chat_server.url, max_retries=0, timeout=300) as found:
        yield found


@pytest.mark.parametrize("steering", [None, STEERED], ids=["plain", "steered"])
@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_a_reply_is_scored_as_it_was_drawn(client: Client, model: str, steering: Any) -> None:
    options: Any = {"model": model, "max_tokens": 16, "seed": 3, "n": 8, "temperature": 0.5}
    if steering is None:
        (result,) = client.generate(None, messages=CHAT, **options).results
    else:
        (result,) = client.steer(None, steering, messages=CHAT, **options).results
    rendered = client.detokenize([result.prompt_ids], model=model).texts[0]
    assert rendered.endswith("<|assistant|>\n\n")

    by_ids = {
        "context_ids": result.prompt_ids,
        "target_ids": [completion.token_ids for completion in result.completions],
    }
    by_text = {"messages": CHAT, "targets": [completion.text for completion in result.completions]}
    scored = client.logprob([by_ids, by_text], model=model, steering=steering).results
    num_same = 0
    for completion, ids, text in zip(
        result.completions, scored[0].targets, scored[1].targets, strict=True
    ):
        assert ids.logprobs == pytest.approx(completion.logprobs, abs=PER_TOKEN)
        pairs = zip(completion.token_ids, text.token_ids or [], strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_same += same  # drawn tokens need not be those of their text
        assert text.logprobs[:same] == pytest.approx(completion.logprobs[:same], abs=PER_TOKEN)
    assert num_same >= 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_of_several_templates_the_one_in_use_has_its_name(client: Client, model: str) -> None:
    from logsteer.lm_eval import LogsteerLM

    adapter = LogsteerLM(client.base_url, model)
    template = Path(__file__).parents[1].joinpath("chat_template.jinja").read_text()
    assert adapter.chat_template(True) == adapter.chat_template("default") == template
    with pytest.raises(LogsteerError, match="uses the chat template default, not 'rag'"):
        adapter.chat_template("rag")
    rendered = client.tokenize(messages=CHAT, model=model).results[0].token_ids
    assert adapter.tok_encode(adapter.apply_chat_template(CHAT)) == rendered
    (score,) = adapter.loglikelihood([SimpleNamespace(args=("", " Paris"))], disable_tqdm=True)
    assert score[0] < 0


@pytest.fixture
def outside(chat_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_a_request_may_bring_its_template(
    outside: openai.OpenAI, client: Client, model: str
) -> None:
    def ask(template: str, **body: Any) -> Any:
        body = {"chat_template": template, "return_token_ids": True} | body
        return outside.chat.completions.create(
            model=model, messages=CHAT, max_tokens=1, extra_body=body
        )

    ids = ask("Q: {{ messages[0].content }} {{ mood }}", chat_template_kwargs={"mood": "A:"})
    text = f"Q: {CHAT[0]['content']} A:"
    assert (
        ids.prompt_token_ids == client.tokenize(text, model=model, bos="never").results[0].token_ids
    )
    for broken, reason in {
        "{% for": "unexpected",
        "{{ raise_exception('no such turn') }}": "no such turn",
        "{{ messages.__class__.__mro__ }}": "unsafe",
        "{{ 1 / 0 }}": "division",
    }.items():
        with pytest.raises(openai.BadRequestError, match=f"chat template.*{reason}") as refused:
            ask(broken)
        assert refused.value.param == "chat_template"


ANSWER = {"role": "assistant", "content": "Paris"}
PREFILL = {"continue_final_message": True}


@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_every_endpoint_reads_the_same_conversation(client: Client, model: str) -> None:
    one, two = [*CHAT, ANSWER], [{"role": "system", "content": "Be kind."}, *CHAT]
    tokens = client.tokenize(messages=[one, two], model=model).results
    ids = [each.token_ids for each in tokens]
    (alone,) = client.tokenize(messages=one, model=model).results
    assert alone.token_ids == ids[0]

    greedy: Any = {"model": model, "temperature": 0, "max_tokens": 4}
    asked = client.generate(None, messages=[one, two], **greedy).results
    assert [result.prompt_ids for result in asked] == ids
    form: Any = {"model": model, "add_generation_prompt": True}
    texts = client.detokenize(ids, model=model).texts
    read = client.perplexity(messages=[one, two], **form, bos="never").results
    wanted = client.perplexity(texts, model=model, bos="never").results
    for found, own in zip(read, wanted, strict=True):
        assert found.sum_logprob == pytest.approx(own.sum_logprob, abs=PER_TOKEN * own.num_scored)
    items = [{"messages": messages} for messages in (one, two)]
    read_ids = [each.token_ids.tolist() for each in client.activations(items, [1], **form)]
    assert read_ids == ids

    with pytest.raises(InvalidRequestError, match="does not read") as refused:
        client.generate(None, messages=one, chat_template_kwargs={"depth": 2}, **greedy)
    assert refused.value.param == "chat_template_kwargs"
    answer = client.generate(None, messages=[one, [ANSWER], two], **greedy, on_error="report")
    problems = [result.problem and result.problem.param for result in answer.results]
    assert problems == [None, "messages[1]", None]


@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_a_configured_variant_sets_variables_of_the_template(client: Client, model: str) -> None:
    quiet: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    item = {"messages": CHAT, "targets": [" Paris"]}
    found = client.logprob([item], model=f"quiet-{model}").results
    assert found == client.logprob([item], model=model, **quiet).results
    assert found != client.logprob([item], model=model).results
    with refused("exists", "server's file"):
        client.variants.put(f"quiet-{model}", model=model)


@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_a_prefilled_answer_goes_on(client: Client, model: str) -> None:
    greedy: Any = {"model": model, "temperature": 0, "max_tokens": 4}
    (result,) = client.generate(None, messages=[*CHAT, ANSWER], **PREFILL, **greedy).results
    (text,) = client.detokenize([result.prompt_ids], model=model).texts
    assert text.endswith("<|assistant|>Paris")
    item = {"messages": [*CHAT, ANSWER], "targets": [result.completions[0].text]}
    (scored,) = client.logprob([item], model=model, **PREFILL).results
    assert scored.targets[0].logprob == pytest.approx(result.completions[0].logprob, abs=1e-3)


@pytest.mark.parametrize("model", ["vllm", "tlens"])
def test_a_vector_of_answers_is_the_difference_at_their_tokens(client: Client, model: str) -> None:
    def answered(text: str) -> list[dict[str, str]]:
        return [*CHAT, {"role": "assistant", "content": text}]

    sides = [(answered("Yes"), answered("No")), (answered("I will"), answered("I won't"))]
    name = f"answers-{model}"
    trained = client.vectors.train(name, sides, model=model, layers=[2], read="answer")
    assert trained.vector.about.read == "answer"
    items = [{"messages": side} for pair in sides for side in pair]
    read = client.activations(items, [2], model=model, read="last", **PREFILL)
    rows = np.stack([each.layers[2][0] for each in read])
    wanted = (rows[0::2] - rows[1::2]).mean(0)
    file = load(client.vectors.download(name, "safetensors"))
    (found,) = file.values()
    assert found == pytest.approx(wanted, abs=1e-4)


SCHEMA: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "sure"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "say", "parameters": SCHEMA}}


@pytest.mark.parametrize("steering", [None, STEERED], ids=["plain", "steered"])
def test_a_reply_has_the_form_asked_for(outside: openai.OpenAI, steering: Any) -> None:
    """Of the same draws as a neighbour's that is free, which is told nothing of it."""
    body = {} if steering is None else {"extra_body": {"steering": steering}}
    arguments: Any = {"model": "vllm", "messages": CHAT, "seed": 5, "max_tokens": 60} | body
    free = outside.chat.completions.create(**arguments, n=2)
    forced = outside.chat.completions.create(
        **arguments, n=6, response_format=FORM, logprobs=True, temperature=1.5
    )
    cities = set()
    for choice in forced.choices:
        assert choice.finish_reason == "stop", choice
        said = json.loads(choice.message.content or "")
        assert said.keys() == {"city", "sure"}
        cities.add(said["city"])
        tokens = (choice.logprobs and choice.logprobs.content) or []
        # Log-probabilities are the model's own, to which such a reply is strange.
        assert sum(token.logprob for token in tokens) < -20
    assert cities == {"Paris", "Rome"}
    assert (getattr(forced, "steering", None) is None) == (steering is None)
    again = outside.chat.completions.create(**arguments, n=2)
    assert [c.message.content for c in again.choices] == [c.message.content for c in free.choices]
    json_object = outside.chat.completions.create(
        **arguments | {"max_tokens": 200}, response_format={"type": "json_object"}
    )
    assert (json_object.choices[0].message.content or "").lstrip().startswith("{")


CHOICES = ["a+b", 'say "c\\d"\nor']


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"choice": CHOICES}, "|".join(map(re.escape, CHOICES))),
        ({"regex": r"^[xy]{2,3}\.$"}, "[xy]{2,3}[.]"),
    ],
)
def test_a_reply_matches_an_expression(
    outside: openai.OpenAI, client: Client, form: Any, wanted: str
) -> None:
    body = {"structured_outputs": form, "return_token_ids": True}
    replies = outside.completions.create(
        model="vllm", prompt="Once", n=8, seed=1, max_tokens=40, extra_body=body, temperature=2
    )
    said = {choice.text for choice in replies.choices}
    assert len(said) > 1
    for choice in replies.choices:
        assert (choice.finish_reason, bool(re.fullmatch(wanted, choice.text))) == ("stop", True)
    stream = outside.completions.create(
        model="vllm", prompt="Once", seed=1, max_tokens=40, extra_body=body, temperature=2,
        stream=True,
    )  # fmt: skip
    assert "".join(event.choices[0].text for event in stream) == replies.choices[0].text


NAMED: Any = {"type": "function", "function": {"name": "say"}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_tools_are_called(outside: openai.OpenAI, choice: Any, reason: str) -> None:
    arguments: Any = {
        "model": "vllm", "messages": CHAT, "tools": [TOOL], "tool_choice": choice, "seed": 5,
        "max_tokens": 120, "parallel_tool_calls": False,
    }  # fmt: skip
    found = outside.chat.completions.create(**arguments).choices[0]
    assert found.finish_reason == reason
    (call,) = found.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, found.message.content) == ("say", None)
    assert json.loads(call.function.arguments).keys() == {"city", "sure"}

    with outside.chat.completions.stream(**arguments) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls or []
    assert [one.function.arguments for one in streamed] == [call.function.arguments]

    turns: Any = [
        *CHAT, found.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "It is."},
    ]  # fmt: skip
    reply = outside.chat.completions.create(
        **arguments | {"messages": turns, "tool_choice": "auto"}
    )
    assert reply.choices[0].message.role == "assistant"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_was_cut_says_so(outside: openai.OpenAI, choice: Any) -> None:
    """As in vllm-project/vllm#53269: a stream called it whole."""
    for max_tokens in (1, 4, 8, 120):
        arguments: Any = {
            "model": "vllm", "messages": CHAT, "tools": [TOOL], "tool_choice": choice, "seed": 5,
            "max_tokens": max_tokens, "parallel_tool_calls": False,
        }  # fmt: skip
        whole = outside.chat.completions.create(**arguments).choices[0]
        with outside.chat.completions.stream(**arguments) as events:
            chunks = [event.chunk.choices for event in events if event.type == "chunk"]
        reasons = [each.finish_reason for (each,) in chunks if each.finish_reason]
        assert reasons == [whole.finish_reason]
        assert (whole.finish_reason == "length") == (max_tokens < 120)


PATTERNS = [f"(.*{sign}.{{30}}){{{n}}}x" for sign in "aeiou" for n in range(1, 20)]
BRANCHES: Any = {"anyOf": [{"type": "string", "pattern": pattern} for pattern in PATTERNS]}


def test_a_reply_that_breaks_its_form_is_no_answer(outside: openai.OpenAI) -> None:
    """llguidance ends a reply where its lexer has more states than it may."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": BRANCHES}}
    arguments: Any = {
        "model": "vllm", "messages": CHAT, "max_tokens": 40, "response_format": form, "seed": 1,
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="does not have its form"):
        outside.chat.completions.create(**arguments)
    with pytest.raises(openai.APIError, match="does not have its form"):
        for event in outside.chat.completions.create(**arguments, stream=True):
            assert event.choices[0].finish_reason is None


def test_what_cannot_be_forced_is_refused_by_name(outside: openai.OpenAI) -> None:
    broken: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "cat"}}}
    cases: list[tuple[str, Any, str]] = [
        ("tlens", {"response_format": FORM}, "engine transformer_lens forces no form"),
        ("tlens", {"tools": [TOOL], "tool_choice": "required"}, "serve the model with engine vllm"),
        ("vllm", {"response_format": broken}, "response_format: .* Invalid type: cat"),
        ("vllm", {"extra_body": {"structured_outputs": {"regex": r"\bno"}}}, "cannot be forced"),
        ("tlens", {"extra_body": {"structured_outputs": {"choice": ["a"]}}}, "The engine"),
    ]
    for model, fields, reason in cases:
        with pytest.raises(openai.BadRequestError, match=reason):
            outside.chat.completions.create(model=model, messages=CHAT, max_tokens=8, **fields)
    free = outside.chat.completions.create(model="tlens", messages=CHAT, tools=[TOOL], max_tokens=8)
    assert free.choices[0].message.content
