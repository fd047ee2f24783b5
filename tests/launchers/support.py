"""Launchers of this machine, as commands whose end is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits" / "job.py"
SCRIPT = ROOT / "examples" / "digits" / "train.py"
RUN = (sys.executable, "-P", "-m", "shardline", "run")
PATIENCE_S = 150.0
"""Every wait ends here; a busy machine takes a while to import torch."""


@dataclass(frozen=True)
class Ended:
    code: int
    said: str


class Started:
    """A command with both outputs in a file."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                cwd=cwd,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, *, limit_s: float = PATIENCE_S) -> Ended:
        """Wait for its end; one that goes on too long is killed, and the test fails with what it said."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.process.args!r} did not end within {limit_s} s:\n{self.said()}") from None
        return Ended(code, self.said())
