"""Steer, Dose-response and Vectors: what they show is what the API answers, and what was asked."""

import csv
import io
import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from playwright.sync_api import Locator, Route, expect
from safetensors.numpy import load

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.browser.test_page import read, read_tokens
from tests.browser.visits import EXAMPLE, MINUS, TIMEOUT_MS, download
from tests.conftest import ServerFactory, fake_model
from tests.server.test_saes import save_sae

pytestmark = pytest.mark.engine


def read_sides(view: Locator) -> tuple[list[str], list[str]]:
    """The tokens of both continuations, unsteered and steered, without the prompt."""
    sides = [
        read_tokens(view, f"{title}: the text, by its tokens")
        for title in ("Without steering", "Steered")
    ]
    return sides[0][1:], sides[1][1:]


@pytest.fixture
def own(api: Client) -> str:
    """A name that no other test has, gone before and after."""
    name = "of-this-test"
    for card in api.vectors.list().vectors:
        if card.name == name:
            api.vectors.delete(name)
    return name


# ------------------------------------------------------------------ Steer


def test_steering_is_kept_as_a_model_asked_and_deleted(visit: OpenPage, api: Client) -> None:
    seen = visit("steer?vector=mood&scale=1.5&layers=3&max_tokens=4")
    view = seen.see("steer")
    view.get_by_text("Keep this as a model").click()
    view.get_by_label("Name of the variant").fill("in-a-mood")
    seen.button("Keep the variant").click()
    expect(view.get_by_text("in-a-mood is a model now.")).to_be_visible()
    assert seen.copy("cli", "#view-steer .more").endswith("in-a-mood mood:1.5@3")
    card = api.variants.get("in-a-mood")
    assert (card.model, card.steering) == ("demo", seen.sent_to("/steer")["steering"])
    seen.page.get_by_label("Model", exact=True).select_option("in-a-mood")
    seen.open("text?text=Tom+was+glad.&model=in-a-mood")
    seen.see("text")
    assert seen.sent_to("/perplexity")["model"] == "in-a-mood"
    assert seen.answer_to("/perplexity")["steering"]["tokens_steered"] > 0
    seen.open("models")
    models = seen.see("models")
    expect(models.get_by_role("region", name="Stored variants")).to_contain_text(
        "mood \N{MULTIPLICATION SIGN} 1.5 at 3"
    )
    assert seen.find_violations() == []
    seen.button("Delete in-a-mood").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(models.get_by_text("None. A variant is")).to_be_visible()
    assert not api.variants.list().variants


def test_one_layer_s_direction_is_used_at_all_of_them(visit: OpenPage) -> None:
    seen = visit("steer?vector=mood&scale=1.5&layers=3&max_tokens=4")
    view = seen.see("steer")
    view.get_by_label("Its direction at all layers").check()
    seen.button("Generate").click()
    receipt = view.get_by_role("region", name="Receipt")
    expect(receipt).to_contain_text("Layer 0 changed")
    (vector,) = seen.sent_to("/steer")["steering"]["vectors"]
    assert vector == {"name": "mood", "from_layer": 3, "scale": 1.5}


def test_vectors_of_other_weights_are_marked(visit: OpenPage) -> None:
    seen = visit()

    def mark(route: Route) -> None:
        listing = route.fetch().json()
        for card in listing["vectors"]:
            card["other_weights"] = True
        route.fulfill(json=listing)

    seen.page.route("**/vectors?*", mark)
    seen.open("steer")
    expect(seen.see("steer").get_by_label("Vector", exact=True)).to_contain_text(
        "mood (of other weights)"
    )
    expect(seen.show("vectors").locator("[data-vector=mood]")).to_contain_text("on other weights")


def test_steer_streams_both_sides_to_what_the_api_answers(visit: OpenPage, api: Client) -> None:
    seen = visit("steer?vector=mood&scale=1.5&layers=3")
    view = seen.see("steer")
    sent = seen.sent_to("/steer")
    assert sent["steering"] == {"vectors": [{"name": "mood", "layers": [3], "scale": 1.5}]}
    assert (sent["baseline"], seen.posts("/steer")[-1].post_data_json["stream"]) == (True, True)
    answer = api.steer(**sent)
    (result,) = answer.results
    assert result.baseline is not None
    unsteered, steered = read_sides(view)
    assert unsteered == result.baseline[0].tokens
    assert steered == result.completions[0].tokens
    assert unsteered != steered

    receipt = view.get_by_role("region", name="Receipt").inner_text()
    site = answer.steering.layers["3"]
    assert f"{answer.steering.tokens_steered} tokens were read under steering by mood" in receipt
    assert f"changed at {site.tokens} tokens" in receipt
    assert site.relative_norm is not None
    assert f"{100 * site.relative_norm:#.3g} %" in receipt


def test_tokens_are_coloured_by_the_probe_and_say_what_it_read(
    visit: OpenPage, api: Client
) -> None:
    seen = visit("steer?vector=mood&scale=2&max_tokens=12")
    view = seen.see("steer")
    sent = seen.sent_to("/steer")
    layer = sent["steering"]["vectors"][0]["layers"]
    assert sent["probes"] == [{"name": "mood", "layers": layer}]
    (result,) = api.steer(**sent).results
    (probe,) = result.completions[0].probes or []
    assert probe.after is not None
    box = view.get_by_role("listbox", name="Steered: the text, by its tokens")
    box.locator(".token").nth(3).hover()  # the third token behind the prompt
    card = seen.page.get_by_role("tooltip").inner_text().replace(MINUS, "-")
    for value in (probe.before[2], probe.after[2]):
        assert value is not None
        assert f"{value:.3g}" in card or f"{value:.1f}" in card
    colours = box.evaluate("box => [...box.children].map(token => token.style.backgroundColor)")
    assert colours[0] == ""  # the prompt
    assert all(colours[1:])


def test_the_slider_gives_up_the_stream_before(visit: OpenPage, api: Client) -> None:
    seen = visit("steer?vector=mood&max_tokens=200&temperature=1.2")
    seen.see("steer")
    slider = seen.page.get_by_role("slider", name="Scale of mood")
    slider.focus()
    for _ in range(12):
        seen.page.keyboard.press("ArrowLeft")
        seen.page.wait_for_timeout(30)
    seen.see_steered(slider)
    asked = seen.posts("/steer")
    assert any(request.failure for request in asked[1:-1]), "no earlier stream was given up"
    body = seen.sent_to("/steer")
    scale = body["steering"]["vectors"][0]["scale"]
    assert float(slider.input_value()) == scale
    assert f"scale={scale:g}" in seen.page.url
    (result,) = api.steer(**body).results
    assert read_sides(seen.page.locator("#view-steer"))[1] == result.completions[0].tokens


def test_a_result_keeps_the_prompt_that_it_answers(visit: OpenPage) -> None:
    seen = visit("steer?vector=mood&max_tokens=8&prompt=Once%20upon%20a%20time")
    view = seen.see("steer")
    before = read_tokens(view, "Steered: the text, by its tokens")
    assert before[0] == "Once upon a time"
    seen.page.get_by_label("Text", exact=True).fill("The dog was")
    view.locator(".continuations.is-stale").wait_for()
    assert read_tokens(view, "Steered: the text, by its tokens") == before
    expect(view.get_by_text("these texts answer the request before")).to_be_visible()
    seen.button("Generate").click()
    expect(view.locator(".continuations .token").first).to_have_text("The\u00a0dog\u00a0was")
    expect(view.locator(".continuations.is-stale")).to_have_count(0)


def test_tokens_are_shown_while_they_are_generated(visit: OpenPage) -> None:
    # With one activation for all tokens the model says one word for ever.
    seen = visit("steer?vector=mood&op=replace&layers=4&temperature=0&max_tokens=300")
    seen.see("steer")
    watch = """async () => {
          const view = document.querySelector("#view-steer");
          view.querySelector("button.run").click();
          const counts = [];
          for (;;) {
            await new Promise(requestAnimationFrame);
            const text = view.querySelector("[data-column=Steered] .tokens");
            counts.push(text.childElementCount);
            const isDone = view.querySelector("[aria-busy=false]") && counts.length > 5;
            if (isDone) return counts;
          }
        }"""
    for _ in range(10):
        counts = seen.page.evaluate(watch)
        grown = {count for count in counts[3:] if count < counts[-1]}
        assert counts[-1] == 301  # the prompt is the first
        if len(grown) >= 3:
            break  # else the machine may have been too busy to draw
    assert len(grown) >= 3, counts


def test_vectors_scales_samples_and_texts_are_rows_of_one_table(
    visit: OpenPage, api: Client
) -> None:
    more = quote(json.dumps(["vector=mood&scale=0.5&layers=3&where=completion"]))
    prompts = quote(json.dumps(["Tom felt"]))
    seen = visit(
        f"steer?vector=mood&layers=2&scales=-2,2&n=2&max_tokens=9&more={more}&prompts={prompts}"
    )
    view = seen.page.locator("#view-steer")
    seen.button("Generate").click()  # so many texts wait for the button
    table = view.get_by_role("region", name="All texts")
    table.wait_for()
    first, second = sorted(seen.all_sent_to("/steer"), key=lambda b: not b.get("baseline"))
    vectors = [
        [
            (v["name"], v["layers"], v["scale"], v.get("positions"))
            for v in body["steering"]["vectors"]
        ]
        for body in (first, second)
    ]
    assert vectors == [
        [("mood", [2], scale, None), ("mood", [3], 0.5, "completion")] for scale in (-2, 2)
    ]
    expected = {}
    for body in (first, second):
        scale = body["steering"]["vectors"][0]["scale"]
        for prompt, result in zip(body["prompts"], api.steer(**body).results, strict=True):
            for name, completions in (("unsteered", result.baseline), (scale, result.completions)):
                for one in completions or []:
                    expected[str(name).replace("-", MINUS), prompt, one.seed] = one
    assert len(expected) == 3 * 2 * 2
    table.get_by_role("button", name="Score a token").click()
    scores = []
    for row in table.locator("tbody tr").all():
        name = row.locator("th").inner_text()
        prompt, seed, score, _, tokens, text = row.locator("td").all_inner_texts()
        one = expected.pop((name, prompt, int(seed)))
        assert (text, int(tokens)) == (one.text.strip(), one.num_tokens)
        scores.append(read(score))
    assert scores == sorted(scores, reverse=True)


def test_both_sides_of_a_chat_go_on_from_their_own_replies(visit: OpenPage, api: Client) -> None:
    turns = quote(json.dumps(["Tell me a story."]))
    seen = visit(
        f"steer?vector=mood&layers=4&scale=12&mode=chat&max_tokens=9&turns={turns}&prompt=Why%3F"
    )
    view = seen.see("steer")
    opening = [{"role": "user", "content": "Tell me a story."}]
    told = api.steer(messages=opening, prompts=None, **{
        name: value for name, value in seen.all_sent_to("/steer")[0].items()
        if name != "messages"
    }).results[0]  # fmt: skip
    assert told.baseline is not None
    assert told.baseline[0].text != told.completions[0].text
    replies = {"/steer": told.completions[0].text, "/generate": told.baseline[0].text}
    for path, reply in replies.items():
        messages = seen.sent_to(path)["messages"]
        assert messages[1:] == [
            {"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}
        ]  # fmt: skip
    columns = [column.inner_text() for column in view.locator(".column").all()]
    for column, reply in zip(columns, (replies["/generate"], replies["/steer"]), strict=True):
        assert " ".join(reply.split()) in " ".join(column.split())


def test_a_text_goes_on_from_an_alternative(visit: OpenPage, api: Client) -> None:
    seen = visit("steer?vector=mood&scale=1&max_tokens=8&temperature=0")
    view = seen.see("steer")
    (body,) = seen.all_sent_to("/steer")
    (result,) = api.steer(**body).results
    ids = [*result.prompt_ids, *result.completions[0].token_ids[:2]]
    item = {"context_ids": ids, "target_ids": [[result.completions[0].token_ids[2]]]}
    top = api.logprob([item], steering=body["steering"], top=6).results[0].targets[0].top
    assert top is not None
    box = view.get_by_role("listbox", name="Steered: the text, by its tokens")
    box.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        seen.page.keyboard.press(key)
    card = seen.page.get_by_role("dialog", name="Token")
    card.get_by_role("button").nth(1).click()
    seen.see("steer").locator(".note").wait_for()
    expect(card).to_be_hidden()
    seen.page.wait_for_function("() => location.hash.includes('branch=')")
    expect(view.locator(".continuations[aria-busy=false]")).to_be_visible()
    assert seen.sent_to("/steer")["prompt_ids"] == [[*ids, top.token_ids[0][1]]]


def test_a_newcomer_trains_the_example_with_one_click(
    visit_any: OpenPage, start_server: ServerFactory
) -> None:
    server = start_server({"models": [fake_model(num_layers=80)]})
    seen = visit_any(server.url, "sweep")
    for view in ("steer", "sweep"):
        seen.page.locator(f"#tab-{view}").click()
        panel = seen.page.locator(f"#view-{view}")
        expect(panel.get_by_role("heading", name="No steering vector is stored")).to_be_visible()
    seen.button("Train “mood” from these pairs").click()
    expect(panel.locator(".heat tbody tr")).to_have_count(8, timeout=TIMEOUT_MS)
    seen.page.locator("#tab-inside").click()
    tall = seen.see("inside").locator(".heat.is-tall .heat-box")
    tall.evaluate("box => box.scrollTop = box.scrollHeight")
    head, box = tall.locator("thead th").last.bounding_box(), tall.bounding_box()
    assert head is not None
    assert box is not None
    # Tokens stay named while their 80 layers are scrolled.
    assert head["y"] == pytest.approx(box["y"], abs=2)
    seen.page.locator("#tab-steer").click()
    expect(seen.page.get_by_role("slider", name="Scale of mood")).to_be_visible()
    with Client(server.url) as client:
        assert [card.name for card in client.vectors.list().vectors] == ["mood"]


# ------------------------------------------------------------------ Dose-response


def test_curves_are_those_of_the_api(visit: OpenPage, api: Client, tmp_path: Path) -> None:
    seen = visit("sweep?vector=mood&layers=3%3B4&points=5&measure=change")
    view = seen.see("sweep")
    sent = seen.sent_to("/sweep")
    assert sent["layers"] == [[3], [4]]
    assert sent["scales"] == [-4, -2, 0, 2, 4]
    answer = api.sweep(**sent)

    view.locator("summary", has_text="All points").click()
    rows = view.get_by_role("region", name="All points").locator("tbody tr").all()
    assert len(rows) == len(answer.points)
    for row, point in zip(rows, answer.points, strict=True):
        cells = [read(cell) for cell in row.locator("td").all_inner_texts()[-5:]]
        expected = [target.logprob for item in point.items for target in item.targets]
        assert cells[:4] == pytest.approx(expected, abs=6e-4)
        assert cells[4] == pytest.approx(point.texts[0].perplexity, rel=6e-3)

    button = view.locator(".chart").first.get_by_role("button", name="CSV")
    saved = download(button, tmp_path / "sweep.csv")
    table = list(csv.DictReader(io.StringIO(saved.read_text())))
    steered = [line for line in table if line["target"] and line["layers"] != "unsteered"]
    found = [float(line["change"]) for line in steered]
    shown = [
        target["change"]
        for point in seen.answer_to("/sweep")["points"]
        for item in point["items"]
        for target in item["targets"]
    ]
    assert found == shown
    wanted = [t.change for p in answer.points for i in p.items for t in i.targets]
    assert shown == pytest.approx(wanted, abs=1e-4)

    saved = download(view.get_by_role("button", name="PNG").first, tmp_path / "sweep.png")
    assert saved.read_bytes().startswith(b"\x89PNG")


def test_a_cell_is_shown_in_numbers_and_generated_with(visit: OpenPage, api: Client) -> None:
    seen = visit("sweep?vector=mood&points=5&layers=3%3B4")
    view = seen.see("sweep")
    chart = view.get_by_role("img").first
    words = view.get_by_role("region", name="The chosen scale")
    best = api.vectors.get("mood").about.recommendation
    assert best is not None
    nearest = min(seen.sent_to("/sweep")["scales"], key=lambda scale: abs(scale - best.scale))
    expect(words.get_by_role("heading")).to_have_text(f"At scale {nearest:.3g}")
    chart.focus()
    for _ in range(2):  # the first press chooses the first point
        chart.press("ArrowRight")
    expect(words.get_by_role("heading")).to_have_text(f"At scale {MINUS}2")
    point = api.sweep(**seen.sent_to("/sweep")).points[1]
    assert point.relative_norm is not None
    assert f"{100 * point.relative_norm:#.3g} %" in words.inner_text()
    change = point.items[0].targets[0].change
    assert change is not None
    assert f"{change:+.2f}".replace("-", MINUS) in words.inner_text()
    chart.hover()
    box = chart.bounding_box()
    assert box is not None
    chart.hover(position={"x": 0.95 * box["width"], "y": 0.4 * box["height"]})
    expect(words.get_by_role("heading")).to_have_text("At scale 4")

    answer = api.sweep(**seen.sent_to("/sweep"))
    cells = view.locator(".heat tbody button").all_inner_texts()
    wanted = [
        sum((a.logprob or 0) - (b.logprob or 0) for a, b in (i.targets for i in p.items)) / 2
        for p in answer.points
    ]
    assert [read(cell) for cell in cells] == pytest.approx(wanted, abs=6e-3)
    view.locator("[data-cell='1-1']").click()  # layer 4, scale -2
    view.locator(".said .continuations[aria-busy=false]").wait_for()
    sent = seen.sent_to("/steer")
    (vector,) = sent["steering"]["vectors"]
    assert (vector["layers"], vector["scale"]) == ([4], -2)
    texts = [result.completions[0].text for result in api.steer(**sent).results]
    table = view.get_by_role("region", name="All texts").inner_text()
    assert all(text.strip() in table for text in texts)


# ------------------------------------------------------------------ Vectors


def test_training_shows_how_well_layers_separate(visit: OpenPage, api: Client, own: str) -> None:
    seen = visit("vectors")
    view = seen.page.locator("#view-vectors")
    pairs = "\n".join(f"{pair['positive']}\t{pair['negative']}" for pair in EXAMPLE)
    view.get_by_label("Pairs of texts").fill(pairs + "\nno pair")
    expect(view.get_by_text("6 pairs; line 7 is no pair")).to_be_visible()
    expect(seen.button("Train")).to_be_disabled()
    view.get_by_label("Pairs of texts").fill(pairs)
    view.get_by_label("Name", exact=True).fill(own)
    seen.button("Train").click()
    entry = view.locator(f"[data-vector={own}]")
    entry.locator(".quality").wait_for()
    card = api.vectors.get(own)
    assert card.about.pairs == len(EXAMPLE)
    entry.locator("summary", has_text="Every layer").click()
    for row in entry.locator("tbody tr").all():
        found = (card.about.quality or {})[row.locator("th").inner_text()]
        cells = [read(cell) for cell in row.locator("td").all_inner_texts()[:3]]
        expected = [found.auc, found.accuracy, found.pair_accuracy]
        assert cells == pytest.approx(expected, abs=6e-3)
    best = card.about.recommendation
    assert best is not None
    assert f"Begin at layer {best.layer}" in entry.inner_text()

    entry.get_by_role("button", name="Steer with it").click()
    seen.see("steer")
    (vector,) = seen.sent_to("/steer")["steering"]["vectors"]
    assert (vector["name"], vector["layers"]) == (own, [best.layer])
    assert vector["scale"] == pytest.approx(best.scale, rel=6e-3)
    api.vectors.delete(own)


def test_vectors_go_up_and_down_as_files(
    visit: OpenPage, api: Client, own: str, tmp_path: Path
) -> None:
    # llama.cpp's control vectors have no layer 0.
    api.vectors.train("without-0", EXAMPLE, layers=[2, 3])
    seen = visit("vectors?opened=without-0")
    view = seen.see("vectors")
    for form, name in (("safetensors", "safetensors"), ("gguf", "GGUF")):
        button = view.get_by_role("button", name=f"Download without-0 as {name}")
        path = download(button, tmp_path / f"{own}-{form}.{form}")
        if form == "safetensors":
            seen.drop(view.get_by_role("textbox").first, path)
        else:
            view.locator("input[type=file]").set_input_files(path)
        expect(view.get_by_label("Name", exact=True)).to_have_value(path.stem)
        seen.button("Upload").click()
        entry = view.locator(f"[data-vector={path.stem}]")
        entry.locator(".vector-facts").wait_for()
        entry.locator("summary", has_text="Rename").click()
        entry.get_by_label("New name").fill(f"{own}-renamed")
        seen.button("Rename").click()
        view.locator(f"[data-vector={own}-renamed] .vector-facts").wait_for()
        stored = {card.name: card.sha256 for card in api.vectors.list().vectors}
        assert path.stem not in stored
        assert stored[f"{own}-renamed"] == stored["without-0"]
        api.vectors.delete(f"{own}-renamed")
    api.vectors.delete("without-0")


def test_a_feature_of_an_uploaded_autoencoder_steers(
    visit: OpenPage, api: Client, tmp_path: Path
) -> None:
    width, size = api.vectors.get("mood").width, 10
    weights = {"W_enc": (width, size), "W_dec": (size, width), "b_enc": (size,), "b_dec": (width,)}
    tensors = {name: torch.ones(shape) for name, shape in weights.items()}
    save_sae(tmp_path, {"d_in": width, "d_sae": size}, tensors)
    seen = visit("vectors?make=upload")
    view = seen.page.locator("#view-vectors")
    view.locator("input[type=file]").set_input_files(sorted(tmp_path.iterdir()))
    view.get_by_label("Name", exact=True).fill("of-the-page")
    seen.button("Upload").click()
    expect(view.get_by_text("of-the-page", exact=True)).to_be_visible()
    seen.open("steer?vector=of-the-page/7&max_tokens=4&scale=3")
    view = seen.see("steer")
    (vector,) = seen.sent_to("/steer")["steering"]["vectors"]
    assert vector == {"sae": "of-the-page", "feature": 7, "scale": 3}
    expect(view.get_by_label("Feature")).to_have_value("7")
    api.saes.delete("of-the-page")


def test_a_vector_is_combined_and_deleted_after_a_question(
    visit: OpenPage, api: Client, own: str
) -> None:
    seen = visit("vectors?make=combine&parts=%5B%22mood%3A-2%22%5D")
    view = seen.page.locator("#view-vectors")
    view.get_by_label("Name of the sum").fill(own)
    seen.button("Combine").click()
    entry = view.locator(f"[data-vector={own}]")
    entry.locator(".vector-facts").wait_for()
    (part,) = api.vectors.get(own).about.parts or []
    assert (part.name, part.weight) == ("mood", -2)

    delete = entry.get_by_role("button", name=f"Delete {own}")
    dialog = seen.page.get_by_role("dialog", name=f"Delete {own}?")
    delete.click()
    expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
    seen.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(delete).to_be_focused()
    assert api.vectors.get(own).name == own
    delete.click()
    dialog.get_by_role("button", name="Delete").click()
    expect(entry).to_have_count(0, timeout=TIMEOUT_MS)
    assert own not in [card.name for card in api.vectors.list().vectors]


def test_a_vector_is_tried_on_other_pairs(visit: OpenPage, api: Client, own: str) -> None:
    api.vectors.train(own, EXAMPLE, method="logistic")
    seen = visit("vectors?opened=mood")
    view = seen.see("vectors")
    view.locator("summary", has_text="Try it on other pairs").click()
    pairs = [
        ("He laughed with joy.", "He cried."), ("A kind day.", "A gloomy day."), ("Fun!", "No."),
    ]  # fmt: skip
    view.get_by_label("Pairs that it was not trained").fill("\n".join(map(" | ".join, pairs)))
    seen.button("Evaluate").click()
    table = view.get_by_role("region", name="mood on these pairs")
    table.wait_for()
    readings = [
        [np.mean([v for v in probe.before if v is not None]) for probe in result.tokens.probes]
        for result in api.perplexity(**seen.sent_to("/perplexity")).results
    ]
    positive, negative = np.array(readings[:3]), np.array(readings[3:])
    areas = (positive[:, None] > negative[None]).mean(axis=(0, 1))
    shown = [read(row.locator("td").first.inner_text()) for row in table.locator("tbody tr").all()]
    assert shown == pytest.approx(areas, abs=6e-4)

    seen.button("Compare the stored vectors").click()
    layer = str(api.vectors.get("mood").layers[-1])
    found = {name: load(api.vectors.download(name)) for name in ("mood", own)}
    a, b = (next(v for n, v in f.items() if f".{layer}." in n) for f in found.values())
    cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    names = view.locator(".cosines thead th").all_inner_texts()[1:]
    cell = view.locator(f".cosines [data-cell='{names.index('mood')}-{names.index(own)}']")
    assert read(cell.inner_text()) == pytest.approx(cosine, abs=6e-3)
    api.vectors.delete(own)
