"""A worker's loaders: which of them reads what, and what comes back."""

from __future__ import annotations

import itertools
import logging
import pickle
import selectors
from collections import Counter
from dataclasses import dataclass, field

from shardline.data import Batch, BatchSource
from shardline.errors import JobError, ShardlineError, TaskLostError
from shardline.loading import messages
from shardline.loading.loader import LoaderProcess
from shardline.loading.messages import FORGET, Answer, Failed, HungUp, Request, Skipped
from shardline.loading.packed import PackedBatch, unpack
from shardline.loading.upcoming import Place, UpcomingBatches

log = logging.getLogger("shardline.loading")

MAX_DEATHS = 2
"""Number of loaders that may end while they read one batch; the last of them ends the job."""


@dataclass
class _Loader:
    """A loader and the requests that it has not answered, by number. None = nobody wants the batch any more."""

    process: LoaderProcess
    asked: dict[int, Place | None] = field(default_factory=dict)


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
        self._ready: dict[Place, Answer] = {}
        self._number = 0
        self._deaths: Counter[Place] = Counter()
        """Loaders that have ended, by the batch that they were reading."""
        self._loaders: list[_Loader] = []
        for number in range(loaders):
            self._loaders.append(self._started(number))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the loaders."""
        return tuple(loader.process.pid for loader in self._loaders)

    def batch(self, place: Place, end: int | None = None) -> Batch:
        """The batch for (step, replica, microbatch), and have loaders read the next ones.

        end: first step that this worker won't compute, if known. Raises what reading the batch raises without loaders,
        and TaskLostError naming a loader that was killed twice.
        """
        self._upcoming.ask(place)
        ahead = list(itertools.islice(self._upcoming.after(end), self._most))
        self._ask([place, *ahead])
        while place not in self._ready:
            self._take_answers()
        return self._opened(self._ready.pop(place))

    def close(self) -> None:
        """End the loaders."""
        for loader in self._loaders:
            loader.process.hang_up()
        for loader in self._loaders:
            loader.process.close()
        self._drop(keep=())

    def _ask(self, wanted: list[Place]) -> None:
        """Have loaders read these, and nothing else."""
        asked = {place for loader in self._loaders for place in loader.asked.values() if place is not None}
        if not asked.issubset(wanted) or not self._ready.keys() <= set(wanted):
            # Other places than guessed: after a rollback, or with other replicas.
            self._drop(keep=wanted)
            self._forget()
            asked = set()
        for place in wanted:
            if place not in self._ready and place not in asked:
                self._send(min(self._loaders, key=lambda loader: len(loader.asked)), place)

    def _drop(self, keep: tuple[Place, ...] | list[Place]) -> None:
        for place in [place for place in self._ready if place not in keep]:
            answer = self._ready.pop(place)
            if isinstance(answer, PackedBatch):
                answer.close()

    def _forget(self) -> None:
        for loader in self._loaders:
            if loader.asked:
                loader.asked = dict.fromkeys(loader.asked)
                self._send(loader, FORGET)

    def _send(self, loader: _Loader, place: Place) -> None:
        self._number += 1
        if place != FORGET:
            loader.asked[self._number] = place
        try:
            messages.send_request(loader.process.sock, Request(self._number, place))
        except HungUp:
            # Found out, and told, where its end is waited for.
            log.debug("loader %d has ended", loader.process.number)

    def _take_answers(self) -> None:
        """Wait until a loader has answered or ended."""
        with selectors.DefaultSelector() as selector:
            for loader in self._loaders:
                selector.register(loader.process.sock, selectors.EVENT_READ, loader)
                selector.register(loader.process.end, selectors.EVENT_READ, loader)
            found = {id(key.data): key.data for key, _ in selector.select()}
            answered = {id(key.data) for key, _ in selector.select(0) if key.fileobj is not key.data.process.end}
        for loader in found.values():
            # What it has answered counts, even if it has ended since.
            if id(loader) not in answered or not self._take_answer(loader):
                self._replace(loader)

    def _take_answer(self, loader: _Loader) -> bool:
        """Take one answer; False if the loader has ended instead."""
        try:
            number, answer = messages.receive_answer(loader.process.sock)
        except HungUp:
            return False
        place = loader.asked.pop(number)
        if place is not None and not isinstance(answer, Skipped):
            self._ready[place] = answer
        elif isinstance(answer, PackedBatch):
            answer.close()
        return True

    def _replace(self, loader: _Loader) -> None:
        """Start another process for one that has ended, and ask it for the same."""
        process, asked = loader.process, list(loader.asked.values())
        what = f"loader {process.number} of {self._who} (process {process.pid}) {process.close()}"
        self._loaders.remove(loader)
        reading = asked[0] if asked else None
        if reading is not None:
            self._deaths[reading] += 1
            what += " while it read step {}, replica {}, microbatch {}".format(*reading)
            if self._deaths[reading] >= MAX_DEATHS:
                raise TaskLostError(
                    f"{what}, as one before it; is there enough memory for {len(self._loaders)} loaders, and does the "
                    "data set end its process?"
                )
        log.warning("%s; starting another", what)
        new = self._started(process.number)
        self._loaders.append(new)
        for place in asked:
            if place is not None:
                self._send(new, place)

    def _started(self, number: int) -> _Loader:
        others = [loader.process for loader in self._loaders]
        try:
            return _Loader(LoaderProcess(number, self._source, others))
        except OSError as error:
            raise JobError(f"{self._who} can't start loader {number}: {error.strerror}; lower loaders") from error

    def _opened(self, answer: Answer) -> Batch:
        if isinstance(answer, Failed):
            error: ShardlineError = pickle.loads(answer.error)
            raise error
        assert isinstance(answer, PackedBatch)
        try:
            return unpack(answer)
        finally:
            answer.close()
