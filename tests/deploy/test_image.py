"""What the Dockerfile asks pip for when it installs torch: its own shell, with a pip that notes what it was asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTORCH = "https://download.pytorch.org/whl/cpu"
VERSION = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


def torch_layer() -> str:
    """The RUN instruction that installs torch, as the shell gets it."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found = re.search(r"^RUN --mount=\S+ +(version=.*)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


@dataclass
class Build:
    """A folder in the place of the image's."""

    folder: Path

    def __post_init__(self) -> None:
        venv = self.folder / "venv" / "bin"
        venv.mkdir(parents=True)
        (self.folder / "wheelhouse").mkdir()
        # The settings are read by the real pip; nothing is installed.
        self._write(
            venv / "pip",
            f'if [ "$1" = config ]; then exec {sys.executable} -m pip "$@"; fi\nprintf "%s\\n" "$@" > {self.asked}',
        )
        self._write(venv / "python", 'echo "${FOUND:-cpu}"')

    @property
    def asked(self) -> Path:
        return self.folder / "asked"

    def _write(self, path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, **arguments: str) -> subprocess.CompletedProcess[str]:
        script = torch_layer().replace("/opt/venv", str(self.folder / "venv"))
        script = script.replace("/wheelhouse", str(self.folder / "wheelhouse"))
        script = script.replace("/src/constraints.txt", str(ROOT / "constraints.txt"))
        environment = {"TORCH": "cpu", "TORCH_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull, **arguments}
        environment |= {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        return subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def index(self, **arguments: str) -> str | None:
        """The further index that pip is given; None for none."""
        done = self.run(**arguments)
        assert done.returncode == 0, done.stderr
        words = self.asked.read_text().split("\n")
        assert f"torch=={VERSION}" in words
        return words[words.index("--extra-index-url") + 1] if "--extra-index-url" in words else None


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def test_cpu_build_comes_from_pytorchs_own_index_where_nothing_is_told(build: Build) -> None:
    assert build.index() == PYTORCH
    # Set to nothing, as a line of .env may be, or to what names no place.
    assert build.index(PIP_INDEX_URL="", PIP_RETRIES="9") == PYTORCH


@pytest.mark.parametrize(
    "told",
    [
        {"PIP_INDEX_URL": "https://pip.example/simple"},
        {"PIP_EXTRA_INDEX_URL": "https://pip.example/simple"},
        {"PIP_FIND_LINKS": "/wheels"},
        {"PIP_NO_INDEX": "1"},
    ],
    ids=lambda told: str(*told),
)
def test_settings_of_pip_that_name_a_place_are_left_alone(build: Build, told: dict[str, str]) -> None:
    assert build.index(**told) is None


def test_settings_file_of_the_base_image_counts_as_well(build: Build) -> None:
    path = build.folder / "pip.conf"
    path.write_text("[global]\nindex-url = https://pip.example/simple\n")
    assert build.index(PIP_CONFIG_FILE=str(path)) is None


@pytest.mark.parametrize(("wheel", "expected"), [(VERSION, None), (f"{VERSION}+cpu", None), ("0.1", PYTORCH)])
def test_wheel_of_the_pinned_version_in_the_wheelhouse_is_enough(
    build: Build, wheel: str, expected: str | None
) -> None:
    (build.folder / "wheelhouse" / f"torch-{wheel}-cp311-cp311-linux_x86_64.whl").touch()
    assert build.index() == expected


def test_index_that_is_given_goes_before_all(build: Build) -> None:
    given = "https://wheels.example/cpu"
    assert build.index(TORCH_INDEX_URL=given, PIP_INDEX_URL="https://pip.example/simple") == given


def test_cuda_build_is_what_pips_own_index_has(build: Build) -> None:
    assert build.index(TORCH="cuda", FOUND="cuda") is None


def test_other_build_than_asked_for_stops_with_what_to_do(build: Build) -> None:
    done = build.run(FOUND="cuda")
    assert done.returncode == 2
    assert (
        f"pip found a cuda build of torch {VERSION}, but TORCH=cpu was asked for: give TORCH_INDEX_URL" in done.stderr
    )
