"""Tells the ranks of torchrun where the chief is, through torch.distributed's TCPStore."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from shardline.core.waiting import Waiting
from shardline.errors import UnreachableError
from shardline.host.awake import awake_s
from shardline_launchers.places import Rendezvous

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

log = logging.getLogger("shardline.launchers")

ASK_S = 2.0
"""Longest time in a call of the store, in which no signal is handled."""


def _open(meeting: Rendezvous, wait_s: float) -> TCPStore:
    # Imports torch, which --help must not do.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=max(1.0, wait_s))
    try:
        return TCPStore(meeting.host, meeting.port, None, meeting.serves, wait, wait_for_workers=False)
    except RuntimeError as error:
        raise UnreachableError(
            f"the store of torch.distributed at {meeting.host}:{meeting.port} (MASTER_ADDR, MASTER_PORT) can't be "
            f"reached: {_line(error)}"
        ) from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def ask(meeting: Rendezvous, wait_s: float) -> str:
    """Wait for the chief's address. Raises UnreachableError after wait_s seconds."""
    waiting = Waiting(awake_s(), awake_s() + wait_s)
    store = _open(meeting, wait_s)
    while (left_s := waiting.deadline_s - awake_s()) > 0:
        try:
            store.wait([meeting.key], timedelta(seconds=min(ASK_S, max(0.01, left_s))))
            return bytes(store.get(meeting.key)).decode()
        except RuntimeError as error:
            # A store that has gone is another error than a key that is not there yet.
            if "timeout" not in str(error).lower():
                raise UnreachableError(
                    f"the store of torch.distributed at {meeting.host}:{meeting.port} has gone before rank 0 left the "
                    f"chief's address there: {_line(error)}"
                ) from None
        if sentence := waiting.sentence(awake_s(), "rank 0 to say where the chief is"):
            log.info("%s", sentence)
    raise UnreachableError(
        f"rank 0 did not say within {wait_s:.0f} s where the chief is, at {meeting.host}:{meeting.port}; see its log, "
        "or raise --join-timeout"
    )


class Teller:
    """Leaves the chief's address in the store, on a thread, since torch is imported for it while the tasks start.

    failed: called with the reason if that is not possible.
    """

    def __init__(self, meeting: Rendezvous, wait_s: float, failed: Callable[[str], None]) -> None:
        self._meeting = meeting
        self._wait_s = wait_s
        self._failed = failed
        self._address: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._store: TCPStore | None = None
        """Kept: a store that this process serves ends with it."""
        threading.Thread(target=self._run, name="teller", daemon=True).start()

    def tell(self, address: str) -> None:
        self._address.put(address)

    def _run(self) -> None:
        try:
            self._store = _open(self._meeting, self._wait_s)
            self._store.set(self._meeting.key, self._address.get(timeout=self._wait_s))
        except queue.Empty:
            # The start has failed, which who started it reports.
            return
        except Exception as error:
            self._failed(f"the other ranks can't be told where the chief is: {_line(error)}")
