"""The notebook in docs, run against the demo model."""

import json
import os
import sys
from typing import Any

import pytest

from tests.conftest import ROOT, Server

pytestmark = pytest.mark.engine

PATH = ROOT / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def cells(tlens_server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The notebook's cells after they have run, in a kernel of this Python."""
    import nbformat
    from nbclient import NotebookClient

    directory = tmp_path_factory.mktemp("jupyter")
    spec = directory / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    document = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(document))
    # The user's own kernels, settings and history stay out of it.
    own = {
        "JUPYTER_PATH": str(directory), "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
        "JUPYTER_CONFIG_DIR": str(directory / "config"), "IPYTHONDIR": str(directory / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1", "LOGSTEER_URL": tlens_server.url,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        patch.delenv("LOGSTEER_API_KEY", raising=False)
        notebook = nbformat.read(PATH, as_version=4)
        client = NotebookClient(notebook, timeout=300, kernel_name="python3")
        client.execute(cwd=str(directory), env=os.environ.copy())
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def list_types(cell: Any) -> set[str]:
    return {kind for output in cell.outputs for kind in output.get("data", {})}


def find(cells: list[Any], words: str) -> Any:
    (found,) = [cell for cell in cells if words in cell.source]
    return found


def read_html(cell: Any) -> str:
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


def test_answers_are_drawn(cells: list[Any]) -> None:
    for words in ("client.models()", "the stock market", "read = ", "training = ", "steered = "):
        assert "text/html" in list_types(find(cells, words)), words
    for words in ("read.plot()", "training.plot()", "sweep.plot("):
        assert "image/png" in list_types(find(cells, words)), words
    # A heat map shows the words of the text, and the receipt the vector.
    assert "> mother</span>" in read_html(find(cells, "read = "))
    assert "tour-mood x -3" in read_html(find(cells, "steered = "))


def test_what_is_steered_scores_as_it_was_written(cells: list[Any]) -> None:
    (output,) = find(cells, "difference = ").outputs
    assert "nats apart" in output.text


def test_no_cell_complains(cells: list[Any]) -> None:
    for cell in cells:
        assert not [output for output in cell.outputs if output.get("name") == "stderr"]
