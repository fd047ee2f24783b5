"""Coroutines that run up to their first wait without a task: often there is nothing to wait for."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Started(Generic[T]):
    """A coroutine that has run up to its first wait, without a task. On the loop.

    ended: it had nothing to wait for; `result` is what it returned. Raises what the coroutine raises.
    """

    result: T

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._awaited: Any = None
        self.ended = False
        try:
            self._awaited = coroutine.send(None)
        except StopIteration as end:
            self.ended, self.result = True, end.value

    @types.coroutine
    def rest(self) -> Generator[Any, Any, T]:
        """The rest of it, for a task."""
        while not self.ended:
            try:
                try:
                    sent = yield self._awaited
                except BaseException as error:
                    self._awaited = self._coroutine.throw(error)
                else:
                    self._awaited = self._coroutine.send(sent)
            except StopIteration as end:
                self.ended, self.result = True, end.value
        return self.result

    def close(self) -> None:
        """Give up the rest of it, if there is any."""
        self._coroutine.close()
