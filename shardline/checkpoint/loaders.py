"""States of scripts' data loaders on their way into the checkpoints of their steps, and out of them."""

from __future__ import annotations

import itertools
import logging
import threading

log = logging.getLogger(__name__)

LOADERS = "loaders"
"""Field of a manifest's `extra`: each loader's state before the checkpoint's step, as JSON, by worker and number."""
KEPT = 32
"""States of each loader that are held: a cut may be saved some steps after it was made."""
PATIENCE_S = 2.0
"""Seconds that a checkpoint waits for states: a worker may learn only from its last answer that the job stops there."""
CHECKPOINT_BYTES = 64 << 20
"""Most characters of all states in a checkpoint."""


class LoaderStates:
    """What workers have handed over, by loader ("worker/0-0") and step. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, str]] = {}
        self._changed = threading.Condition()

    def keep(self, loader: str, step: int, state: str) -> None:
        with self._changed:
            held = self._held.setdefault(loader, {})
            held.pop(step, None)
            held[step] = state
            for old in list(itertools.islice(held, max(0, len(held) - KEPT))):
                del held[old]
            self._changed.notify_all()

    def of(self, step: int) -> dict[str, str]:
        """All states before a step, once they have come; those that are late are left out."""

        def came() -> bool:
            return all(step in held or next(reversed(held)) > step for held in self._held.values())

        with self._changed:
            self._changed.wait_for(came, PATIENCE_S)
            found = {loader: held[step] for loader, held in sorted(self._held.items()) if step in held}
        if (size := sum(map(len, found.values()))) > CHECKPOINT_BYTES:
            log.warning("the states of %d loaders are too large for a checkpoint: %d bytes", len(found), size)
            return {}
        return found

    def find(self, loader: str, step: int) -> str:
        """A state before a step; "" if it is not here."""
        with self._changed:
            return self._held.get(loader, {}).get(step, "")
