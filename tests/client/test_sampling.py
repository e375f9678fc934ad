"""`Client.sample`: which prompts are drawn, how they are batched, and what becomes of them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer import Client
from logsteer.errors import InvalidRequestError
from logsteer.extras.datasets import draw_prompts, read_prompts, register_dataset
from tests.client.documents import ANSWER


def continue_prompts(request: httpx.Request) -> httpx.Response:
    """An answer that says which prompt and seed each completion had."""
    body = json.loads(request.content)
    seed, results = body["seed"], []
    for prompt in body["prompts"]:
        completions = []
        for _ in range(body.get("n", 1)):
            completions.append({
                "text": f"{prompt} {seed}", "token_ids": [1, 2], "tokens": ["a", "b"],
                "logprobs": [-0.5, -0.25], "logprob": -0.75, "num_tokens": 2,
                "finish_reason": "stop", "seed": seed,
                "columns": {"entropy": [0.1, 0.2]},
                "aggregates": {"entropy": dict.fromkeys(
                    ("sum", "mean", "min", "max", "early", "late"), 0.15)},
            })  # fmt: skip
            seed += 1
        results.append({"completions": completions, "prompt_ids": [1, 9]})
    return httpx.Response(200, json=ANSWER | {"results": results})


@pytest.fixture
def client() -> Any:
    with Client("http://test", transport=httpx.MockTransport(continue_prompts)) as found:
        yield found


def test_every_sample_has_a_seed_of_its_own(client: Client) -> None:
    prompts = [f"p{n}" for n in range(7)]
    samples = client.sample(prompts, n=2, seed=100, batch_size=3)
    assert [sample.completion.seed for sample in samples] == list(range(100, 114))
    assert [sample.index for sample in samples] == [n // 2 for n in range(14)]
    assert samples[4:6][0].source.prompt == "p2"


def test_rewards_stand_beside_the_results(client: Client) -> None:
    samples = client.sample(["a", "bb"], reward=lambda prompt, text: len(prompt) + len(text))
    assert [sample.reward for sample in samples] == [4, 6]


def test_the_table_has_rows_columns_and_aggregates(client: Client, tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": 3}, {"question": "b", "answer": 4}]
    samples = client.sample(rows, field="question", reward=lambda _prompt, _text: 1.5)
    table = samples.to_pandas()
    assert table["row_answer"].tolist() == [3, 4]
    assert table["reward"].tolist() == [1.5, 1.5]
    assert table["entropy"].tolist() == [[0.1, 0.2]] * 2
    assert table["entropy_mean"].tolist() == [0.15] * 2
    samples.to_parquet(tmp_path / "samples.parquet")
    import pandas as pd

    again = pd.read_parquet(tmp_path / "samples.parquet")
    assert again["text"].tolist() == ["a 0", "b 1"]
    assert again["token_ids"][0].tolist() == [1, 2]


def test_json_lines_are_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "n": 1}\n\n"two"\n')
    for source in (path, str(path), f"jsonl:{path}"):
        assert [row.prompt for row in read_prompts(source)] == ["one", "two"]
    path.write_text("{broken\n")
    with pytest.raises(InvalidRequestError, match="line 1: no JSON"):
        read_prompts(path)
    path.write_text('{"text": "x"}\n')
    with pytest.raises(InvalidRequestError, match="row 0 has no text under 'prompt', only text"):
        read_prompts(path)


def test_other_kinds_of_datasets_can_be_added() -> None:
    register_dataset("numbers", lambda name: [{"prompt": str(n)} for n in range(int(name))])
    assert [row.prompt for row in read_prompts("numbers:3")] == ["0", "1", "2"]
    assert [row.prompt for row in read_prompts("Once upon a time: a story")] == [
        "Once upon a time: a story"
    ]


def test_draws_with_and_without_replacement() -> None:
    prompts = read_prompts([str(n) for n in range(20)])
    once = draw_prompts(prompts, 20, False, 1)
    assert sorted(once, key=lambda row: int(row.prompt)) == prompts != once
    assert draw_prompts(prompts, 20, False, 1) == once
    again = draw_prompts(prompts, 200, True, 1)
    assert len(again) == 200
    assert len({row.prompt for row in again}) == 20
    with pytest.raises(InvalidRequestError, match="with_replacement"):
        draw_prompts(prompts, 21, False, 1)
    assert draw_prompts(prompts, None, False, 1) == prompts
