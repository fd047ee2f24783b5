"""Waiting for another thread's effect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.support.cluster import PATIENCE_S


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S} s for {what}"
        pause.wait(0.002)
