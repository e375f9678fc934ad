"""Writes the pictures of docs/images: `.venv/bin/python -m tests.browser.screenshots`

It starts the demo model as `make serve` does, trains the example vector as a visitor would, and
saves a PNG of each view, and one GIF in which a visitor steers. A picture larger than MAX_BYTES, or
a film larger than MAX_FILM_BYTES, ends it with an error.
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path

import yaml
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.conftest import find_chromium, launch
from tests.browser.visits import Visit
from tests.conftest import DEMO_MODEL, ROOT
from tests.servers import Server

MAX_BYTES = 150_000
MAX_FILM_BYTES = 1_500_000
SCALES = (0.5, -0.5, -1.0, 0.0)
"""Where the visitor of the film stops the slider; it begins at 1."""
WRITING = "#view-steer .continuations[aria-busy=true]"
FRAME_MS = 120

ADDRESSES = {
    "text": "text",
    "choices": "choices",
    "sweep": "sweep",
    "inside": "inside",
    "vectors": "vectors?opened=mood",
    "models": "models",
}
HEIGHTS = {
    "text": 860,
    "choices": 900,
    "sweep": 1100,
    "inside": 620,
    "vectors": 1100,
    "models": 860,
}


def main() -> int:
    """Write them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "docs" / "images")
    parser.add_argument("--url", help="of a server that runs; else one is started")
    parser.add_argument("--views", nargs="+", choices=ADDRESSES, default=list(ADDRESSES))
    arguments = parser.parse_args()
    path = find_chromium()
    if path is None:
        sys.exit("no Chromium is on PATH: apt-get install chromium")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    server = None
    with tempfile.TemporaryDirectory() as directory:
        if arguments.url is None:
            server = start_demo(Path(directory))
        try:
            with sync_playwright() as playwright:
                chromium = launch(playwright, path)
                visit = Visit.start(chromium, arguments.url or server.url)
                for view in arguments.views:
                    save(visit, view, arguments.directory)
                visit.close()
                visit = Visit.start(chromium, arguments.url or server.url, height=800)
                film(visit, arguments.directory)
                visit.close()
                chromium.close()
        finally:
            if server is not None:
                server.stop()
    return 0


def start_demo(directory: Path) -> Server:
    """Start the demo model as `make serve` does, and wait for it."""
    config = yaml.safe_load((ROOT / "demo" / "models.yaml").read_text())
    config["models"][0]["path"] = str(DEMO_MODEL)
    server = Server.start(config, directory)
    server.wait_until_ready()
    return server


def save(visit: Visit, view: str, directory: Path) -> None:
    """Save the picture of a view, once it shows an answer. Errors: SystemExit for a large one."""
    page = visit.page
    page.set_viewport_size({"width": 1280, "height": HEIGHTS[view]})
    page.mouse.move(0, 0)
    visit.open(ADDRESSES[view])
    if view in ("sweep", "vectors"):
        train_example(visit, view)
    if view == "models":
        visit.button("Run the self-test").click()
        page.get_by_role("status").filter(has_text="Passed").wait_for()
    visit.see(view)
    if view == "text":
        page.locator("#view-text .token", has_text="Oslo").hover()
        page.get_by_role("tooltip").get_by_role("list").wait_for()
    page.wait_for_timeout(500)  # bars grow to their length, charts take the width they have
    path = directory / f"{view}.png"
    # 256 colours are enough for a page, and a third of the bytes.
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture = picture.convert("RGB").quantize(
        256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )
    picture.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")
    if path.stat().st_size > MAX_BYTES:
        sys.exit(f"{path} is larger than {MAX_BYTES:,} bytes")
    if visit.complaints:
        sys.exit(f"{view}: {visit.complaints}")


def film(visit: Visit, directory: Path) -> None:
    """Save a GIF of a visitor who steers. Errors: SystemExit for a large one."""
    page = visit.page
    visit.open("steer?scale=1&max_tokens=64")
    train_example(visit, "steer")
    visit.see("steer")
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    slider = page.get_by_role("slider", name="Scale of mood")
    frames: list[tuple[Image.Image, int]] = []

    def take(milliseconds: int) -> None:
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.append((picture.resize((960, 600), Image.Resampling.LANCZOS), milliseconds))

    take(2000)
    last = [frames[0][0]]
    for scale in SCALES:
        slider.fill(str(scale))
        page.locator(WRITING).wait_for()
        while page.locator(WRITING).count():
            take(FRAME_MS)
        visit.see_steered(slider)
        page.wait_for_timeout(300)
        take(1600)
        last.append(frames[-1][0])
    # One palette for all frames, from those with the most colours.
    strip = Image.new("RGB", (960, 600 * len(last)))
    for n, picture in enumerate(last):
        strip.paste(picture, (0, 600 * n))
    palette = strip.quantize(256, dither=Image.Dither.NONE)
    pictures = [f.quantize(palette=palette, dither=Image.Dither.NONE) for f, _ in frames]
    path = directory / "steering.gif"
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=[ms for _, ms in frames],
        loop=0, optimize=False,
    )  # fmt: skip
    print(f"{path}: {path.stat().st_size:,} bytes, {sum(ms for _, ms in frames) / 1000:.0f} s")
    if path.stat().st_size > MAX_FILM_BYTES:
        sys.exit(f"{path} is larger than {MAX_FILM_BYTES:,} bytes")
    if visit.complaints:
        sys.exit(f"film: {visit.complaints}")


def train_example(visit: Visit, view: str) -> None:
    """Train the example where no vector is stored yet."""
    page = visit.page
    panel = page.locator(f"#view-{view}")
    panel.locator(".form, .no-vector, .stored").first.wait_for()
    page.wait_for_timeout(500)
    if panel.locator(".no-vector").count():
        visit.button("Train “mood” from these pairs").click()


if __name__ == "__main__":
    sys.exit(main())
