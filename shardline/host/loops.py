"""For event loops: work that other threads leave for one, and coroutines that begin without a task."""

from __future__ import annotations

import asyncio
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Box:
    """What is left for one loop; however much comes at once, the loop is woken once."""

    def __init__(self) -> None:
        self._acts: deque[Callable[[], None]] = deque()
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        if loop.is_closed():
            self._acts.clear()
            return
        self._acts.append(act)
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._empty, loop)
            except RuntimeError:
                # The loop is closed: nobody needs it any more.
                self._acts.clear()
                self._woken = False

    def _empty(self, loop: asyncio.AbstractEventLoop) -> None:
        # Before taking them: whatever is left from now on wakes the loop again.
        self._woken = False
        while self._acts:
            act = self._acts.popleft()
            try:
                act()
            except Exception as error:
                loop.call_exception_handler({"message": f"unexpected error in {act!r}", "exception": error})


_boxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Box] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def post(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Run an action on the loop soon, after what was posted before. From any thread; nothing on a closed loop."""
    box = _boxes.get(loop)
    if box is None:
        with _lock:
            box = _boxes.setdefault(loop, _Box())
    box.post(loop, act)


class Started(Generic[T]):
    """A coroutine that has run up to its first wait, without a task: often there is nothing to wait for. On the loop.

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
