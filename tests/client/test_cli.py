"""The `logsteer` command."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from .documents import (
    MODELS,
    PERPLEXITY,
    PERPLEXITY_EVENTS,
    SELFTEST,
    SELFTEST_EVENTS,
    START,
    TOKENS,
    events,
    logprob_answer,
    steer_answer,
    target,
)
from .scripted import Output, Script, answer, event_stream, problem, run

SCORES = logprob_answer(
    [
        target(
            " [red]Paris",
            -1.25,
            tokens=[" [red]Paris"],
            top={"token_ids": [[4]], "tokens": [[" Rome"]], "logprobs": [[-0.5]]},
            logprob_any_space=-1.125,
            variants={"with_space": target("x", -2.25), "without_space": target("x", -3.75)},
        ),
        target(" London", None, boundary="merged", truncated_tokens=4, flags=["not_finite"]),
    ]
)


def test_models(capsys: Output) -> None:
    assert run(answer(MODELS), "models") == 0
    out, err = capsys.readouterr()
    # What looks like rich's markup is data.
    assert "[bold]serving" in out and "128" in out
    assert err == ""


def test_score_marks_the_best_and_says_what_is_unusual(capsys: Output) -> None:
    server = answer(SCORES)
    argv = ["score", "It is", " [red]Paris", " London", "--space", "both", "--top", "1"]
    assert run(server, *argv, "--boundary", "separate", "--model", "demo") == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["'", "[red]Paris'", "-1.25", "0.25", "2", "11", "0.5", "yes", "0"] in rows
    assert ["'", "London'", "n/a", "0.25", "2", "7", "0.5", "no", "4", "not_finite"] in rows
    assert ["'", "[red]Paris'", "-2.25", "-3.75", "-1.125"] in rows
    assert "--boundary separate" in out and "' Rome'" in out
    assert json.loads(server.bodies[0]) == {
        "model": "demo",
        "items": [{"context": "It is", "targets": [" [red]Paris", " London"]}],
        "space": "both",
        "top": 1,
        "boundary": "separate",
    }


def test_selftest_shows_each_check_and_fails_where_one_does(capsys: Output) -> None:
    server = Script(event_stream(events(*SELFTEST_EVENTS)))
    assert run(server, "selftest", "demo", "--against", "other") == 1
    out, err = capsys.readouterr()
    assert str(server.requests[0].url).endswith("/models/demo/selftest")
    assert json.loads(server.bodies[0]) == {"against": "other", "stream": True}
    rows = [line.split() for line in out.splitlines()]
    assert ["batched", "It", "[red]holds.", "903", "0", "1.0e-04", "passed"] in rows
    assert ["shuffled", "It", "[red]holds.", "902", "5.7e-06", "1.0e-04", "passed"] in rows
    assert ["steered_neighbour", "It", "[red]holds.", "901", "2.5e-01", "1.0e-04", "failed"] in rows
    assert ["chunked", "It", "[red]holds.", "1.0e-04", "not", "run"] in rows
    assert "value 3 differs" in out and "noise floor 5.0e-07" in out
    assert err == "error: demo failed its self-test: steered_neighbour\n"


def test_selftest_that_passes_is_0(capsys: Output) -> None:
    passed = {**SELFTEST, "verdict": "passed", "checks": SELFTEST["checks"][:2]}
    told = events(*SELFTEST_EVENTS[:3], ("result", passed))
    assert run(Script(event_stream(told)), "selftest", "demo", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "passed"
    assert err == ""


def test_tokenize(capsys: Output) -> None:
    assert run(answer(TOKENS), "tokenize", "Hi") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][-2:] == [
        ["9", "'", "Hi'", "0", "3"],
        [],
    ]


def test_perplexity_of_a_file(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("some text")
    server = Script(event_stream(PERPLEXITY_EVENTS))
    argv = ["--protocol", "sliding", "--context-length", "8", "--stride", "4", "--bos", "never"]
    assert run(server, "perplexity", str(path), *argv) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert ["perplexity", "1.6487"] in rows and ["num_scored", "4"] in rows
    assert err == ""
    assert server.bodies == [b"some text"]
    assert dict(server.requests[0].url.params) == {
        "protocol": "sliding",
        "context_length": "8",
        "stride": "4",
        "bos": "never",
    }


def test_perplexity_of_standard_input(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é".encode())))
    server = Script(event_stream(PERPLEXITY_EVENTS))
    assert run(server, "perplexity", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total"]["num_scored"] == 4
    assert server.bodies == ["é".encode()]


def test_progress_goes_to_stderr(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = tmp_path / "text"
    path.write_text("some text")
    assert run(Script(event_stream(PERPLEXITY_EVENTS)), "perplexity", str(path), "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == "demo"
    assert "4 tokens" in err and "tokens/s" in err and "perplexity 1.65" in err


@pytest.mark.parametrize(
    ("argv", "document"),
    [
        (["models"], MODELS),
        (["models", "list"], MODELS),
        (["score", "a", "b", "c"], SCORES),
        (["tokenize", "a"], TOKENS),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_json_is_the_answer_and_nothing_else(
    capsys: Output, argv: list[str], document: Any, before: bool
) -> None:
    argv = ["--json", *argv] if before else [*argv, "--json"]
    assert run(answer(document), *argv) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert err == ""
    assert contains(printed, document)


def contains(found: Any, expected: Any) -> bool:
    """Whether everything expected is in what was found, which may have more fields."""
    if isinstance(expected, dict):
        return all(contains(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return all(contains(f, e) for f, e in zip(found, expected, strict=True))
    return bool(found == expected)


def test_a_refusal_is_one_line_on_stderr(capsys: Output) -> None:
    server = Script(problem("unknown_model", 404, detail="no model x;\nthere is: demo"))
    assert run(server, "models", "--json") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: unknown_model: no model x; there is: demo (request from-server)\n"


def test_no_server_is_told(capsys: Output, pauses: list[float]) -> None:
    assert run(Script(httpx.ConnectError("refused")), "models", "--base-url", "http://h:1") == 3
    err = capsys.readouterr().err
    assert err.startswith("error: no server answers at http://h:1 (refused)")
    assert "logsteer serve MODEL" in err and err.count("\n") == 1


def test_a_file_that_is_not_there_is_told(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert run(answer(PERPLEXITY), "perplexity", str(path)) == 1
    assert capsys.readouterr().err == f"error: No such file or directory: {path}\n"


def test_a_wrong_address_is_told(capsys: Output) -> None:
    assert run(answer(MODELS), "models", "--base-url", "localhost:1") == 1
    assert "needs the form http://host:port" in capsys.readouterr().err


def test_settings_before_or_after_the_command(capsys: Output) -> None:
    server = answer(MODELS)
    run(server, "--api-key", "k", "models", "--base-url", "http://there")
    assert str(server.requests[0].url) == "http://there/models"
    assert server.requests[0].headers["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["scor", "a", "b"], "score"),
        (["score", "a", "b", "--spce", "both"], "--space"),
        (["score", "a", "b", "--space=bth"], "both"),
        (["steer", "a", "--vectr", "mood"], "--vector"),
    ],
)
def test_what_was_meant_is_told(capsys: Output, argv: list[str], meant: str) -> None:
    with pytest.raises(SystemExit):
        run(answer(MODELS), *argv)
    assert f"did you mean {meant}? See logsteer" in capsys.readouterr().err


def test_a_pipe_gets_whole_lines(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = {**MODELS["models"][0], "detail": "word " * 60}
    assert run(answer({"models": [long]}), "models") == 0
    assert ("word " * 60).strip() in capsys.readouterr().out


def test_the_model_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGSTEER_MODEL", "of-the-environment")
    for argv, model in ((["--model", "m"], "m"), ([], "of-the-environment")):
        server = answer(logprob_answer([target("b", -1.0)]))
        assert run(server, "score", "a", "b", *argv) == 0
        assert json.loads(server.bodies[0])["model"] == model


def test_a_chat_is_steered_as_one_talks(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> httpx.Response:
        return event_stream(events(("start", START), ("result", steer_answer())))

    server = Script(tell(), problem("unknown_vector", 404), tell())
    lines = "Hi\n/steer mood:4 calm@3\nlost\n\n/steer\nmore\n/new\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(server, "chat", "--temperature", "0", "--system", "Be kind.") == 0
    sent = [json.loads(body) for body in server.bodies]
    assert [[turn["content"] for turn in one["messages"]] for one in sent] == [
        ["Be kind.", "Hi"], ["Be kind.", "Hi", "glad 0", "lost"],
        ["Be kind.", "Hi", "glad 0", "more"],
    ]  # fmt: skip
    assert [one.get("steering") and len(one["steering"]["vectors"]) for one in sent] == [
        None,
        2,
        None,
    ]
    assert "unknown_vector" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nothing"],
        ["score", "context"],
        ["perplexity"],
        ["models", "--timeout", "-1"],
        ["models", "--timeout", "soon"],
        ["score", "a", "b", "--space", "none"],
    ],
)
def test_wrong_usage_is_2(capsys: Output, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(answer(MODELS), *argv)
    assert caught.value.code == 2
    assert "See logsteer" in (err := capsys.readouterr().err) and err.count("\n") == 2


def test_interruption_is_130() -> None:
    def interrupt(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    assert run(Script(interrupt), "models") == 130
