"""The tokens that vectors read highest, as the page finds, shows and follows them."""

import json
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from playwright.sync_api import expect
from safetensors.numpy import load

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.conftest import fake_model
from tests.faults.keys import serve
from tests.faults.processes import wait_for

pytestmark = pytest.mark.engine

TEXTS = ["Lily was sad. Tom was happy.", "He felt happy and glad.", "It was a terrible day."]
K = 5


def rank(api: Client, layer: int) -> list[tuple[float, int, int, int]]:
    """The cosines of `mood` at the tokens of all texts but their first, the highest first."""
    found = api.activations(TEXTS, layers=[layer], read="each")
    arrays = load(api.vectors.download("mood"))
    (v_D,) = (array for name, array in arrays.items() if f".{layer}." in name)
    x_ND = found.layers[layer]
    cosines_N = x_ND @ v_D / np.linalg.norm(v_D) / np.linalg.norm(x_ND, axis=1)
    rows = []
    for document, start in enumerate(found.row_starts[:-1]):
        ids = api.tokenize([TEXTS[document]], bos="auto").results[0].token_ids
        rows += [
            (float(cosines_N[start + position]), document, position, ids[position])
            for position in range(1, len(ids))
        ]
    return sorted(rows, reverse=True)[:K]


def test_examples_are_the_tokens_of_the_largest_readings(
    visit: OpenPage, api: Client, tmp_path: Path
) -> None:
    """Of a file one of whose rows cannot be read; each is marked, and opens in Text."""
    lines = [*(json.dumps({"text": text}) for text in TEXTS), "{"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    asked = {"name": "zz-rows", "k": K, "probes": json.dumps(["mood@3", "mood@4"])}
    seen = visit(f"examples?{urlencode(asked)}")
    view = seen.page.locator("#view-examples")
    expect(seen.button("Find examples")).to_be_enabled()
    view.get_by_label("File: Choose a file").set_input_files(tmp_path / "rows.jsonl")
    expect(view.locator(".file")).to_contain_text("rows.jsonl")
    seen.page.get_by_role("tab", name="Models").click()
    seen.page.get_by_role("tab", name="Examples").click()
    seen.button("Find examples").click()
    for layer in (3, 4):
        wanted = rank(api, layer)
        items = view.get_by_role("list", name=f"mood at layer {layer}").get_by_role("listitem")
        expect(items).to_have_count(K)
        tokens = api.detokenize([[token] for *_, token in wanted]).texts
        for item, token, (cosine, document, position, _) in zip(
            items.all(), tokens, wanted, strict=True
        ):
            expect(item.locator("mark")).to_have_text(token.replace(" ", "\u00a0"))
            assert float(item.locator("b").inner_text()) == pytest.approx(cosine, abs=2e-3)
            expect(item).to_contain_text(f"text {document}, token {position}")
    view.locator("summary", has_text="1 text could not be read").click()
    expect(view.locator(".wrong")).to_contain_text("Text 3: It is not JSON")
    row = view.get_by_role("list", name="mood at layer 4").get_by_role("listitem").first
    text = api.captures.get("zz-rows").reduced.top[1].examples[0].text
    assert row.locator("p").inner_text().replace("\u00a0", " ") == text.lstrip()
    row.get_by_role("button", name="Copy example 1").click()
    expect(row.get_by_role("status")).to_have_text("Copied")
    assert seen.page.evaluate("navigator.clipboard.readText()") == text
    row.get_by_role("link", name="Read example 1 in Text").click()
    seen.see("text")
    sent = seen.sent_to("/perplexity")
    assert sent["texts"] == [text]
    assert sent["probes"][0].items() >= {"name": "mood", "layers": [4], "read": "cosine"}.items()


def test_captures_are_watched_paused_resumed_and_deleted(
    visit_any: OpenPage, tmp_path: Path
) -> None:
    model = fake_model("slow", delay_s=0.05, ahead_tokens=10)
    with serve({"models": [model]}, tmp_path) as server, Client(server.url) as client:
        client.capture(["Once upon a time"], "plain", [0], progress=False)
        rows = [f"Once upon a time there were {n} cats." for n in range(200)]
        client.captures.start("long", [0], items=rows, shard_rows=1)
        seen = visit_any(server.url, "examples?opened=plain")
        view = seen.page.locator("#view-examples")
        expect(view.locator(".capture")).to_contain_text("It lists no examples. Its activations")
        expect(view.locator(".example")).to_have_count(0)
        bar = view.get_by_role("progressbar", name="Texts of long")
        expect(bar).to_have_attribute("max", "200")

        def count_looks() -> int:
            return sum(request.url.endswith("/captures/long") for request in seen.requests)

        wait_for(lambda: seen.wait_frames() or count_looks() > 1)
        seen.button("Pause long").click()
        seen.button("Resume long").wait_for()
        assert client.captures.get("long").state == "paused"
        looks = count_looks()
        seen.page.wait_for_timeout(2500)
        assert count_looks() == looks, "what does not run is looked at"
        seen.button("Resume long").click()
        bar.wait_for()
        assert client.captures.get("long").state == "running"
        seen.button("Delete long").click()
        seen.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(view.locator("[data-capture]")).to_have_count(1)
        assert [card.name for card in client.captures.list().captures] == ["plain"]
