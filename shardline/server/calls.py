"""Open calls of the data plane by sender, so that a fence can end them. PROTOCOL 1.3 (F4)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from shardline.errors import UnreachableError
from shardline.rpc import errors as rpc_errors

HELD_BYTES = 32 << 10
"""Shorter messages never wait for the reader: they fit into gRPC's smallest flow-control window."""
READER_S = 20.0
"""Default of OpenCalls.reader_s: a third of --timeout."""


class OpenCall:
    """One call while its handler runs; a context manager of the handler. Used on the server's loop.

    The handler gives back the call's resources (room in staging, copies of parameters) when it ends in any way. If a
    fence ends the call, the block raises UnreachableError: a worker that is still alive retries and then gets the
    reason why it is not admitted.
    """

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self._handler: asyncio.Task[object] | None = None
        self._reason = ""
        self._begun = False
        self.senders: set[tuple[str, int]] = set()
        """(task, incarnation) of every admitted message in this call."""

    def of(self, task: str, incarnation: int) -> None:
        """Note the sender of an admitted message in this call."""
        self.senders.add((task, incarnation))

    async def write(self, context: Any, message: Any) -> None:
        """Send one message of the answer. Raises UnreachableError if the caller reads nothing for reader_s seconds."""
        if not self._begun and message.ByteSize() > HELD_BYTES:
            await context.send_initial_metadata(())
        self._begun = True
        await rpc_errors.write(context, message, self._calls.reader_s)

    def end(self, reason: str) -> None:
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
    """All open calls. Used on the server's loop."""

    def __init__(self) -> None:
        self.open: set[OpenCall] = set()
        self.reader_s = READER_S
        """Seconds for which a caller may read nothing of an answer, which waits in memory meanwhile."""

    def enter(self) -> OpenCall:
        return OpenCall(self)

    def keep_only(self, members: Mapping[str, int] | None) -> None:
        """End the calls of incarnations that are not in the chief's table."""
        if members is None:
            return
        for call in list(self.open):
            gone = [task for task, incarnation in sorted(call.senders) if members.get(task) != incarnation]
            if gone:
                call.end(f"the call was ended: this incarnation of {', '.join(gone)} is fenced")

    def end_all(self, reason: str) -> None:
        for call in list(self.open):
            call.end(f"the call was ended: {reason}")


async def all_ended(tasks: list[asyncio.Future[None]]) -> None:
    """Wait for every task, then raise the first error, so that no task ends unnoticed. Empties the list."""
    # An error references the frames that it passes, this one and its callers'. If those referenced the tasks, and so
    # the tasks' errors, only the garbage collector could free the memory that the call used.
    if not tasks:
        return
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
