"""A Chromium, and pages in it that fail their test for anything that a visitor should not get.

The browser is the system's own (Debian: `apt-get install chromium`); without one these tests are
skipped, and say so.
"""

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright

from logsteer import Client
from tests.browser.visits import EXAMPLE, TIMEOUT_MS, Visit
from tests.conftest import Server

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
)

OpenPage = Callable[..., Visit]

expect.set_options(timeout=TIMEOUT_MS)


def find_chromium() -> str | None:
    """Return where a Chromium is, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def launch(playwright: Playwright, path: str) -> Browser:
    """Start a Chromium without a window."""
    return playwright.chromium.launch(executable_path=path, args=list(FLAGS))


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """A running browser."""
    path = find_chromium()
    if path is None:
        pytest.skip(f"SKIPPED BECAUSE NO BROWSER IS FOUND: none of {', '.join(NAMES)} is on PATH")
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def api(playground_server: Server) -> Iterator[Client]:
    """A client of the server whose pages are visited; requests go to `demo`.

    In its store is `mood`, which pages take where they name no vector: the first in the alphabet;
    and `stories`, a capture with examples of it.
    What a test stores there has a name behind it, as another file's pages may be open meanwhile;
    and captures stay, as those pages ask for what runs.
    """
    with Client(playground_server.url, model="demo", timeout=300) as client:
        if "mood" not in [card.name for card in client.vectors.list().vectors]:
            client.vectors.train("mood", EXAMPLE, read="mean")
        texts = [pair["positive"] for pair in EXAMPLE]
        probe = {"name": "mood", "layers": [3]}
        client.capture(texts, "stories", [3], reduce={"top": [probe]}, progress=False)
        yield client


@pytest.fixture
def visit_any(chromium: Browser) -> Iterator[OpenPage]:
    """Opens pages: `visit_any(url, "steer?scale=2", dark=True)`; all are looked at in the end."""
    visits: list[Visit] = []

    def start(url: str, address: str = "", **options: object) -> Visit:
        visits.append(Visit.start(chromium, url, **options))
        visits[-1].open(address)
        return visits[-1]

    yield start
    for visit in visits:
        visit.close()
    for visit in visits:
        assert visit.complaints == []


@pytest.fixture
def visit(visit_any: OpenPage, playground_server: Server, api: Client) -> OpenPage:
    """Opens pages of the server with the demo model, in whose store `mood` is."""

    def start(address: str = "", **options: object) -> Visit:
        return visit_any(playground_server.url, address, **options)

    return start
