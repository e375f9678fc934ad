"""Conversations on real engines, by a template that ends in white space: what is scored is what was
generated."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from logsteer import Client
from tests.conftest import Server
from tests.contract.steering import DATA

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
        assert text.logprobs is not None
        pairs = zip(completion.token_ids, text.token_ids or [], strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_same += same  # drawn tokens need not be those of their text
        assert text.logprobs[:same] == pytest.approx(completion.logprobs[:same], abs=PER_TOKEN)
    assert num_same >= 4
