"""Wheels that `make wheel` put into dist/: tags, contents, and a job trained by an installed one outside the checkout.

torch is not downloaded again: the environment sees that of the checkout's, by a .pth file, and nothing else of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

from native import build

ROOT = Path(__file__).parents[2]
PACKAGES = ("", "_ps", "_aggregator", "_worker", "_chief", "_evaluator", "_pipeline", "_lab", "_launchers")
pytestmark = pytest.mark.wheel


def wheel(platform_tag: str) -> Path:
    found = list((ROOT / "dist").glob(f"shardline-*-py3-none-{platform_tag}.whl"))
    assert len(found) == 1, f"dist/ has {len(found)} wheels for {platform_tag}; run: make wheel"
    return found[0]


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHARDLINE_", "PYTHON"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel for this machine."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    # torch alone, and what belongs to a CUDA build of it; its dependencies come from the index.
    shared = folder / "torch"
    shared.mkdir()
    for path in Path(str(distribution("torch").locate_file(""))).iterdir():
        if path.name.startswith(("torch", "functorch", "nvidia", "triton", "cuda")):
            (shared / path.name).symlink_to(path)
    (site / "torch.pth").write_text(f"{shared}\n")
    bin_folder = folder / "venv" / "bin"
    made = wheel(f"manylinux_2_17_{build.machine()}")
    pip = [bin_folder / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    done = run([*pip, f"{made}[examples]"], folder)
    assert done.returncode == 0, done.stderr
    return bin_folder


@pytest.mark.parametrize("processor", list(build.LEVELS))
def test_a_wheel_needs_no_newer_glibc_than_its_tag_says(processor: str) -> None:
    auditwheel = [ROOT / "build" / ".venv" / "bin" / "auditwheel", "show", wheel(f"manylinux_2_17_{processor}")]
    done = run(auditwheel, ROOT)
    said = " ".join(done.stdout.split())
    assert f'is consistent with the following platform tag: "manylinux_2_17_{processor}"' in said, done.stderr


@pytest.mark.parametrize("tag", ["any", *(f"manylinux_2_17_{processor}" for processor in build.LEVELS)])
def test_a_wheel_has_all_packages_and_examples_and_the_library_or_why_not(tag: str) -> None:
    with zipfile.ZipFile(wheel(tag)) as archive:
        names = set(archive.namelist())
        assert {f"shardline{part}/__init__.py" for part in PACKAGES} <= names
        assert {"shardline_lab/examples/digits/job.py", "shardline_lab/examples/digits/train.py"} <= names
        assert f"shardline/native/built/{build.MISSING if tag == 'any' else build.LIBRARY}" in names
        assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
        entries = next(name for name in names if name.endswith("entry_points.txt"))
        assert "init = shardline_lab.init:init" in archive.read(entries).decode()


def test_the_pure_wheel_says_why_it_has_no_kernels(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel("any")) as archive:
        archive.extractall(tmp_path)
    code = "from shardline.native.library import describe; print(describe())"
    done = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.startswith("native kernels: none (this is the wheel for machines that have none of their own; ")


@pytest.mark.timeout(400)
def test_an_installed_wheel_trains_the_digits_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    shardline = installed / "shardline"
    done = run([shardline, "--version"], tmp_path)
    # As pip understood the version of the file's name.
    version = wheel(f"manylinux_2_17_{build.machine()}").name.split("-")[1]
    assert done.stdout.split()[1] == version and "native kernels: none" not in done.stdout, done
    assert run([shardline, "init", "digits"], tmp_path).returncode == 0
    project = tmp_path / "digits"
    assert sorted(path.name for path in project.iterdir()) == ["compose.yaml", "job.py"]
    train = [shardline, "train", "job.py", "--ps", "2", "--workers", "2", "--evaluators", "1", "--out", "run"]
    done = run(train, project)
    assert done.returncode == 0, done.stderr
    summary = json.loads((project / "run" / "summary.json").read_text())
    assert summary["done"] == 500 and summary["evaluation"]["last"]["metrics"]["accuracy"] > 0.97, summary
