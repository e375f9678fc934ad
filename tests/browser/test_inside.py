"""What is inside a model, as the page shows it: the numbers are the API's."""

import csv
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from playwright.sync_api import Locator, Route, expect

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.browser.visits import download
from tests.contract.agreement import PER_TOKEN

pytestmark = pytest.mark.engine

STEERING = {"vectors": [{"name": "mood", "scale": 3, "layers": [2]}]}
BESIDE = {"beside": "steered", "vector": "mood", "layers": 2, "scale": 3}


def save(view: Locator, kind: str, directory: Path, number: int = 0) -> Path:
    """Save a map as a file of this kind."""
    button = view.locator(".heat").nth(number).get_by_role("button", name=kind)
    return download(button, directory / f"map.{kind.lower()}")


def read_map(view: Locator, directory: Path, number: int = 0) -> dict[str, list[float]]:
    """Return what a map says, by layer."""
    _, *rows = csv.reader(save(view, "CSV", directory, number).read_text("utf-8").splitlines())
    return {layer: [float(cell) for cell in cells] for layer, *cells in rows}


def test_a_lens_shows_what_each_layer_expects(visit: OpenPage, api: Client, tmp_path: Path) -> None:
    text = "Tom was happy. Lily was sad."
    seen = visit(f"inside?{urlencode({'text': text, 'at': '1,3-4', **BESIDE})}")
    view = seen.see("inside")
    expect(view.locator(".heat")).to_have_count(2)
    for number, steering in enumerate((None, STEERING)):
        answer = api.lens([text], layers=[1, 3, 4], steering=steering, top=1)
        (target,) = answer.results[0].targets
        shown = read_map(view, tmp_path, number)
        assert list(shown) == ["4", "3", "1"]
        for layer, rows in target.layers.items():
            wanted = np.exp(np.array(rows.logprobs, float))
            assert shown[str(layer)] == pytest.approx(wanted, abs=PER_TOKEN)
        words = view.locator(".heat").nth(number).locator("tbody tr").first.locator("td span")
        expected = [tokens[0].replace(" ", "␣") for tokens in target.layers[4].top.tokens]
        assert words.all_inner_texts()[::2] == expected
    cell = view.locator("[data-cell='0-2']").first
    cell.hover()
    card = seen.page.get_by_role("tooltip")
    rank = api.lens([text], layers=[4]).results[0].targets[0].layers[4].ranks[2]
    expect(card.locator("dt:text-is('Rank') + dd")).to_have_text(str(rank))
    cell.focus()
    seen.page.keyboard.press("ArrowDown")
    expect(card.locator("dt:text-is('Layer') + dd")).to_have_text("3")
    assert "␣happy" in save(view, "SVG", tmp_path).read_text(encoding="utf-8")
    assert save(view, "PNG", tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_patch_shows_shares_of_what_lies_between_both_runs(
    visit: OpenPage, api: Client, tmp_path: Path, direction: str
) -> None:
    contexts = {"clean": "The capital of France is", "corrupted": "The capital of Spain is"}
    fields = {"look": "patch", "direction": direction, "at": "0-1;3", **contexts}
    view = visit(f"inside?{urlencode(fields)}").see("inside")
    targets = [" Paris", " Madrid"]
    pair = {name: {"context": text, "targets": targets} for name, text in contexts.items()}
    answer = api.patch([pair], layers=[[0, 1], [3]], metric="difference", direction=direction)
    result = answer.results[0]
    begin, end = result.corrupted, result.clean
    if direction == "noise":
        begin, end = end, begin
    shown = read_map(view, tmp_path)
    assert list(shown) == ["3", "0, 1"]
    wanted = (np.array(result.matrix[::-1], float) - begin) / (end - begin)
    assert list(shown.values()) == pytest.approx(wanted, abs=PER_TOKEN)


def test_a_result_that_another_form_asked_for_is_dimmed(visit: OpenPage) -> None:
    seen = visit("inside?look=patch")
    seen.expect(422)  # the contexts are of different lengths
    view = seen.see("inside")
    status = view.get_by_role("status").filter(has_text="The form has changed since")
    view.get_by_label("Clean context").fill("The capital of France " * 80)
    expect(status).to_be_visible()
    result = view.locator(".pane-result > .result")
    assert float(result.evaluate("element => getComputedStyle(element).opacity")) < 1
    view.get_by_label("Clean context").fill("The capital of France is")
    expect(status).to_have_count(0)


def test_attribution_shows_what_each_token_contributes(visit: OpenPage, tmp_path: Path) -> None:
    seen = visit("models")
    seen.see("models")
    values = [0.5, -0.25, 0.0]
    target = {"target": " Paris", "logprob": -1.5, "input_ids": [1, 5, 6], "attributions": values}
    target |= {"input_tokens": ["<s>", "Tom", " is"], "baseline_logprob": -2.0}
    seen.page.route(
        "**/gradient", lambda asked: asked.fulfill(json={"results": [{"targets": [target]}]})
    )
    # Whether a model has gradients stands in its card.
    seen.open("inside?look=attribution&clean=Tom%20is&targets=[%22%20Paris%22]&steps=9")
    view = seen.page.locator("#view-inside")
    expect(view.locator(".note")).to_contain_text("the engine vllm has no gradients")
    expect(seen.button("Attribute")).to_be_disabled()

    def give_gradients(asked: Route) -> None:
        cards = asked.fetch().json()
        for card in cards["models"]:
            card["lacks"] = {}
        asked.fulfill(json=cards)

    seen.page.route("**/models", give_gradients)
    seen.page.reload()
    expect(view.locator(".token")).to_have_count(3)
    sent = seen.sent_to("/gradient")
    assert sent["items"] == [{"context": "Tom is", "targets": [" Paris"]}]
    assert (sent["attribution"], sent["steps"]) == ("integrated", 9)
    view.locator("summary", has_text="All numbers").click()
    saved = download(view.get_by_role("button", name="CSV"), tmp_path / "numbers.csv")
    _, *rows = csv.reader(saved.read_text("utf-8").splitlines())
    assert [float(row[2]) for row in rows] == values
