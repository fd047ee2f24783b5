"""Work that other threads leave for an event loop: however much comes at once, the loop is woken once."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable


class _Box:
    """What is left for one loop."""

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
