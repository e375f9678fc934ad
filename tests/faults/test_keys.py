"""Keys: who is let in, for what, how often, and what it costs to find out."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer._endpoints import ENDPOINTS
from logsteer.errors import APIError
from logsteer_server.__main__ import main
from logsteer_server.keys.caller import Allowance, KeyLimits, TokenCounts
from logsteer_server.keys.commands import CONCURRENCY, STORED_BYTES
from logsteer_server.keys.keyring import KeyRing, change_keys, read_keys
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings
from tests.conftest import Server, fake_model
from tests.faults.keys import add_key, connect, serve
from tests.faults.processes import open_request, read_metric, wait_for
from tests.held import HOLD, HOLD_FILE, held, may_hold

ITEM = {"context_ids": [5], "target_ids": [[6]]}
BODY = {"model": "quick", "items": [ITEM]}
TEXTS = {"model": "quick", "texts": ["a"]}
STEERING = {"vectors": [{"data": {"0": [0.5] * 16}}]}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def tokens(key_file: Path) -> dict[str, str]:
    return {
        "scorer": add_key(key_file, "scorer", "score"),
        "steerer": add_key(key_file, "steerer", "score", "steer"),
        "writer": add_key(key_file, "writer", "score", "write"),
        "root": add_key(key_file, "root", "score", "steer", "write", "admin"),
        "narrow": add_key(key_file, "narrow", "score", concurrency=2),
        "lone": add_key(key_file, "lone", "score", concurrency=1),
        "poor": add_key(key_file, "poor", "score", tokens_per_minute=30),
        "drawing": add_key(key_file, "drawing", "score", tokens_per_minute=30),
        "small": add_key(key_file, "small", "score", "write", stored_bytes=1024),
        "nightly": add_key(key_file, "nightly", "score", priority="batch"),
    }


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, key_file: Path, tokens: dict[str, str]
) -> Iterator[Server]:
    """Two fakes behind a key file: `quick`, and `slow`, which takes 50 ms for 10 tokens."""
    directory = tmp_path_factory.mktemp("server")
    hold = may_hold(directory / HOLD_FILE)
    config = {
        "models": [
            fake_model("quick", **hold),
            fake_model("slow", delay_s=0.05, ahead_tokens=10, **hold),
        ],
        "log_format": "json",
        "access_log": True,
        "key_file": str(key_file),
        "cache_bytes": 0,
    }
    with serve(config, directory) as server:
        yield server


def post(server: Server, token: str | None, path: str, body: Any, **headers: str) -> httpx.Response:
    with connect(server, token, **headers) as http:
        return http.post(path, json=body)


def count_jobs(server: Server, token: str, model: str = "quick") -> int:
    """Jobs that the engine of a model has."""
    with connect(server, token) as http:
        return sum(card["num_jobs"] for card in http.get(f"/models/{model}").json()["replicas"])


def read_callers(server: Server) -> list[str]:
    """Whose requests to score were answered, in the server's order."""
    lines = map(json.loads, filter(None, server.output.splitlines()))
    return [line["key"] for line in lines if line.get("route") == "/logprob"]


# ------------------------------------------------------------------ who is let in


@pytest.mark.parametrize(
    "authorization", [None, "Bearer", "Basic abc", "Bearer wrong", "Bearer ls_000000000000_x"]
)
def test_the_key_is_asked_for_before_the_body_is_read(
    server: Server, authorization: str | None
) -> None:
    """422 told strangers which fields a body has, and 413 which sizes; the body was parsed."""
    headers = {"authorization": authorization} if authorization else {}
    for content in (b"{", b"[" * 100_000, json.dumps(BODY).encode()):
        response = httpx.post(f"{server.url}/logprob", content=content, headers=headers, timeout=60)
        assert response.status_code == 401, response.text
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["code"] == "unauthorized"


def test_a_body_that_never_comes_is_not_waited_for(server: Server) -> None:
    with open_request(server, "POST /logprob", b"{", 100) as begun:
        begun.settimeout(25)
        assert begun.recv(4096).startswith(b"HTTP/1.1 401 ")  # a body may take 30 s


def test_what_needs_no_key(server: Server) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert httpx.get(server.url + path, timeout=60).status_code == 200


def test_every_route_stands_in_the_table() -> None:
    """A route that is missing there fails at the import of the routes, not by being open."""
    assert {e.path for e in ENDPOINTS.values() if e.scope is None} == {
        "/healthz",
        "/readyz",
        "/startupz",
        "/metrics",
        *("/health", "/ping", "/version"),
    }


WORK = {
    "score": [("POST", "/logprob"), ("GET", "/models"), ("GET", "/vectors"), ("POST", "/tokenize"),
              ("POST", "/v1/completions"), ("POST", "/generate")],
    "steer": [("POST", "/steer"), ("POST", "/sweep"), ("POST", "/patch"), ("POST", "/lens"),
              ("POST", "/gradient"), ("POST", "/activations")],
    "write": [("PUT", "/vectors/a"), ("DELETE", "/vectors/a"), ("POST", "/vectors/train"),
              ("POST", "/vectors/a/combine"), ("PUT", "/overrides/a"), ("DELETE", "/adapters/a")],
    "admin": [("POST", "/models/quick/selftest"), ("POST", "/models/quick/load"),
              ("POST", "/models/quick/unload"), ("POST", "/models/quick/drain"),
              ("POST", "/admin/reload")],
}  # fmt: skip
HAS = {"scorer": {"score"}, "steerer": {"score", "steer"}, "writer": {"score", "write"}}


@pytest.mark.parametrize("name", HAS)
def test_a_key_does_what_its_scopes_say(server: Server, tokens: dict[str, str], name: str) -> None:
    with connect(server, tokens[name]) as http:
        for scope, calls in WORK.items():
            for method, path in calls:
                answer = http.request(method, path, content=b"{")
                refused = answer.status_code == 403
                assert refused == (scope not in HAS[name]), (method, path, answer.text)
                if refused:
                    problem = answer.json()
                    problem = problem.get("error", problem)
                    assert problem["code"] == "forbidden"
                    assert f"scope {scope};" in (problem.get("detail") or problem["message"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steering", STEERING),
        ("override", {"name": "a", "eta": 1.0}),
        ("adapter", "a"),
    ],
)
def test_interventions_take_the_scope_steer(
    server: Server, tokens: dict[str, str], field: str, value: Any
) -> None:
    answer = post(server, tokens["scorer"], "/logprob", BODY | {field: value})
    assert (answer.status_code, answer.json()["param"]) == (403, field)
    allowed = post(server, tokens["steerer"], "/logprob", BODY | {field: value})
    assert allowed.status_code != 403


# ------------------------------------------------------------------ how much


def test_requests_at_once_are_bounded_by_key(server: Server, tokens: dict[str, str]) -> None:
    body = BODY | {"items": [{"context_ids": [HOLD], "target_ids": [[6]]}]}
    with ThreadPoolExecutor(3) as pool, held(server.directory / HOLD_FILE):
        begun = [pool.submit(post, server, tokens["narrow"], "/logprob", body) for _ in range(2)]
        wait_for(lambda: count_jobs(server, tokens["scorer"]) == 2)
        for _ in range(3):  # two is the limit of this key, and both are at work
            refused = post(server, tokens["narrow"], "/logprob", BODY)
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
            assert refused.json()["retryable"] and int(refused.headers["retry-after"]) >= 1
        other = pool.submit(post, server, tokens["scorer"], "/tokenize", TEXTS)
        assert other.result().status_code == 200
    assert [answer.result().status_code for answer in begun] == [200, 200]
    assert post(server, tokens["narrow"], "/logprob", BODY).status_code == 200


def test_a_stream_counts_until_its_end(server: Server, tokens: dict[str, str]) -> None:
    body = {"model": "slow", "prompts": ["a"], "max_tokens": 3, "n": 20, "stream": True}
    with connect(server, tokens["lone"]) as http:
        with http.stream("POST", "/generate", json=body | {"n": 1000}) as stream:
            assert stream.status_code == 200
            assert post(server, tokens["lone"], "/logprob", BODY).status_code == 429
        # The caller has hung up.
        wait_for(lambda: post(server, tokens["lone"], "/logprob", BODY).status_code == 200)
        with http.stream("POST", "/generate", json=body) as stream:
            assert stream.status_code == 200
            for _ in stream.iter_bytes():
                pass
        assert http.post("/logprob", json=BODY).status_code == 200


def test_tokens_a_minute_are_bounded_by_key(server: Server, tokens: dict[str, str]) -> None:
    items = [{"context_ids": [n] * 20, "target_ids": [[6]]} for n in range(5, 8)]
    body = {"model": "quick", "items": items}
    assert post(server, tokens["poor"], "/logprob", body).status_code == 200  # 60 of 30
    refused = post(server, tokens["poor"], "/logprob", body)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 1.4 * 60 + 1
    assert post(server, tokens["scorer"], "/logprob", body).status_code == 200


def test_what_is_generated_is_charged_as_it_comes(server: Server, tokens: dict[str, str]) -> None:
    body = {"model": "quick", "prompts": ["a b"], "max_tokens": 40}
    assert post(server, tokens["drawing"], "/generate", body).status_code == 200  # 42 of 30
    refused = post(server, tokens["drawing"], "/generate", body)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")


def test_stored_bytes_are_bounded_by_key(server: Server, tokens: dict[str, str]) -> None:
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save

    small, large = (save({"0": numpy.ones(n, "float32")}) for n in (16, 1024))
    with connect(server, tokens["small"]) as http:
        assert http.put("/vectors/v", content=small).status_code == 200
        refused = http.put("/vectors/w", content=large)
        assert (refused.status_code, refused.json()["code"]) == (413, "payload_too_large")
        assert http.get("/vectors").json()["max_bytes"] == 1024


def test_a_flood_of_one_key_keeps_no_other_waiting(server: Server, tokens: dict[str, str]) -> None:
    """Turns went from call to call: 40 calls of one caller took 40 turns for one of another's."""
    callers = ["steerer"] * 41 + ["scorer", "nightly"]

    def send(number: int, token: int) -> int:
        item = {"context_ids": [token] * 8 + [100 + number], "target_ids": [[6]]}
        body = {"model": "slow", "items": [item]}
        return post(server, tokens[callers[number]], "/logprob", body).status_code

    before = len(read_callers(server))
    with ThreadPoolExecutor(len(callers)) as pool, held(server.directory / HOLD_FILE):
        sent = [pool.submit(send, 0, HOLD)]
        wait_for(lambda: count_jobs(server, tokens["scorer"], "slow") == 1)
        each = read_metric(server, "pending_tokens", model="slow")
        sent += [pool.submit(send, number, 5) for number in range(1, 41)]
        wait_for(lambda: read_metric(server, "pending_tokens", model="slow") == 41 * each)
        sent += [pool.submit(send, number, 5) for number in (41, 42)]
        wait_for(lambda: read_metric(server, "pending_tokens", model="slow") == 43 * each)
    assert {answer.result() for answer in sent} == {200}
    wait_for(lambda: len(read_callers(server)) == before + len(sent))
    served = read_callers(server)[before:]
    assert served.index("scorer") <= 2, "the first is at work, and they take turns"
    assert 14 <= served.index("nightly") <= 18, "of priority batch: one turn in 16, never none"


def test_a_request_may_lower_its_priority_and_not_raise_it(
    server: Server, tokens: dict[str, str]
) -> None:
    for name, asked in (("scorer", "batch"), ("nightly", "interactive"), ("scorer", "Batch")):
        answer = post(server, tokens[name], "/logprob", BODY, **{"X-Priority": asked})
        assert answer.status_code == 200
    refused = post(server, tokens["scorer"], "/logprob", BODY, **{"X-Priority": "first"})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


def test_the_lower_of_two_priorities_holds(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    day, night = add_key(path, "day", "score"), add_key(path, "night", "score", priority="batch")
    ring = make_ring(path)
    for token, asked, priority in (
        (day, "interactive", "interactive"),
        (day, "batch", "batch"),
        (night, "interactive", "batch"),
    ):
        assert ring.identify(f"Bearer {token}", asked).routing.priority == priority  # type: ignore[arg-type]


# ------------------------------------------------------------------ tokens a minute


def make_ring(path: Path, **settings: Any) -> KeyRing:
    given = Settings(models=[ModelSettings(id="a", path="p")], key_file=path, **settings)
    return KeyRing(given)


def refuse(ring: KeyRing, token: str) -> str:
    """The code with which a token is refused."""
    with pytest.raises(APIError) as caught:
        ring.identify(f"Bearer {token}")
    return caught.value.code


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis of this test's own, on a Unix domain socket."""
    command = shutil.which("redis-server")
    if command is None or find_spec("redis") is None:
        pytest.skip("needs Debian's redis-server and logsteer-server[redis]")
    path = tmp_path / "redis.sock"
    given = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen([command, *given], stdout=subprocess.DEVNULL)
    try:
        wait_for(path.is_socket)
        yield f"redis+unix://{path}"
    finally:
        server.kill()
        server.wait()


async def measure_wait(allowance: Allowance) -> float:
    """For how long a key is refused; 0 where it is not."""
    try:
        await allowance.check_tokens()
    except APIError as error:
        assert error.code == "rate_limited"
        return error.retry_after or 0.0
    return 0.0


@pytest.mark.parametrize(
    ("charged", "at_least", "at_most"),
    [
        ([599], 0, 0),
        ([600], 50, 60),
        ([300, 300], 50, 60),
        ([900, 10], 50, 60),  # a request that has begun is not stopped
        ([35_999], 50, 60),
        ([36_000], 3500, 3600),  # 60 minutes' worth at once: the rest of the hour
        ([864_000], 86_000, 86_400),
    ],
)
async def test_tokens_are_counted_by_minute_hour_and_day(
    charged: list[int], at_least: float, at_most: float
) -> None:
    counts = TokenCounts()
    limits = KeyLimits(tokens_per_minute=600)
    first, second = (Allowance(key, limits, counts) for key in "ab")
    for num_tokens in charged:
        assert await measure_wait(second) == 0
        await first.charge(num_tokens)
    assert at_least <= await measure_wait(first) <= at_most
    assert await measure_wait(second) == 0
    await Allowance("c", KeyLimits(), counts).charge(10**9)  # one without a limit


async def test_servers_share_the_tokens_of_a_key_in_redis(redis_url: str) -> None:
    limits = KeyLimits(tokens_per_minute=600)
    servers = TokenCounts(redis_url), TokenCounts(redis_url)
    here, there = (Allowance("a", limits, counts) for counts in servers)
    await here.charge(400)
    assert await measure_wait(there) == 0
    await there.charge(400)
    assert 50 <= await measure_wait(here) <= 60
    assert await measure_wait(Allowance("b", limits, servers[0])) == 0
    for counts in servers:
        await counts.close()


async def test_requests_are_served_while_redis_is_away(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("redis")
    counts = TokenCounts("redis://127.0.0.1:1/0")
    allowance = Allowance("a", KeyLimits(tokens_per_minute=1), counts)
    await allowance.charge(5)
    assert await measure_wait(allowance) == 0
    await counts.close()
    assert caplog.text.count("limits_url: no answer") == 1  # and is left alone for a while


def test_a_url_that_names_no_redis_is_refused() -> None:
    with pytest.raises(ValueError, match="limits_url"):
        Settings(models=[ModelSettings(id="a", path="p")], limits_url="http://localhost")


# ------------------------------------------------------------------ the file


def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    ann = add_key(path, "ann", "score", concurrency=2)
    ring = make_ring(path)
    before = ring.identify(f"Bearer {ann}")
    bob = add_key(path, "bob", "score")
    assert ring.identify(f"Bearer {bob}").namespace == "bob"
    assert ring.identify(f"Bearer {ann}").allowance is before.allowance  # which is at work
    content = path.read_bytes()
    for broken in (b"", b'{"keys": [{}]}', content[:-20]):
        path.write_bytes(broken)
        caplog.clear()
        for _ in range(2):
            assert ring.identify(f"Bearer {ann}").namespace == "ann"
        assert caplog.text.count("the keys stay as they were") == 1
    path.unlink()
    assert ring.identify(f"Bearer {ann}").namespace == "ann"
    path.write_bytes(content)
    assert main(["keys", "revoke", "ann", "--file", str(path)]) == 0
    assert refuse(ring, ann) == "unauthorized"
    assert ring.identify(f"Bearer {bob}").namespace == "bob"


def test_a_secret_that_was_replaced_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    old = add_key(path, "ann", "score", concurrency=3)
    ring = make_ring(path)
    before = ring.identify(f"Bearer {old}")
    assert main(["keys", "replace", "ann", "--file", str(path)]) == 0
    new = capsys.readouterr().out.strip()
    assert refuse(ring, old) == "unauthorized"
    after = ring.identify(f"Bearer {new}")
    assert (after.namespace, after.scopes) == (before.namespace, before.scopes)
    assert after.allowance is before.allowance and after.allowance.limits.concurrency == 3
    assert main(["keys", "replace", "bob", "--file", str(path)]) == 2


def test_a_wrong_secret_of_a_known_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ann, bob = add_key(path, "ann", "score"), add_key(path, "bob", "score")
    ring = make_ring(path)
    wrong = [ann[:-1], ann + "x", ann[:-43] + bob[-43:], ann[:-43] + "y" * 43, "x" * 100_000]
    assert {refuse(ring, token) for token in wrong} == {"unauthorized"}
    assert refuse(ring, "ls_" + "0" * 12 + ann[-44:]) == "unauthorized"


def test_the_file_holds_no_secret_and_is_its_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    old = os.umask(0)
    try:
        arguments = ["--scope", "write,score", "--tokens-per-minute", "9", "--file", str(path)]
        assert main(["keys", "add", "ann", *arguments]) == 0
    finally:
        os.umask(old)
    token = capsys.readouterr().out.strip()
    assert token[-43:] not in path.read_text()
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600, 0o600]
    assert main(["keys", "add", "ANN", *arguments]) == 2
    assert main(["keys", "add", "../a", *arguments]) == 2
    assert main(["keys", "add", "bob", "--scope", "score", "--concurrency", "0", "--file",
                 str(path)]) == 2  # fmt: skip
    assert main(["keys", "revoke", "bob", "--file", str(path)]) == 2
    told = capsys.readouterr().err
    for line in ("there is a key ANN", "name must ", "concurrency must ", f"{path} has no key bob"):
        assert f"error: {line}" in told
    add = ["add", "eve", "--file", str(path), "--scope"]
    for wrong, why in (
        ([], "required: add|list|replace|revoke"),
        ([*add, ""], "give some of score,steer,write,admin"),
        ([*add, "score,all"], "give some of score,steer,write,admin"),
    ):
        with pytest.raises(SystemExit):
            main(["keys", *wrong])
        assert why in capsys.readouterr().err
    assert main(["keys", "list", "--file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ann") and "score,write" in shown and "tokens_per_minute=9" in shown
    (key,) = read_keys(path)[0]
    assert key.sha256 not in shown
    assert (key.limits.concurrency, key.limits.stored_bytes) == (CONCURRENCY, STORED_BYTES)
    path.chmod(0o644)
    make_ring(path)
    assert "others may read" in caplog.text
    path.chmod(0o666)
    with pytest.raises(ConfigurationError, match="anybody may write"):
        make_ring(path)


def test_two_commands_do_not_lose_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_key(path, f"key{n}", "score"), range(16)))
    with change_keys(path) as keys:
        assert {key.name for key in keys} == {f"key{n}" for n in range(16)}


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"keys": 1}', '{"keys": [], "more": 1}', "\xff", "s3cret"]
)
def test_a_server_does_not_start_with_a_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path, config = tmp_path / "keys", tmp_path / "models.yaml"
    if content is not None:
        path.write_text(content)
    config.write_text(json.dumps({"models": [fake_model()], "key_file": "keys"}))
    assert main(["--check", "--config", str(config)]) == 2
    told = capsys.readouterr().err
    assert "key_file" in told and "s3cret" not in told


def test_one_kind_of_key_at_a_time() -> None:
    with pytest.raises(ValueError, match="give the file alone") as caught:
        Settings(models=[ModelSettings(id="a", path="p")], api_key="s3cret", key_file=Path("b"))
    assert "s3cret" not in str(caught.value)
