"""A loader: a process that reads batches for one worker. Starting one, and what it does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import signal
import socket
import struct
import time
import traceback
from collections import deque

import torch

from shardline.data import BatchSource
from shardline.errors import InternalError, JobError, ShardlineError
from shardline.host.forkserver import PR_SET_NAME, PR_SET_PDEATHSIG, prctl
from shardline.host.process import Termination, kept_from_children
from shardline.loading.packed import opened, pack
from shardline.loading.upcoming import Place

FOR_THE_WORKER = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a task."""

Request = tuple[int, Place]
"""(round, place). A loader doesn't read what an earlier round than the newest asked for."""
TRIES = 3000
"""How often a batch is sent until workers have taken others."""
AGAIN_S = 0.01
"""Seconds between two tries."""
_REQUEST = struct.Struct("<qqqq")
_READ, _SKIPPED = b"r", b"s"


class Loader:
    def __init__(self, number: int, source: BatchSource, newest: ctypes.c_int64) -> None:
        """Fork it. source: what it reads from. newest: round, in memory that it shares.

        Raises OSError.
        """
        self.number = number
        self.asked: deque[Request] = deque()
        """What it has not answered; it is reading the first."""
        # Whole messages, so that a loader that is killed leaves no half of one.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock = kept_from_children(ours)
        self._process = multiprocessing.get_context("fork").Process(
            target=_be_a_loader,
            args=(number, theirs, source, newest, os.getpid()),
            daemon=True,
        )
        # Until the loader leaves them to its worker, see _be_a_loader().
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_WORKER)
        try:
            self._process.start()
            self.end = os.pidfd_open(self.pid)
            """Becomes readable when it has ended, whatever its own children still hold."""
        except OSError:
            self.sock.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ask(self, request: Request) -> None:
        """Have it read this after what it was asked for before."""
        self.asked.append(request)
        # One that has ended is found out, and told, where its end is waited for.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.send(_REQUEST.pack(request[0], *request[1]))

    def answer(self) -> tuple[Request, memoryview | None] | None:
        """Take an answer that has come: a request, and the batch or error, packed; None if it was not read.

        Without an answer, it has ended: None. Raises JobError if there are too many descriptors.
        """
        try:
            kind, fds, _, _ = socket.recv_fds(self.sock, 1, 1, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return None
        if not kind:
            return None
        if kind == _SKIPPED:
            return self.asked.popleft(), None
        reason: object = "too many open files"
        try:
            if fds:
                return self.asked.popleft(), opened(fds[0])
        except RuntimeError as error:
            reason = error
        raise JobError(
            f"a batch can't be taken from loader {self.number}: {reason}; raise the limit, ulimit -n, or lower loaders "
            "or prefetch"
        )

    def hang_up(self) -> None:
        """Have it end, when it has read the samples of a batch, without waiting for it."""
        self.sock.close()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> str:
        """Wait until it has ended; returns how it did, for messages."""
        self._process.join()
        os.close(self.end)
        code = self._process.exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _be_a_loader(number: int, sock: socket.socket, source: BatchSource, newest: ctypes.c_int64, worker: int) -> None:
    """Answer requests until the worker has gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:
        return
    prctl(PR_SET_NAME, f"loader {number}".encode())
    # A signal for the whole group is for the worker to answer, which needs batches until it has.
    Termination().install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_WORKER)
    # The data set may start processes of its own.
    multiprocessing.current_process().daemon = False
    # OpenMP's threads are missing in a fork, which would wait for them.
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while data := sock.recv(_REQUEST.size):
            wanted, *place = _REQUEST.unpack(data)
            if wanted < newest.value:
                sock.send(_SKIPPED)
                continue
            fd = _read((place[0], place[1], place[2]), source)
            try:
                _give(sock, fd)
            finally:
                os.close(fd)


def _give(sock: socket.socket, fd: int) -> None:
    """Send a batch, or after many tries its answer without it, which the worker tells."""
    for _ in range(TRIES):
        try:
            socket.send_fds(sock, [_READ], [fd])
            return
        except OSError as error:
            # A user may have as many descriptors on their way, in all processes, as one of them may have files open.
            if error.errno != errno.ETOOMANYREFS:
                raise
        time.sleep(AGAIN_S)
    sock.send(_READ)


def _read(place: Place, source: BatchSource) -> int:
    """The batch, packed, or the error that says why it can't be read."""
    try:
        batch = source.batch(*place)
    except ShardlineError as error:
        return _pack_error(error)
    except Exception:
        return _pack_error(InternalError(f"a loader of data failed: {traceback.format_exc()}"))
    try:
        return pack(batch)
    except OSError as error:
        reason = f"{error.strerror}; lower --loaders or prefetch"
    except Exception as error:
        reason = (
            f"it can't be pickled: {type(error).__name__}: {error}; have collate return tensors and plain values, or "
            "use loaders=0"
        )
    return pack(
        JobError(f"a batch of class {type(batch).__name__} can't be given from a loader to the worker: {reason}")
    )


def _pack_error(error: ShardlineError) -> int:
    try:
        return pack(error)
    except Exception:
        # Its cause or an attribute of the user's can't be sent; the sentence can.
        return pack(JobError(str(error)))
