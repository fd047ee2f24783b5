"""States of scripts' data loaders on their way into the checkpoints of their steps, and out of them."""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import zlib

log = logging.getLogger(__name__)

LOADERS = "loaders"
"""Field of a manifest's `extra`: each loader's state before the checkpoint's step, packed, by worker and number."""
STATE_BYTES = 1 << 20
"""Most bytes of a state that is unpacked: no longer one comes in a message."""
HELD_BYTES = 256 << 20
"""Most bytes of all states that are held: a cut may be saved some steps after it was made."""
ENTRY_BYTES = 400
"""Bytes that a state takes beside its own."""
PATIENCE_S = 2.0
"""Seconds that a checkpoint waits for states: a worker may learn only from its last answer that the job stops there."""
CHECKPOINT_BYTES = 64 << 20
"""Most characters of all packed states in a checkpoint."""


def pack(state: str) -> str:
    """A state as text without signs of JSON: a manifest's reader reckons with memory for each of those."""
    return base64.b64encode(zlib.compress(state.encode(), 1)).decode()


def unpack(packed: str) -> str:
    """The state; "" if this is none."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(packed), STATE_BYTES).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""


class LoaderStates:
    """What workers have handed over, by loader ("worker/0-0") and step. Thread-safe."""

    def __init__(self, most_bytes: int = HELD_BYTES) -> None:
        self._most = most_bytes
        self._held: dict[tuple[str, int], str] = {}
        """Packed, the one that was handed over last at the end."""
        self._nbytes = 0
        self._last: dict[str, int] = {}
        """The step that each loader has handed over last; a checkpoint waits for these loaders."""
        self._changed = threading.Condition()

    def keep(self, loader: str, step: int, state: str) -> None:
        packed = pack(state)
        with self._changed:
            self._drop((loader, step))
            self._held[loader, step] = packed
            self._nbytes += len(packed) + ENTRY_BYTES
            self._last[loader] = step
            while self._nbytes > self._most:
                self._drop(next(iter(self._held)))
            self._changed.notify_all()

    def of(self, step: int) -> dict[str, str]:
        """All states before a step, packed, once they have come; those that are late are left out."""

        def came() -> bool:
            return all((loader, step) in self._held or last > step for loader, last in self._last.items())

        with self._changed:
            self._changed.wait_for(came, PATIENCE_S)
            found = {loader: state for (loader, at), state in sorted(self._held.items()) if at == step}
            missing = sorted(self._last.keys() - found.keys())
            # The next checkpoint waits for none whose worker is gone; it is known again once it hands a state over.
            self._last = {loader: last for loader, last in self._last.items() if loader in found or last > step}
        if missing:
            log.warning("the checkpoint of step %d is without the states of the loaders %s", step, ", ".join(missing))
        if (size := sum(map(len, found.values()))) > CHECKPOINT_BYTES:
            log.warning("the states of %d loaders are too large for a checkpoint: %d bytes", len(found), size)
            return {}
        return found

    def committed(self, step: int) -> None:
        """Drop the states up to that of a checkpoint, which has them now."""
        with self._changed:
            for place in [place for place in self._held if place[1] <= step]:
                self._drop(place)

    def find(self, loader: str, step: int) -> str:
        """A state before a step; "" if it is not here."""
        with self._changed:
            packed = self._held.get((loader, step), "")
        return unpack(packed)

    def _drop(self, place: tuple[str, int]) -> None:
        if (packed := self._held.pop(place, None)) is not None:
            self._nbytes -= len(packed) + ENTRY_BYTES
