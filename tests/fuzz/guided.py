"""Frames made by atheris, which looks for inputs that reach new places in the reader: python -m tests.fuzz.guided.

Takes libFuzzer's own flags. The last line of its output is a JSON object of figures. Exit code 77: a finding, whose
input libFuzzer has written to a file.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["shardline.wire"]):
    from shardline.wire import protobuf

from tests.fuzz.frames import KINDS, check, seeds
from tests.fuzz.resources import rss_mb

assert protobuf.read_request is KINDS[0].ours, "the reader was imported before it could be watched"


class Count:
    """Frames so far, and the memory that was held when the corpus had grown to most of its size."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.done = self.taken = 0
        self.longest_s = self.early_mb = 0.0
        self.began_s = time.monotonic()

    def one(self, data: bytes) -> None:
        """One input: which message it stands for, then its bytes."""
        began_s = time.thread_time()
        if data and check(KINDS[data[0] % len(KINDS)], data[1:]):
            self.taken += 1
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)
        self.done += 1
        if self.done == self.runs // 4:
            self.early_mb = rss_mb()
        if self.done == self.runs:
            self.tell()

    def tell(self) -> None:
        """Print the figures."""
        figures = {
            "frames": self.done,
            "taken": self.taken,
            "seconds": round(time.monotonic() - self.began_s, 1),
            "longest_ms": round(self.longest_s * 1000, 1),
            "rss_quarter_mb": round(self.early_mb, 1),
            "rss_end_mb": round(rss_mb(), 1),
        }
        print(json.dumps(figures), flush=True)


def main() -> None:
    """Run until -runs are made; libFuzzer ends the process."""
    runs = next((int(flag[6:]) for flag in sys.argv if flag.startswith("-runs=")), 0)
    with tempfile.TemporaryDirectory(prefix="shardline-fuzz-") as folder:
        for number, (kind, data) in enumerate(seeds()):
            (Path(folder) / f"seed-{number}").write_bytes(bytes([kind]) + data)
        atheris.Setup([*sys.argv, folder], Count(runs).one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
