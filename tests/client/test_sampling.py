"""`Client.sample`: which prompts are drawn, how they are batched, and what becomes of them."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer import AsyncClient, Client
from logsteer.errors import InvalidRequestError, OverloadedError
from logsteer.extras.datasets import draw_prompts, read_prompts, register_dataset
from logsteer.extras.sampling import Samples
from tests.client.documents import ANSWER
from tests.own_time import run_in_own_time

from .scripted import Caller, problem


def continue_prompts(request: httpx.Request) -> httpx.Response:
    """An answer that says which prompt and seed each completion had."""
    body = json.loads(request.content)
    seed, results = body["seed"], []
    for prompt in body["prompts"]:
        completions = []
        for _ in range(body.get("n", 1)):
            completions.append({
                "text": f"{prompt} {seed}", "token_ids": [1, 2], "tokens": ["a", "b"],
                "logprobs": [-0.5, None], "logprob": -0.75, "num_tokens": 2,
                "finish_reason": "stop", "seed": seed,
                "columns": {"entropy": [0.1, 0.2]},
                "aggregates": {"entropy": dict.fromkeys(
                    ("sum", "mean", "min", "max", "early"), 0.15) | {"late": None}},
            })  # fmt: skip
            seed += 1
        results.append({"completions": completions, "prompt_ids": [1, 9, 9], "baseline": None})
    return httpx.Response(200, json=ANSWER | {"results": results})


class Flaky:
    """Continues prompts, or the last turns of conversations; refuses requests with one of `broken`.

    `asked` are the requests' bodies; `change` is applied to each answer, given its prompts.
    """

    def __init__(self, *broken: str, code: str = "overloaded", status: int = 429) -> None:
        self.broken = set(broken)
        self.refusal = problem(code, status)
        self.asked: list[dict[str, Any]] = []
        self.change: Callable[[Any, list[str]], None] = lambda answer, prompts: None

    @property
    def sizes(self) -> list[int]:
        """The number of prompts of each request."""
        return [len(body["prompts"]) for body in self.asked]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        prompts = body.get("prompts") or [turns[-1]["content"] for turns in body["messages"]]
        if self.broken & set(prompts):
            return self.refusal
        asked = httpx.Request("POST", request.url, json={**body, "prompts": prompts})
        answer = json.loads(continue_prompts(asked).content)
        self.change(answer, prompts)
        return httpx.Response(200, json=answer)


PROMPTS = [f"p{n}" for n in range(12)]
Use = Callable[..., Samples]


@pytest.fixture
def sample(call: Caller) -> Use:
    """`client.sample` of either client: of its server first, then its own arguments."""

    def use(server: Any, *arguments: Any, **options: Any) -> Samples:
        found: Samples = call(server, lambda c: c.sample(*arguments, **options), max_retries=0)
        return found

    return use


def texts(samples: Samples) -> list[str]:
    return [one.completion.text for one in samples]


def test_every_sample_has_a_seed_of_its_own(sample: Use) -> None:
    samples = sample(continue_prompts, PROMPTS[:7], n=2, seed=100, batch_size=3)
    assert [one.completion.seed for one in samples] == list(range(100, 114))
    assert [one.index for one in samples] == [n // 2 for n in range(14)]
    assert samples[4:6][0].source.prompt == "p2"
    assert [one.completion.seed for one in samples[9:3:-2]] == [109, 107, 105]
    assert (samples[-1].prompt_ids, samples[-1].prompt_length) == ([1, 9, 9], 3)
    assert samples.failures == []


def test_rows_may_hold_conversations(sample: Use) -> None:
    server = Flaky()
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS[:3]]
    found = sample(server, rows, batch_size=2, concurrency=1)
    asked = [body["messages"] for body in server.asked]
    assert asked == [[row["prompt"] for row in rows[:2]], [rows[2]["prompt"]]]
    assert texts(found) == ["p0 0", "p1 1", "p2 2"]
    with pytest.raises(InvalidRequestError, match="texts and conversations"):
        sample(server, [*rows, "p"])


def test_options_are_those_of_generate(sample: Use) -> None:
    server, steering = Flaky(), {"vectors": [{"name": "mood", "scale": 2.0}]}
    n = np.int64(2)
    sample(server, ["a"], columns=("log_q",), n=n, stop=["x"], steering=steering, seed=None)
    wanted = {"prompts": ["a"], "columns": ["log_q"], "n": 2, "stop": ["x"], "seed": 0}
    assert server.asked == [wanted | {"steering": steering}]


def test_batches_are_under_way_at_once_and_results_in_order() -> None:
    together = threading.Barrier(3, timeout=60)

    def wait_for_others(request: httpx.Request) -> httpx.Response:
        together.wait()
        return continue_prompts(request)

    with Client("http://test", transport=httpx.MockTransport(wait_for_others)) as client:
        samples = client.sample(PROMPTS[:6], batch_size=1, concurrency=3, seed=0)
    assert texts(samples) == [f"p{n} {n}" for n in range(6)]


def test_tasks_are_under_way_at_once_and_no_more_than_asked_for() -> None:
    here = most = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal here, most
        here += 1
        most = max(most, here)
        # Later batches answer first.
        await asyncio.sleep(0.02 / (1 + json.loads(request.content)["seed"]))
        here -= 1
        return continue_prompts(request)

    async def run() -> Samples:
        async with AsyncClient("http://test", transport=httpx.MockTransport(answer)) as client:
            return await client.sample(PROMPTS, batch_size=1, concurrency=3)

    assert texts(run_in_own_time(run())) == [f"p{n} {n}" for n in range(12)]
    assert most == 3


def test_a_reward_sees_the_row(sample: Use) -> None:
    rows = [{"question": "a", "answer": "a 0"}, {"question": "b", "answer": "?"}]

    def is_right(row: Any, prompt: str, completion: str) -> float:
        assert prompt == row["question"]
        return completion == row["answer"]

    samples = sample(continue_prompts, rows, field="question", reward=is_right)
    assert [one.reward for one in samples] == [1.0, 0.0]


def test_a_reward_that_fails_costs_one_result(sample: Use) -> None:
    def rate(row: Any, prompt: str, completion: str) -> Any:
        return {"p0": 1, "p1": float("nan"), "p2": "many", "p3": None}[prompt]

    with pytest.warns(UserWarning, match="4 rewards failed .*ValueError: the reward is nan"):
        samples = sample(continue_prompts, PROMPTS[:5], reward=rate, batch_size=2, concurrency=1)
    assert [one.reward for one in samples] == [1.0, None, None, None, None]
    assert [str(one.reward_error).partition(":")[0] for one in samples] == [
        "None", "ValueError", "ValueError", "TypeError", "KeyError",
    ]  # fmt: skip
    assert samples.records()[4]["reward_error"] == "KeyError: 'p4'"


def test_rewards_may_be_awaited(sample: Use) -> None:
    loops = set()

    async def rate(row: Any, prompt: str, completion: str) -> float:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        if prompt == "p1":
            raise RuntimeError("no judge")
        return len(completion)

    with pytest.warns(UserWarning, match="1 rewards failed .*RuntimeError: no judge"):
        samples = sample(continue_prompts, PROMPTS[:4], reward=rate, batch_size=2)
    assert [one.reward for one in samples] == [4.0, None, 4.0, 4.0]
    assert len(loops) == 1


def test_a_notebook_may_sample() -> None:
    async def notebook() -> Samples:
        with Client("http://test", transport=httpx.MockTransport(continue_prompts)) as client:
            return client.sample(["a"], reward=lambda *_: 2.0)

    assert [one.reward for one in asyncio.run(notebook())] == [2.0]


@pytest.mark.parametrize(
    ("code", "status", "size", "lost", "sizes", "told"),
    [
        ("overloaded", 429, 3, range(3, 6), [3, 3, 3, 3], "3 of 12 .*draw 3 to 5: overloaded"),
        ("context_too_long", 422, 6, range(4, 5), [6, 3, 3, 1, 2, 1, 1, 6],
         "1 of 12 .*draw 4: context_too"),
    ],
)  # fmt: skip
def test_a_batch_that_fails_costs_its_own_draws_and_a_refused_prompt_itself(
    sample: Use, code: str, status: int, size: int, lost: range, sizes: list[int], told: str
) -> None:
    server = Flaky("p4", code=code, status=status)
    with pytest.warns(UserWarning, match=told):
        samples = sample(server, PROMPTS, batch_size=size, n=2, concurrency=1)
    draws = [n for n in range(12) for _ in range(2) if n not in lost]
    assert [one.index for one in samples] == draws
    assert [one.completion.seed for one in samples][::2] == [2 * n for n in draws[::2]]
    assert [failure.draws for failure in samples.failures] == [lost]
    assert samples.failures[0].error.code == code  # type: ignore[attr-defined]
    assert server.sizes == sizes


def test_a_run_that_is_refused_throughout_raises(sample: Use) -> None:
    server = Flaky(*PROMPTS, code="invalid_vector", status=422)
    with pytest.raises(InvalidRequestError, match="invalid_vector"):
        sample(server, PROMPTS * 10, batch_size=8, concurrency=1, max_failures=2)
    assert server.sizes == [8, 4, 2, 1, 1]


def test_a_run_that_only_fails_ends(sample: Use) -> None:
    server = Flaky(*PROMPTS)
    with pytest.raises(OverloadedError):
        sample(server, PROMPTS, batch_size=1, concurrency=1, max_failures=3)
    assert len(server.asked) == 3
    server = Flaky(*PROMPTS[2:])
    with pytest.warns(UserWarning, match="10 of 12 draws"):
        samples = sample(server, PROMPTS, batch_size=1, concurrency=1, max_failures=3)
    assert len(server.asked) == 5
    assert texts(samples) == ["p0 0", "p1 1"]
    assert [failure.draws for failure in samples.failures][3:5] == [range(5, 6), range(6, 7)]
    assert "3 batches in a row had failed" in str(samples.failures[-1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda answer: answer["results"][0]["completions"].pop(),
         "asked for 2 continuations of 1 prompts, got"),
        (lambda answer: answer["provenance"].update(weights_digest="other"),
         "draw 1: another model than before"),
    ],
)  # fmt: skip
def test_what_is_no_answer_to_a_batch_is_its_failure(sample: Use, change: Any, told: str) -> None:
    server = Flaky()
    server.change = lambda answer, prompts: change(answer) if prompts == ["p1"] else None
    with pytest.warns(UserWarning, match=told):
        samples = sample(server, PROMPTS[:3], n=2, batch_size=1, concurrency=1)
    assert [one.index for one in samples] == [0, 0, 2, 2]


def test_wrong_options_are_told_before_anything_is_sent(sample: Use) -> None:
    def older(prompt: str, completion: str) -> float:
        return 0.0

    def named(row: Any, prompt: str, text: str, *, scale: float) -> float:
        return scale

    server = Flaky()
    three = r"called with \(row, prompt, text\)"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 0}, "batch_size is 0; give an integer, at least 1"),
        ({"count": "3"}, "count is '3'; give an integer"),
        ({"concurrency": 2.5}, "concurrency is 2.5; give an integer"),
        ({"max_failures": True}, "max_failures is True; give an integer"),
        ({"reward": older}, three),
        ({"reward": named}, three),
        ({"reward": 3}, three),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"count": 0}, "count is 0"),
        ({"max_prompts_pool": 0}, "max_prompts_pool is 0"),
        ({"temperature": 9}, "temperature"),
    ]
    for options, what in wrong:
        with pytest.raises(InvalidRequestError, match=what):
            sample(server, PROMPTS, **options)
    assert server.asked == []


def test_a_pool_is_the_first_rows(sample: Use) -> None:
    def endless() -> Any:
        number = 0
        while True:
            yield f"p{number}"
            number += 1

    samples = sample(
        continue_prompts, endless(), max_prompts_pool=3, count=50, with_replacement=True, seed=1
    )
    assert {one.source.prompt for one in samples} == {"p0", "p1", "p2"}
    assert len(samples) == 50


def test_the_table_has_rows_columns_and_aggregates(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": 3}, {"question": "b", "answer": 4}]
    with Client("http://test", transport=httpx.MockTransport(continue_prompts)) as client:
        samples = client.sample(rows, field="question", reward=lambda *_: 1.5)
    table = samples.to_pandas()
    assert table["row_answer"].tolist() == [3, 4]
    assert table["reward"].tolist() == [1.5, 1.5]
    assert table["prompt_length"].tolist() == [3, 3]
    assert table["entropy"].tolist() == [[0.1, 0.2]] * 2
    assert table["entropy_mean"].tolist() == [0.15] * 2
    table.to_parquet(tmp_path / "samples.parquet")
    import pandas as pd

    again = pd.read_parquet(tmp_path / "samples.parquet")
    assert again["text"].tolist() == ["a 0", "b 1"]
    assert again["token_ids"][0].tolist() == [1, 2]


def test_other_kinds_of_datasets_can_be_added() -> None:
    register_dataset("numbers", lambda name: [{"prompt": str(n)} for n in range(int(name))])
    assert [row.prompt for row in read_prompts("numbers:3")] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["prompts.txt", "openai/gsm8k", "hub:x", "hf:", "Once: a story"])
def test_a_text_is_no_source(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"pass \[text\] for one prompt.*hf:NAME"):
        read_prompts(name)
    assert [row.prompt for row in read_prompts([name])] == [name]


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
