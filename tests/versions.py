"""Whether the ranges in pyproject.toml say the truth: the demo and the unit tests with other versions.

    python -m tests.versions                      # every Python on PATH with the newest libraries, one with the oldest
    python -m tests.versions --python ~/py/bin/python3.14 --libraries newest

Each trial has a virtual environment of its own that goes away. What was tried and what was not to be had is said at the
end; the exit code is 0 only where something was tried and nothing failed. Minutes each, and gigabytes to download.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
LIBRARIES = ("newest", "oldest")
EXTRAS = "examples,test"
SHOWN = ("torch", "numpy", "grpcio", "protobuf", "pydantic", "starlette")
"""Libraries whose versions are named."""
NOT_TO_BE_HAD = ("No matching distribution found", "Could not find a version that satisfies")
INSTALL_S, DEMO_S, TESTS_S = 3600.0, 900.0, 3600.0
TAIL = 30
"""Lines that are shown of what failed."""


@dataclass(frozen=True)
class Trial:
    """One interpreter with one choice of libraries."""

    python: str
    version: str
    """Such as "3.12.1"."""
    libraries: str

    @property
    def name(self) -> str:
        """For people."""
        return f"Python {self.version} with the {self.libraries} libraries"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trial."""

    trial: Trial
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    """What was not to be had, so that nothing was tried."""
    failed: str = ""
    """Which part failed."""
    tests: str = ""
    """Last line of pytest."""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """For people."""
        if self.missing:
            return f"{self.trial.name}: not to be had: {self.missing}"
        found = ", ".join(f"{name} {self.versions[name]}" for name in SHOWN if name in self.versions)
        result = f"FAILED: {self.failed}" if self.failed else f"demo and unit tests pass ({self.tests})"
        return f"{self.trial.name} ({found}): {result}, {self.seconds:.0f} s"


def find_pythons(names: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(interpreters with their versions, those that are not to be had with why not)."""
    found, missing = [], {}
    for name in names:
        path = shutil.which(name)
        if path is None:
            missing[name] = "there is no such command on PATH"
            continue
        asked = [path, "-c", "import ensurepip, platform, venv; print(platform.python_version())"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            # A version manager's stand-in for an interpreter that is not there, or one without venv.
            missing[name] = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[0]
        else:
            found.append((path, done.stdout.strip()))
    return found, missing


def oldest(requirements: Sequence[str]) -> list[str]:
    """The lower ends of ranges such as "torch>=2.11", as constraints. Raises ValueError for what is no such range."""
    pins = []
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml has no lower end, such as torch>=2.11")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


def _call(command: Sequence[str], log: Path, *, limit_s: float, path: Path | None = None) -> bool:
    """Run a command from the repository, its output in a file; whether it ended well and in time."""
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if path is not None:
        settings["PATH"] = f"{path}{os.pathsep}{settings.get('PATH', '')}"
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=settings, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            output.write(f"\nnot done within {limit_s:.0f} s\n")
            return False
        except OSError as error:
            output.write(f"\n{command[0]}: {error.strerror}\n")
            return False
    return done.returncode == 0


def run(trial: Trial, folder: Path) -> Outcome:
    """Install, run the demo and the unit tests. folder: goes away with all that is in it."""
    folder.mkdir()
    began_s = time.monotonic()
    environment, log = folder / "venv", folder / "log"
    bin_folder = environment / "bin"
    limits: list[str] = []
    if trial.libraries == "oldest":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        (folder / "oldest.txt").write_text("\n".join(oldest(project["dependencies"])))
        limits = ["-c", str(folder / "oldest.txt")]
    install = [str(bin_folder / "pip"), "install", "--disable-pip-version-check", *limits, f"{ROOT}[{EXTRAS}]"]
    demo = [str(bin_folder / "shardline"), "train", "examples/digits/job.py", "--ps", "2", "--workers", "2"]
    demo += ["--evaluators", "1", "--out", str(folder / "demo")]
    tests = [str(bin_folder / "python"), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    tests += ["-m", "not chaos and not bench", "-p", "no:cacheprovider", "tests/unit"]
    try:
        for what, command, limit_s in (
            ("making its environment", [trial.python, "-m", "venv", str(environment)], INSTALL_S),
            ("installing", install, INSTALL_S),
            ("the demo", demo, DEMO_S),
            ("the unit tests", tests, TESTS_S),
        ):
            print(f"  {what}", flush=True)
            if _call(command, log, limit_s=limit_s, path=bin_folder):
                continue
            said = log.read_text(errors="replace").splitlines()
            lacking = [line for line in said if any(sign in line for sign in NOT_TO_BE_HAD)]
            if what == "installing" and lacking:
                return Outcome(trial=trial, missing=lacking[-1].removeprefix("ERROR: "))
            print("\n".join(f"    {line}" for line in said[-TAIL:]), flush=True)
            versions = _versions(bin_folder, folder)
            return Outcome(trial=trial, versions=versions, failed=what, seconds=time.monotonic() - began_s)
        summary = log.read_text(errors="replace").splitlines()[-1].strip("= ")
        seconds = time.monotonic() - began_s
        return Outcome(trial=trial, versions=_versions(bin_folder, folder), tests=summary, seconds=seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _versions(bin_folder: Path, folder: Path) -> dict[str, str]:
    """Versions of what is installed, by name; empty where that can't be told."""
    log = folder / "freeze"
    if not _call([str(bin_folder / "pip"), "freeze"], log, limit_s=60.0):
        return {}
    pairs = (line.split("==", 1) for line in log.read_text().splitlines() if "==" in line)
    return {name.lower(): version for name, version in pairs}


def report(outcomes: Sequence[Outcome], missing: Mapping[str, str]) -> str:
    """What was tried, and what could not be."""
    lines = [outcome.line for outcome in outcomes]
    lines += [f"{name}: not to be had: {why}" for name, why in missing.items()]
    return "\n".join(lines)


def passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether something was tried, and nothing failed."""
    tried = [outcome for outcome in outcomes if not outcome.missing]
    return bool(tried) and not any(outcome.failed for outcome in tried)


@click.command()
@click.option("--python", "names", multiple=True, help=f"Interpreter; may be repeated. Default: {', '.join(PYTHONS)}.")
@click.option(
    "--libraries", type=click.Choice(LIBRARIES), help="Default: newest, and oldest for the first interpreter."
)
def main(names: tuple[str, ...], libraries: str | None) -> None:
    """Run the demo and the unit tests with other versions of Python and of the libraries."""
    found, missing = find_pythons(names or PYTHONS)
    trials = [Trial(path, version, libraries or "newest") for path, version in found]
    if libraries is None:
        trials += [Trial(path, version, "oldest") for path, version in found[:1]]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="shardline-versions-") as folder:
        for number, trial in enumerate(trials, 1):
            print(f"{trial.name} ({number} of {len(trials)})", flush=True)
            outcomes.append(run(trial, Path(folder) / str(number)))
            print(f"  {outcomes[-1].line}", flush=True)
    print(f"\n{report(outcomes, missing)}")
    sys.exit(0 if passed(outcomes) else 1)


if __name__ == "__main__":
    main()
