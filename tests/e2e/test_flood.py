"""Strangers flood the chief's port and its page while a job trains with TLS: it ends with the bits it should have."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from shardline.certs import make_certificates
from tests.e2e.support import (
    Command,
    expected_sha256,
    pid_of,
    slow_job,
    summary_of,
    train_command,
    wait_for_step,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]

FLOOD_S = 2.0
PER_S = 200
HELD = 200
"""Connections that the strangers keep open at most."""


def used(pid: int) -> tuple[int, int]:
    """Descriptors of a process, and its memory in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE") >> 20


def flood(places: list[tuple[tuple[str, int], bytes]], pid: int) -> tuple[int, int]:
    """Connect, say something and stay, PER_S times a second; returns the most that the process used meanwhile."""
    held: list[socket.socket] = []
    began_s, made, peak = time.monotonic(), 0, (0, 0)
    with contextlib.ExitStack() as stack:
        while (now_s := time.monotonic() - began_s) < FLOOD_S:
            for where, said in places[: max(0, int(now_s * PER_S) - made)]:
                sock = stack.enter_context(socket.socket())
                sock.settimeout(1.0)
                made += 1
                # Who is not let in, or sent away at once, has come all the same.
                with contextlib.suppress(OSError):
                    sock.connect(where)
                    sock.sendall(said)
                held.append(sock)
            for sock in held[:-HELD]:
                sock.close()
            del held[:-HELD]
            now = used(pid)
            peak = max(peak[0], now[0]), max(peak[1], now[1])
            time.sleep(0.5 / PER_S)
    assert made > FLOOD_S * PER_S / 4
    return peak


def test_a_flood_of_strangers_changes_no_bit_and_leaves_nothing(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certs", {"all": "127.0.0.1"}, days=30)
    cert, key = made.pairs["all"]
    job = slow_job(tmp_path / "job.py", step_s=0.05, steps=100)
    out = tmp_path / "run"
    files = ["--tls-ca", made.ca, "--tls-cert", cert, "--tls-key", key]
    command = Command(*train_command(job, out, "--ps", "1", "--workers", "1", "--page", "127.0.0.1:0", *files))
    wait_for_step(out, 5, while_runs=command)
    chief = json.loads((out / "cluster.json").read_text())["chief"][0]
    log = (out / "logs" / "chief-0.log").read_text()
    page = re.findall(r"https?://(127\.0\.0\.1:\d+)/(?!metrics)", log)[0]
    doors = [(text.rpartition(":")[0], int(text.rpartition(":")[2])) for text in (chief, page)]
    pid = pid_of(out, "chief/0")
    before = used(pid)
    asks = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    peak = flood([(doors[0], b"\x16\x03\x01garbage"), (doors[1], asks), (doors[0], b""), (doors[1], asks[:9])], pid)
    assert peak[0] <= before[0] + HELD + 50 and peak[1] <= before[1] + 100, (before, peak)
    wait_until(lambda: used(pid)[0] <= before[0] + 5, "the descriptors to be closed", while_runs=command)
    finished = command.finish()
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == expected_sha256(job)
    assert (out / "logs" / "chief-0.log").stat().st_size < 20_000
