"""The notebooks in docs: they run on the demo model, and print what is committed with them."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import Server
from tests.notebooks import DOCS, NOTEBOOKS, list_types, read_printed, run, split_numbers

pytestmark = pytest.mark.engine

SERVERS = {"quantised-perplexity": "quantized_server"}
"""Notebook -> the server that it asks, where one with the demo model alone will not do."""


def read_code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_is_committed(path: Path, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(SERVERS.get(path.stem, "tlens_server"))
    committed = read_code(nbformat.read(path, as_version=4))
    found = read_code(run(path, server.url))
    # Rounding to 8 bits depends on the last digit of an activation, which processors differ in.
    tolerance = {"rel": 0.3, "abs": 0.02} if path.stem in SERVERS else {"rel": 1e-3, "abs": 2e-3}
    for old, new in zip(committed, found, strict=True):
        assert not [o for o in new.outputs if o.get("name") == "stderr"], new.source
        assert list_types(new) == list_types(old), new.source
        (old_words, old_numbers), (new_words, new_numbers) = (
            split_numbers("".join(line for line in read_printed(cell).splitlines(True)
                                  if "apart" not in line))
            for cell in (old, new)
        )  # fmt: skip
        assert new_words == old_words
        assert new_numbers == pytest.approx(old_numbers, **tolerance), new.source


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
