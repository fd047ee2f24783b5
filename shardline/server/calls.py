"""Open calls of the data plane by whose they are, so that a fence ends them. PROTOCOL 1.3 (F4)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from shardline.errors import UnreachableError

HELD_BYTES = 32 << 10
"""A shorter message never waits for its reader: it fits what gRPC's smallest window lets through."""
READER_S = 20.0
"""Unless its server says otherwise: a third of --timeout."""


class OpenCall:
    """One call while its handler runs; a context of the handler's. Used on the server's loop.

    What it holds (room in staging, copies of parameters) is given back by the handler's own end, whichever it is.
    Raises UnreachableError from its block when the call is ended by a fence: a worker that is alive after all comes
    again and is told why it is not admitted, in the words for that.
    """

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self._handler: asyncio.Task[object] | None = None
        self._reason = ""
        self._begun = False
        self.senders: set[tuple[str, int]] = set()
        """(task, incarnation) of every admitted message in it."""

    def of(self, task: str, incarnation: int) -> None:
        """An admitted message in this call is of this life of a task."""
        self.senders.add((task, incarnation))

    async def write(self, context: Any, message: bytes) -> None:
        """Send a message of the answer. Raises UnreachableError if the caller takes nothing for too long."""
        try:
            async with asyncio.timeout(self._calls.reader_s):
                if not self._begun and len(message) > HELD_BYTES:
                    # gRPC could not end the call in mid-write if it were sent with the first message.
                    await context.send_initial_metadata(())
                self._begun = True
                await context.write(message)
        except TimeoutError:
            raise UnreachableError(
                f"the call was ended: its caller took nothing of the answer for {self._calls.reader_s:g} s"
            ) from None

    def end(self, reason: str) -> None:
        """Cancel the handler."""
        if not self._reason and self._handler is not None:
            self._reason = reason
            self._handler.cancel()

    def __enter__(self) -> OpenCall:
        self._handler = asyncio.current_task()
        self._calls.open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._calls.open.discard(self)
        if self._reason and isinstance(error, asyncio.CancelledError) and self._handler is not None:
            self._handler.uncancel()
            raise UnreachableError(self._reason) from None


class OpenCalls:
    """All of them. Used on the server's loop."""

    def __init__(self) -> None:
        self.open: set[OpenCall] = set()
        self.reader_s = READER_S
        """How long a caller may take nothing of an answer, which waits in memory meanwhile."""

    def enter(self) -> OpenCall:
        """A context for one call."""
        return OpenCall(self)

    def keep_only(self, members: Mapping[str, int] | None) -> None:
        """End the calls of incarnations that are not in the table of the living."""
        if members is None:
            return
        for call in list(self.open):
            gone = [task for task, incarnation in sorted(call.senders) if members.get(task) != incarnation]
            if gone:
                call.end(f"the call was ended: this life of {', '.join(gone)} is fenced")

    def end_all(self, reason: str) -> None:
        """End every call."""
        for call in list(self.open):
            call.end(f"the call was ended: {reason}")


async def all_ended(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for every task, then raise the first error: none is left behind to end unseen. Empties the list."""
    # An error holds the frames that it passes, this one and its callers'. Where those held the tasks, and so the tasks'
    # errors, only the garbage collector could free what the call worked on.
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        tasks.clear()
    error = next((result for result in results if isinstance(result, BaseException)), None)
    del results
    try:
        if error is not None:
            raise error
    finally:
        del error
