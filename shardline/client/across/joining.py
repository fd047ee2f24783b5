"""How a group of torch.distributed is made by those who were at a meeting, and by nobody else.

gloo's members learn each other's addresses from a store, and take connections from anyone on the host. A store at a
port can be written to by others, so this one uses the connections of the meeting. Once there is a group, its members
prove to each other that they are those of the meeting, before they compute with what they hear.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardline.client.across.meeting import hear, tell
from shardline.host.awake import awake_s
from shardline.rpc.auth.proof import NONCE_BYTES, mac


class TeamStore(dist.Store):  # type: ignore[name-defined,misc]  # torch exports it at run time only
    """A store in which all members set a key at a time: each then has the keys of all.

    connections: see Meeting.meet(). timeout_s: for which one waits for the others.
    """

    def __init__(self, connections: Sequence[socket.socket], rank: int, timeout_s: float) -> None:
        super().__init__()
        self._connections = connections
        self._leads = rank == 0
        self._timeout_s = timeout_s
        self._values: dict[str, str] = {}

    def set(self, key: str, value: bytes) -> None:
        """See dist.Store. Raises DistError if a member is lost meanwhile."""
        deadline_s = awake_s() + self._timeout_s
        found = {key: value.hex()}
        try:
            for connection in self._connections if self._leads else ():
                found.update(hear(connection, deadline_s))
            for connection in self._connections:
                tell(connection, found)
            for connection in self._connections if not self._leads else ():
                found.update(hear(connection, deadline_s))
        except OSError as error:
            raise dist.DistError(f"a member was lost before the group was made: {error}") from error
        self._values.update(found)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """See dist.Store. Raises DistError for a key that nobody has set: none will come."""
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            raise dist.DistError(f"no member has set {key!r}")
        return bytes.fromhex(self._values[key])

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def check_group(group: dist.ProcessGroup | None, key: bytes) -> None:
    """Raise DistError unless every member of a new group has the key: gloo takes connections from anyone on the host.

    Each proves it by what all have drawn. Whoever came to a member in another's place does not hear the other's proof,
    which goes where that one's own connections lead.
    """
    assert group is not None
    drawn = _told(group, secrets.token_bytes(NONCE_BYTES))
    proofs = _told(group, mac(key, b"member", group.rank().to_bytes(4, "big"), *drawn))
    for rank, proof in enumerate(proofs):
        if not hmac.compare_digest(proof, mac(key, b"member", rank.to_bytes(4, "big"), *drawn)):
            raise dist.DistError(f"another process of this host has connected to gloo in the place of rank {rank}")


def _told(group: dist.ProcessGroup, own: bytes) -> list[bytes]:
    """The same number of bytes from each member, by rank."""
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    heard = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([heard], [tensor]).wait()
    return [one.numpy().tobytes() for one in heard]
