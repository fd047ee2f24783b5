"""The workers that share layers, as a process group of torch.distributed over gloo, as long as all of them live."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardline.client.overlap.gate import StepAgain
from shardline.core.placement import Post
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, UnreachableError
from shardline.host.awake import awake_s
from shardline.rpc.auth.proof import NONCE_BYTES, mac
from shardline_pipeline.tensor_parallel.meeting import Meeting, Place, hear, team_key, tell


class TeamStore(dist.Store):  # type: ignore[name-defined,misc]  # torch exports it at run time only
    """A store in which all members set a key at a time: each then has the keys of all.

    gloo's members learn each other's addresses from a store, and take connections from anyone on the host. A store at a
    port can be written to by others, so this one uses the connections of the meeting.

    connections: see Meeting.meet(). timeout_s: for which one waits for the others.
    """

    def __init__(self, connections: Sequence[socket.socket], rank: int, timeout_s: float) -> None:
        super().__init__()
        self._connections = connections
        self._leads = rank == 0
        self._timeout_s = timeout_s
        self._values: dict[str, str] = {}

    def set(self, key: str, value: bytes) -> None:
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
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    heard = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([heard], [tensor]).wait()
    return [one.numpy().tobytes() for one in heard]


log = logging.getLogger("shardline.client")

MOST_FAILURES = 5
"""Attempts in a row that may fail while the orders stay the same."""


class Team:
    """A worker and those that it shares layers with. Used by the session's thread, except interrupt().

    still_ordered: whether the orders are still those that the open step began with.
    """

    def __init__(self, timeouts: Timeouts, still_ordered: Callable[[], bool]) -> None:
        self._timeouts = timeouts
        self._still_ordered = still_ordered
        self._lock = threading.Lock()
        self._members: tuple[Post, ...] = ()
        self._rank = 0
        self._place: Place | None = None
        """Set where this worker is rank 0."""
        self._store: TeamStore | None = None
        self.mesh: DeviceMesh | None = None
        self._grouped = False
        """torch's default group is this one's, or about to be."""
        self._inside = False
        """Within together(), or in the middle of making a group."""
        self._failures = 0
        self._waiting_s = 0.0
        self._told = False

    def meet(self, members: tuple[Post, ...], rank: int, about: str, secret: bytes) -> DeviceMesh:
        """Leave the group there is, and make one of these workers, by rank, once all are about to begin the same.

        secret: of the job; see Orders.job_secret. Raises StepAgain if the step has to be found again, JobError if they
        are on several hosts, UnreachableError if one of them lives and does not come, or their place is taken.
        """
        self.leave()
        hosts = {post.address.rpartition(":")[0] for post in members}
        if len(hosts) > 1:
            where = ", ".join(f"{post.task} at {post.address}" for post in members)
            raise JobError(
                f"workers that share layers have to be on one host, but these are not: {where}; start as many workers "
                "as tensor_ranks on each host"
            )
        if not secret:
            raise JobError(
                "the chief has sent no secret by which workers that share layers recognize each other, as an older "
                "version does; start all tasks with the same version"
            )
        if members != self._members:
            self._failures = 0
        self._members, self._rank = members, rank
        key = team_key(secret, [f"{post.task} {post.incarnation:x}" for post in members])
        meeting = Meeting(
            key=key,
            rank=rank,
            ranks=len(members),
            about=about,
            still_wanted=self._wait_for,
            place=self._place_of(key) if rank == 0 else None,
        )
        self._waiting_s, self._told = awake_s(), False
        self._store = TeamStore(meeting.meet(), rank, self._timeouts.rpc_s)
        return self._join(self._store, key)

    def _place_of(self, key: bytes) -> Place:
        if self._place is None or self._place.key != key:
            self._close_place()
            self._place = Place(key)
        return self._place

    def _close_place(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None

    def _wait_for(self, missing: list[int]) -> bool:
        waited_s = awake_s() - self._waiting_s
        who = ", ".join(f"{self._members[rank].task} (rank {rank})" for rank in missing)
        # torch's caches keep a group's connections: in a sum, a member notices only by --timeout that this one left.
        if missing and waited_s > self._timeouts.join_s + self._timeouts.total_s:
            raise UnreachableError(f"{who} did not come to share layers with this worker within {waited_s:.0f} s")
        if missing and waited_s >= self._timeouts.suspect_s and not self._told:
            self._told = True
            log.warning("waiting for %s since %.0f s, to share layers", who, waited_s)
        return self._still_ordered()

    def _join(self, store: TeamStore, key: bytes) -> DeviceMesh:
        if dist.is_initialized():
            raise JobError(
                "the job file uses torch.distributed itself, which tensor_parallel needs for its own groups; leave one "
                "of them out, or train with --set tensor_ranks=1"
            )
        # gloo otherwise asks for the host's name, which may lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        patience = datetime.timedelta(seconds=self._timeouts.total_s)
        ranks = len(self._members)
        self._inside = self._grouped = True
        with self._leaving_after_errors():
            try:
                dist.init_process_group("gloo", store=store, rank=self._rank, world_size=ranks, timeout=patience)
                check_group(dist.group.WORLD, key)
                mesh = self.mesh = init_device_mesh("cpu", (ranks,))
            finally:
                self._inside = False
        log.info("shares layers as rank %d with %s", self._rank, ", ".join(post.task for post in self._members))
        return mesh

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around all that the group does: where a member is lost, or the orders change, StepAgain, without the group.

        The others then miss this one, and begin again too. Raises UnreachableError if this happens again and again
        while the orders stay the same.
        """
        with self._lock:
            if self.mesh is None:
                raise StepAgain
            self._inside = True
        with self._leaving_after_errors():
            try:
                yield
            finally:
                with self._lock:
                    self._inside = False
            if not self._still_ordered():
                raise StepAgain
        self._failures = 0

    @contextlib.contextmanager
    def _leaving_after_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.leave()
            if not _is_of_group(error):
                raise
            self._failures += 1
            if self._failures > MOST_FAILURES and self._still_ordered():
                who = ", ".join(post.task for post in self._members)
                raise UnreachableError(f"{who} can't compute together: {_root(error)}") from error
            log.info("leaving the group of %s: %s", ", ".join(post.task for post in self._members), _root(error))
            raise StepAgain from error
        except BaseException:
            self.leave()
            raise

    def interrupt(self) -> None:
        """Leave the group unless it is computing: the orders have changed, and the others need not wait for this one.

        Any thread may call this.
        """
        with self._lock:
            if not self._inside:
                self._close()

    def leave(self) -> None:
        with self._lock:
            self._close()

    def close(self) -> None:
        self.leave()
        self._close_place()

    def _close(self) -> None:
        """With the lock: gloo closes its connections."""
        self.mesh = None
        if self._grouped and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._grouped = False
        if self._store is not None:
            self._store.close()
            self._store = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_group(error: BaseException) -> bool:
    # gloo's errors are plain RuntimeErrors that begin with the place in its source.
    return any(
        isinstance(one, dist.DistError) or (isinstance(one, RuntimeError) and "gloo" in str(one).lower())
        for one in _chain(error)
    )


def _root(error: BaseException) -> str:
    return str(list(_chain(error))[-1]).splitlines()[0]
