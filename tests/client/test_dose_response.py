"""`evaluate_vector`, `logsteer vectors evaluate` and its plot, against a scripted sweep."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer import Client, LogsteerError
from logsteer.cli import main
from logsteer.extras.dose_response import DoseResponse, evaluate_vector
from logsteer.extras.plots import plot_doses

from .documents import ANSWER
from .test_vectors import ADVICE, CARD

PAIR = {"positive": "The day was sunny", "negative": "The day was rainy"}


class LinearServer:
    """Scores positive targets -10 + 2 scale and negative ones -9 - scale; KL is scale²."""

    def __init__(self, card: dict[str, Any] = CARD) -> None:
        self.card = card
        self.sweeps: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/sweep":
            return httpx.Response(200, json=self.card)
        body = json.loads(request.content)
        self.sweeps.append(body)
        points = [self._point(body, scale) for scale in body["scales"]]
        document = {**ANSWER, "unsteered": self._point(body, 0.0), "points": points}
        return httpx.Response(200, json=document)

    def _point(self, body: dict[str, Any], scale: float) -> dict[str, Any]:
        targets = [
            {"logprob": -10 + 2 * scale, "change": 2 * scale},
            {"logprob": -9 - scale, "change": -scale},
        ]
        # Requests of fewer pairs have a larger change, so that weights count.
        norm = abs(scale) / len(body["items"]) if scale else None
        items = [{"targets": targets, "kl": scale**2} for _ in body["items"]]
        return {"layers": None, "scale": scale, "items": items, "texts": [], "relative_norm": norm}


def evaluate(server: Any, count: int = 1, **options: Any) -> DoseResponse:
    with Client(transport=httpx.MockTransport(server)) as client:
        return evaluate_vector(client, "happy", [PAIR] * count, **options)


@pytest.mark.parametrize(
    ("positive", "negative", "context", "targets"),
    [
        ("The day was sunny", "The day was rainy", "The day was", [" sunny", " rainy"]),
        ("The daylight", "The darkness", "The", [" daylight", " darkness"]),
        ("Is it?\n(A)", "Is it?\n(B)", "Is it?", ["\n(A)", "\n(B)"]),
        ("It was", "It was not", "It", [" was", " was not"]),
        ("good", "bad", "", ["good", "bad"]),
        ("a b", "a\tb", "a", [" b", "\tb"]),
    ],
)
def test_pairs_are_cut_before_the_word_that_differs(
    positive: str, negative: str, context: str, targets: list[str]
) -> None:
    server = LinearServer()
    with Client(transport=httpx.MockTransport(server)) as client:
        evaluate_vector(client, "happy", [{"positive": positive, "negative": negative}])
    assert server.sweeps[0]["items"] == [{"context": context, "targets": targets}]


def test_means_over_the_pairs() -> None:
    server = LinearServer()
    found = evaluate(server, 40, scales=[2.0, -1.0], layers=[3], bos="never")
    assert [len(body["items"]) for body in server.sweeps] == [32, 8]
    assert server.sweeps[0]["bos"] == "never"
    vector = {"name": "happy", "layers": [3]}
    assert [vector.items() <= v.items() for v in server.sweeps[0]["steering"]["vectors"]] == [True]
    assert (found.num_pairs, found.layers) == (40, [3])
    assert [point.scale for point in found.points] == [-1, 0, 2]
    below, plain, above = found.points
    assert (below.preference, plain.preference, above.preference) == (-4, -1, 5)
    assert (above.preference_change, above.positive_change, above.negative_change) == (6, 4, -2)
    assert (below.preferred, above.preferred, above.kl) == (0, 1, 4)
    assert plain.relative_norm is None
    assert above.relative_norm == pytest.approx((32 * 2 / 32 + 8 * 2 / 8) / 40)


def test_the_recommended_layer_and_scales_about_the_recommended_one() -> None:
    server = LinearServer()
    evaluate(server)
    (body,) = server.sweeps
    upward = [share * ADVICE["scale"] for share in (0.25, 0.5, 1, 2, 4)]
    assert body["scales"] == [*(-scale for scale in reversed(upward)), 0, *upward]
    assert body["steering"]["vectors"][0]["layers"] == [ADVICE["layer"]]
    server = LinearServer(CARD | {"about": {"source": "upload"}})
    assert evaluate(server).layers is None
    assert server.sweeps[0]["scales"] == [-4, -2, -1, 0, 1, 2, 4]
    assert server.sweeps[0]["steering"]["vectors"][0].get("layers") is None
    with pytest.raises(LogsteerError, match="no pairs"):
        evaluate(server, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps([PAIR]))
    argv = ["vectors", "evaluate", "happy", "--pairs", str(pairs), "--scales=-1,2", "--layers", "2"]
    plot = tmp_path / "doses.svg"
    transport = httpx.MockTransport(LinearServer())
    assert main([*argv, "--plot", str(plot)], transport=transport) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["2", "5", "6", "4", "-2", "1", "4", "2"] in rows
    assert "happy at 2, means over 1 pairs" in shown
    assert "happy at layers 2 on 1 pairs" in plot.read_text()
    assert main([*argv, "--json"], transport=transport) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 3


def test_the_plot_s_lines(tmp_path: Path) -> None:
    figure = plot_doses(evaluate(LinearServer(), scales=[-1.0, 2.0]))
    left, right = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in left.lines}  # type: ignore[call-overload]
    assert lines["preference"] == [-3, 0, 6]
    assert lines["positive texts"] == [-2, 0, 4]
    assert list(right.lines[0].get_ydata()) == [1, 0, 4]  # type: ignore[call-overload]
    with pytest.raises(LogsteerError, match=r"ends in \.png"):
        plot_doses(evaluate(LinearServer()), tmp_path / "a.txt")
