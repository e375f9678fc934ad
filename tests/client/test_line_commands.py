"""`logsteer generate`, `diagnostics` and `gradient`: from arguments, and from JSON lines."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from logsteer.cli import main

from .documents import ANSWER, START, completion, events, logprob_answer, piece, target
from .scripted import Script, event_stream, problem

Output = pytest.CaptureFixture[str]
AGGREGATE = {"sum": -1.5, "mean": -0.75, "min": -1.0, "max": -0.5, "early": -0.5, "late": None}
USED = {"name": "dir", "sha256": "cd" * 32, "eta": 0.001}


def continue_all(request: httpx.Request) -> httpx.Response:
    """Each prompt's continuations say which they are, and of what."""
    body = json.loads(request.content)
    prompts = body.get("prompts") or body.get("prompt_ids") or ["chat"]
    n, seed = body.get("n", 1), body.get("seed", 0)
    results = [
        {
            "completions": [completion(f"{prompt}!", seed + place * n + k) for k in range(n)],
            "prompt_ids": [1, 9],
            "baseline": None,
        }
        for place, prompt in enumerate(prompts)
    ]
    return httpx.Response(200, json={**ANSWER, "results": results})


def score_all(request: httpx.Request) -> httpx.Response:
    items = json.loads(request.content)["items"]
    results = [[target("t", -1.0) for _ in i.get("targets") or i["target_ids"]] for i in items]
    return httpx.Response(200, json=logprob_answer(*results))


def gradient_answer(**fields: Any) -> dict[str, Any]:
    one = {"target": " glad", "token_ids": [5], "logprobs": [-1.0], "logprob": -1.0,
           "num_context": 2, "boundary": "exact", **fields}  # fmt: skip
    return {**ANSWER, "results": [{"targets": [one]}]}


GRADIENT = gradient_answer(
    positions=[1, 2],
    gradients={"2": [[3.0, 4.0], [0.0, 1.0]], "3": [[0.0, 0.5], [0.0, 2.0]]},
    norms={"2": [5.0, 1.0], "3": [0.5, 2.0]},
)
ALONG = {**gradient_answer(directional=0.25, directional_per_token=[0.25]), "along": USED}


def run(server: Any, *argv: str) -> int:
    return main(argv, transport=httpx.MockTransport(server))


def bodies(server: Script) -> list[Any]:
    return [json.loads(body) for body in server.bodies]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a command these lines on standard input."""

    def write(*lines: Any) -> None:
        text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return write


def printed(capsys: Output) -> list[Any]:
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


# ------------------------------------------------------------------ arguments


def test_one_prompt_is_shown_as_it_grows(capsys: Output) -> None:
    result = json.loads(continue_all(httpx.Request("POST", "/", json={"prompts": ["a"]})).content)
    told = events(("start", START), ("piece", piece(" gl\x1b")), ("piece", piece("ad")),
                  ("result", result))  # fmt: skip
    server = Script(event_stream(told))
    argv = ["generate", "I am", "--max-tokens", "2", "--stop", "x", "--override", "dir:-1e-3"]
    assert run(server, *argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("I am gl\\x1bad\n2 tokens, length, logprob -1.5, seed 0")
    assert bodies(server) == [
        {
            "prompts": ["I am"], "max_tokens": 2, "stop": ["x"], "stream": True,
            "override": {"name": "dir", "eta": -1e-3},
        }
    ]  # fmt: skip


def test_several_prompts_and_what_was_read(capsys: Output) -> None:
    answer = json.loads(
        continue_all(httpx.Request("POST", "/", json={"prompts": ["a", "b"], "n": 2})).content
    )
    one = answer["results"][1]["completions"][1]
    one |= {"columns": {"log_q": [-0.25, None]}, "aggregates": {"log_q": AGGREGATE}}
    server = Script(httpx.Response(200, json={**answer, "override": USED}))
    argv = ["generate", "a", "b", "-n", "2", "--diagnostics", "--columns", "log_q"]
    assert run(server, *argv) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["'!'", "-1", "n/a"] in rows
    assert ["log_q", "-0.75", "-1", "-0.5", "-0.5", "n/a", "-1.5"] in rows
    assert "under override dir x 0.001 (cdcdcdcdcdcd)" in out
    assert bodies(server) == [
        {"prompts": ["a", "b"], "n": 2, "diagnostics": True, "columns": ["log_q"]}
    ]


def test_generate_as_json_and_as_a_conversation(capsys: Output) -> None:
    server = Script(continue_all)
    assert run(server, "generate", "Hi", "--chat", "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["completions"][0]["text"] == "chat!"
    assert bodies(server) == [{"messages": [{"role": "user", "content": "Hi"}]}]


def test_diagnostics_of_targets(capsys: Output) -> None:
    score = target(" glad", -1.5, tokens=[" gl", "ad"], logprobs=[-0.5, -1.0], ranks=[1, 7],
                   columns={"entropy": [0.5, None]}, aggregates={"entropy": AGGREGATE})  # fmt: skip
    server = Script(httpx.Response(200, json=logprob_answer([score])))
    argv = ["diagnostics", "I am", " glad", "--top-p", "0.9", "--temperature", "2", "--columns",
            "entropy", "--columns", "rank", "--vector", "mood:2"]  # fmt: skip
    assert run(server, *argv) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert "' glad': logprob -1.5, perplexity 2, 5 tokens" in out
    assert ["'ad'", "-1", "7", "n/a"] in rows
    assert ["entropy", "-0.75", "-1", "-0.5", "-0.5", "n/a", "-1.5"] in rows
    assert bodies(server) == [
        {
            "items": [{"context": "I am", "targets": [" glad"]}],
            "policy": {"temperature": 2.0, "top_p": 0.9},
            "columns": ["entropy", "rank"],
            "steering": {"vectors": [{"name": "mood", "scale": 2.0}]},
        }
    ]
    # Every column is too wide for a terminal: unless some are named, aggregates are shown.
    assert run(server, "diagnostics", "I am", " glad") == 0
    assert "'ad'" not in capsys.readouterr().out
    assert "columns" not in bodies(server)[1]


def test_gradients_of_activations(capsys: Output) -> None:
    server = Script(httpx.Response(200, json=GRADIENT))
    argv = ["gradient", "I am", " glad", "--layers", "2-3", "--hook", "attn_out", "--at", "0:2"]
    assert run(server, *argv) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "context", "5", "0.5"] in rows
    assert ["2", "target", "1", "2"] in rows
    assert bodies(server)[0]["wrt"] == {
        "layers": [2, 3], "hook": "attn_out", "positions": {"slices": [[0, 2]]},
    }  # fmt: skip


def test_a_derivative_along_a_direction(capsys: Output) -> None:
    server = Script(httpx.Response(200, json=ALONG))
    assert run(server, "gradient", "I am", " glad", "--along", "dir", "--bos", "never") == 0
    out = capsys.readouterr().out
    assert "along dir (cdcdcdcdcdcd)" in out
    assert ["'", "glad'", "-1", "0.25", "1"] in [line.split() for line in out.splitlines()]
    assert bodies(server) == [
        {
            "items": [{"context": "I am", "targets": [" glad"]}],
            "wrt": {"override": "dir"},
            "bos": "never",
        }
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["generate"],
        ["generate", "a", "-"],
        ["generate", "-", "--chat"],
        ["generate", "a", "b", "--chat"],
        ["generate", "a", "--override", "dir"],
        ["generate", "a", "--override", ":1"],
        ["generate", "-", "--batch-size", "0"],
        ["diagnostics", "a"],
        ["diagnostics", "-", "a", "--plot", "a.png"],
        ["diagnostics", "-", "a", "--format", "table"],
        ["gradient", "a", "b"],
        ["gradient", "a", "b", "--layers", "1", "--along", "dir"],
        ["gradient", "a", "b", "--along", "dir", "--at", "all"],
    ],
)
def test_wrong_usage_is_2(capsys: Output, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(Script(continue_all), *argv)
    assert caught.value.code == 2
    assert "usage: logsteer" in capsys.readouterr().err


# ------------------------------------------------------------------ lines


def test_lines_keep_their_fields(capsys: Output, pipe: Any) -> None:
    pipe("", '"a"', {"prompt": "b", "answer": 42}, {"prompt_ids": [1, 2]}, {"prompt_ids": [3]},
         {"messages": [{"role": "user", "content": "x"}], "id": 1},
         {"messages": [{"role": "user", "content": "y"}], "id": 2})  # fmt: skip
    server = Script(continue_all)
    assert run(server, "generate", "-", "-n", "2", "--seed", "10") == 0
    lines = printed(capsys)
    assert [one["completions"][0]["seed"] for one in lines] == [10, 12, 14, 16, 18, 20]
    assert lines[0]["prompt"] == "a" and lines[0]["prompt_ids"] == [1, 9]
    assert (lines[1]["answer"], lines[1]["completions"][0]["text"]) == (42, "b!")
    assert [one.get("id") for one in lines[4:]] == [1, 2]
    assert [(b["seed"], len(b.get("prompts") or b.get("prompt_ids") or [0])) for b in
            bodies(server)] == [(10, 2), (14, 2), (18, 1), (20, 1)]  # fmt: skip


def test_lines_go_in_batches_and_come_as_they_are_done(capsys: Output, pipe: Any) -> None:
    pipe(*({"question": f"q{n}"} for n in range(5)))
    server = Script(continue_all, continue_all, problem("overloaded", 422))
    assert run(server, "generate", "-", "--field", "question", "--batch-size", "2") == 3
    out, err = capsys.readouterr()
    assert [json.loads(line)["question"] for line in out.splitlines()] == ["q0", "q1", "q2", "q3"]
    assert err.startswith("error: line 5: overloaded")
    assert [body["prompts"] for body in bodies(server)] == [["q0", "q1"], ["q2", "q3"], ["q4"]]


class Refusing:
    """Refuses every request that has this text in a prompt; continues the others."""

    def __init__(self, text: str, code: str, status: int) -> None:
        self.text = text
        self.refusal = (code, status)
        self.asked: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append((body["prompts"], body.get("seed")))
        if any(self.text in prompt for prompt in body["prompts"]):
            return problem(*self.refusal)
        return continue_all(request)


@pytest.mark.parametrize(
    ("code", "status"), [("context_too_long", 422), ("payload_too_large", 413)]
)
def test_a_refused_batch_is_halved_down_to_its_line(
    capsys: Output, pipe: Any, code: str, status: int
) -> None:
    pipe(*(f'"p{n}"' for n in range(8)))
    server = Refusing("p5", code, status)
    assert run(server, "generate", "-", "--seed", "10", "-n", "2") == 1
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == [f"p{n}" for n in range(5)]
    assert [row["completions"][0]["seed"] for row in rows] == [10, 12, 14, 16, 18]
    assert err.startswith(f"error: line 6: {code}")
    assert [len(prompts) for prompts, _ in server.asked] == [8, 4, 4, 2, 1, 1]


def test_other_refusals_are_not_asked_for_again(capsys: Output, pipe: Any) -> None:
    pipe('"p0"', '"p1"')
    server = Refusing("p1", "unknown_model", 404)
    assert run(server, "generate", "-") == 1
    assert capsys.readouterr().err.startswith("error: line 1 to 2: unknown_model")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "p1"}', "line 2: no text under 'prompt', only text"),
        ("p1", "standard input, line 2: no JSON"),
        ("[1]", "standard input, line 2: no JSON object; write a text"),
    ],
)
def test_lines_in_front_of_a_wrong_one_come_out(
    capsys: Output, pipe: Any, line: str, told: str
) -> None:
    pipe('"p0"', line, '"p2"')
    assert run(Script(continue_all), "generate", "-") == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["p0"]
    assert err.startswith(f"error: {told}")


def test_a_line_is_answered_as_it_comes(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """With --batch-size 1, before the next line is there."""
    seen = []

    class Slow:
        def __iter__(self) -> Iterator[bytes]:
            for number in range(3):
                yield b'"p%d"\n' % number
                seen.append(len(capsys.readouterr().out.splitlines()))

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=Slow()))
    assert run(Script(continue_all), "generate", "-", "--batch-size", "1") == 0
    assert seen == [1, 1, 1]


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        (["generate"], "Once upon a time", "standard input, line 1: no JSON: Expecting value at "
         'column 1; write a text in quotation marks, "Once upon a time", or an object, '
         '{"prompt": "Once upon a time"}'),
        (["generate", "--field", "q"], "x", "standard input, line 1: no JSON: Expecting value at "
         'column 1; write a text in quotation marks, "Once upon a time", or an object, {"q":'),
        (["diagnostics"], "x", "standard input, line 1: no JSON: Expecting value at column 1; "
         'write {"context": "'),
        (["generate"], "[" * 100_000, "standard input, line 1: no JSON: nested too deeply"),
        (["generate"], '{"prompt": "a", "x": ' + "[" * 300 + "]" * 300 + "}",
         "standard input, line 1: it cannot be written again: "),
        (["generate"], '{"prompt": "a", "x": "\\ud800"}',
         "standard input, line 1: it cannot be written again: "),
        (["generate"], "{", "standard input, line 1: no JSON"),
        (["generate"], "[1]", "standard input, line 1: no JSON object"),
        (["generate"], '{"text": "a"}', "line 1: no text under 'prompt', only text"),
        (["diagnostics"], '"a"', "standard input, line 1: no JSON object"),
        (["diagnostics"], '{"x": 1}', "line 1: no item such as"),
        (["diagnostics"], '{"context": "a"}', "line 1: invalid_request: items.0"),
        (["gradient", "--layers", "1"], '{"prompt_ids": [1], "completions": [{}]}',
         "line 1: completions without token_ids"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_told(
    capsys: Output, pipe: Any, command: list[str], line: str, message: str
) -> None:
    pipe(line)
    server = Script(continue_all)
    assert run(server, command[0], "-", *command[1:]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}")
    assert server.requests == []


def test_what_generate_writes_diagnostics_reads(capsys: Output, pipe: Any) -> None:
    pipe('"a"', '"b"')
    assert run(Script(continue_all), "generate", "-", "-n", "2") == 0
    pipe(*printed(capsys), {"context": "c", "targets": ["d"], "note": "mine"})
    server = Script(score_all)
    assert run(server, "diagnostics", "-") == 0
    lines = printed(capsys)
    assert [len(line["result"]["targets"]) for line in lines] == [2, 2, 1]
    assert lines[0]["prompt"] == "a" and lines[2]["note"] == "mine"
    assert bodies(server)[0]["items"] == [
        *[{"context_ids": [1, 9], "target_ids": [[1, 2], [1, 2]]}] * 2,
        {"context": "c", "targets": ["d"]},
    ]


def test_gradients_of_lines(capsys: Output, pipe: Any) -> None:
    pipe({"context": "c", "targets": [" glad"]})
    assert run(Script(httpx.Response(200, json=GRADIENT)), "gradient", "-", "--layers", "2") == 0
    (line,) = printed(capsys)
    assert line["result"]["targets"][0]["norms"] == {"2": [5.0, 1.0], "3": [0.5, 2.0]}


def test_too_few_results_are_told(capsys: Output, pipe: Any) -> None:
    pipe(*[{"context": "c", "targets": ["d"]}] * 2)
    server = Script(httpx.Response(200, json=logprob_answer([target("d", -1.0)])))
    assert run(server, "diagnostics", "-") == 1
    assert "line 1 to 2: 2 items, 1 results: a fault of the server" in capsys.readouterr().err


def test_a_reader_that_goes_ends_the_command_quietly() -> None:
    code = (
        "import httpx, sys\n"
        "from logsteer.cli import main\n"
        "from tests.client.test_line_commands import continue_all\n"
        "transport = httpx.MockTransport(continue_all)\n"
        "sys.exit(main(['generate', '-', '--batch-size', '1'], transport=transport))\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], input=b'"a"\n' * 3, stdout=writing, stderr=subprocess.PIPE,
        env=environment, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
