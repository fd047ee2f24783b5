"""Tells the ranks of torchrun where the chief is, through torch.distributed's TCPStore."""

from __future__ import annotations

import logging
import os
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


def tell(meeting: Rendezvous, address: str, wait_s: float, life_fd: int | None) -> None:
    """Leave the chief's address in the store. Raises UnreachableError.

    life_fd: a pipe that closes with the launcher; until then a store that this process serves is kept.
    """
    store = _open(meeting, wait_s)
    try:
        store.set(meeting.key, address)
    except RuntimeError as error:
        raise UnreachableError(f"the other ranks can't be told where the chief is: {_line(error)}") from None
    while meeting.serves and life_fd is not None and os.read(life_fd, 1):
        pass
