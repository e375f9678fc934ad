"""The page as a whole: links, keyboard, access, keys, speed, and that it asks nobody else.

And each view shows what the API answers: the same numbers, the same tokens.
"""

import json
import re
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx
import numpy as np
import pytest
from playwright.sync_api import Locator, expect
from safetensors.numpy import load

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.browser.visits import DONE, MINUS, SHOWN, VIEWS, download
from tests.conftest import ServerFactory, fake_model
from tests.faults.keys import add_key, serve

pytestmark = pytest.mark.engine


# ------------------------------------------------------------------ links

LINKS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "text": (
        {"text": "Tom felt happy.", "colour": "rank"},
        {"Text": "Tom felt happy.", "Rank": True},
    ),
    "choices": (
        {"context": "Tom felt", "targets": json.dumps([" glad", " sad"]), "space": "both"},
        {"Context": "Tom felt", "Target 2": " sad", "With and without": True},
    ),
    "steer": (
        {"vector": "mood", "scale": -1.5, "layers": "2,3", "seed": 9, "positions": "completion"},
        {"Layers": "2,3", "Seed of both": "9", "Positions": "completion", "Scale of mood": "-1.5"},
    ),
    "sweep": (
        {"vector": "mood", "points": 3, "to": 2, "measure": "logprob", "layers": "2;3"},
        {"Points": "3", "to": "2", "log-probability": True},
    ),
    "inside": (
        {
            "look": "patch",
            "clean": "Tom was",
            "corrupted": "Lily was",
            "metric": "kl",
            "at": "0;1,2",
            "cells": "change",
        },
        {"patching": True, "Clean context": "Tom was", "Metric": "kl", "Layers": "0;1,2"},
    ),
    "examples": (
        {"opened": "stories", "name": "mine", "probes": json.dumps(["mood@2,3"]), "k": 7},
        {"Name": "mine", "Layer": "2,3", "Examples of each": "7"},
    ),
    "vectors": (
        {"opened": "mood", "method": "lda", "name": "mine"},
        {"Method": "lda", "Name": "mine"},
    ),
    "models": ({"against": "other"}, {"Compared with": "other"}),
    "sessions": ({"search": "mood"}, {"Search": "mood"}),
}
"""View -> fields of a link, and what stands in which input then."""


@pytest.mark.parametrize("view", VIEWS)
def test_a_link_restores_a_view(visit: OpenPage, view: str) -> None:
    fields, expected = LINKS[view]
    seen = visit(f"{view}?{urlencode(fields)}")
    panel = seen.see(view)
    for label, value in expected.items():
        found = panel.get_by_label(label, exact=True).and_(panel.locator("input,select,textarea"))
        if value is True:
            expect(found.first).to_be_checked()
        else:
            expect(found.first).to_have_value(str(value))
    seen.page.reload()
    seen.see(view)
    # Nothing is lost and nothing is made up on the way through the page.
    address = seen.page.evaluate("location.hash")
    for name in fields:
        assert f"{name}=" in address, address


def test_what_is_changed_goes_into_the_address_and_back_leads_back(visit: OpenPage) -> None:
    seen = visit("choices")
    seen.see("choices")
    seen.page.get_by_label("Context", exact=True).fill("Lily was")
    expect(seen.page).to_have_url(re.compile(r"#choices\?context=Lily\+was$"))
    seen.page.get_by_role("tab", name="Models").click()
    expect(seen.page).to_have_url(re.compile(r"#models$"))
    seen.page.go_back()
    expect(seen.page.get_by_role("tab", name="Choices")).to_have_attribute("aria-selected", "true")
    expect(seen.page.get_by_label("Context", exact=True)).to_have_value("Lily was")


# ------------------------------------------------------------------ sessions


def test_results_are_kept_named_compared_and_moved_as_a_file(
    visit: OpenPage, tmp_path: Path
) -> None:
    seen = visit("choices?context=Tom+was")
    shown = seen.see("choices").locator(".choices").inner_text()
    seen.open("text?text=Lily+was+sad.")
    seen.see("text")
    seen.open("sessions")
    view = seen.see("sessions")
    entries = view.locator(".session")
    expect(entries).to_have_count(2)
    kept = entries.filter(has_text="Choices")
    kept.get_by_role("button", name="Name ").click()
    view.get_by_role("textbox", name="Name of").fill("about Tom")
    seen.page.keyboard.press("Enter")
    expect(kept.locator("b")).to_have_text("about Tom")
    kept.get_by_role("button", name="Pin").click()
    expect(entries.first).to_contain_text("about Tom")  # it was the older one
    view.get_by_label("Search").fill("about tom")
    expect(entries).to_have_count(1)
    view.get_by_label("Search").fill("")
    for box in view.get_by_role("checkbox").all():
        box.check()
    expect(view.locator(".compared .choice").first).to_be_visible()
    expect(view.locator(".compared .token").first).to_be_visible()
    download(view.get_by_role("button", name="Export"), tmp_path / "sessions.json")

    elsewhere = visit("sessions")
    panel = elsewhere.see("sessions")
    panel.get_by_label("File: Import a file").set_input_files(tmp_path / "sessions.json")
    panel.get_by_role("button", name="about Tom Choices").click()
    assert elsewhere.see("choices").locator(".choices").inner_text() == shown
    elsewhere.wait_frames()
    assert not [r for r in elsewhere.requests if r.url.endswith("/logprob")], "it was asked again"
    # The same question asked again takes the place of what has neither a name nor a pin.
    seen.open("text?text=Lily+was+sad.")
    seen.see("text")
    seen.open("sessions")
    expect(entries).to_have_count(2)


# ------------------------------------------------------------------ access


def test_a_journey_by_keyboard_alone(visit: OpenPage, api: Client) -> None:
    seen = visit("text")
    seen.see("text")
    keyboard = seen.page.keyboard

    def reach(target: Locator) -> None:
        """Press Tab until this has the focus."""
        for _ in range(60):
            keyboard.press("Tab")
            if target.evaluate("element => element === document.activeElement"):
                return
        raise AssertionError(f"Tab does not lead to {target}")

    reach(seen.page.get_by_role("link", name="Skip to the view"))
    reach(seen.page.get_by_role("tab", name="Text", exact=True))
    for _ in range(2):
        keyboard.press("ArrowRight")
    expect(seen.page.get_by_role("tab", name="Steer")).to_be_focused()
    view = seen.see("steer")
    slider = view.get_by_role("slider", name="Scale of mood")
    reach(slider)
    for _ in range(5):
        keyboard.press("ArrowRight")
    seen.see_steered(slider)
    scale = seen.sent_to("/steer")["steering"]["vectors"][0]["scale"]
    assert f"scale={scale:g}" in seen.page.url
    box = view.get_by_role("listbox", name="Steered: the text, by its tokens")
    reach(box)
    keyboard.press("ArrowRight")
    expect(seen.page.get_by_role("tooltip")).to_contain_text("Probability")
    reach(view.locator("[data-copy=curl]"))
    keyboard.press("Enter")
    expect(view.get_by_role("status").filter(has_text="Copied")).to_be_visible()
    assert f'"scale":{scale:g}' in seen.page.evaluate("navigator.clipboard.readText()")


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_in_light_and_dark_and_it_fits_a_phone(
    visit: OpenPage, view: str
) -> None:
    seen = visit(SHOWN.get(view, view))
    seen.see(view)
    seen.page.evaluate("document.querySelectorAll('details').forEach((box) => (box.open = true))")
    assert seen.find_violations() == []
    seen.page.get_by_role("button", name="Use dark colours").click()
    expect(seen.page.locator("html")).to_have_attribute("data-theme", "dark")
    assert seen.find_violations() == []
    for width in (390, 768, 1440):
        seen.page.set_viewport_size({"width": width, "height": 844})
        seen.page.wait_for_function("width => innerWidth === width", arg=width)
        wide = seen.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{view} is {wide} pixels wider than a screen of {width}"


# ------------------------------------------------------------------ keys and errors


def test_a_key_is_asked_for_used_and_never_written_down(
    visit_any: OpenPage, tmp_path: Path
) -> None:
    token = add_key(tmp_path / "keys.json", "visitor", "score", "steer", "write")
    config = {"models": [fake_model()], "key_file": str(tmp_path / "keys.json")}
    with serve(config, tmp_path / "server") as server:
        seen = visit_any(server.url, "text")
        seen.expect(401)
        dialog = seen.page.get_by_role("dialog", name="This server wants an API key")
        dialog.wait_for()
        assert seen.find_violations() == []
        told = httpx.get(f"{server.url}/models").json()["detail"]
        expect(dialog).to_contain_text(told)
        dialog.get_by_label("API key").fill("ls_000000000000_wrong")
        with seen.page.expect_response(lambda answer: answer.status == 401):
            dialog.get_by_role("button", name="Use this key").click()
        seen.wait_frames()  # it closes when a key is given, and opens again when that is refused
        expect(dialog).to_be_visible()
        dialog.get_by_label("API key").fill(token)
        seen.page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        seen.see("text")
        assert "$LOGSTEER_API_KEY" in seen.copy("curl")
        kept = seen.page.evaluate(
            "[...Object.values(localStorage), ...Object.values(sessionStorage),"
            " document.cookie, location.href, document.body.innerText].join()"
        )
        assert token not in kept
        assert all(token not in request.url for request in seen.requests)


@pytest.mark.parametrize(
    ("address", "view", "status", "path"),
    [
        # An address from before long texts were read under Text.
        ("long?protocol=sliding&length=4&stride=99", "text", 422, "/perplexity"),
        ("steer?vector=mood&layers=99", "steer", 422, "/steer"),
        ("steer?vector=nobody", "steer", 404, "/steer"),
    ],
)
def test_errors_stand_where_they_arose_in_the_servers_words(
    visit: OpenPage, address: str, view: str, status: int, path: str
) -> None:
    seen = visit(address)
    seen.expect(status)
    alert = seen.page.locator(f"#view-{view}").get_by_role("alert")
    alert.wait_for()
    refused = httpx.post(f"{seen.url}{path}", json=seen.sent_to(path))
    assert refused.status_code == status and refused.json()["detail"] in alert.inner_text()


def test_what_the_page_cannot_read_is_told_before_it_asks(visit: OpenPage) -> None:
    seen = visit("steer?vector=mood")
    seen.see("steer")
    seen.page.get_by_label("Layers", exact=True).fill("three")
    alert = seen.page.get_by_role("alert")
    expect(alert).to_contain_text("are not written as in 4 or 2,5-7")


def test_a_server_that_is_away_is_said_and_asked_again(visit: OpenPage) -> None:
    seen = visit("choices")
    seen.see("choices")
    seen.expect_failures()
    seen.page.context.set_offline(True)
    seen.button("Compare").click()
    expect(seen.page.locator(".head-state")).to_have_text("no answer")
    expect(seen.page.locator("#view-choices .choice").first).to_be_visible()  # it is kept
    seen.page.context.set_offline(False)
    seen.button("Try again").click()
    expect(seen.page.locator("#view-choices").get_by_role("alert")).to_have_count(0)
    expect(seen.page.locator(".head-state")).not_to_have_text("no answer")


# ------------------------------------------------------------------ long texts


def test_5000_tokens_are_few_elements(visit: OpenPage) -> None:
    seen = visit("text?model=other")
    seen.see("text")
    text = " ".join(f"Lily and Tom walked to the lake number {n}." for n in range(450))
    seen.page.get_by_role("textbox", name="Text").fill(text)
    seen.button("Score").click()
    box = seen.page.get_by_role("listbox", name="Tokens of the text")
    box.locator(".token").nth(4999).wait_for(state="attached")
    nodes = seen.page.evaluate("document.getElementsByTagName('*').length")
    assert nodes <= 12_000


def test_every_view_has_an_answer_to_wait_for() -> None:
    assert set(DONE) == set(LINKS) == set(VIEWS)


# ------------------------------------------------------------------ views


DONE_WITH = re.compile(r"\d tokens?(, from the result cache| in .* tokens/s)")
"""What the view of long texts says once it has scored one."""


def read(text: str | None) -> float:
    """A number as the page writes it: with a true minus sign and commas, and a unit behind it."""
    assert text is not None
    words = text.replace(MINUS, "-").replace(",", "").split()
    return float(words[0])


def read_tokens(view: Locator, label: str) -> list[str]:
    """The tokens of a text as they are: the page has marks for line ends, and spaces that stay."""
    tokens: list[str] = view.get_by_role("listbox", name=label).evaluate(
        "box => [...box.children].map(token => token.textContent)"
    )
    return [token.replace("↵", "\n").replace("\xa0", " ") for token in tokens]


def read_stats(view: Locator) -> dict[str, str]:
    """The numbers in a row, by their names."""
    return {
        stat.locator("dt").inner_text(): stat.locator("dd").first.inner_text()
        for stat in view.locator(".stats > div").all()
    }


def test_text_shows_tokens_surprisal_and_sums(visit: OpenPage, api: Client) -> None:
    seen = visit("text")
    view = seen.see("text")
    sent = seen.sent_to("/perplexity")
    answer = api.perplexity(sent["texts"], tokens=True).results[0]
    assert answer.tokens is not None
    cut = api.tokenize(sent["texts"]).results[0]
    assert read_tokens(view, "Tokens of the text") == cut.tokens[1:]
    stats = read_stats(view)
    assert read(stats["Perplexity"]) == pytest.approx(answer.perplexity, rel=5e-3)
    assert read(stats["Bits per byte"]) == pytest.approx(answer.bits_per_byte, rel=5e-3)
    assert read(stats["Log-probability"]) == pytest.approx(answer.sum_logprob, abs=6e-3)

    logprobs = answer.tokens.logprobs or []
    logprob = min(value for value in logprobs if value is not None)
    wrong = answer.tokens.positions[logprobs.index(logprob)]
    view.locator(".token").nth(wrong).hover()
    card = seen.page.get_by_role("tooltip")
    assert f"{-logprob:.3f} nats" in card.inner_text()
    expect(card.get_by_role("list", name="Most probable tokens")).to_be_visible()


def test_arabic_stands_as_it_is_written(visit: OpenPage, api: Client) -> None:
    """Each letter is two tokens of the demo model, and joined to the next."""
    text = "مرحبا بالعالم"
    view = visit(f"text?text={quote(text)}").see("text")
    box = view.get_by_role("listbox", name="Tokens of the text")
    (encoded,) = api.tokenize([text]).results
    assert box.locator(".token").count() == len([o for o in encoded.offsets if o]) > len(text)
    assert box.inner_text().replace("\u00a0", " ") == text
    assert box.evaluate("element => getComputedStyle(element).direction") == "rtl"


def test_text_compares_two_models(visit: OpenPage, api: Client) -> None:
    seen = visit("text?beside=model&text=Once+upon+a+time")
    view = seen.see("text")
    labels = [box.get_attribute("aria-label") for box in view.get_by_role("listbox").all()]
    assert labels == ["Tokens as demo reads them", "Tokens, other", "Difference per token"]
    perplexities = [
        api.perplexity(["Once upon a time"], model=model).total.perplexity
        for model in ("demo", "other")
    ]
    columns = view.locator(".beside > .sheet").all()
    for column, perplexity in zip(columns, perplexities, strict=True):
        assert read(read_stats(column)["Perplexity"]) == pytest.approx(perplexity, rel=5e-3)


def test_choices_shows_shares_and_tokens(visit: OpenPage, api: Client) -> None:
    seen = visit("choices")
    view = seen.see("choices")
    item = api.logprob(seen.sent_to("/logprob")["items"]).results[0]
    rows = view.locator(".choice").all()
    assert len(rows) == len(item.targets)
    for row, target, share in zip(rows, item.targets, item.choice_probs, strict=True):
        shown = row.locator(".choice-share").inner_text().split()
        percent = float(shown[-2].replace(MINUS, "-").lstrip("<>"))
        assert share is not None
        assert percent == pytest.approx(100 * share, rel=0.06, abs=0.06)
        assert read_tokens(row, f"Tokens of {target.target}") == target.tokens
        assert target.logprob is not None
        assert f"{target.logprob:.3f} nats".replace("-", MINUS) in row.inner_text()
    best = view.locator(".choice.is-strong")
    assert best.count() == 1
    assert rows[item.best].evaluate("row => row.classList.contains('is-strong')")


def test_a_table_of_questions_is_answered_under_two_conditions(
    visit: OpenPage, api: Client, tmp_path: Path
) -> None:
    cases = [
        ("The capital of France is", [" Paris", " London"], 0),
        ("Tom was, as ever,", [" sad and lonely.", " happy."], 1),
    ]
    lines = [json.dumps({"context": c, "targets": t, "answer": a}) for c, t, a in cases]
    (tmp_path / "cases.jsonl").write_text("\n".join(lines))
    seen = visit(
        "choices?mode=table&shares=pmi&neutral=So&beside=steered&vector=mood&layers=4&scale=4"
    )
    view = seen.page.locator("#view-choices")
    view.get_by_label("File: Choose a file").set_input_files(tmp_path / "cases.jsonl")
    table = view.get_by_role("region", name="Questions")
    expect(table.locator("tbody tr")).to_have_count(2)
    seen.wait_frames()
    seen.button("Compare").click()
    steering = {"vectors": [{"name": "mood", "scale": 4, "layers": [4]}]}
    wanted = []
    for steered in (None, steering):
        items = [{"context": c, "targets": t} for c, t, _ in cases]
        neutral = [{"context": "So", "targets": t} for _, t, _ in cases]
        results = api.logprob([*items, *neutral], steering=steered).results
        for own, other in zip(results[:2], results[2:], strict=True):
            gains = [a.logprob - b.logprob for a, b in zip(own.targets, other.targets, strict=True)]
            wanted.append(100 * np.exp(max(gains)) / np.exp(gains).sum())
    expect(table).to_contain_text("Paris")
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    shown = [rows[0][3], rows[1][3], rows[0][5], rows[1][5]]
    for text, share in zip(shown, wanted, strict=True):
        assert read(text.lstrip("<>")) == pytest.approx(share, rel=0.06, abs=0.06)


def test_a_model_is_drained_and_loaded_again(
    visit_any: OpenPage, start_server: ServerFactory
) -> None:
    server = start_server({"models": [fake_model("one")]})
    seen = visit_any(server.url, "models")
    model = seen.see("models").get_by_role("article", name="one")
    for button, state in (("Drain", "Draining"), ("Load", "Ready"), ("Unload", "Unloaded")):
        model.get_by_role("button", name=button, exact=True).first.click()
        if button == "Unload":
            seen.page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        expect(model.locator(".model-state")).to_contain_text(state)
        with Client(server.url) as client:
            assert client.models().models[0].state == state.lower()


def test_long_text_sums_up_its_windows(visit: OpenPage, api: Client) -> None:
    seen = visit("text?read=windows")
    view = seen.see_windows()
    expect(view.get_by_role("status").filter(has_text=DONE_WITH)).to_be_visible()
    sent = seen.sent_to("/perplexity")
    assert seen.posts("/perplexity")[-1].post_data_json["stream"] is True
    total = api.perplexity(**sent).total
    stats = read_stats(view)
    assert read(stats["Perplexity"]) == pytest.approx(total.perplexity, rel=5e-3)


def test_long_text_takes_a_file_and_can_be_cancelled(visit: OpenPage, api: Client) -> None:
    seen = visit("text?read=windows&model=other")
    view = seen.see_windows()
    text = "The girl went home. " * 2500  # a shorter one is scored without the button, too
    view.get_by_label("File: Choose a file").set_input_files(
        {"name": "home.txt", "mimeType": "text/plain", "buffer": text.encode()}
    )
    expect(view.get_by_role("textbox")).to_have_value(text)
    seen.button("Score").click()
    expect(view.get_by_role("status").filter(has_text=DONE_WITH)).to_be_visible()
    assert seen.sent_to("/perplexity")["texts"] == [text]


def test_models_shows_cards_and_the_self_test(visit: OpenPage, api: Client) -> None:
    seen = visit("models")
    view = seen.see("models")
    for card in api.models().models:
        article = view.get_by_role("article", name=card.id)
        shown = article.inner_text()
        assert f"{card.num_layers}" in shown
        assert card.provenance is not None
        assert card.provenance.dtype in shown
    article = view.get_by_role("article", name="other")
    article.get_by_role("button", name="Run the self-test").click()
    done = article.get_by_role("status").filter(has_text="tokens")
    expect(done).to_have_text(re.compile("Passed|Failed"), timeout=60_000)
    checks = api.selftest("other").checks
    rows = article.locator("tbody tr").all()
    words = {"passed": "Passed", "failed": "Failed", "not_run": "Not run"}
    assert len(rows) == len(checks)
    for row, check in zip(rows, checks, strict=True):
        assert check.promise in row.locator("th").inner_text()
        assert words[check.verdict] in row.locator("td").first.inner_text()


def test_a_probe_is_shown_at_the_token_that_it_was_read_at(visit: OpenPage, api: Client) -> None:
    seen = visit("text?colour=probe&probe=mood&text=Lily%20was%20sad.%20Tom%20was%20happy.")
    view = seen.see("text")
    sent = seen.sent_to("/perplexity")
    (layer,) = sent["probes"][0]["layers"]
    activations_TD = api.activations(sent["texts"], layers=[layer], read="each").layers[layer]
    arrays = load(api.vectors.download("mood"))
    (direction_D,) = (array for name, array in arrays.items() if f".{layer}." in name)
    projections_T = activations_TD @ direction_D / np.linalg.norm(direction_D)
    tokens = view.get_by_role("listbox", name="Tokens of the text").locator(".token")
    assert tokens.count() == len(projections_T) - 1  # all but the beginning of the sequence
    for index in range(tokens.count()):
        tokens.nth(index).hover()
        shown = seen.page.get_by_role("tooltip").locator("dt:text-is('Probe') + dd").inner_text()
        assert read(shown) == pytest.approx(float(projections_T[index + 1]), abs=2e-3)
