"""`logsteer models load|unload|drain|reload`."""

import json

import httpx
import pytest

from .documents import MODELS
from .scripted import Output, Script, problem, run

CARD = MODELS["models"][0] | {  # type: ignore[index]
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
    server = Script(httpx.Response(200, json=CARD))
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
