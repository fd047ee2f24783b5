"""A worker's loaders: which of them reads what, and what comes back."""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections import Counter
from itertools import islice
from multiprocessing.connection import wait

from shardline.data import Batch, BatchSource
from shardline.errors import JobError, ShardlineError, TaskLostError
from shardline.loading.loader import Loader
from shardline.loading.packed import unpack
from shardline.loading.upcoming import Place, UpcomingBatches

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
        loader.hang_up()
    deadline = time.monotonic() + END_S
    for loader in loaders:
        if not wait([loader.end], max(deadline - time.monotonic(), 0)):
            loader.kill()
    return [loader.close() for loader in loaders]
