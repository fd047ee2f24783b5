"""Where workers that are to share layers meet: at a socket that rank 0 listens on, in the kernel of their host.

Both ends prove the team's key (shardline.rpc.auth.proof), made of a secret of the job; then a message goes each way.
While a connection lasts, its worker still wants to begin what it said, so nobody begins with somebody who has left
again. Such sockets have no file. Their names are secret until they are taken, and only processes of the same user are
let in.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardline.client.overlap.gate import StepAgain
from shardline.errors import ForbiddenError, UnreachableError
from shardline.host import segments
from shardline.host.awake import awake_s
from shardline.host.process import kept_from_children
from shardline.host.segments import SegmentError
from shardline.rpc.auth.proof import check_caller, mac, prove, receive

LOOK_S = 0.2
"""Seconds between two looks whether the meeting is still wanted."""
AGAIN_S = 0.02
"""Seconds until rank 0 is looked for again."""
PROOF_S = 2.0
"""Seconds for a proof once the other side has begun it; one that takes longer may come again."""
LONGEST = 1 << 20
"""Bytes of a message."""
MOST_WAITING = 64
"""Connections that rank 0 has not taken yet."""


class Place:
    """Rank 0's socket for one team. It stays open between meetings, since its name can be seen once it is bound."""

    def __init__(self, key: bytes) -> None:
        """key: the team's. Raises UnreachableError if its name is taken."""
        self.key = key
        self.listener = kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self.listener.bind(name_of(key))
            self.listener.listen(MOST_WAITING)
        except OSError as error:
            self.listener.close()
            raise UnreachableError(
                f"workers of this host can't meet to share layers at the unix socket @{name_of(key)[1:].decode()}: "
                f"{error.strerror}; end the process that `ss -xlp` shows there, or start this worker again, to get "
                "another name"
            ) from error
        self.listener.settimeout(LOOK_S)

    def close(self) -> None:
        """Close the socket; its name is free then."""
        self.listener.close()


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One worker's wish to begin something with the others of its team.

    key: secret of this team of this job. place: rank 0's; None for the others. ranks: how many they are. about: what
    they begin, which has to be the same for all. still_wanted(missing): asked every LOOK_S; False, or an error, ends
    the wait.
    """

    key: bytes = field(repr=False)
    rank: int
    ranks: int
    about: str
    still_wanted: Callable[[list[int]], bool]
    place: Place | None = None

    def meet(self) -> list[socket.socket]:
        """Wait until all are here; returns rank 0's connections to the others, by rank, or the others' one to rank 0.

        Raises StepAgain if it is not wanted any more, or the others begin something else.
        """
        return [self._come()] if self.place is None else self._lead(self.place.listener)

    def _look(self, missing: list[int]) -> None:
        if not self.still_wanted(missing):
            raise StepAgain

    # Rank 0

    def _lead(self, listener: socket.socket) -> list[socket.socket]:
        with contextlib.ExitStack() as stack:
            guests: dict[int, tuple[socket.socket, str]] = {}
            while missing := [rank for rank in range(1, self.ranks) if rank not in guests]:
                self._look(missing)
                self._take_in(listener, guests, stack)
                for rank in [rank for rank, (connection, _) in guests.items() if _has_left(connection)]:
                    del guests[rank]
            again = any(about != self.about for _, about in guests.values())
            for connection, _ in guests.values():
                # One that leaves now is missed at the first thing that they do together.
                with contextlib.suppress(OSError):
                    tell(connection, {"again": again})
            if again:
                raise StepAgain
            stack.pop_all()
        return [guests[rank][0] for rank in sorted(guests)]

    def _take_in(
        self, listener: socket.socket, guests: dict[int, tuple[socket.socket, str]], stack: contextlib.ExitStack
    ) -> None:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        stack.enter_context(kept_from_children(connection))
        try:
            segments.check_user(connection)
            check_caller(connection, self.key, PROOF_S)
            told = hear(connection, awake_s() + PROOF_S)
        except (OSError, SegmentError, ForbiddenError):
            connection.close()
            return
        rank = told.get("rank")
        if isinstance(rank, int) and 0 < rank < self.ranks:
            guests[rank] = connection, str(told.get("about"))

    # The others

    def _come(self) -> socket.socket:
        while True:
            self._look([0])
            with contextlib.ExitStack() as stack:
                connection = kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stack.enter_context(connection)
                with contextlib.suppress(OSError, SegmentError, ForbiddenError):
                    if self._ask(connection).get("again"):
                        raise StepAgain
                    stack.pop_all()
                    return connection
            # Rank 0 is not here yet, has left and may come again, or somebody else is here.
            time.sleep(AGAIN_S)

    def _ask(self, connection: socket.socket) -> dict[str, Any]:
        connection.settimeout(LOOK_S)
        connection.connect(name_of(self.key))
        segments.check_user(connection)
        # Connections queue while rank 0 is not at the meeting.
        prove(connection, self.key, PROOF_S, lambda: self._await(connection, [0]))
        tell(connection, {"rank": self.rank, "about": self.about})
        self._await(connection, [])
        return hear(connection, awake_s() + PROOF_S)

    def _await(self, connection: socket.socket, missing: list[int]) -> None:
        connection.settimeout(LOOK_S)
        while True:
            with contextlib.suppress(TimeoutError):
                connection.recv(1, socket.MSG_PEEK)
                return
            self._look(missing)


def team_key(job_secret: bytes, members: list[str]) -> bytes:
    """The secret of one team of one job. members: their lives, by rank."""
    return mac(job_secret, b"shardline ranks 1", *(member.encode() for member in members))


def name_of(key: bytes) -> bytes:
    """Address of a team's socket in the abstract namespace: it goes with the process."""
    return b"\0shardline-" + mac(key, b"name").hex()[:32].encode()


def _has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def tell(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. Raises OSError."""
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def hear(connection: socket.socket, deadline_s: float) -> dict[str, Any]:
    """Receive a message. Raises OSError if the other side has left, makes no sense or takes too long."""
    nbytes = int.from_bytes(receive(connection, 4, deadline_s), "big")
    if nbytes > LONGEST:
        raise ConnectionAbortedError(f"a message of {nbytes} bytes")
    data = receive(connection, nbytes, deadline_s)
    with contextlib.suppress(ValueError):
        message = json.loads(data)
        if isinstance(message, dict):
            return message
    raise ConnectionAbortedError("no message")
