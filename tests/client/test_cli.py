"""The `logsteer` command: what each command sends, and what it shows."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from .documents import (
    ANSWER,
    ATTRIBUTED,
    MODELS,
    PERPLEXITY,
    PERPLEXITY_EVENTS,
    SELFTEST,
    START,
    SWEEP,
    TOKENS,
    completion,
    events,
    gradient_answer,
    logprob_answer,
    piece,
    steer_answer,
    steering_receipt,
    target,
    window,
)
from .scripted import Output, Script, answer, answer_selftest, event_stream, problem, run
from .test_vectors import CARD, GONE, LIST

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
ITEMS = [{"context": "I am", "targets": [" glad"]}]
AB = [{"context": "a", "targets": ["b"]}]
RECOMMENDED = {"scale": "recommended", "layers": "recommended"}
MOOD = {"vectors": [{"name": "mood"} | RECOMMENDED]}
AGGREGATE = {"sum": -1.5, "mean": -0.75, "min": -1.0, "max": -0.5, "early": -0.5, "late": None}
USED = {"name": "dir", "sha256": "cd" * 32, "eta": 0.001}
ADAPTER = {"adapter": {"name": "lora", "sha256": "ab" * 32}}
RECEIPT = {"steering": steering_receipt()}
READ = {"name": "mood", "sha256": "0" * 64, "layer": 2, "hook": "resid_post", "read": "cosine",
        "before": [0.25], "after": [0.5]}  # fmt: skip
PASSED = steering_receipt()
PASSED["vectors"][0]["passed"] = 3


def continued(*prompts: str, n: int = 1) -> dict[str, Any]:
    """An answer of `/generate`."""
    results = [
        {"completions": [completion(f"{prompt}!", k) for k in range(n)], "prompt_ids": [1, 9]}
        for prompt in prompts
    ]
    return {**ANSWER, "results": results}


DIAGNOSED = continued("a", "b", n=2) | {"override": USED}
DIAGNOSED["results"][1]["completions"][1] |= {
    "columns": {"log_q": [-0.25, None]}, "aggregates": {"log_q": AGGREGATE},
}  # fmt: skip


GRADIENT = gradient_answer(
    positions=[1, 2],
    gradients={"2": [[3.0, 4.0], [0.0, 1.0]], "3": [[0.0, 0.5], [0.0, 2.0]]},
    norms={"2": [5.0, 1.0], "3": [0.5, 2.0]},
)
ALONG = {**gradient_answer(directional=0.25, directional_per_token=[0.25]), "along": USED}
OVERRIDE: dict[str, Any] = {
    "name": "dir", "sha256": "cd" * 32, "model": "demo", "weights_digest": "w", "tensors": 3,
    "moved": 128, "total": 922496, "norm": 11.595, "bytes": 600,
    "created": "2026-01-02T03:04:05.678Z",
}  # fmt: skip
OVERRIDES = {"overrides": [OVERRIDE], "damaged": ["old"], "bytes": 600, "max_bytes": 1000}
OVERRIDE_ROW = ["dir", "demo", "3", "128", "922496", "11.595", "2026-01-02", "03:04", "cd" * 6]
LORA: dict[str, Any] = {
    "name": "lora", "sha256": "ab" * 32, "model": "demo", "weights_digest": "w", "rank": 8,
    "alpha": 16.0, "modules": ["[red]q_proj", "v_proj"], "tensors": 4, "updated": None,
    "norm": 1.5, "bytes": 400, "created": "2026-01-02T03:04:05.678Z",
}  # fmt: skip
LORAS = {"adapters": [LORA], "damaged": ["torn"], "bytes": 400, "max_bytes": 1000}
LORA_ROW = ["lora", "demo", "8", "16", "[red]q_proj,", "v_proj", "2026-01-02", "03:04", "ab" * 6]
MODEL = MODELS["models"][0] | {  # type: ignore[index]
    "replicas": [
        {"state": "ready", "detail": "answers"},
        {"state": "restarting", "detail": "its process was ended by SIGKILL", "restarts": 1},
    ]
}
RELOAD = {
    "added": ["new"], "removed": [], "replaced": ["demo", "other"], "unchanged": ["same"],
    "pending": ["new"], "failed": {}, "needs_restart": ["port"],
}  # fmt: skip


def stream(*pieces: dict[str, Any], result: Any = None, **more: Any) -> httpx.Response:
    named = [("piece", one) for one in pieces]
    last = ("result", steer_answer(**more) if result is None else result)
    return event_stream(events(("start", START), *named, last))


def stream_perplexity(result: dict[str, Any] = PERPLEXITY) -> httpx.Response:
    return event_stream(events(("start", START), ("window", window(1, 1)), ("result", result)))


# Arguments, the answer, the line of the request and its body; rows and texts that are shown.
COMMANDS: dict[str, tuple[list[str], Any, str, Any, list[list[str]], list[str]]] = {
    # What looks like rich's markup is data.
    "models": (["models"], MODELS, "GET /models", None, [], ["[bold]serving", "128"]),
    **{
        f"models {name}": (
            ["models", name, "demo", "--wait", "7"], MODEL,
            f"POST /models/demo/{name}?wait_s=7.0", None, [], ["1/2"],
        )
        for name in ("load", "unload", "drain")
    },
    "models reload": (
        ["models", "reload"], RELOAD, "POST /admin/reload?wait_s=300.0", None, [],
        ["added: new\nreplaced: demo, other\nunchanged: same\nstill running: new\n"
         "count from the next start on: port\n"],
    ),
    "score": (
        ["score", "It is", " [red]Paris", " London", "--space", "both", "--top", "1",
         "--boundary", "separate", "--model", "demo"],
        SCORES, "POST /logprob",
        {"model": "demo", "items": [{"context": "It is", "targets": [" [red]Paris", " London"]}],
         "space": "both", "top": 1, "boundary": "separate"},
        [["'", "[red]Paris'", "-1.25", "0.25", "2", "11", "0.5", "yes", "0"],
         ["'", "London'", "n/a", "0.25", "2", "7", "0.5", "no", "4", "not_finite"],
         ["'", "[red]Paris'", "-2.25", "-3.75", "-1.125"]],
        ["--boundary separate", "' Rome'"],
    ),
    "score under steering": (
        ["score", "a", "b", "--vector", "mood"], logprob_answer([target("b", -1.0)]) | RECEIPT,
        "POST /logprob", {"items": AB, "steering": MOOD}, [], ["steered 5 tokens by mood x 2"],
    ),
    "score under an adapter": (
        ["score", "a", "b", "--adapter", "lora"], logprob_answer([target("b", -1.0)]) | ADAPTER,
        "POST /logprob", {"items": AB, "adapter": "lora"}, [],
        ["under adapter lora (abababababab)"],
    ),
    "score under both": (
        ["score", "a", "b", "--adapter", "lora", "--vector", "mood"],
        logprob_answer([target("b", -1.0)]) | ADAPTER | RECEIPT, "POST /logprob",
        {"items": AB, "adapter": "lora", "steering": MOOD}, [],
        ["under adapter lora", "steered 5 tokens"],
    ),
    "score with probes": (
        ["score", "a", "b", "--vector", "mood", "--probe", "mood@2:cosine"],
        logprob_answer([target("b", -1.0, tokens=["b"], logprobs=[-1.0], probes=[READ])])
        | {"steering": PASSED},
        "POST /logprob",
        {"items": AB, "steering": MOOD,
         "probes": [{"name": "mood", "layers": [2], "read": "cosine"}]},
        [["token", "logprob", "mood@2:", "cosine", "mood@2:", "cosine", "after"],
         ["'b'", "-1", "0.25", "0.5"]],
        ["steered 5 tokens", "where its condition held, at 3 tokens"],
    ),
    "tokenize": (
        ["tokenize", "Hi"], TOKENS, "POST /tokenize", {"texts": ["Hi"]},
        [["9", "'", "Hi'", "0", "3"]], [],
    ),
    "perplexity": (
        ["perplexity", "text", "--protocol", "sliding", "--context-length", "8", "--stride", "4",
         "--bos", "never"],
        stream_perplexity(),
        "POST /perplexity/stream?bos=never&protocol=sliding&context_length=8&stride=4",
        "söme text".encode(), [["perplexity", "1.6487"], ["num_scored", "4"]], [],
    ),
    "perplexity under steering": (
        ["perplexity", "text", "--vector", "mood@2"], stream_perplexity(PERPLEXITY | RECEIPT),
        "POST /perplexity/stream?steering=%7B%22vectors%22%3A%5B%7B%22name%22%3A%22mood%22%2C"
        "%22layers%22%3A%5B2%5D%2C%22scale%22%3A%22recommended%22%7D%5D%7D",
        "söme text".encode(), [], ["1.6487", "steered 5 tokens by mood x 2"],
    ),
    "generate": (
        ["generate", "I am", "--max-tokens", "2", "--stop", "x", "--override", "dir:-1e-3"],
        stream(piece(" gl\x1b"), piece("ad"), result=continued("a")), "POST /generate",
        {"prompts": ["I am"], "max_tokens": 2, "stop": ["x"], "stream": True,
         "override": {"name": "dir", "eta": -1e-3}},
        [], ["I am gl\\x1bad\n2 tokens, length, logprob -1.5, seed 0"],
    ),
    "generate several": (
        ["generate", "a", "b", "-n", "2", "--diagnostics", "--columns", "log_q"], DIAGNOSED,
        "POST /generate", {"prompts": ["a", "b"], "n": 2, "diagnostics": True,
                           "columns": ["log_q"]},
        [["'!'", "-1", "n/a"], ["log_q", "-1.5", "-0.75", "-1", "-0.5", "-0.5"]],
        ["under override dir x 0.001 (cdcdcdcdcdcd)"],
    ),
    "generate in a chat": (
        ["generate", "Hi", "--chat", "--json"], continued("chat"), "POST /generate",
        {"messages": [[{"role": "user", "content": "Hi"}]]}, [], ['"text": "chat!"'],
    ),
    "diagnostics": (
        ["diagnostics", "I am", " glad", "--top-p", "0.9", "--temperature", "2", "--columns",
         "entropy", "--columns", "rank", "--vector", "mood:2"],
        logprob_answer([
            target(" glad", -1.5, tokens=[" gl", "ad"], logprobs=[-0.5, -1.0], ranks=[1, 7],
                   columns={"entropy": [0.5, None]}, aggregates={"entropy": AGGREGATE})
        ]),
        "POST /diagnostics",
        {"items": ITEMS, "policy": {"temperature": 2.0, "top_p": 0.9},
         "columns": ["entropy", "rank"],
         "steering": {"vectors": [{"name": "mood", "scale": 2.0, "layers": "recommended"}]}},
        [["'ad'", "-1", "7", "n/a"], ["entropy", "-1.5", "-0.75", "-1", "-0.5", "-0.5"]],
        ["' glad': logprob -1.5, perplexity 2, 5 tokens"],
    ),
    "gradient": (
        ["gradient", "I am", " glad", "--layers", "2-3", "--hook", "attn_out", "--at", "0:2"],
        GRADIENT, "POST /gradient",
        {"items": ITEMS, "wrt": {"layers": [2, 3], "hook": "attn_out",
                                 "positions": {"slices": [[0, 2]]}}},
        [["0", "'", "glad'", "1", "5", "0.5"], ["0", "'", "glad'", "2", "1", "2"]], [],
    ),
    "gradient along": (
        ["gradient", "I am", " glad", "--along", "dir", "--bos", "never"], ALONG, "POST /gradient",
        {"items": ITEMS, "wrt": {"override": "dir"}, "bos": "never"},
        [["0", "'", "glad'", "-1", "2", "exact", "0", "0.25", "1"]], ["along dir (cdcdcdcdcdcd)"],
    ),
    "attribution": (
        ["gradient", "I am", " glad", "--attribution", "integrated", "--steps", "9", "--baseline",
         "7"],
        ATTRIBUTED, "POST /gradient",
        {"items": ITEMS, "attribution": "integrated", "steps": 9, "baseline": 7},
        [["0", "'", "glad'", "1", "'", "<am>'", "4", "-0.25"]], [],
    ),
    # No control character reaches the terminal.
    "steer": (
        ["steer", "There", "--vector", "mood", "--model", "demo", "--override", "dir:1e-6"],
        stream(piece(" was [b]"), piece(" a\x1b[2J"), piece(" cat\n")), "POST /steer",
        {"model": "demo", "prompts": ["There"], "steering": MOOD, "stream": True,
         "override": {"name": "dir", "eta": 1e-6}},
        [["2", "5", "0.25"]],
        ["There was [b] a\\x1b[2J cat\n", "2 tokens, length, logprob -1.5, seed 7",
         "steered 5 tokens by mood x 2 (abababababab)"],
    ),
    "steer beside the baseline": (
        ["steer", "I am", "--vector", "mood", "--baseline", "--n", "2"],
        steer_answer(baseline=True, n=2), "POST /steer",
        {"prompts": ["I am"], "steering": MOOD, "n": 2, "baseline": True},
        [["steered", "unsteered"], ["glad", "0", "sad", "0"], ["glad", "1", "sad", "1"]],
        ["steered 5 tokens"],
    ),
    "sweep": (
        ["sweep", "--vector", "mood@2", "--scales=-1,0,1", "--layers", "2;3", "--item", "I am",
         " glad", " [red]sad", "--text", "text", "--boundary", "separate", "--adapter", "lora"],
        SWEEP, "POST /sweep",
        {"items": [{"context": "I am", "targets": [" glad", " [red]sad"]}],
         "texts": ["söme text"], "steering": {"vectors": [RECOMMENDED | {"name": "mood",
                                                                         "layers": [2]}]},
         "scales": [-1.0, 0.0, 1.0], "layers": [[2], [3]], "boundary": "separate",
         "adapter": "lora"},
        [["2", "-1", "0.125", "'I", "am'", "'", "glad'", "-2.5", "-1.5", "0.5"],
         ["2", "0", "n/a", "'I", "am'", "'", "[red]sad'", "-2", "0", "0"],
         ["3", "1", "0.125", "text", "4"]],
        ["' [red]sad'", "'I am'"],
    ),
    "overrides list": (
        ["overrides", "list"], OVERRIDES, "GET /overrides", None, [OVERRIDE_ROW], ["damaged: old"],
    ),
    "overrides show": (
        ["overrides", "show", "dir"], OVERRIDE, "GET /overrides/dir", None, [OVERRIDE_ROW], [],
    ),
    "overrides put": (
        ["overrides", "put", "dir", "text", "--model", "demo"], OVERRIDE,
        "PUT /overrides/dir?model=demo", "söme text".encode(), [OVERRIDE_ROW], [],
    ),
    "overrides delete": (
        ["overrides", "delete", "dir"], {"name": "dir", "sha256": "cd" * 32},
        "DELETE /overrides/dir", None, [["deleted", "dir,", "cd" * 32]], [],
    ),
    "adapters list": (
        ["adapters", "list"], LORAS, "GET /adapters", None, [LORA_ROW],
        ["damaged: torn; put or delete"],
    ),
    "vectors list": (
        ["vectors", "list"], LIST, "GET /vectors", None, [],
        ["1-3, 7", "training", "pca", "ab" * 6],
    ),
    "vectors show": (
        ["vectors", "show", "happy"], CARD, "GET /vectors/happy", None,
        [["2", "2.25", "0.875", "0.75", "1", "2", "3", "0.0625"], ["7", "7", *["n/a"] * 6]], [],
    ),
    "vectors put": (
        ["vectors", "put", "happy", "text", "--format", "gguf"], CARD,
        "PUT /vectors/happy?format=gguf", "söme text".encode(), [], ["happy"],
    ),
    "vectors delete": (
        ["vectors", "delete", "happy"], GONE, "DELETE /vectors/happy", None, [],
        ["deleted happy"],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("söme text")


@pytest.mark.parametrize(("argv", "reply", "line", "body", "rows", "texts"), COMMANDS.values(),
                         ids=COMMANDS)  # fmt: skip
def test_what_a_command_sends_and_shows(
    capsys: Output, argv: list[str], reply: Any, line: str, body: Any, rows: Any, texts: list[str]
) -> None:
    server = Script(reply) if isinstance(reply, httpx.Response) else answer(reply)
    assert run(server, *argv) == 0
    (request,) = server.requests
    assert f"{request.method} {request.url.raw_path.decode()}" == line
    assert (server.bodies[0] if isinstance(body, bytes) else server.sent) == body
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert [row for row in rows if row not in lines] == [], out
    assert [text for text in texts if text not in out] == [], out
    assert max(map(len, out.splitlines())) < 200, "a pipe gets lines as long as what they say"
    assert err == ""
    for word in ("steered 5", "under adapter"):
        assert (word in out) == any(word in text for text in texts)


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
        ["generate"],
        ["generate", "a", "--override", "dir"],
        ["generate", "a", "--override", ":1"],
        ["diagnostics", "a"],
        ["gradient", "a", "b"],
        ["gradient", "a", "b", "--layers", "1", "--along", "dir"],
        ["gradient", "a", "b", "--along", "dir", "--at", "all"],
        ["gradient", "a", "b", "--attribution", "integrated", "--hook", "attn_out"],
        ["score", "a", "b", "--cast", "float32"],
        ["steer", "a", "--vector", "v", "--cast", "float32"],
        ["vectors"],
        ["vectors", "show"],
        ["vectors", "put", "a"],
        ["vectors", "get", "a", "b", "--format", "pt"],
        ["vectors", "train", "a", "b", "--layers", "x"],
        ["models", "--json", "--format", "csv"],
        ["models", "--output", "rows"],
        ["models", "--format", "xml"],
        ["models", "--plot", "a.png"],
        ["score", "a", "b", "--per", "token"],
        ["score", "a", "b", "--per", "window", "--format", "csv"],
        ["score", "a", "b", "--plot", "a.png"],
        ["steer", "a"],
        ["steer", "a", "--vector", "mood:"],
        ["steer", "a", "--vector", "mood:x"],
        ["steer", "a", "--vector", "mood@x"],
        ["steer", "a", "--vector", "mood@3-1"],
        ["steer", "a", "--vector", "mood", "--steering", "file"],
        ["steer", "a", "--steering", "file", "--op", "add"],
        ["steer", "a", "--vector", "mood", "--positions", "somewhere"],
        ["steer", "a", "--vector", "mood", "--clamp", "1"],
        ["score", "a", "b", "--unit", "raw"],
        ["steer", "a", "--vector", "mood", "--above", "1"],
        ["steer", "a", "--vector", "mood", "--when", "no@1:temper", "--above", "1"],
        ["score", "a", "b", "--probe", "mood@x"],
        ["perplexity", "a", "--positions", "all"],
        ["sweep", "--vector", "mood", "--item", "I", " a"],
        ["sweep", "--vector", "mood", "--scales", "-1,b", "--item", "I", " a"],
        ["sweep", "--vector", "mood", "--scales=1"],
        ["sweep", "--vector", "mood", "--scales=1", "--item", "no target"],
        ["sweep", "--vector", "mood", "--scales=1", "--item", "I", " a", "--layers", "1;;2"],
        ["sweep", "--scales=1", "--item", "I", " a"],
        ["capture", "text", "--output", "a.safetensors", "--layers", "x"],
        ["capture", "text", "--output", "a.safetensors", "--layers", "1", "--at", "3"],
        ["capture", "text", "--output", "a.safetensors", "--layers", "1", "--at", "last_prompt"],
        ["score-file", "text", "out.jsonl", "--map", "text"],
        ["score-file", "text", "out.jsonl", "--options", "[1]"],
        ["score-file", "text", "out.jsonl", "--endpoint", "tokenize"],
        ["perplexity", "--dataset", "data", "also.txt"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(capsys: Output, argv: list[str]) -> None:
    server = answer(MODELS)
    with pytest.raises(SystemExit) as caught:
        run(server, *argv)
    assert (caught.value.code, server.requests) == (2, [])
    err = capsys.readouterr().err
    assert f"See {' '.join(['logsteer', *argv[:1]])}" in err or argv[:1] == ["nothing"]
    assert err.count("\n") == 2 and ("--cast" not in argv or "only with --override" in err)


def test_every_column_is_too_wide_for_a_terminal_unless_some_are_named(capsys: Output) -> None:
    argv, reply, *_ = COMMANDS["diagnostics"]
    server = answer(reply)
    assert run(server, *argv[:3]) == 0
    assert "'ad'" not in capsys.readouterr().out and "columns" not in server.sent


def test_selftest_shows_each_check_and_fails_where_one_does(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer_selftest(monkeypatch, SELFTEST)
    address = ("http://elsewhere", "--model", "demo", "--against", "other")
    assert run(Script(), "selftest", *address) == 1
    out, err = capsys.readouterr()
    assert asked == [("http://elsewhere", "demo", "other")]
    rows = [line.split() for line in out.splitlines()]
    assert ["batched", "It", "[red]holds.", "903", "0", "1.0e-04", "passed"] in rows
    assert ["shuffled", "It", "[red]holds.", "902", "5.7e-06", "1.0e-04", "passed"] in rows
    assert ["steered_neighbour", "It", "[red]holds.", "901", "2.5e-01", "1.0e-04", "failed"] in rows
    assert ["chunked", "It", "[red]holds.", "1.0e-04", "not", "run"] in rows
    assert "value 3 differs" in out and "noise floor 5.0e-07" in out
    assert err == "error: demo failed its self-test: steered_neighbour\n"


def test_selftest_that_passes_is_0(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {**SELFTEST, "verdict": "passed", "checks": SELFTEST["checks"][:2]}
    asked = answer_selftest(monkeypatch, passed)
    assert run(Script(), "--base-url", "http://here", "selftest", "--json") == 0
    assert asked == [("http://here", None, None)]
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "passed"
    assert err == ""


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


SWEPT = ["sweep", "--vector", "mood", "--scales=1", "--item", "I am", " glad", " sad"]


@pytest.mark.parametrize(
    ("argv", "reply", "status", "told"),
    [
        (["models", "--json"], problem("unknown_model", 404, detail="no model x;\nthere is: demo"),
         1, "error: unknown_model: no model x; there is: demo (request from-server)\n"),
        (["models"], problem("invalid_request", 422), 1, "invalid_request"),
        (["models"], problem("internal", 500), 1, "internal"),
        (["models"], problem("unauthorized", 401), 1, "unauthorized"),
        (["models"], problem("overloaded", 429), 3, "overloaded"),
        (["models"], problem("model_loading", 503), 3, "model_loading"),
        (["models"], problem("deadline_exceeded", 504), 3, "deadline_exceeded"),
        (["models"], httpx.ReadTimeout("slow"), 3, "did not answer"),
        (["models", "--base-url", "http://h:1"], httpx.ConnectError("refused"), 3,
         "error: no server answers at http://h:1 (refused)"),
        (["models", "--base-url", "localhost:1"], None, 1, "needs the form http://host:port"),
        (["models", "reload"], problem("invalid_request", 422, detail="nothing changed: line 3"), 1,
         "nothing changed: line 3"),
        (["models", "--output", "none/rows.csv"], None, 1, "there is no directory"),
        (["perplexity", "none"], None, 1, "error: No such file or directory: none\n"),
        (["steer", "I", "--vector", "mood"], problem("unknown_vector", 404), 1, "unknown_vector"),
        (SWEPT, httpx.Response(200, json=SWEEP), 1, "texts: a fault of the server (request r)"),
        ([*SWEPT, "--text", "text", "--plot", "x.doc"], None, 1, ".png, .svg or .pdf"),
        ([*SWEPT, "--text", "text", "--plot", "none/x.png"], None, 1, "there is no directory"),
        (["perplexity", "text", "--plot", "s.txt"], None, 1, ".png, .svg or .pdf"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_line_on_stderr_and_a_status(
    capsys: Output, pauses: list[float], argv: list[str], reply: Any, status: int, told: str
) -> None:
    server = Script(reply)
    assert run(server, *argv) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), bool(server.requests)) == ("", 1, reply is not None)
    assert err.startswith("error: ") and told in err


@pytest.mark.parametrize(
    ("argv", "reply", "path", "start"),
    [
        (["perplexity", "text", "--json"], event_stream(PERPLEXITY_EVENTS), "p.svg", b"<?xml"),
        ([*SWEPT, "--text", "text"], httpx.Response(200, json=SWEEP), "p.png", b"\x89PNG"),
    ],
)
def test_an_answer_is_drawn_to_a_file(
    capsys: Output, argv: list[str], reply: Any, path: str, start: bytes
) -> None:
    assert run(Script(reply), *argv, "--plot", path) == 0
    assert Path(path).read_bytes().startswith(start)
    assert ("plot: p.png" in capsys.readouterr().out) == ("--json" not in argv)


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


def test_interruption_is_130() -> None:
    def interrupt(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    assert run(Script(interrupt), "models") == 130


def test_a_replacement_that_failed_is_exit_status_1(capsys: Output) -> None:
    failed = RELOAD | {"failed": {"other": "no such directory"}}
    assert run(Script(httpx.Response(200, json=failed)), "models", "reload", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == {"other": "no such directory"}
    assert err == "error: other: no such directory\n"
