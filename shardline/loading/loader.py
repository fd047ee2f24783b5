"""A loader: a process that reads batches for one worker. Starting one, and what it does."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Iterable

import torch

from shardline.data import Batch, BatchSource
from shardline.errors import InternalError, JobError, ShardlineError
from shardline.host.forkserver import PR_SET_NAME, PR_SET_PDEATHSIG, prctl
from shardline.host.process import Termination
from shardline.loading import messages
from shardline.loading.messages import FORGET, Answer, Failed, HungUp, Request, Skipped
from shardline.loading.packed import pack

log = logging.getLogger("shardline.loading")

END_S = 2.0
"""Seconds that a loader may take to end; it may be reading a sample."""

FOR_THE_WORKER = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a task."""


class LoaderProcess:
    """A loader, as its worker sees it."""

    def __init__(self, number: int, source: BatchSource, others: Iterable[LoaderProcess]) -> None:
        """Fork it. source: what it reads from. others: loaders whose sockets it is not to keep.

        Raises OSError.
        """
        self.number = number
        self.sock, theirs = socket.socketpair()
        worker = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # Until the loader leaves them to its worker, see _be_a_loader().
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_WORKER)
        try:
            self.pid = os.fork()
            if self.pid:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.sock.close()
            theirs.close()
            raise
        if not self.pid:
            for sock in (self.sock, *(other.sock for other in others)):
                sock.close()
            _be_a_loader(number, theirs, source, worker)
        theirs.close()
        self.end = os.pidfd_open(self.pid)
        """Becomes readable when it has ended."""

    def hang_up(self) -> None:
        """Have it end, when it has read the samples of a batch, without waiting for it."""
        self.sock.close()

    def close(self) -> str:
        """Wait until it has ended, or end it; returns how it did, for messages."""
        self.hang_up()
        if not select.select([self.end], [], [], END_S)[0]:
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.end)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _be_a_loader(number: int, sock: socket.socket, source: BatchSource, worker: int) -> None:
    """Answer requests until the worker has gone, then end this process without the worker's exit handlers."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == worker:
            prctl(PR_SET_NAME, f"loader {number}".encode())
            # A signal for the whole group is for the worker to answer, which needs batches until it has.
            Termination().install()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_WORKER)
            # OpenMP's threads are missing in a fork, which would wait for them.
            torch.set_num_threads(1)
            serve(sock, source)
        code = 0
    except BaseException:
        log.exception("loader %d", number)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def serve(sock: socket.socket, source: BatchSource) -> None:
    """Answer requests in their order until the other side has gone."""
    waiting: deque[Request] = deque()
    with contextlib.suppress(HungUp):
        while True:
            while (request := messages.receive_request(sock, wait=not waiting)) is not None:
                if request.place == FORGET:
                    while waiting:
                        messages.send_answer(sock, waiting.popleft().number, Skipped())
                else:
                    waiting.append(request)
            if waiting:
                _answer(sock, waiting.popleft(), source)


def _answer(sock: socket.socket, request: Request, source: BatchSource) -> None:
    answer = _read(request, source)
    try:
        messages.send_answer(sock, request.number, answer)
    finally:
        if not isinstance(answer, Failed | Skipped):
            answer.close()


def _read(request: Request, source: BatchSource) -> Answer:
    try:
        batch = source.batch(*request.place)
    except ShardlineError as error:
        return _failed(error)
    except Exception:
        return _failed(InternalError(f"a loader of data failed: {traceback.format_exc()}"))
    try:
        return pack(batch)
    except OSError as error:
        return _failed(JobError(f"a batch can't be given to the worker: {error.strerror}; lower --loaders or prefetch"))
    except Exception as error:
        return _failed(_cannot_be_sent(batch, error))


def _cannot_be_sent(batch: Batch, error: Exception) -> JobError:
    return JobError(
        f"a batch of class {type(batch).__name__} can't be given from a loader to the worker, since it can't be "
        f"pickled: {type(error).__name__}: {error}; have collate return tensors and plain values, or use loaders=0"
    )


def _failed(error: ShardlineError) -> Failed:
    try:
        return Failed(pickle.dumps(error))
    except Exception:
        # Its cause or an attribute of the user's can't be sent; the sentence can.
        return Failed(pickle.dumps(JobError(str(error))))
