"""The notebooks in docs: they run on the demo model, and print what is committed with them."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import Server
from tests.notebooks import DOCS, NOTEBOOKS, list_types, read_printed, run, split_numbers

pytestmark = pytest.mark.engine

QUANTISED = DOCS / "quantised-perplexity.ipynb"
ON_DEMO = [path for path in NOTEBOOKS if path != QUANTISED]


def read_code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def compare(path: Path, server: Server, **tolerance: float) -> None:
    """Hold what a notebook prints now to what is committed, numbers to a tolerance."""
    committed = read_code(nbformat.read(path, as_version=4))
    found = read_code(run(path, server.url))
    for old, new in zip(committed, found, strict=True):
        assert not [o for o in new.outputs if o.get("name") == "stderr"], new.source
        assert list_types(new) == list_types(old), new.source
        (old_words, old_numbers), (new_words, new_numbers) = (
            split_numbers(re.sub(r".* apart\n", "", read_printed(cell))) for cell in (old, new)
        )
        assert new_words == old_words
        assert new_numbers == pytest.approx(old_numbers, **tolerance), new.source


@pytest.mark.parametrize("path", ON_DEMO, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path, tlens_server: Server) -> None:
    compare(path, tlens_server, rel=1e-3, abs=2e-3)


def test_the_quantised_one_prints_what_is_committed(quantized_server: Server) -> None:
    # Rounding to 8 bits depends on the last digit of an activation, in which processors differ.
    compare(QUANTISED, quantized_server, rel=0.3, abs=0.02)


def test_the_tour_draws_its_answers() -> None:
    cells = read_code(nbformat.read(DOCS / "tour.ipynb", as_version=4))

    def find(words: str) -> Any:
        (cell,) = [cell for cell in cells if words in cell.source]
        return cell

    for words in ("client.models()", "the stock market", "read = ", "training = ", "steered = "):
        assert "text/html" in list_types(find(words)), words
    for words in ("read.plot()", "training.plot()", "sweep.plot("):
        assert "image/png" in list_types(find(words)), words
    html = "".join(o.data.get("text/html", "") for o in find("read = ").outputs)
    assert "> mother</span>" in html
    receipt = "".join(o.data.get("text/html", "") for o in find("steered = ").outputs)
    assert "tour-mood x -3" in receipt
