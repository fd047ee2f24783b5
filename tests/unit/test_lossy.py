"""A full disk costs lines of a log and nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.host import files
from shardline.observability import log
from shardline.observability.log import LossyFile, lossy_text

FULL = "full.jsonl"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is opened to be appended to is on a full disk."""
    monkeypatch.setattr(files, "append_fd", lambda path: os.open("/dev/full", os.O_WRONLY))


@pytest.mark.usefixtures("full")
def test_what_a_disk_does_not_take_is_dropped_and_said_once() -> None:
    told: list[str | None] = []
    with lossy_text(FULL, on_loss=lambda error: told.append(error.strerror)) as stream:
        for _ in range(3):
            assert stream.write("a line\n") == 7
            stream.flush()
    assert told == ["No space left on device"]


def test_what_it_takes_is_there_at_once_and_other_errors_are_raised(tmp_path: Path) -> None:
    path = tmp_path / "log"
    stream = lossy_text(str(path))
    stream.write("ä\n")
    assert path.read_text(encoding="utf-8") == "ä\n"
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.write("x")
    with path.open("rb") as reading, pytest.raises(OSError, match="Bad file descriptor"):
        LossyFile(reading.fileno()).write(b"x")


@pytest.mark.usefixtures("full")
def test_a_log_that_can_not_be_written_is_said_once_and_logging_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        path = Path(FULL).absolute()
        log.setup("ps/0", json_path=path)
        for number in range(3):
            logging.getLogger("shardline").info("event %d", number)
    finally:
        log.close()
    err = capsys.readouterr().err
    assert "Traceback" not in err and "Logging error" not in err
    assert err.count(f"the log {path} can't be written: No space left on device") == 1
    assert [f"event {number}" in err for number in range(3)] == [True] * 3


PRINTS = """
import resource, sys
from shardline.observability.log import protect_output
protect_output()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for number in range(1000):
    print("a line of the job", number)
    print("another", number, file=sys.stderr)
sys.stdout.flush()
sys.exit(7)
"""


def test_print_into_a_file_that_has_no_room_does_not_end_the_process(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        code = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=stdout, stderr=stderr, timeout=60, check=False
        ).returncode
    assert code == 7
    assert out.read_text().startswith("a line of the job 0\na line of the job 1\n") and out.stat().st_size == 1000
    assert err.read_text().startswith("another 0\n") and "Traceback" not in err.read_text()
