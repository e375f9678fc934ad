"""Every example in the help of the command line, run as it stands against the demo model.

The server is TransformerLens', which can do what every command asks for. And the notebooks in docs:
they run on the demo model, and print what is committed with them.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import logsteer
from logsteer import Client
from logsteer.cli import main
from tests.client.test_examples import EXAMPLES
from tests.conftest import Server, ServerFactory, tlens_model, uncached
from tests.notebooks import DOCS, NOTEBOOKS, PUBLISHED, compare

pytestmark = pytest.mark.engine

NAMES = ("Tom", "Lily", "Ben", "Mia")
PAIRS = [{"positive": f"{n} was very happy.", "negative": f"{n} was very sad."} for n in NAMES]
STORY = "Lily was a little girl. She had a ball. One day, she walked to the park with her dog. "
LINES = {
    "pairs.jsonl": PAIRS,
    "items.jsonl": [{"context": "I feel", "targets": [" happy", " sad"]}],
    "prompts.jsonl": ["Once upon a time", {"prompt": "The king"}],
    "corpus.jsonl": [{"text": STORY}, {"text": "Tom was happy."}],
}
MAKES = {
    "--plot along.png": "along.png", "--output windows.csv": "windows.csv",
    "--output tokens.csv": "tokens.csv", "--output means.safetensors": "means.safetensors",
    "--output shards": "shards/index.json",
    "--plot layers.png": "layers.png", "--plot doses.png": "doses.png",
    "--plot sweep.png": "sweep.png", "get mood mood.s": "mood.safetensors",
}  # fmt: skip
"""What stands in an example, and the file that it then leaves."""


@pytest.fixture(scope="module")
def server(start_server: ServerFactory) -> Server:
    """A server that no other test asks: examples store, delete and unload."""
    return start_server(uncached(tlens_model("demo")))


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def place(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the examples name, and a server with what they name there."""
    import torch
    from safetensors.torch import save_file

    from tests.conftest import DEMO_MODEL
    from tests.contract.directions import draw_direction, load_model
    from tests.contract.lora import write_adapter
    from tests.server.test_saes import save_sae

    for card in client.vectors.list().vectors:
        client.vectors.delete(card.name)  # of other files with this server
    directory = tmp_path_factory.mktemp("examples")
    (directory / "book.txt").write_text(STORY * 40)
    for name, rows in LINES.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_adapter(directory / "adapter")
    save_file(draw_direction(load_model(DEMO_MODEL)), directory / "direction.safetensors")
    width = client.models().models[0].hidden_size or 0
    config = {"d_in": width, "d_sae": 130, "hook_name": "blocks.2.hook_resid_post"}
    shapes = {"W_enc": (width, 130), "W_dec": (130, width), "b_dec": (width,), "b_enc": (130,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    (directory / "gpt2-small-res-jb").mkdir()
    save_sae(directory / "gpt2-small-res-jb/blocks.8.hook_resid_pre", config, weights)
    return directory


@pytest.fixture(autouse=True)
def _stored(place: Path, client: Client, request: pytest.FixtureRequest) -> None:
    """Have what the examples name, whatever an earlier one has deleted or unloaded."""
    _load(client)
    for variant in client.variants.list().variants:
        client.variants.delete(variant.name)
    if not (place / "mood.safetensors").exists() or not _has_mood(client):
        client.vectors.train("mood", PAIRS)
        (place / "mood.safetensors").write_bytes(client.vectors.download("mood"))
    client.vectors.put("happy", place / "mood.safetensors", overwrite=True)
    client.saes.put("res8", place / "gpt2-small-res-jb/blocks.8.hook_resid_pre")
    client.adapters.put("story", place / "adapter")
    client.overrides.put("gradient", place / "direction.safetensors")
    if "captures delete" in request.node.name:
        client.capture(["Once"], "res2", [2], overwrite=True)
    if "cheerful" in request.node.name and "variants put" not in request.node.name:
        client.variants.put("cheerful", steering="mood:4@2")


def _load(client: Client) -> None:
    (model,) = client.models().models
    if model.state != "ready":
        client.load_model(model.id, wait_s=300)


def _has_mood(client: Client) -> bool:
    return "mood" in [card.name for card in client.vectors.list().vectors]


@pytest.mark.parametrize("line", sorted({line for lines in EXAMPLES.values() for line in lines}))
def test_an_example_runs(
    line: str,
    place: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [file for words, file in MAKES.items() if words in line]
    for file in made:
        (place / file).unlink(missing_ok=True)
    monkeypatch.setenv("LOGSTEER_BASE_URL", server.url)
    monkeypatch.chdir(place)
    line = re.sub(r"https?://\S+", server.url, line)
    needs_shell = re.search("[|<>]", line) is not None
    status, output, error = run_in_shell(line) if needs_shell else run_here(line, capsys)
    assert status == 0, error
    assert error == ""
    assert output or made
    for file in made:
        assert (place / file).stat().st_size > 0


def test_the_tasks_of_the_package_run(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.vectors.delete("mood")
    monkeypatch.setenv("LOGSTEER_BASE_URL", server.url)
    runner = doctest.DocTestRunner()
    (example,) = [test for test in doctest.DocTestFinder().find(logsteer) if test.examples]
    runner.run(example, clear_globs=False)
    example.globs["client"].close()
    assert (runner.failures, runner.tries > 5) == (0, True)


def run_in_shell(line: str) -> tuple[int, str, str]:
    """Run a line as a user's shell does; return its status, output and errors."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-o", "pipefail", "-c", line]
    environment = os.environ | {"PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


def run_here(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command of its own in this process; return its status, output and errors."""
    name, *arguments = shlex.split(line)
    assert name == "logsteer"
    capsys.readouterr()
    status = main(arguments)
    return status, *capsys.readouterr()


# ------------------------------------------------------------------ notebooks


QUANTISED = DOCS / "quantised-perplexity.ipynb"
ON_DEMO = [path for path in NOTEBOOKS if path != QUANTISED and path not in PUBLISHED]


@pytest.mark.parametrize("path", ON_DEMO, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path, tlens_server: Server) -> None:
    compare(path, tlens_server.url, rel=1e-3, abs=2e-3)


def test_the_quantised_one_prints_what_is_committed(quantized_server: Server) -> None:
    # Rounding to 8 bits depends on the last digit of an activation, in which processors differ.
    compare(QUANTISED, quantized_server.url, rel=0.3, abs=0.02)
