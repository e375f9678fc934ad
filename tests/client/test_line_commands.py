"""Commands of a line or two: models, overrides, and the rest."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer.schemas import GradientAnswer

from .documents import (
    ANSWER,
    MODELS,
    PERPLEXITY,
    START,
    SWEEP,
    completion,
    events,
    logprob_answer,
    piece,
    steer_answer,
    target,
)
from .scripted import Output, Script, answer, event_stream, problem, run

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


ATTRIBUTED = gradient_answer(
    input_ids=[3, 4], input_tokens=["I", " <am>"], attributions=[0.5, -0.25],
    baseline_logprob=-1.25, convergence_delta=0.0,
)  # fmt: skip


def bodies(server: Script) -> list[Any]:
    return [json.loads(body) for body in server.bodies]


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
    assert ["log_q", "-1.5", "-0.75", "-1", "-0.5", "-0.5"] in rows
    assert "under override dir x 0.001 (cdcdcdcdcdcd)" in out
    assert bodies(server) == [
        {"prompts": ["a", "b"], "n": 2, "diagnostics": True, "columns": ["log_q"]}
    ]


def test_generate_as_json_and_as_a_conversation(capsys: Output) -> None:
    server = Script(continue_all)
    assert run(server, "generate", "Hi", "--chat", "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["completions"][0]["text"] == "chat!"
    assert bodies(server) == [{"messages": [[{"role": "user", "content": "Hi"}]]}]


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
    assert ["entropy", "-1.5", "-0.75", "-1", "-0.5", "-0.5"] in rows
    assert bodies(server) == [
        {
            "items": [{"context": "I am", "targets": [" glad"]}],
            "policy": {"temperature": 2.0, "top_p": 0.9},
            "columns": ["entropy", "rank"],
            "steering": {"vectors": [{"name": "mood", "scale": 2.0, "layers": "recommended"}]},
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
    assert ["0", "'", "glad'", "1", "5", "0.5"] in rows
    assert ["0", "'", "glad'", "2", "1", "2"] in rows
    assert bodies(server)[0]["wrt"] == {
        "layers": [2, 3], "hook": "attn_out", "positions": {"slices": [[0, 2]]},
    }  # fmt: skip


def test_a_derivative_along_a_direction(capsys: Output) -> None:
    server = Script(httpx.Response(200, json=ALONG))
    assert run(server, "gradient", "I am", " glad", "--along", "dir", "--bos", "never") == 0
    out = capsys.readouterr().out
    assert "along dir (cdcdcdcdcdcd)" in out
    assert ["0", "'", "glad'", "-1", "2", "exact", "0", "0.25", "1"] in [
        line.split() for line in out.splitlines()
    ]
    assert bodies(server) == [
        {
            "items": [{"context": "I am", "targets": [" glad"]}],
            "wrt": {"override": "dir"},
            "bos": "never",
        }
    ]


def test_an_attribution_is_a_row_a_token_and_coloured_text(capsys: Output) -> None:
    server = Script(httpx.Response(200, json=ATTRIBUTED))
    argv = ["gradient", "I am", " glad", "--attribution", "integrated", "--steps", "9"]
    assert run(server, *argv, "--baseline", "7") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "-0.25" in [row[-1] for row in rows if row], rows
    asked = {"attribution": "integrated", "steps": 9, "baseline": 7}
    assert bodies(server)[0].items() >= asked.items() and "wrt" not in bodies(server)[0]
    page = GradientAnswer.model_validate(ATTRIBUTED)._repr_html_()
    assert "attribution: -0.5" in page and "surprisal" not in page
    # Orange for what the target gains by a token, blue for what it loses, half as strong.
    assert 'background:rgba(222,84,30,0.600)" title="&#x27;I&#x27;' in page
    assert 'background:rgba(31,111,180,0.300)" title="&#x27; &lt;am&gt;&#x27;' in page


@pytest.mark.parametrize(
    "argv",
    [
        ["generate"],
        ["generate", "a", "--override", "dir"],
        ["generate", "a", "--override", ":1"],
        ["diagnostics", "a"],
        ["gradient", "a", "b"],
        ["gradient", "a", "b", "--layers", "1", "--along", "dir"],
        ["gradient", "a", "b", "--along", "dir", "--at", "all"],
        ["gradient", "a", "b", "--attribution", "integrated", "--hook", "attn_out"],
    ],
)
def test_wrong_usage_is_2(capsys: Output, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(Script(continue_all), *argv)
    assert caught.value.code == 2
    assert "See logsteer" in capsys.readouterr().err


CARD: dict[str, Any] = {
    "name": "dir", "sha256": "cd" * 32, "model": "demo", "weights_digest": "w", "tensors": 3,
    "moved": 128, "total": 922496, "norm": 11.595, "bytes": 600,
    "created": "2026-01-02T03:04:05.678Z",
}  # fmt: skip
LIST = {"overrides": [CARD], "damaged": ["old"], "bytes": 600, "max_bytes": 1000}
GONE = {"name": "dir", "sha256": "cd" * 32}
WANTED = {"name": "dir", "eta": 1e-6}


def test_overrides_are_listed_and_shown(capsys: Output) -> None:
    row = ["dir", "demo", "3", "128", "922496", "11.595"]
    row += [*CARD["created"][:16].split("T"), CARD["sha256"][:12]]
    for argv, document in ((["list"], LIST), (["show", "dir"], CARD)):
        server = answer(document)
        assert run(server, "overrides", *argv) == 0
        out = capsys.readouterr().out
        assert row in [line.split() for line in out.splitlines()]
        assert ("damaged: old" in out) is (argv == ["list"])
    assert server.requests[0].url.path == "/overrides/dir"


def test_an_override_is_put_and_deleted(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    path.write_bytes(b"direction")
    server = answer(CARD)
    assert run(server, "overrides", "put", "dir", str(path), "--model", "demo", "--json") == 0
    assert json.loads(capsys.readouterr().out) == CARD
    (request,) = server.requests
    assert (request.method, request.url.path) == ("PUT", "/overrides/dir")
    assert dict(request.url.params) == {"model": "demo"}
    assert server.bodies == [b"direction"]
    server = answer(GONE)
    assert run(server, "overrides", "delete", "dir") == 0
    assert server.requests[0].method == "DELETE"
    assert capsys.readouterr().out.startswith("deleted dir, cdcd")


def test_the_commands_about_texts_take_an_override(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("some text")
    perplexity = event_stream(events(("start", START), ("result", PERPLEXITY)))
    steered = event_stream(events(("start", START), ("result", steer_answer())))
    vector = ["--vector", "mood"]
    commands: list[tuple[list[str], Script]] = [
        (["score", "a", "b"], answer(logprob_answer([target("b", -1.0)]))),
        (["perplexity", str(path)], Script(perplexity)),
        (["steer", "a", *vector], Script(steered)),
        (["sweep", "--scales=0,1", "--item", "I am", " glad", " sad", "--text", str(path), *vector],
         answer(SWEEP)),
    ]  # fmt: skip
    for command, server in commands:
        assert run(server, *command, "--override", "dir:1e-6") == 0
        if command[0] == "perplexity":  # the body is the text
            assert json.loads(server.requests[0].url.params["override"]) == WANTED
        else:
            assert json.loads(server.bodies[0])["override"] == WANTED


@pytest.mark.parametrize("command", [["score", "a", "b"], ["steer", "a", "--vector", "v"]])
def test_a_cast_goes_with_an_override(capsys: Output, command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(Script(problem("internal", 500)), *command, "--cast", "float32")
    assert caught.value.code == 2
    assert "--cast: only with --override" in capsys.readouterr().err


MODEL_CARD = MODELS["models"][0] | {  # type: ignore[index]
    "replicas": [
        {"state": "ready", "detail": "answers"},
        {"state": "restarting", "detail": "its process was ended by SIGKILL", "restarts": 1},
    ]
}
RELOAD = {
    "added": ["new"], "removed": [], "replaced": ["demo", "other"], "unchanged": ["same"],
    "pending": ["new"], "failed": {}, "needs_restart": ["port"],
}  # fmt: skip


@pytest.mark.parametrize("name", ["load", "unload", "drain"])
def test_a_change_is_asked_for_and_the_card_is_shown(name: str, capsys: Output) -> None:
    server = Script(httpx.Response(200, json=MODEL_CARD))
    assert run(server, "models", name, "demo", "--wait", "7") == 0
    request = server.requests[0]
    assert (request.method, request.url.path) == ("POST", f"/models/demo/{name}")
    assert dict(request.url.params) == {"wait_s": "7.0"}
    assert "1/2" in capsys.readouterr().out


def test_reload_names_what_has_changed(capsys: Output) -> None:
    server = Script(httpx.Response(200, json=RELOAD))
    assert run(server, "models", "reload") == 0
    assert server.requests[0].url.path == "/admin/reload"
    assert capsys.readouterr().out.splitlines() == [
        "added: new",
        "replaced: demo, other",
        "unchanged: same",
        "still running: new",
        "count from the next start on: port",
    ]


def test_a_replacement_that_failed_is_exit_status_1(capsys: Output) -> None:
    failed = RELOAD | {"failed": {"other": "no such directory"}}
    assert run(Script(httpx.Response(200, json=failed)), "models", "reload", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == {"other": "no such directory"}
    assert err == "error: other: no such directory\n"


def test_a_configuration_that_cannot_be_used_is_told(capsys: Output) -> None:
    server = Script(problem("invalid_request", 422, detail="nothing was changed: line 3"))
    assert run(server, "models", "reload") == 1
    assert "nothing was changed: line 3" in capsys.readouterr().err
