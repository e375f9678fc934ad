"""Writes the pictures of README and documentation: `.venv/bin/python -m tests.browser.screenshots`

It starts the demo model as `make serve` does, trains the example vector as a visitor would, and
saves a PNG for each view; `--film steer.gif` writes one that moves instead. A picture larger than
MAX_BYTES ends it with an error.
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

HEIGHTS = {"text": 1080, "steer": 1290, "sweep": 1640, "inside": 700}
"""Views whose pictures the documentation has, and how high each is."""

FILMED = (0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1, 0, -0.1, -0.2, -0.3, -0.4, -0.3, -0.2, -0.1)
"""Where the slider of a moving picture stands, of its whole reach."""


def main() -> int:
    """Write them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--film", type=Path, help="write a moving picture of steering here, alone")
    arguments = parser.parse_args()
    path = find_chromium()
    if path is None:
        sys.exit("no Chromium is on PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        server = start_demo(Path(directory))
        try:
            visit = Visit.start(launch(playwright, path), server.url)
            if arguments.film is not None:
                film(visit, arguments.film)
                return 0
            for view in HEIGHTS:
                save(visit, view)
        finally:
            server.stop()
    return 0


def start_demo(directory: Path) -> Server:
    """Start the demo model as `make serve` does, and wait for it."""
    config = yaml.safe_load((ROOT / "demo" / "models.yaml").read_text())
    config["models"][0]["path"] = str(DEMO_MODEL)
    server = Server.start(config, directory)
    server.wait_until_ready()
    return server


def save(visit: Visit, view: str) -> None:
    """Save the picture of a view, once it shows an answer. Errors: SystemExit for a large one."""
    page = visit.page
    page.set_viewport_size({"width": 1280, "height": HEIGHTS[view]})
    page.mouse.move(0, 0)
    visit.open(view)
    if view in ("steer", "sweep"):
        train_example(visit, view)
    visit.see(view)
    if view == "text":
        page.locator("#view-text .token", has_text="Oslo").hover()
        page.get_by_role("tooltip").get_by_role("list").wait_for()
    page.wait_for_timeout(500)  # bars grow to their length, charts take the width they have
    path = ROOT / "docs" / "images" / f"playground-{view}-light.png"
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


def film(visit: Visit, path: Path) -> None:
    """Save a moving picture of Steer, whose text follows the slider: a GIF, or what PIL writes."""
    page = visit.page
    page.set_viewport_size({"width": 1280, "height": 760})
    visit.open("steer?scale=0")
    train_example(visit, "steer")
    slider = visit.see("steer").get_by_role("slider", name="Scale of ")
    reach = float(slider.get_attribute("max") or 1)
    frames = []
    for share in FILMED:
        slider.fill(f"{share * reach:.2f}")
        visit.see_steered(slider)
        page.wait_for_timeout(300)
        frames.append(Image.open(io.BytesIO(page.screenshot())).convert("P", palette=1, colors=128))
    first, *others = frames
    first.save(path, save_all=True, append_images=others, duration=700, loop=0, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


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
