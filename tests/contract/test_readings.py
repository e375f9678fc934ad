"""Readings of probes on every surface: what `/activations` says of the token that they stand at."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from html import unescape
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from logsteer import APIError, Client
from logsteer.cli import main
from logsteer.extras.rows import list_rows
from logsteer.schemas import SteerPiece

pytestmark = pytest.mark.engine

LAYER = 2
NAME = "readings"
COLUMN = f"{NAME}@{LAYER}: projection"
PROBE = {"name": NAME, "layers": [LAYER]}
CONTEXTUAL = PROBE | {"context": True}
PAIRS = [
    {"positive": f"{name} was very happy.", "negative": f"{name} was very sad."}
    for name in ("Tom", "Lily", "Ben", "Mia")
]
CONTEXT, TARGET = "Lily", " was sad."
PROMPT = "Once upon a time"
STEERING = {"vectors": [{"name": NAME, "layers": [LAYER], "scale": 2.0}]}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
GREEDY_OPTIONS = ["--temperature", "0", "--max-tokens", "6"]

Read = Callable[..., list[float]]


@pytest.fixture(params=["tlens", "vllm"])
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.getfixturevalue(f"{request.param}_client")
    found.vectors.train(NAME, PAIRS, layers=[LAYER], overwrite=True)
    return found


@pytest.fixture
def read(client: Client) -> Read:
    """What `/activations` says of each of these tokens: its projection on the stored vector."""
    (vector_D,) = load(client.vectors.download(NAME)).values()

    def project(ids: Sequence[int], steering: Any = None) -> list[float]:
        found = client.activations([{"token_ids": list(ids)}], [LAYER], steering=steering)
        return (found.layers[LAYER] @ vector_D / np.linalg.norm(vector_D)).tolist()

    return project


def near(found: Sequence[Any], wanted: Sequence[float], tolerance: float = 1e-3) -> None:
    assert [float(value) for value in found] == pytest.approx(wanted, abs=tolerance, rel=tolerance)


def check_tables(answer: Any, wanted: Sequence[float], column: str = COLUMN, **which: Any) -> None:
    """Rows, pandas and the notebook have a reading at each token, and at nothing else."""
    rows = [row for row in list_rows(answer, "token") if which.items() <= row.items()]
    near([row[column] for row in rows], wanted)
    frame = answer.to_pandas("token")
    for name, value in which.items():
        frame = frame[frame[name] == value]
    near(frame[column].tolist(), wanted)
    shown = re.findall(rf"{re.escape(column)} (\S+)[\n\"]", unescape(answer._repr_html_()))
    near([shown[: len(wanted)], shown[-len(wanted) :]][which.get("steered") is False], wanted, 6e-3)


def check_commands(
    client: Client, capsys: pytest.CaptureFixture[str], tokens: Sequence[str],
    wanted: Sequence[float], *argv: str, column: str = COLUMN,
) -> None:  # fmt: skip
    """So have CSV and the tables of the command line; of two sequences they have `tokens` first."""

    def run(*more: str) -> str:
        where = ["--base-url", str(client.base_url), "--model", client.models().models[0].id]
        asked = [*argv, *more, *where, "--probe", f"{NAME}@{LAYER}"]
        assert main(asked) == 0
        return capsys.readouterr().out

    rows = list(csv.DictReader(io.StringIO(run("--per", "token", "--format", "csv"))))
    assert [row["token"] for row in rows[: len(tokens)]] == list(tokens)
    near([row[column] for row in rows[: len(tokens)]], wanted)
    names = {repr(token) for token in tokens}
    lines = [re.split(r"\s{2,}", line.strip()) for line in run().splitlines()]
    found = [line for line in lines if line[0] in names][: len(tokens)]
    assert [line[0] for line in found] == [repr(token) for token in tokens]
    near([line[-1] for line in found], wanted, 6e-3)


def test_scores(
    client: Client, read: Read, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "160")
    (encoded,) = client.tokenize(CONTEXT + TARGET).results
    wanted = read(encoded.token_ids)
    # What is late by one is another number.
    assert min(abs(a - b) for a, b in pairwise(wanted)) > 0.05
    answer = client.logprob([{"context": CONTEXT, "targets": [TARGET]}], probes=[CONTEXTUAL])
    (target,) = answer.results[0].targets
    front = len(wanted) - target.num_tokens
    near(target.probes[0].before, wanted[front:])
    near(target.probes[0].context_before or (), wanted[:front])
    assert answer.usage.scored_tokens == target.num_tokens
    plain = client.logprob([{"context": CONTEXT, "targets": [TARGET]}])
    assert target.logprob == pytest.approx(plain.results[0].targets[0].logprob, abs=1e-3)
    answer = client.logprob([{"context": CONTEXT, "targets": [TARGET]}], probes=[PROBE])
    check_tables(answer, wanted[front:])
    tokens = target.tokens or []
    check_commands(client, capsys, tokens, wanted[front:], "score", CONTEXT, TARGET)
    # Single tokens after one context are read each on its own.
    choices = [ids[0] for ids in ([target.token_ids or [], encoded.token_ids])]
    item = {"context_ids": encoded.token_ids[:front], "target_ids": [[token] for token in choices]}
    for token, one in zip(choices, client.logprob([item], probes=[PROBE]).results[0].targets,
                          strict=True):  # fmt: skip
        near(one.probes[0].before, read([*encoded.token_ids[:front], token])[-1:])


def test_texts(client: Client, read: Read) -> None:
    (encoded,) = client.tokenize(CONTEXT + TARGET).results
    wanted = read(encoded.token_ids)
    asked: dict[str, Any] = {"tokens": True, "probes": [CONTEXTUAL]}
    tokens = client.perplexity(CONTEXT + TARGET, **asked).results[0].tokens
    front = len(wanted) - len(tokens.positions)
    near(tokens.probes[0].before, wanted[front:])
    near(tokens.probes[0].context_before or (), wanted[:front])
    answer = client.perplexity(CONTEXT + TARGET, tokens=True, probes=[PROBE])
    check_tables(answer, wanted[front:])
    # Windows read their own tokens to the last one, whichever protocol has cut them.
    own = encoded.token_ids[sum(offset is None for offset in encoded.offsets) :]
    for protocol in ("sliding", "disjoint", "rolling"):
        more = {"protocol": protocol, "context_length": 2, "windows": True}
        result = client.perplexity(CONTEXT + TARGET, **asked, **more).results[0]
        assert result.windows is not None and len(result.windows) > 1
        last = result.windows[-1]
        assert result.tokens.positions[-1] == last.end - 1
        near(result.tokens.probes[0].before[-1:], read(own[last.start : last.end])[-1:])
    with pytest.raises(APIError, match="Probes read a window's last token, too"):
        client.perplexity(CONTEXT + TARGET, **asked, protocol="rolling")


@pytest.mark.parametrize("kind", ["generate", "steer"])
def test_continuations(
    client: Client, read: Read, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, kind: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "160")
    is_steered = kind == "steer"
    more: dict[str, Any] = {"steering": STEERING, "baseline": True} if is_steered else {}
    options = GREEDY | more | {"probes": [PROBE]}
    answer = getattr(client, kind)(PROMPT, **options)
    (result,) = answer.results
    (made,) = result.completions
    ids, front = [*result.prompt_ids, *made.token_ids], len(result.prompt_ids)
    wanted = read(ids, more.get("steering"))[front:]
    assert len(wanted) == 6
    side = "after" if is_steered else "before"
    near(getattr(made.probes[0], side), wanted)
    column = f"{COLUMN} after" if is_steered else COLUMN
    check_tables(answer, wanted, column, **({"steered": True} if is_steered else {}))
    argv = [kind, PROMPT, *GREEDY_OPTIONS]
    argv += ["--vector", f"{NAME}:2@{LAYER}", "--baseline"] if is_steered else []
    check_commands(client, capsys, made.tokens, wanted, *argv, column=column)
    if is_steered:
        (plain,) = result.baseline
        unsteered = read([*result.prompt_ids, *plain.token_ids])[front:]
        near(plain.probes[0].before, unsteered)
        check_tables(answer, unsteered, steered=False)
    pieces = [event for event in getattr(client, f"{kind}_events")(PROMPT, **options)
              if isinstance(event, SteerPiece) and (event.steered or not is_steered)]  # fmt: skip
    streamed = [value for one in pieces if one.probes for value in getattr(one.probes[0], side)]
    near(streamed, wanted)
    near(read_openai(client, answer.model, options, side), wanted)


def read_openai(client: Client, model: str, options: dict[str, Any], side: str) -> list[float]:
    """Return the readings of `/v1/completions`, which its chunks have, too."""
    body = {name: value for name, value in options.items() if name != "baseline"}
    body |= {"model": model, "prompt": PROMPT}
    url = f"{client.base_url}/v1/completions"
    (choice,) = httpx.post(url, json=body, timeout=120).json()["choices"]
    whole: list[float] = choice["probes"][0][side]
    streamed: list[float] = []
    text = httpx.post(url, json=body | {"stream": True}, timeout=120).text
    for found in re.findall(rf'"{side}":\s?\[([^\]]*)\]', text):
        streamed += [float(value) for value in found.split(",") if value]
    near(streamed, whole)
    return whole
