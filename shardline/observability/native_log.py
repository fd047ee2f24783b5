"""Native code's output to this task's stderr; lines that strangers can provoke are shown once a minute.

gRPC's core writes a line to file descriptor 2 for each connection that fails its TLS handshake, and offers no hook to
prevent it. So a task that serves with TLS redirects the descriptor to a pipe, whose output native_log_filter.py, a
small process, passes on. Python's own output (sys.stderr, logging, faulthandler) goes to the real stderr directly.
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
"""Seconds that the end waits for the last output; children of this task may hold the pipe longer."""
WHOLE = ("GRPC_VERBOSITY", "GRPC_TRACE")
"""gRPC's debug variables: if one is set, nothing is filtered."""
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def wanted(security: Security, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether strangers can make gRPC write in this task: it serves with TLS, and gRPC is not being debugged."""
    return security.tls_cert is not None and not any(environment.get(name) for name in WHOLE)


@contextlib.contextmanager
def condensed() -> Iterator[None]:
    """Within the block, native code's stderr goes through the filter. For the main thread of a task's process.

    If the filter can't be started, a warning is logged and nothing changes.
    """
    try:
        real = fcntl.fcntl(STDERR, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)
    except OSError:
        # Started without a stderr: nothing to filter.
        yield
        return
    sys.stderr.flush()
    try:
        process = _start(real)
    except OSError as error:
        log.warning("repeated lines of gRPC are not counted: the filter can't be started (%s)", error.strerror)
        os.close(real)
        yield
        return
    former = sys.stderr
    if _fd_of(former) == STDERR:
        # Left open at the end: log handlers still write to it.
        sys.stderr = _stream(real)
    if faulthandler.is_enabled():
        faulthandler.enable(file=real)
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stderr = former
        # This closes the last write end of the pipe, and the filter writes its counts.
        os.dup2(real, STDERR)
        if faulthandler.is_enabled():
            faulthandler.enable(file=STDERR)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.debug("the filter of stderr keeps running: children of this task write there")


def _start(real: int) -> subprocess.Popen[bytes]:
    """Start the filter, writing to descriptor `real`, with its pipe as this process's stderr. Raises OSError."""
    read, write = os.pipe()
    try:
        # The filter must end only when all writers are gone, so it must ignore signals to the process group. Signals
        # blocked here stay blocked in the child.
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
    """The stream's file descriptor; None if it has none, as in a test."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False)
