"""What native code writes to this task's stderr, with lines that strangers can repeat said once a minute.

gRPC's core writes a line to file descriptor 2 for each connection that fails its TLS handshake, and offers no way to
be told instead. So a task that serves with TLS puts a pipe there, and native_log_filter.py, a small process, passes on
what comes out of it. Python's own words (sys.stderr, logging, faulthandler) go to the real stderr directly.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from shardline.observability import native_log_filter
from shardline.security import Security

log = logging.getLogger("shardline.observability.native_log")

STDERR = 2
END_S = 2.0
"""How long the end waits for the last words; children of this task may hold the pipe longer."""
WHOLE = ("GRPC_VERBOSITY", "GRPC_TRACE")
"""Variables of gRPC's: who sets one wants all that it says."""
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def wanted(security: Security, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether strangers can make gRPC write in this task: where it serves with TLS, and nobody debugs gRPC."""
    return security.tls_cert is not None and not any(environment.get(name) for name in WHOLE)


@contextlib.contextmanager
def condensed() -> Iterator[None]:
    """Within it, native code's stderr goes through the filter. For the main thread of a task's process.

    Where the filter can't be started, nothing changes but for a warning.
    """
    try:
        real = fcntl.fcntl(STDERR, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)
    except OSError:
        # Started without a stderr: nobody is told anything.
        yield
        return
    sys.stderr.flush()
    try:
        process = _start(real)
    except OSError as error:
        log.warning("lines that gRPC repeats are not counted: the filter can't be started (%s)", error.strerror)
        os.close(real)
        yield
        return
    former = sys.stderr
    if _fd_of(former) == STDERR:
        # Left open at the end: handlers of the log still write there.
        sys.stderr = _stream(real)
    if faulthandler.is_enabled():
        faulthandler.enable(file=real)
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = former
        # The last writer of the pipe goes, and with that the filter says what it has counted.
        os.dup2(real, STDERR)
        if faulthandler.is_enabled():
            faulthandler.enable(file=STDERR)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.debug("the filter of stderr goes on: children of this task write there")


def _start(real: int) -> subprocess.Popen[bytes]:
    """The filter, writing to the descriptor `real`, and its pipe at this process's stderr. Raises OSError."""
    read, write = os.pipe()
    try:
        # The filter ends when all writers have gone, not before: signals to the whole group are not for it. What is
        # blocked here stays blocked there.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(native_log_filter.__file__))],
                stdin=read,
                stdout=real,
                stderr=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(write, STDERR)
        return process
    finally:
        os.close(read)
        os.close(write)


def _fd_of(stream: TextIO) -> int | None:
    """Its file descriptor; None where it has none, as in a test."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False)
