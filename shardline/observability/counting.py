"""A job's progress in words: steps, rounds of several passes, batches, updates. Pure."""

from __future__ import annotations

from shardline.core.status import Counting


def plural(count: int, unit: str) -> str:
    """Such as "1 step", "1,200 passes"."""
    if count == 1:
        return f"1 {unit}"
    return f"{count:,} {unit}{'es' if unit.endswith(('s', 'ch')) else 's'}"


def position(counting: Counting, step: int, done: int, steps: int) -> str:
    """Such as "step 120/400", "round 12/120 of 10 passes", "batch 118/120, update 59". steps: 0 = unknown."""
    text = f"{counting.asked} {done}/{steps}" if steps else f"{counting.unit} {step}"
    text += f" of {counting.passes:,} passes" if counting.passes > 1 else ""
    return f"{text}, {counting.unit} {step}" if steps and counting.asked != counting.unit else text


def speed(counting: Counting, per_second: str) -> str:
    return f"{per_second} {counting.unit}s/s"


def made(counting: Counting, step: int, done: int) -> str:
    """Describe a job's progress, such as "12 rounds of 10 passes" or "120 batches, 61 updates"."""
    text = plural(done, counting.asked)
    text += f" of {counting.passes:,} passes" if counting.passes > 1 else ""
    return text if counting.asked == counting.unit else f"{text}, {plural(step, counting.unit)}"


def plan(counting: Counting, steps: int) -> str:
    """Describe a job's steps where each is more than a pass; else ""."""
    if counting.passes == 1 or not steps:
        return ""
    each = f" of {counting.passes:,} passes" if counting.passes else ""
    whom = "every replica" if counting.asked == counting.unit else "all workers together"
    return f"{plural(steps, counting.asked)}{each}: {plural(counting.all_passes, 'pass')} of {whom}"
