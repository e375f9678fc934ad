"""Readings of probes, in tables, CSV, notebooks and pandas: what `/activations` says of a token."""

import csv
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from logsteer import Client
from logsteer.cli import main
from logsteer.extras.rows import list_rows
from logsteer.extras.tensors import TensorFile
from tests.conftest import Server

pytestmark = pytest.mark.engine

LAYER = 2
NAME = "readings"
COLUMN = f"{NAME}@{LAYER}: projection"
PROBE = {"name": NAME, "layers": [LAYER]}
PAIRS = [
    {"positive": f"{name} was very happy.", "negative": f"{name} was very sad."}
    for name in ("Tom", "Lily", "Ben", "Mia")
]
CONTEXT, TARGET = "Lily", " was sad."

Read = Callable[[list[int]], Any]


@pytest.fixture
def read(tlens_client: Client) -> Read:
    """What `/activations` says of each of these tokens: its projection on the stored vector [T]."""
    tlens_client.vectors.train(NAME, PAIRS, layers=[LAYER], overwrite=True)
    file = TensorFile(tlens_client.vectors.download(NAME))
    (vector_D,) = (file.read(name, ("F32",)) for name in file.entries)

    def project(ids: list[int]) -> Any:
        found = tlens_client.activations([{"token_ids": ids}], [LAYER])
        return found.layers[LAYER] @ vector_D / np.linalg.norm(vector_D)

    return project


def run(server: Server, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv, "--base-url", server.url, "--probe", f"{NAME}@{LAYER}"]) == 0
    return capsys.readouterr().out


def check(rows: list[Any], wanted: Any, place: str, front: int) -> None:
    """Each reading stands at the token that was read; the last token has none."""
    found = {row[place] + front: row[COLUMN] for row in rows}
    assert list(found) == list(range(min(found), len(wanted))) and min(found) < max(front, 1)
    assert found.pop(len(wanted) - 1) in (None, "")
    for position, value in found.items():
        assert float(value) == pytest.approx(wanted[position], abs=1e-3)


def test_scores(
    tlens_server: Server, tlens_client: Client, read: Read, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "160")
    (encoded,) = tlens_client.tokenize(CONTEXT + TARGET).results
    wanted, tokens = read(encoded.token_ids), encoded.tokens
    sad = tokens.index(" sad")
    assert abs(wanted[sad] - wanted[sad + 1]) > 0.1
    answer = tlens_client.logprob([{"context": CONTEXT, "targets": [TARGET]}], probes=[PROBE])
    front = len(tokens) - answer.results[0].targets[0].num_tokens
    check(list_rows(answer, "token"), wanted, "place", front)
    check(answer.to_pandas("token").replace({np.nan: None}).to_dict("records"), wanted, "place",
          front)  # fmt: skip
    argv = ["score", CONTEXT, TARGET]
    cells = csv.DictReader(io.StringIO(run(tlens_server, capsys, *argv, "--per", "token",
                                           "--format", "csv")))  # fmt: skip
    check([{**row, "place": int(row["place"])} for row in cells], wanted, "place", front)
    shown = f"{wanted[sad]:.3f}"[:-1]  # digits that rounding leaves alone
    (line,) = re.findall(r"^.*' sad'.*$", run(tlens_server, capsys, *argv), re.MULTILINE)
    assert line.split()[-1].startswith(shown)
    page = answer._repr_html_()
    (title,) = set(re.findall(r'title="&#x27; sad&#x27;\n([^"]*)"', page))
    assert f"{COLUMN} {shown}" in title


def test_texts(tlens_client: Client, read: Read) -> None:
    (encoded,) = tlens_client.tokenize(CONTEXT + TARGET).results
    answer = tlens_client.perplexity(CONTEXT + TARGET, tokens=True, probes=[PROBE])
    rows = list_rows(answer, "token")
    check(rows, read(encoded.token_ids), "position", 1)  # BOS is in front of the text


def test_continuations(
    tlens_server: Server, tlens_client: Client, read: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    steering = {"vectors": [{"name": NAME, "layers": [LAYER], "scale": 2.0}]}
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "probes": [PROBE]}
    answer = tlens_client.steer("Once upon a time", steering, baseline=True, **options)
    (result,) = answer.results
    assert result.baseline is not None
    plain = result.baseline[0]
    wanted = read([*result.prompt_ids, *plain.token_ids])
    rows = [row for row in list_rows(answer, "token") if not row["steered"]]
    check(rows, wanted, "place", len(result.prompt_ids))
    out = run(tlens_server, capsys, "steer", "Once upon a time", "--vector", f"{NAME}:2@{LAYER}",
              "--baseline", "--temperature", "0", "--max-tokens", "6")  # fmt: skip
    shown = out.partition("unsteered completion 0")[2]
    first = wanted[len(result.prompt_ids) - 1]
    assert f"{first:.3f}"[:-1] in shown
    assert "steered completion 0" in out.partition("unsteered completion 0")[0]
