"""The passes that workers tell of, where a package draws them: for the page, the status and the trace file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shardline import plugins
from shardline.core.orders import PassReport
from shardline.core.spec import JobSpec
from shardline.core.status import StageStatus


class Passes(Protocol):
    """Thread-safe: the control thread writes, the page's thread reads."""

    def heard(
        self, job: JobSpec, life: tuple[str, int], passes: Sequence[PassReport], *, sent_s: float, now_s: float
    ) -> None:
        """Take in what one heartbeat says. life: task and incarnation. sent_s: when it was sent, on the clock of its
        passes; now_s: on this one.
        """
        ...

    def read(self, job: JobSpec, trace: Mapping[str, Any]) -> None:
        """Take in the passes of a trace file."""
        ...

    def figures(self) -> tuple[StageStatus, ...]:
        """Each stage over the recent steps; none without a pipeline, and before its first step is done."""
        ...

    def recent(self) -> str:
        """The newest whole steps as JSON for the page."""
        ...

    def trace(self) -> dict[str, Any] | None:
        """All passes that are kept, as a trace; None without a pipeline."""
        ...


def passes() -> Passes:
    found: Passes = plugins.installed("shardline.boards", "passes", "a page of passes")()
    return found
