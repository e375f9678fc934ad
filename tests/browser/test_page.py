"""The page as a whole: links, keyboard, access, keys, speed, and that it asks nobody else."""

import json
import re
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
from playwright.sync_api import Locator, expect

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.browser.visits import DONE, SHOWN, VIEWS, download
from tests.conftest import Server, fake_model
from tests.faults.keys import add_key, serve

pytestmark = pytest.mark.engine


def test_the_page_is_one_file_with_a_strict_policy(playground_server: Server) -> None:
    answer = httpx.get(playground_server.url)
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"('sha256-[\w+/=]+' ?)+", policy["script-src"])
    assert len(answer.content) <= 450_000
    assert not re.findall(rb'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', answer.content)


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
