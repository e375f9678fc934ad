"""Requests that the schemas allow, made of the values at the edges of what they allow.

`INPUTS=5000` sends so many to each engine.
"""

import base64
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from logsteer import Client, schemas
from logsteer.schemas import openai
from logsteer.schemas.steering import FLOAT32_MAX
from tests.conftest import VOCAB_SIZE, Server

pytestmark = pytest.mark.engine

ENDPOINTS: dict[str, type[BaseModel]] = {
    "/logprob": schemas.LogprobRequest,
    "/diagnostics": schemas.DiagnosticsRequest,
    "/divergence": schemas.DivergenceRequest,
    "/perplexity": schemas.PerplexityRequest,
    "/steer": schemas.SteerRequest,
    "/generate": schemas.GenerateRequest,
    "/sweep": schemas.SweepRequest,
    "/patch": schemas.PatchRequest,
    "/lens": schemas.LensRequest,
    "/gradient": schemas.GradientRequest,
    "/activations": schemas.ActivationsRequest,
    "/captures": schemas.CaptureRequest,
    "/v1/completions": openai.CompletionRequest,
    "/v1/chat/completions": openai.ChatCompletionRequest,
    "/v1/score": openai.ScoreRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
WIDTH, LAYERS = 128, 5
"""Of the demo model."""

TEXTS = st.sampled_from(
    ["Once upon a time", "a", " ", "\n\n", "\x00", "é😀", "\u200b", "cat " * 40, "</s><s>", "."]
)
IDS = st.sampled_from([0, 1, 2, 3, 5, 99, VOCAB_SIZE - 1] * 4 + [VOCAB_SIZE, 2**31 - 1])
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-7, 0.5, 3.7, 1e3, 65504.0, 1e6, 1e9, 1e18, 1e19,
           1e30, FLOAT32_MAX)  # fmt: skip
WHOLE = (0, 1, 2, 3, 5, 20, 21, 64, 127, 1000, VOCAB_SIZE, VOCAB_SIZE + 1, 2**15, 2**16, 2**24,
         2**31 - 1, 2**31, 2**62 - 1, 2**63 - 1)  # fmt: skip


def _make_vector() -> SearchStrategy[Any]:
    small = [number for number in NUMBERS if number < 1e19]
    numbers = st.sampled_from([*small, *(-number for number in small)] * 2 + [1e30, FLOAT32_MAX])

    def pack(few: list[float], as_text: bool, odd: int) -> Any:
        vector = np.resize(np.array(few, np.float32), WIDTH + odd)
        return base64.b64encode(vector.astype("<f4")).decode() if as_text else vector.tolist()

    odd = st.sampled_from([0] * 29 + [-1])
    return st.builds(pack, st.lists(numbers, min_size=1, max_size=5), st.booleans(), odd)


LAYER = st.sampled_from([*range(LAYERS)] * 6 + [LAYERS, 2**31 - 1])
SLICES = st.lists(
    st.tuples(st.sampled_from([0, 1, 5]), st.sampled_from([6, 50, 2**31 - 1])),
    min_size=1, max_size=3,
)  # fmt: skip
SCALES = st.sampled_from([1.0, 1.0, 2.0, -3.0, 0.0, 90.0, 1e18, -1e18, 1e38])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS}
    ),
    min_size=1, max_size=3,
)  # fmt: skip
ANGLES = st.sampled_from([0.0, 1e-38, 90.0, -180.0])
TARGETS = st.lists(TEXTS, min_size=1, max_size=3)


def _make_steered() -> SearchStrategy[Any]:
    """One vector of a steering object, with what its operation takes."""
    data = st.dictionaries(
        LAYER.map(lambda layer: str(layer % 10**6)), _make_vector(), min_size=1, max_size=2
    )
    hook = st.sampled_from(["resid_post"] * 5 + ["resid_pre", "attn_out", "nothing"])
    base = {"data": data}
    rest = {"layers": st.lists(LAYER, min_size=1, max_size=3, unique=True), "hook": hook}
    units = st.sampled_from(["raw", "unit", "residual_norm"])
    bound = st.sampled_from([0.0, -1.0, 5.0, 1e18, 1e38, -1e38])
    free = st.sampled_from(["add", "add", "project", "replace"])
    bounds = st.tuples(bound, bound).map(lambda pair: {"min": min(pair), "max": max(pair)})
    return st.one_of(
        st.fixed_dictionaries(base | {"op": free, "unit": units, "scale": SCALES}, optional=rest),
        st.fixed_dictionaries(base | {"op": st.just("ablate"), "scale": SCALES}, optional=rest),
        st.fixed_dictionaries(
            base | {"op": st.just("rotate"), "scale": ANGLES},
            optional=rest,
        ),
        st.fixed_dictionaries(base | {"op": st.just("clamp"), "params": bounds}, optional=rest),
    )


OWN: dict[str, SearchStrategy[Any]] = {
    "vectors": st.lists(_make_steered(), min_size=1, max_size=2),
    "items": st.lists(
        st.one_of(
            st.fixed_dictionaries({"context": TEXTS, "targets": TARGETS}),
            st.fixed_dictionaries({"messages": MESSAGES, "targets": TARGETS}),
            st.fixed_dictionaries(
                {
                    "context_ids": st.lists(IDS, max_size=40),
                    "target_ids": st.lists(
                        st.lists(IDS, min_size=1, max_size=5), min_size=1, max_size=3
                    ),
                }
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    "wrt": st.fixed_dictionaries(
        {"layers": st.lists(LAYER, min_size=1, max_size=2, unique=True)},
        optional={
            "positions": st.one_of(
                st.sampled_from(["all", "last_prompt", "completion"]),
                st.fixed_dictionaries({"slices": SLICES}),
            ),
        },
    ),
    "texts": st.lists(TEXTS, min_size=1, max_size=2),
    "prompts": st.lists(TEXTS, min_size=1, max_size=2),
    "messages": MESSAGES,
    "scales": st.lists(SCALES, min_size=1, max_size=3),
    "slices": SLICES,
    "n": st.sampled_from([1, 1, 2, 3]),
    "max_tokens": st.sampled_from([1, 2, 5, 5, 9, 0, 2**31 - 1]),
    "max_completion_tokens": st.sampled_from([1, 3, 2**31 - 1]),
    "prompt": st.one_of(TEXTS, TEXTS, st.lists(TEXTS, max_size=2), st.lists(IDS, max_size=9)),
    "token_ids": st.lists(st.lists(IDS, max_size=5), min_size=1, max_size=2),
    "label_token_ids": st.lists(IDS, min_size=1, max_size=4, unique=True),
    "prompt_ids": st.lists(st.lists(IDS, min_size=1, max_size=9), min_size=1, max_size=2),
}
"""By the name of a field, values that come further than any others."""
CAPTURED: dict[str, SearchStrategy[Any]] = {
    "items": st.lists(
        st.one_of(
            TEXTS,
            st.fixed_dictionaries({"token_ids": st.lists(IDS, min_size=1, max_size=40)}),
            st.fixed_dictionaries({"messages": MESSAGES}),
        ),
        min_size=1,
        max_size=3,
    ),
    "layers": st.lists(LAYER, min_size=1, max_size=2, unique=True),
    "hook": st.sampled_from(["resid_post"] * 5 + ["resid_pre", "mlp_out", "nothing"]),
}
"""Likewise, of requests for activations."""
LEFT_OUT = {"model", "adapter", "override", "sha256", "reference", "name", "format"}
"""Fields that name what is not there: given now and then."""


class Edges:
    """Strategies of the JSON schema of one request."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._schema = model.model_json_schema()
        captures = (schemas.ActivationsRequest, schemas.CaptureRequest)
        self._own = OWN | (CAPTURED if model in captures else {})
        self._known: dict[str, SearchStrategy[Any]] = {}

    def make(self) -> SearchStrategy[Any]:
        """Values of the whole schema."""
        return self._make(self._schema, "")

    def _make(self, schema: Mapping[str, Any], name: str) -> SearchStrategy[Any]:
        if name in self._own and not (name == "items" and "anyOf" in schema):  # of /v1/score
            return self._own[name]
        if "$ref" in schema:
            key = schema["$ref"].rpartition("/")[2]
            if key not in self._known:
                self._known[key] = st.deferred(lambda: self._make(self._schema["$defs"][key], ""))
            return self._known[key]
        if "anyOf" in schema:
            return st.one_of(*(self._make(part, name) for part in schema["anyOf"]))
        if "const" in schema or "enum" in schema:
            return st.sampled_from(schema.get("enum") or [schema["const"]])
        return getattr(self, f"_make_{schema.get('type', 'null')}")(schema)

    def _make_null(self, _schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        return st.none()

    def _make_boolean(self, _schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        return st.booleans()

    def _make_string(self, _schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        return TEXTS

    def _make_integer(self, schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", 1) - 1)
        edges = {low, low + 1, high - 1, high, *WHOLE}
        return st.sampled_from(sorted(number for number in edges if low <= number <= high))

    def _make_number(self, schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        low, high = schema.get("minimum", -FLOAT32_MAX), schema.get("maximum", FLOAT32_MAX)
        above = schema.get("exclusiveMinimum", -np.inf)
        edges = {low, high, *NUMBERS, *(-number for number in NUMBERS)}
        return st.sampled_from(sorted(n for n in edges if low <= n <= high and n > above))

    def _make_array(self, schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        least = schema.get("minItems", 0)
        items = self._make(schema.get("items", {}), "")
        return st.lists(items, min_size=least, max_size=max(least, 2))

    def _make_object(self, schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        required = set(schema.get("required", ()))
        properties = schema.get("properties", {})
        given = {name: self._make(part, name) for name, part in properties.items()}
        fixed = {name: given[name] for name in given if name in required}
        # A few of the others, or nearly every request would be refused for two that do not agree.
        others = sorted(given.keys() - required - LEFT_OUT)
        rare = sorted(LEFT_OUT & given.keys())
        names = st.lists(st.sampled_from(others * 9 + rare), max_size=3) if others else st.just([])
        return names.flatmap(
            lambda chosen: st.fixed_dictionaries(
                fixed | {name: given[name] for name in self._complete(schema, chosen)}
            )
        )

    def _complete(self, schema: Mapping[str, Any], chosen: list[str]) -> list[str]:
        """What is chosen, with one of the forms that a request must have one of."""
        properties = schema.get("properties", {})
        for forms in (
            ("prompts", "prompt_ids", "messages"), ("items", "texts"), ("texts", "prompt"),
            ("token_ids", "tokens"),
        ):  # fmt: skip
            if set(forms) <= properties.keys() and not set(forms) & set(chosen):
                chosen = [*chosen, forms[len(chosen) % len(forms)]]
        return chosen


def make_requests() -> SearchStrategy[tuple[str, Any]]:
    """A path, and a body that its schema allows; checks across fields may refuse it."""
    made = {path: Edges(model).make() for path, model in ENDPOINTS.items()}
    return st.sampled_from(list(made)).flatmap(lambda path: st.tuples(st.just(path), made[path]))


def send(client: httpx.Client, path: str, body: Any) -> int:
    """Send a request; return the status of the answer, or of the error that ended its stream."""
    response = client.post(path, json=body)
    if response.headers["content-type"].startswith("text/event-stream"):
        for line in response.text.splitlines():
            if line.startswith("data: {") and '"retryable"' in line:
                return int(json.loads(line.removeprefix("data: "))["status"])
    return response.status_code


def attack(url: str, count: int, model: str) -> Counter[str]:
    """Send so many requests to a server; return how many had each status, by path.

    Errors: AssertionError where one is answered with 5xx, or where the engine does not go on.
    """
    found: Counter[str] = Counter()
    item = {"context_ids": [1, 5, 9, 30], "target_ids": [[7, 8]]}
    probe = {"model": model, "items": [item], "cache": False}
    with httpx.Client(base_url=url, timeout=120) as client, Client(url) as own:
        before = client.post("/logprob", json=probe).json()["results"]

        @seed(0)
        @settings(
            max_examples=count, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(make_requests())
        def run(request: tuple[str, Any]) -> None:
            path, body = request
            status = send(client, path, {"model": model} | body)
            found[f"{path} {status}"] += 1
            assert status < 500, f"{path} answers {status} to {json.dumps(body)}"

        run()
        after = client.post("/logprob", json=probe).json()["results"]
        logprobs = [results[0]["targets"][0]["logprob"] for results in (before, after)]
        assert abs(logprobs[0] - logprobs[1]) < 1e-4, logprobs
        cards = {card.id: card for card in own.models().models}
        card = cards[model]
        assert (card.state, card.restarts) == ("ready", 0), card
    return found


EXAMPLES = int(os.environ.get("INPUTS", "100"))
PROMPT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 2}
ITEM = {"context_ids": [1, 5, 9, 30], "target_ids": [[7, 8]]}
ONES = {"data": {"1": [1.0] * 128}}
KILLERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT | {"logprobs": 21}),
    ("/v1/completions", PROMPT | {"logprobs": 1000, "echo": True}),
    ("/v1/completions", PROMPT | {"top_k": 2**63}),
    ("/generate", {"model": "demo", "prompts": ["a"], "top_k": 2**63}),
    ("/generate", {"model": "demo", "prompts": ["a"], "max_tokens": 2**63}),
    ("/logprob", {"model": "demo", "items": [ITEM], "policy": {"top_k": 2**63}}),
    ("/logprob", {
        "model": "demo", "items": [ITEM],
        "steering": {"vectors": [ONES], "positions": {"slices": [[0, 2**63]]}},
    }),
    ("/generate", {
        "model": "demo", "prompts": ["a"],
        "capture": {"layers": [1], "positions": {"completion": [0, 2**63]}},
    }),
    ("/steer", {
        "model": "demo", "prompts": ["a"],
        "steering": {"vectors": [ONES | {"op": "clamp", "params": {"min": 1e308}}]},
    }),
    ("/steer", {
        "model": "demo", "prompts": ["Once upon a time"],
        "steering": {"vectors": [ONES | {"op": "clamp", "params": {"min": 1e18}}]},
    }),
    ("/steer", {
        "model": "demo", "prompts": ["Once upon a time"],
        "steering": {"vectors": [ONES | {"scale": 1e18, "unit": "residual_norm"}] * 2},
    }),
]  # fmt: skip
"""Requests that ended an engine, or poisoned it."""


def test_no_request_that_the_schemas_allow_ends_vllm(vllm_server: Server) -> None:
    kill(vllm_server)
    check(vllm_server)


def test_no_request_that_the_schemas_allow_ends_transformer_lens(tlens_server: Server) -> None:
    kill(tlens_server)
    check(tlens_server)


def kill(server: Server) -> None:
    """Send what ended engines; whatever is asked for that there is comes back."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for path, body in KILLERS:
            answer = client.post(path, json=body)
            assert answer.status_code in (200, 400, 422), (path, body, answer.text)
            if wanted := body.get("logprobs"):
                tops = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
                assert len(tops[-1]) > 0.8 * wanted  # several tokens may have one text
        overflows = client.post(*KILLERS[-1][:1], json=KILLERS[-1][1]).json()
        assert overflows["code"] == "non_finite"


def check(server: Server) -> None:
    found = attack(server.url, EXAMPLES, "demo")
    answered = sum(count for key, count in found.items() if key.endswith(" 200"))
    assert answered > EXAMPLES / 5, "most requests come no further than the schemas"
