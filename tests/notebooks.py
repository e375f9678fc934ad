"""Runs the notebooks of docs and writes their outputs: `.venv/bin/python -m tests.notebooks URL`

Names after URL choose notebooks. URL is of a server with the demo model as its default; for
`quantised-perplexity` also with `w8a8`, a checkpoint of `demo/quantize.py`; for `published-*` with
SmolLM2 of `tests/trained.py`.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))
PUBLISHED = sorted(DOCS.glob("published-*.ipynb"))
"""Published results on SmolLM2."""


def run(path: Path, url: str) -> Any:
    """Return a notebook after it has run, in a kernel of this Python."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch, "kernels", "python3")
        spec.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        document = {"argv": argv, "display_name": "Python 3", "language": "python"}
        (spec / "kernel.json").write_text(json.dumps(document))
        # The user's own kernels, settings and history stay out of it.
        own = {
            "JUPYTER_PATH": scratch, "JUPYTER_RUNTIME_DIR": f"{scratch}/runtime",
            "JUPYTER_CONFIG_DIR": f"{scratch}/config", "IPYTHONDIR": f"{scratch}/ipython",
            "JUPYTER_PLATFORM_DIRS": "1", "LOGSTEER_BASE_URL": url,
        }  # fmt: skip
        before = dict(os.environ)
        os.environ.update(own)
        os.environ.pop("LOGSTEER_API_KEY", None)
        try:
            client = NotebookClient(notebook, timeout=300, kernel_name="python3")
            client.execute(cwd=scratch, env=os.environ.copy())
        finally:
            os.environ.clear()
            os.environ.update(before)
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def read_printed(cell: Any) -> str:
    """Return what a cell has printed."""
    return "".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream")


def list_types(cell: Any) -> set[str]:
    """Return the media types of a cell's results."""
    return {kind for output in cell.get("outputs", []) for kind in output.get("data", {})}


def split_numbers(text: str) -> tuple[str, list[float]]:
    """Return a text without its numbers and spaces, and the numbers."""
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    words = re.sub(r"\s+", " ", re.sub(number, "#", text))
    return words, [float(found) for found in re.findall(number, text)]


def read_code(notebook: Any) -> list[Any]:
    """Return the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def compare(path: Path, url: str, **tolerance: float) -> None:
    """Hold what a notebook prints now to what is committed, numbers to a tolerance."""
    committed = read_code(nbformat.read(path, as_version=4))
    found = read_code(run(path, url))
    for old, new in zip(committed, found, strict=True):
        assert not [o for o in new.outputs if o.get("name") == "stderr"], new.source
        assert list_types(new) == list_types(old), new.source
        (old_words, old_numbers), (new_words, new_numbers) = (
            split_numbers(re.sub(r".* apart\n", "", read_printed(cell))) for cell in (old, new)
        )
        assert new_words == old_words
        assert new_numbers == pytest.approx(old_numbers, **tolerance), new.source


def main() -> int:
    """Write the outputs of the notebooks; return the exit status."""
    url, *names = sys.argv[1:]
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            nbformat.write(run(path, url), path)
            print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
