"""What `Copy as` gives runs as it stands: in a shell, in Python, and on the command line."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import expect

from logsteer import Client
from tests.browser.conftest import OpenPage
from tests.browser.visits import Visit

pytestmark = pytest.mark.engine

ADDRESSES = {
    "text": "text",
    "text, steered": "text?beside=steered&vector=mood",
    "choices": "choices?context=It's%20%22Tom%22%20%5Cn",
    "text, by windows": "text?read=windows&length=32&stride=16",
    "steer": "steer?vector=mood&max_tokens=8",
    "steer, in a chat": "steer?vector=mood&mode=chat&prompt=Don't%20be%20sad%20%C3%A9&max_tokens=8",
    "steer, clamped": "steer?vector=mood&op=clamp&positions=slices&max_tokens=8",
    "steer, conditional": "steer?vector=mood&when=mood&above=0&max_tokens=8",
    "sweep": "sweep?vector=mood&points=3&layers=2%3B3",
    "inside": "inside?beside=steered&vector=mood&at=0,2-4",
    "inside, patched": "inside?look=patch&at=0-1;4&metric=kl",
    "examples": "examples?opened=stories&name=snippet",
    "vectors": "vectors?name=snippet",
    "models": "models",
}
VIEW = {name: name.split(",", maxsplit=1)[0] for name in ADDRESSES}


def run(form: str, text: str, directory: Path) -> str:
    """Run a snippet as somebody would who has installed the client; what it prints."""
    command = [sys.executable, "-c", text] if form == "python" else ["bash", "-c", text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory,
        env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def run_all(seen: Visit, directory: Path, forms: tuple[str, ...]) -> dict[str, str]:
    texts = {form: seen.copy(form) for form in forms}
    with ThreadPoolExecutor(len(forms)) as pool:
        ran = {form: pool.submit(run, form, text, directory) for form, text in texts.items()}
        return {form: done.result() for form, done in ran.items()}


@pytest.mark.parametrize("name", ADDRESSES)
def test_snippets_run(visit: OpenPage, api: Client, tmp_path: Path, name: str) -> None:
    seen = visit(ADDRESSES[name])
    view = VIEW[name]
    if view == "vectors":
        seen.page.locator("[data-vector=mood]").wait_for()
    elif "windows" in name:
        seen.see_windows()
    else:
        seen.see(view)
    commands = () if view == "examples" else ("cli",)
    printed = run_all(seen, tmp_path, ("curl", "python", *commands))
    assert all(printed.values()), printed
    if view == "steer":
        answer = next(
            json.loads(line.removeprefix("data: "))
            for line in reversed(printed["curl"].splitlines())
            if line.startswith("data: ")
        )
    else:
        answer = json.loads(printed["curl"])
    assert "code" not in answer, answer
    if view == "vectors":
        assert api.vectors.get("snippet").about.pairs == 8
        api.vectors.delete("snippet")
    if view == "examples":
        assert api.captures.get("snippet").name == "snippet"


def test_a_text_with_a_probe_is_copied_without_a_command(visit: OpenPage, tmp_path: Path) -> None:
    """`logsteer perplexity` reads no probe, and nothing is left out unsaid."""
    seen = visit("text?colour=probe&probe=mood")
    view = seen.see("text")
    assert view.locator("[data-copy=cli]").count() == 0
    printed = run_all(seen, tmp_path, ("curl", "python"))
    assert json.loads(printed["curl"])["results"][0]["tokens"]["probes"][0]["name"] == "mood"


def test_combining_and_uploading_are_copied(visit: OpenPage, api: Client, tmp_path: Path) -> None:
    seen = visit("vectors?make=combine&combined=snippet-sum&parts=%5B%22mood%3A0.5%22%5D")
    seen.page.locator("[data-vector=mood]").wait_for()
    run_all(seen, tmp_path, ("curl", "python", "cli"))  # the same request again is the same vector
    (part,) = api.vectors.get("snippet-sum").about.parts or []
    assert (part.name, part.weight) == ("mood", 0.5)
    file = tmp_path / "snippet file.safetensors"
    file.write_bytes(api.vectors.download("snippet-sum"))
    api.vectors.delete("snippet-sum")
    seen.page.get_by_text("Upload a file").click()
    seen.page.locator("#view-vectors input[type=file]").set_input_files(file)
    run_all(seen, tmp_path, ("curl", "python", "cli"))
    assert api.vectors.delete("snippet-file").name == "snippet-file"


def test_what_a_command_leaves_out_is_said(visit: OpenPage) -> None:
    seen = visit("text")
    row = seen.see("text").locator(".copy-row")
    expect(row).to_contain_text("leaves out tokens, windows, columns")
    seen.page.get_by_role("button", name="A turn of mood").click()
    seen.open("text?colour=probe&probe=mood")
    expect(row).to_contain_text("no CLI: the command reads no probes")
