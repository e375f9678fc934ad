"""Every family on both engines: the numbers of transformers, or a refusal with its words.

`FAMILIES=all` tries all of them, compiled ones too, and writes docs/families.md; without it, those
that most people use, and one of each way in which families differ.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.families.checkpoints import FAMILIES

EVERY = os.environ.get("FAMILIES") == "all"
pytestmark = [pytest.mark.engine, pytest.mark.timeout(7200 if EVERY else 900)]
USUAL = ("llama", "mistral", "qwen3", "gemma3", "gpt_neox", "stablelm")
CHECKS = ("scores", "prefix", "captures", "add", "ablate", "rotate", "generation", "lens")
TOLERANCE = 1e-4
ENGINES = (("vllm", "eager"), ("vllm", "compiled"), ("transformer_lens", "eager"))
TRIED = [
    (family, engine, mode)
    for engine, mode in ENGINES
    for family in (FAMILIES if EVERY else USUAL)
    if EVERY or mode == "eager"
]
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out")
PARALLEL = dict.fromkeys(("cohere", "falcon", "gpt_neox"), ("resid_mid",))
WITHOUT = {
    "vllm": PARALLEL | {
        "granite": ("attn_out", "mlp_out"),
        "granite_hybrid": ("attn_out", "resid_mid", "mlp_out"),
    },
    "transformer_lens": PARALLEL,
}  # fmt: skip
"""By engine and family, points that are refused: parallel blocks have no stream between, Granite
scales what it adds, and a Mamba layer has no attention."""
REFUSED = {("granite_hybrid", "transformer_lens"): "has recurrent layers"}
"""By family and engine, how its refusal begins, where there is one."""


def measure(
    engine: str, mode: str, paths: list[Path], **environment: str
) -> dict[tuple[str, str, str], Any]:
    """What `family_probe` found, by family, engine and mode."""
    command = [sys.executable, "-m", "tests.families.family_probe", engine, mode, "float32"]
    done = subprocess.run(
        [*command, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(paths), done.stderr[-3000:]
    return {(line["family"], engine, mode): line for line in lines}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Any]:
    """What was measured of every family, the engines side by side."""
    directory = tmp_path_factory.mktemp("families")
    families = list(dict.fromkeys(family for family, *_ in TRIED))
    for family in families:
        FAMILIES[family].make(directory / family)
    paths = [directory / family for family in families]
    modes = list(dict.fromkeys((engine, mode) for _, engine, mode in TRIED))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: measure(*pair, paths), modes))
    found = {key: line for result in results for key, line in result.items()}
    if EVERY:
        (ROOT / "docs" / "families.md").write_text(describe(found))
    return found


@pytest.mark.parametrize(("family", "engine", "mode"), TRIED)
def test_a_family_has_the_numbers_of_transformers(
    measured: dict[tuple[str, str, str], Any], family: str, engine: str, mode: str
) -> None:
    line = measured[family, engine, mode]
    assert "died" not in line, line["died"]
    if refusal := REFUSED.get((family, engine)):
        assert line.get("refused", "").startswith(refusal), f"it is refused no more: {line}"
        return
    assert "refused" not in line, line["refused"]
    for check in CHECKS:
        assert not isinstance(line[check], str), f"{check}: {line[check]}"
        assert line[check] < TOLERANCE, (check, line)
    for point in POINTS:
        is_refused = point in WITHOUT[engine].get(family, ())
        assert isinstance(line[point], str) == is_refused, (point, line[point])
        assert is_refused or line[point] < TOLERANCE, (point, line)


def describe(found: dict[tuple[str, str, str], Any]) -> str:
    """The page docs/families.md: a row a family, the largest difference of every check and mode."""
    rows = ["| family | vllm | transformer_lens | hooks that vLLM lacks |", "|---|---|---|---|"]
    for family in sorted({family for family, _, _ in found}):
        cells = [_write_cell(found, family, engine) for engine in ("vllm", "transformer_lens")]
        lacks = ", ".join(WITHOUT["vllm"].get(family, ()))
        rows.append(f"| {' | '.join([family, *cells, lacks])} |")
    return "\n".join([INTRODUCTION, *rows]) + "\n"


def _write_cell(found: dict[tuple[str, str, str], Any], family: str, engine: str) -> str:
    lines = [line for key, line in found.items() if key[:2] == (family, engine)]
    words = [line.get("refused", line.get("died")) for line in lines]
    words += [value for line in lines for value in map(line.get, CHECKS) if isinstance(value, str)]
    if any(words):
        return next(filter(None, words))
    values = [line[check] for line in lines for check in (*CHECKS, *POINTS)]
    return f"{max(value for value in values if not isinstance(value, str)):.0e}"


INTRODUCTION = """# Families of models

The largest difference from transformers (float32, eager attention) on tiny random checkpoints: of
scores, scores after a shared prefix, steered scores (`add`, `ablate`, `rotate`), generation and
the lens in nats; of activations as a part of their root mean square; of resid_pre, attn_out,
resid_mid and mlp_out, read and steered. vLLM ran eager and compiled. `make families` measures this
and writes the page.
"""


def test_the_table_names_every_family() -> None:
    table = (ROOT / "docs" / "families.md").read_text()
    missing = [name for name in FAMILIES if f"| {name} |" not in table]
    assert not missing, f"run `make families`: {missing} are not in docs/families.md"
