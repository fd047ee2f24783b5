"""How the work of a function grows with its input, counted in instructions of Python rather than in seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from shardline.host.files import __file__ as _ANY_FILE

ROOT = str(Path(_ANY_FILE).parents[2])
GENERATED = "<string>"
"""The file of functions that `dataclass` writes."""
MOST = 2.2
"""Times the instructions for twice the input: 2 for linear work, 4 for quadratic work."""


def instructions(act: Callable[[], object]) -> int:
    """Number of bytecode instructions of this project's code that a call executes, in all threads that it starts."""
    count = 0

    def instruction(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return instruction

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith((ROOT, GENERATED)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return instruction

    before = sys.gettrace()
    threading.settrace(call)
    sys.settrace(call)
    try:
        act()
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]  # as documented for sys.settrace
    return count


def assert_grows_at_most_linearly(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Compare the work for inputs of `size` and twice `size`. prepare: makes the act for a size, and isn't counted."""
    acts = [prepare(size), prepare(size), prepare(2 * size)]
    # What is imported, cached or compiled once is done before counting.
    acts[0]()
    one, two = (instructions(act) for act in acts[1:])
    assert one > size, "nothing was counted"
    assert two <= MOST * one, f"{one:,} instructions for {size}, {two:,} for {2 * size}: {two / one:.2f} times as many"
