"""Each view shows what the API answers: the same numbers, the same tokens."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Locator, expect
from safetensors.numpy import load

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.browser.visits import MINUS
from tests.conftest import ServerFactory, fake_model

pytestmark = pytest.mark.engine


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
