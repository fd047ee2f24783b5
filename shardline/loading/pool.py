"""A worker's loaders: which of them reads what, and what comes back."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.connection import wait

import torch

from shardline.data import Batch, BatchSource
from shardline.errors import InternalError, JobError, ShardlineError, TaskLostError
from shardline.host.forkserver import PR_SET_NAME, PR_SET_PDEATHSIG, prctl
from shardline.host.process import Termination, kept_from_children
from shardline.loading.packed import opened, pack, unpack

Place = tuple[int, int, int]
"""(step, replica, microbatch); in asynchronous mode, (number of the batch, 0, microbatch)."""


class UpcomingBatches:
    """The next batches, on the assumption that each step asks for those of the step before.

    A wrong guess costs time only: what was read for nothing.
    """

    def __init__(self, accumulate: int) -> None:
        """accumulate: microbatches of a replica."""
        self._accumulate = accumulate
        self._step = 0
        self._asked: list[tuple[int, int]] = []
        """(replica, microbatch) of the current step so far, in order."""
        self._before: Sequence[tuple[int, int]] = ()
        """Those of the step before."""

    def ask(self, place: Place) -> None:
        step, *own = place
        one = (own[0], own[1])
        if step != self._step:
            self._before, self._asked, self._step = self._asked or self._before, [], step
        elif one in self._asked:
            # The step runs again.
            self._asked = []
        self._asked.append(one)

    def after(self, end: int | None = None) -> Iterator[Place]:
        """The batches after the newest one asked for. end: first step that this worker won't compute, if known."""
        replica, microbatch = self._asked[-1]
        order = self._before
        if (replica, microbatch) not in order:
            # The first step, or another replica than before: at least its own microbatches follow.
            order = [(replica, number) for number in range(self._accumulate)]
        step, rest = self._step, order[order.index((replica, microbatch)) + 1 :]
        while end is None or step < end:
            yield from ((step, *one) for one in rest)
            step, rest = step + 1, order


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
            target=_be_a_loader, args=(number, theirs, source, newest, os.getpid()), daemon=True
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


log = logging.getLogger("shardline.loading")

MAX_DEATHS = 2
"""Number of loaders that may end while they read one batch; the last of them ends the job."""
END_S = 2.0
"""Seconds that loaders may take to end; they may be reading samples."""


class LoaderPool:
    """Reads the batches that the worker asks for next in processes of their own. Used by one thread.

    Any batch may be asked for at any time; what is asked for as before comes without a wait.
    """

    def __init__(self, source: BatchSource, *, loaders: int, prefetch: int, accumulate: int, who: str) -> None:
        """Start the processes. source: what each of them reads from. prefetch: batches per loader that are read
        before they are asked for. who: the worker, for messages.

        Raises JobError if processes can't be started.
        """
        self._source = source
        self._who = who
        self._most = loaders * prefetch
        self._upcoming = UpcomingBatches(accumulate)
        self._round = ctypes.c_int64.from_buffer(mmap.mmap(-1, 8))
        """The newest round: memory that the loaders see too."""
        self._ready: dict[Place, memoryview] = {}
        self._deaths: Counter[Place] = Counter()
        """Loaders that have ended, by the batch that they were reading."""
        self._loaders: list[Loader] = []
        for number in range(loaders):
            self._start(number)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(loader.pid for loader in self._loaders)

    def batch(self, place: Place, end: int | None = None) -> Batch:
        """The batch for (step, replica, microbatch), and have loaders read the next ones.

        end: first step that this worker won't compute, if known. Raises what reading the batch raises without loaders,
        and TaskLostError naming a loader that was killed twice.
        """
        self._upcoming.ask(place)
        self._ask([place, *islice(self._upcoming.after(end), self._most)])
        while place not in self._ready:
            self._take_answers()
        try:
            batch = unpack(self._ready.pop(place))
        except Exception as error:
            raise JobError(
                f"a batch can't be taken from a loader: it can't be unpickled: {type(error).__name__}: {error}; have "
                "collate return tensors and plain values, or use loaders=0"
            ) from error
        if isinstance(batch, ShardlineError):
            raise batch
        return batch

    def close(self) -> None:
        loaders, self._loaders = self._loaders, []
        _end(loaders)
        self._ready.clear()

    def _ask(self, wanted: list[Place]) -> None:
        """Have loaders read these, and nothing else."""
        asked = {place for loader in self._loaders for place in self._still_wanted(loader)}
        if not (asked | self._ready.keys()).issubset(wanted):
            # Other places than guessed: after a rollback, or with other replicas.
            self._round.value += 1
            self._ready = {place: batch for place, batch in self._ready.items() if place in wanted}
            asked = set()
        for place in wanted:
            if place not in self._ready and place not in asked:
                min(self._loaders, key=lambda loader: len(loader.asked)).ask((self._round.value, place))

    def _still_wanted(self, loader: Loader) -> list[Place]:
        return [place for round_, place in loader.asked if round_ == self._round.value]

    def _take_answers(self) -> None:
        """Wait until a loader has answered or ended."""
        found = wait([handle for loader in self._loaders for handle in (loader.sock, loader.end)])
        for loader in [one for one in self._loaders if one.sock in found or one.end in found]:
            # What it has answered counts, even if it has ended since.
            if (answer := loader.answer()) is None:
                self._replace(loader)
                continue
            (round_, place), batch = answer
            if round_ == self._round.value and batch is not None:
                self._ready[place] = batch

    def _replace(self, loader: Loader) -> None:
        """Start another process for one that has ended, and ask it for the same."""
        [how] = _end([loader])
        what = f"loader {loader.number} of {self._who} (process {loader.pid}) {how}"
        wanted = self._still_wanted(loader)
        self._loaders.remove(loader)
        if wanted and loader.asked[0] == (self._round.value, wanted[0]):
            self._deaths[wanted[0]] += 1
            what += " while it read step {}, replica {}, microbatch {}".format(*wanted[0])
            if self._deaths[wanted[0]] >= MAX_DEATHS:
                raise TaskLostError(
                    f"{what}, as one before it; is there enough memory for {len(self._loaders) + 1} loaders, and does "
                    "the data set end its process?"
                )
        log.warning("%s; starting another", what)
        new = self._start(loader.number)
        for place in wanted:
            new.ask((self._round.value, place))

    def _start(self, number: int) -> Loader:
        try:
            loader = Loader(number, self._source, self._round)
        except OSError as error:
            self.close()
            raise JobError(f"{self._who} can't start loader {number}: {error.strerror}; lower loaders") from error
        self._loaders.append(loader)
        return loader


def _end(loaders: list[Loader]) -> list[str]:
    """End these; returns how each of them has ended."""
    for loader in loaders:
        # It ends when it has read the samples of a batch.
        loader.sock.close()
    deadline = time.monotonic() + END_S
    for loader in loaders:
        if not wait([loader.end], max(deadline - time.monotonic(), 0)):
            loader.kill()
    return [loader.close() for loader in loaders]
