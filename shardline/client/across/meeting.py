"""Where workers that are to share layers meet: at a socket that rank 0 listens on, in the kernel of their host.

A line of JSON each way. While a connection lasts, its worker still wants to begin what it said, so nobody begins with
somebody who has left again. Such sockets have no file, and only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardline.client.overlap.watching import StepAgain

LOOK_S = 0.2
"""Seconds between two looks whether the meeting is still wanted."""
AGAIN_S = 0.02
"""Seconds until rank 0 is looked for again."""
LONGEST = 4096
"""Bytes of a line."""
MOST_WAITING = 64
"""Connections that rank 0 has not taken yet."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One worker's wish to begin something with the others of its team.

    leader: unique name of rank 0's process. ranks: how many they are. about: what they begin, which has to be the same
    for all. still_wanted(missing): asked every LOOK_S; False, or an error, ends the wait.
    """

    leader: str
    rank: int
    ranks: int
    about: str
    still_wanted: Callable[[list[int]], bool]

    def meet(self, offer: Callable[[], int]) -> int:
        """Wait until all are here; returns the number that rank 0 has for them, which its offer() makes.

        Raises StepAgain if it is not wanted any more, or the others begin something else.
        """
        return self._lead(offer) if self.rank == 0 else self._come()

    def _look(self, missing: list[int]) -> None:
        if not self.still_wanted(missing):
            raise StepAgain

    # Rank 0

    def _lead(self, offer: Callable[[], int]) -> int:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(_place(self.leader))
            server.listen(MOST_WAITING)
            server.settimeout(LOOK_S)
            guests: dict[int, tuple[socket.socket, str]] = {}
            while missing := [rank for rank in range(1, self.ranks) if rank not in guests]:
                self._look(missing)
                self._take_in(server, guests, stack)
                for rank in [rank for rank, (connection, _) in guests.items() if _has_left(connection)]:
                    del guests[rank]
            others = sorted(rank for rank, (_, about) in guests.items() if about != self.about)
            answer = {"again": True} if others else {"number": offer()}
            for connection, _ in guests.values():
                # One that leaves now is missed at the first thing that they do together.
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        if others:
            raise StepAgain
        return int(answer["number"])

    def _take_in(
        self, server: socket.socket, guests: dict[int, tuple[socket.socket, str]], stack: contextlib.ExitStack
    ) -> None:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return
        stack.enter_context(connection)
        told = _heard(connection, time.monotonic() + LOOK_S) if _is_ours(connection) else None
        rank = told.get("rank") if told else None
        if told is not None and isinstance(rank, int) and 0 < rank < self.ranks:
            guests[rank] = connection, str(told.get("about"))

    # The others

    def _come(self) -> int:
        while True:
            self._look([0])
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                answer = self._ask(connection)
            if answer is None:
                # Rank 0 is not here yet, or has left and may come again.
                time.sleep(AGAIN_S)
                continue
            if not isinstance(answer.get("number"), int):
                raise StepAgain
            return int(answer["number"])

    def _ask(self, connection: socket.socket) -> dict[str, Any] | None:
        connection.settimeout(LOOK_S)
        try:
            connection.connect(_place(self.leader))
            if not _is_ours(connection):
                return None
            connection.sendall(json.dumps({"rank": self.rank, "about": self.about}).encode() + b"\n")
        except OSError:
            return None
        while True:
            self._look([])
            with contextlib.suppress(TimeoutError):
                return _heard(connection, time.monotonic() + LOOK_S)


def _place(leader: str) -> bytes:
    """Address in the abstract namespace: it goes with the process."""
    return b"\0shardline-ranks-" + leader.encode()


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", raw)[1] == os.getuid())


def _has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _heard(connection: socket.socket, deadline_s: float) -> dict[str, Any] | None:
    """A line from the other end; None if it has left, or says nothing that makes sense. Raises TimeoutError."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            got = connection.recv(LONGEST)
            if not got:
                return None
            line += got
    except ConnectionError:
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
