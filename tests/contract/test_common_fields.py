"""Common means common: each endpoint that scores or generates takes each field, or says why not.

A field that is taken has an effect that the fake engine can show: in the answer, in what it counts,
or in what the result cache knows. One that is refused is named, with a reason.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from logsteer.schemas import ALL_COLUMNS
from tests.conftest import ROOT, VOCAB_SIZE

FIELDS = (
    "columns", "policy", "precision", "on_overflow", "on_error", "cache", "bos", "model",
    "special_tokens", "steering", "override", "adapter", "probes", "capture",
)  # fmt: skip
"""Those that API.md lists as common."""

NEITHER = {
    "/tokenize": "encodes",
    "/detokenize": "decodes",
    "/vectors/train": "reads activations",
    "/vectors/{name}/combine": "adds vectors",
    "/captures": "starts a job that reads activations",
    "/captures/{name}/pause": "stops a job",
    "/captures/{name}/resume": "starts a job again",
    "/models/{model_id}/selftest": "tests a model with and without every change that it makes",
    "/models/{model_id}/load": "starts an engine",
    "/models/{model_id}/unload": "ends an engine",
    "/models/{model_id}/drain": "keeps requests out",
    "/admin/reload": "changes models",
    "/ping": "tells whether models answer",
    "/reset_prefix_cache": "leaves kept prefixes unused",
}
"""Endpoints that are posted to and neither score nor generate for the caller, and what they do."""

ABLATE = {"vectors": [{"data": {"1": [1.0] + [0.0] * 15}, "op": "ablate"}]}
ITEMS = [{"context": "Once upon", "targets": [" a time"]}]
TEXT = "Once upon a time there was a capital of France, and it was a long way off."
LONG = "the cat " * 100
"""More tokens than the model's context of 128 holds."""
CHAT = [{"role": "user", "content": "Hi"}]
DRAW = {"max_tokens": 4, "seed": 3, "columns": ["rank"]}

BODIES: dict[str, dict[str, Any]] = {
    "/logprob": {"items": ITEMS},
    "/diagnostics": {"items": ITEMS},
    "/divergence": {"items": ITEMS, "reference": {}},
    "/perplexity": {"texts": [TEXT], "tokens": True},
    "/perplexity/stream": {"text": TEXT},
    "/steer": {"prompts": ["Once upon"], "steering": ABLATE, **DRAW},
    "/generate": {"prompts": ["Once upon"], **DRAW},
    "/sweep": {"items": ITEMS, "steering": ABLATE, "scales": [1.0]},
    "/patch": {"pairs": [{"clean": ITEMS[0], "corrupted": ITEMS[0]}]},
    "/lens": {"items": ITEMS, "layers": [1]},
    "/gradient": {"items": ITEMS, "wrt": {"layers": [1]}},
    "/activations": {"items": ["Once upon"], "layers": [1]},
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/score": {"query": "Once", "items": [" upon"], "label_token_ids": [5, 6]},
}
"""A request of each endpoint that works without any common field (but one it must have)."""

VALUES: dict[str, Any] = {
    "columns": ["rank", "entropy"],
    "policy": {"temperature": 0.5},
    "precision": "float64",
    "on_overflow": "truncate_left",
    "on_error": "report",
    "cache": False,
    "bos": "never",
    "special_tokens": "text",
    "model": "nobody",
    "steering": {"vectors": [{"name": "nothing"}]},
    "override": {"name": "nothing", "eta": 0.5},
    "adapter": "nothing",
    "probes": [{"data": {"1": [1.0] + [0.0] * 15}, "layers": [1, 2]}],
    "capture": {"layers": [2, 1]},
}

OPENAI = dict.fromkeys(
    ("columns", "policy", "precision", "on_overflow", "on_error", "cache", "bos"),
    "OpenAI's shape has no place for it; send /logprob or /generate",
)
REFUSALS: dict[str, dict[str, str]] = {
    "/logprob": {},
    "/diagnostics": {},
    "/divergence": {},
    "/perplexity": {"on_overflow": "cut into windows that fit"},
    "/perplexity/stream": {
        "columns": "keeps no tokens; send the text to /perplexity",
        "policy": "keeps no columns; send the text to /perplexity",
        "probes": "keeps no tokens; send the text to /perplexity",
        "capture": "keeps no tokens; send the text to /perplexity",
        "on_overflow": "cut into windows that fit",
        "on_error": "a stream is one text",
    },
    "/steer": {"policy": "drawn by temperature, top_p, top_k and min_p"},
    "/generate": {"policy": "drawn by temperature, top_p, top_k and min_p"},
    "/sweep": {
        "columns": "gives sums, no tokens",
        "policy": "gives sums, no columns",
        "on_error": "of the same items",
        "probes": "gives sums, no tokens",
        "capture": "gives sums, no tokens",
    },
    "/patch": {
        "columns": "gives one number a place",
        "policy": "gives one number a place",
        "on_error": "of the same pairs",
        "probes": "gives one number a place",
        "capture": "gives one number a place",
        "steering": "changes activations itself",
    },
    "/lens": {"probes": "/logprob gives readings", "capture": "/logprob gives activations"},
    "/gradient": {
        "columns": "/logprob gives columns",
        "policy": "/logprob gives columns",
        "precision": "computed in the model's dtype",
        "probes": "/logprob gives readings",
        "capture": "/logprob gives activations",
    },
    "/activations": {
        "columns": "/logprob gives columns",
        "policy": "/logprob gives columns",
        "precision": "given in float32",
        "on_error": "the arrays are of all items",
        "probes": "/logprob gives readings",
        "capture": "say what is given",
        "cache": "computed each time",
    },
    "/v1/completions": OPENAI,
    "/v1/chat/completions": OPENAI,
    "/v1/score": OPENAI
    | {
        "probes": "/logprob gives readings",
        "capture": "/logprob gives activations",
    },
}
"""What an endpoint does not take, and the reason that it gives."""
DRAWN_EACH_TIME = ("/steer", "/generate")
COMPUTED_EACH_TIME = (*DRAWN_EACH_TIME, "/divergence")
"""Endpoints whose results are never kept, so that `cache` may say either."""

CASES = [(path, field) for path in BODIES for field in FIELDS]
REFUSED = [case for case in CASES if case[1] in REFUSALS[case[0]]]
TAKEN = [case for case in CASES if case not in REFUSED]


def post(http: httpx.Client, path: str, body: dict[str, Any], accept: str = "") -> httpx.Response:
    """Send a request; of a streamed text the fields are query parameters, objects as JSON."""
    if path != "/perplexity/stream":
        return http.post(path, json=body, headers={"accept": accept})
    query = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in body.items()
        if name != "text"
    }
    return http.post(path, params=query, content=body["text"].encode())


def document_of(response: httpx.Response) -> dict[str, Any]:
    """The answer; of a stream of events the last one's."""
    assert response.status_code == 200, response.text
    kind = response.headers["content-type"]
    if kind.startswith("text/event-stream"):
        *_, name, data = response.text.strip().splitlines()
        assert name == "event: result"
        return json.loads(data.removeprefix("data: "))
    if kind == "application/msgpack":
        return msgpack.unpackb(response.content, object_hook=read_array)
    return dict(response.json())


def read_array(entry: dict[str, Any]) -> Any:
    if entry.keys() != {"dtype", "shape", "data"}:
        return entry
    return np.frombuffer(entry["data"], entry["dtype"]).reshape(entry["shape"]).tolist()


def error_of(response: httpx.Response) -> tuple[str, str | None, str]:
    """Code, param and detail of an error, in the shape that its path has for errors."""
    document = response.json()
    if response.request.url.path.startswith("/v1/"):
        error = document["error"]
        return error["code"], error["param"], error["message"]
    return document["code"], document["param"], document["detail"]


def invalid(response: httpx.Response) -> int:
    """The status of an invalid request, in the shape that its path has for errors."""
    return 400 if response.request.url.path.startswith("/v1/") else 422


def with_text(path: str, text: str) -> dict[str, Any]:
    """The endpoint's request about another text."""
    body = dict(BODIES[path])
    item = {"context": text, "targets": [" a time"]}
    for name in ("items", "pairs", "texts", "text", "prompts", "prompt", "messages"):
        if name not in body:
            continue
        body[name] = {
            "items": [text if path in ("/activations", "/v1/score") else item],
            "pairs": [{"clean": item, "corrupted": item | {"targets": [" a girl"]}}],
            "texts": [text],
            "text": text,
            "prompts": [text],
            "prompt": text,
            "messages": [{"role": "user", "content": text}],
        }[name]
    return body


def properties(path: str) -> set[str]:
    """The fields of an endpoint, as openapi.json has them."""
    document = json.loads((ROOT / "openapi.json").read_text())
    operation = document["paths"][path]["post"]
    names = {parameter["name"] for parameter in operation.get("parameters", [])}
    schema = operation["requestBody"]["content"].get("application/json", {}).get("schema", {})
    reference = schema.get("$ref", "").rpartition("/")[2]
    return names | set(document["components"]["schemas"].get(reference, {}).get("properties", ()))


def test_every_endpoint_takes_part_or_does_something_else() -> None:
    """A new endpoint belongs into BODIES, and what it does not take into REFUSALS."""
    paths = json.loads((ROOT / "openapi.json").read_text())["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods}
    assert posted == BODIES.keys() | NEITHER.keys()
    assert BODIES.keys() == REFUSALS.keys()


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_has_what_is_taken_and_nothing_that_is_refused(path: str) -> None:
    taken = {field for where, field in TAKEN if where == path}
    silent = {"on_overflow"} if path.startswith("/perplexity") else set()
    assert properties(path) & set(FIELDS) == taken | silent


@pytest.mark.parametrize("path", BODIES)
def test_the_request_itself_is_right(http: httpx.Client, path: str) -> None:
    response = post(http, path, BODIES[path])
    if path == "/gradient":
        check_unsupported(response)
    else:
        assert document_of(response)["id"]


def check_unsupported(response: httpx.Response, param: str | None = None) -> None:
    """The fake engine lacks it, which is told by name, and with what has it."""
    assert response.status_code == invalid(response), response.text
    code, named, detail = error_of(response)
    assert (code, named) == ("unsupported_by_engine", param)
    assert "serve the model with" in detail
    assert "transformer_lens" in detail


@pytest.mark.parametrize(("path", "field"), REFUSED)
def test_a_field_that_is_not_taken_is_refused_with_the_reason(
    http: httpx.Client, path: str, field: str
) -> None:
    response = post(http, path, BODIES[path] | {field: VALUES[field]})
    assert response.status_code == invalid(response), response.text
    code, param, detail = error_of(response)
    assert (code, param) == ("invalid_request", field)
    assert f"{field}: " in detail
    assert REFUSALS[path][field] in detail


def score_rows(path: str, document: dict[str, Any]) -> dict[str, Any]:
    """The tokens of an answer: of a scored target, at its first layer, a completion, or a text."""
    result = document["results"][0]
    if "layers" in (result.get("targets") or [{}])[0]:
        target = result["targets"][0]
        return {**target, **next(iter(target["layers"].values()))}
    return (
        result["targets"][0]
        if "targets" in result
        else result["completions"][0] if "completions" in result else result["tokens"]
    )  # fmt: skip


def known(http: httpx.Client, path: str, body: dict[str, Any]) -> int:
    """How many results of a request came from the result cache."""
    return document_of(post(http, path, body))["usage"]["cached_results"]


def check_columns(http: httpx.Client, path: str) -> None:
    rows = score_rows(path, document_of(post(http, path, BODIES[path] | {"columns": ["entropy"]})))
    assert rows["columns"].keys() == {"entropy"}
    assert len(rows["columns"]["entropy"]) == len(rows["token_ids"])
    assert "ranks" not in rows or rows["ranks"] is None


def check_policy(http: httpx.Client, path: str) -> None:
    """The fake's numbers know no policy; that it reaches the jobs shows in what they are called.

    `/divergence` takes a temperature: `test_divergence` has its effect.
    """
    body = with_text(path, f"a policy of {path}")
    if path == "/divergence":
        assert error_of(post(http, path, body | {"policy": {"top_k": 7}}))[1] == "policy"
        return
    policies = [{"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 0.5, "top_k": 7}]
    counts = [known(http, path, body | {"policy": policy}) for policy in policies]
    assert counts[0] == counts[2] == 0 < counts[1]


def check_precision(http: httpx.Client, path: str) -> None:
    body = with_text(path, f"a precision of {path}")
    answers = [
        document_of(post(http, path, body | precision))
        for precision in ({}, {"precision": "float32"}, {"precision": "float64"})
    ]
    named = [answer["provenance"]["precision"] for answer in answers]
    assert named == ["float32", "float32", "float64"]
    counts = [answer["usage"]["cached_results"] for answer in answers]
    assert counts[0] == counts[2] == 0
    assert (counts[1] > 0) != (path in COMPUTED_EACH_TIME)


def test_tokens_are_drawn_in_the_precision_asked_for(http: httpx.Client) -> None:
    body = {"prompts": ["Once"], "max_tokens": 2, "precision": "float64"}
    for columns in ({}, {"columns": ["entropy"]}):
        answer = document_of(post(http, "/generate", body | columns))
        assert answer["provenance"]["precision"] == "float64"


def check_on_overflow(http: httpx.Client, path: str) -> None:
    body = with_text(path, LONG)
    response = post(http, path, body)
    assert response.status_code == 422
    assert error_of(response)[0] == "context_too_long"
    answer = document_of(post(http, path, body | {"on_overflow": "truncate_left"}))
    result = (answer["points"][0]["items"] if path == "/sweep" else answer["results"])[0]
    told = result["targets"][0] if "targets" in result else result
    fits = document_of(post(http, path, BODIES[path] | {"on_overflow": "truncate_left"}))
    assert told["truncated_tokens"] > 0
    assert '"truncated_tokens": 0' in json.dumps(fits)


def check_on_error(http: httpx.Client, path: str) -> None:
    """A bad item is named, and with `report` it alone has no result."""
    body = with_text(path, f"an error of {path}")
    (name,) = {"items", "texts", "prompts"} & body.keys()
    bad: Any = ""
    if name == "items":
        bad = {**body[name][0], "targets": ["a", ""]}
    elif name == "texts":
        body[name], bad = [[5, 6, 7]], [VOCAB_SIZE]
    good = body[name][0]
    place = f"{name}[1]" + (".targets[1]" if name == "items" else "")
    alone = document_of(post(http, path, body))["results"][0]
    for mixed in ([good, bad, good], [good, bad, good, bad]):
        refused = post(http, path, body | {name: mixed})
        assert refused.status_code == 422
        assert error_of(refused)[:2] == ("invalid_request", place)
        reported = post(http, path, body | {name: mixed, "on_error": "report"})
        results = document_of(reported)["results"]
        assert ["problem" in result for result in results] == [entry is bad for entry in mixed]
        problem = results[1]["problem"]
        assert results[1].keys() == {"problem"}
        assert (problem["code"], problem["param"]) == ("invalid_request", place)
        assert problem["request_id"] == reported.headers["x-request-id"]
        if path not in DRAWN_EACH_TIME:
            assert results[0] == results[2] == alone
        else:
            seeds = [result["completions"][0]["seed"] for result in results[::2]]
            assert seeds == [DRAW["seed"], DRAW["seed"] + 2]  # as if the bad one had been drawn
    nothing = document_of(post(http, path, body | {name: [bad], "on_error": "report"}))
    assert [result.keys() for result in nothing["results"]] == [{"problem"}]


def check_cache(http: httpx.Client, path: str) -> None:
    body = with_text(path, f"a cache of {path}")
    assert known(http, path, body | {"cache": False}) == 0
    assert known(http, path, body) == 0, "what is not to be cached was kept"
    assert (known(http, path, body | {"cache": True}) > 0) != (path in COMPUTED_EACH_TIME)
    assert known(http, path, body | {"cache": False}) == 0


def check_bos(http: httpx.Client, path: str) -> None:
    read = {
        bos: document_of(post(http, path, BODIES[path] | {"bos": bos}))["usage"]["prompt_tokens"]
        for bos in ("auto", "always", "never")
    }
    assert read["auto"] == read["always"] > read["never"]


def check_special_tokens(http: httpx.Client, path: str) -> None:
    """`<|system|>` is one token to the tokenizer, and several as plain text."""
    body = with_text(path, "a <|system|> b")
    usages = [
        document_of(post(http, path, body | field))["usage"]
        for field in ({}, {"special_tokens": "parse"}, {"special_tokens": "text"})
    ]
    read = [usage["prompt_tokens"] + usage.get("scored_tokens", 0) for usage in usages]
    assert read[0] == read[1] < read[2]


def check_model(http: httpx.Client, path: str) -> None:
    response = post(http, path, BODIES[path] | {"model": "nobody"})
    code, param, detail = error_of(response)
    assert (response.status_code, code, param) == (404, "unknown_model", "model")
    assert "'nobody'" in detail
    assert document_of(post(http, path, BODIES[path] | {"model": "fake"}))["model"] == "fake"


def check_steering(http: httpx.Client, path: str) -> None:
    response = post(http, path, BODIES[path] | {"steering": {"vectors": [{"name": "nothing"}]}})
    assert (response.status_code, error_of(response)[0]) == (404, "unknown_vector")
    answer = document_of(post(http, path, BODIES[path] | {"steering": ABLATE}))
    if path == "/sweep":
        assert [point["scale"] for point in answer["points"]] == [1.0]
        return
    (used,) = answer["steering"]["vectors"]
    assert (used["scale"], len(used["sha256"])) == (1.0, 64)


def check_probes(http: httpx.Client, path: str) -> None:
    unknown = post(http, path, BODIES[path] | {"probes": [{"name": "nothing"}]})
    assert error_of(unknown)[0] == "unknown_vector"
    body = BODIES[path] | {"probes": VALUES["probes"]}
    if path.startswith("/v1/"):
        rows = post(http, path, body).json()["choices"][0]
        count = 4
    else:
        rows = score_rows(path, document_of(post(http, path, body)))
        count = len(rows["token_ids"])
    assert [(read["layer"], read["read"]) for read in rows["probes"]] == [
        (1, "projection"), (2, "projection"),
    ]  # fmt: skip
    is_steered = path == "/steer"
    for read in rows["probes"]:
        assert len(read["before"]) == count
        assert -5 <= min(read["before"]) <= max(read["before"]) <= 5
        moved = [before + 1 for before in read["before"]] if is_steered else None
        assert read.get("after") == moved


def check_capture(http: httpx.Client, path: str) -> None:
    """A window of `/perplexity` has them, elsewhere a target or a completion; none are kept."""
    body = BODIES[path] | {"capture": VALUES["capture"]}
    if path == "/perplexity":
        assert error_of(post(http, path, body))[0] == "invalid_request"
        body |= {"windows": True}
    for _ in range(2):
        document = document_of(post(http, path, body))
        if path.startswith("/v1/"):
            rows = document["choices"][0]
        else:
            assert document["usage"]["cached_results"] == 0
            result = document["results"][0]
            rows = result["windows"][0] if "windows" in result else score_rows(path, document)
        shown = rows["activations"]
        assert list(shown["layers"]) == ["1", "2"]
        assert {len(row) for rows in shown["layers"].values() for row in rows} == {16}
        assert {len(rows) for rows in shown["layers"].values()} == {len(shown["positions"])}


def check_lacking(field: str) -> Callable[[httpx.Client, str], None]:
    def check(http: httpx.Client, path: str) -> None:
        check_unsupported(post(http, path, BODIES[path] | {field: VALUES[field]}), field)

    return check


EFFECTS: dict[str, Callable[[httpx.Client, str], None]] = {
    "columns": check_columns,
    "policy": check_policy,
    "precision": check_precision,
    "on_overflow": check_on_overflow,
    "on_error": check_on_error,
    "cache": check_cache,
    "bos": check_bos,
    "special_tokens": check_special_tokens,
    "model": check_model,
    "steering": check_steering,
    "override": check_lacking("override"),
    "adapter": check_lacking("adapter"),
    "probes": check_probes,
    "capture": check_capture,
}


@pytest.mark.parametrize(("path", "field"), TAKEN)
def test_a_field_that_is_taken_has_its_effect(http: httpx.Client, path: str, field: str) -> None:
    if path == "/gradient" and field != "model":
        # The fake has no gradients: it says so once the field itself has been taken.
        check_unsupported(post(http, path, BODIES[path] | {field: VALUES[field]}))
    elif path == "/gradient":
        response = post(http, path, BODIES[path] | {field: VALUES[field]})
        assert error_of(response)[:2] == ("unknown_model", "model")
    else:
        EFFECTS[field](http, path)


ROWS = [path for path, field in TAKEN if field == "columns"]
SHOWN = set(ALL_COLUMNS) - {"logprob", "rank"}


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
@pytest.mark.parametrize("path", ROWS)
def test_columns_have_one_shape(http: httpx.Client, path: str, accept: str) -> None:
    """A target, a completion and a text: `logprobs`, `ranks`, and `columns` for all others."""
    response = post(http, path, BODIES[path] | {"columns": list(ALL_COLUMNS)}, accept)
    assert response.headers["content-type"] == accept
    rows = score_rows(path, document_of(response))
    count = len(rows["token_ids"])
    assert count > 0
    assert rows["columns"].keys() == SHOWN
    arrays = [rows["logprobs"], rows["ranks"], *rows["columns"].values()]
    assert [len(array) for array in arrays] == [count] * len(arrays)
    assert all(isinstance(rank, int) for rank in rows["ranks"])
    assert not SHOWN & rows.keys(), "a column stands in two places"
