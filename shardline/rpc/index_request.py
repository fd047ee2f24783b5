"""A task without an index asks the chief for one, before anything else of it is set up."""

from __future__ import annotations

import logging
import random
import threading

import grpc

from shardline.cluster import MAX_TASKS, TaskPlace, check_chief_port, own_address, parse_task, read_spec, wants_place
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import Waiting
from shardline.errors import ClusterSpecError, MismatchError, ProtocolError, UnreachableError
from shardline.host.awake import LONGEST_S, awake_s
from shardline.rpc.channel import Peer
from shardline.rpc.v1 import places_pb2, places_pb2_grpc
from shardline.security import PLAIN, Security

log = logging.getLogger("shardline.rpc")


def assigned_place(
    task: str, cluster: str | None, *, address: str | None, timeouts: Timeouts, security: Security
) -> TaskPlace:
    """The place that the chief assigns for a task such as "worker/any". address: of this task; None = a free port.

    Raises ClusterSpecError for a cluster that can't be read, and what take_place() raises.
    """
    role = wants_place(task)
    assert role is not None, "the caller has asked"
    if cluster is None:
        raise ClusterSpecError(f"--task {task} needs --cluster FILE or SHARDLINE_CLUSTER")
    spec = read_spec(cluster)
    check_chief_port(TaskPlace(spec, role, 0))
    own = own_address(address or ":0")
    found = take_place(spec.chief, role, own, timeouts, security)
    return TaskPlace(spec.with_place(found, own), *parse_task(found))


def take_place(chief: str, role: str, address: str, timeouts: Timeouts, security: Security = PLAIN) -> str:
    """The assigned task, such as "worker/1"; waits up to the timeout for the chief, and for an index to become free.

    address: host:port at which this task will answer; the chief reserves the index for it. Raises UnreachableError,
    MismatchError if the chief refuses for good, UsageError if it requires a token, ProtocolError if its answer is not a
    task of this role.
    """
    request = places_pb2.PlaceRequest(role=role, address=address)
    start_s = awake_s()
    waiting = Waiting(start_s, start_s + timeouts.join_s)
    while True:
        # A new one each time: the chief's name may have another address by now, and its old address another owner.
        peer = Peer("chief", chief, timeouts, security)
        try:
            peer.await_name(max(0.1, waiting.deadline_s - awake_s()))
            task, reason = _ask(peer, request, waiting)
        finally:
            peer.close()
        if task:
            return task
        if awake_s() >= waiting.deadline_s:
            raise UnreachableError(
                f"{peer} did not assign this {role} an index within {timeouts.join_s:.0f} s: {reason}"
            )
        _tell(waiting, peer, reason)
        # Jitter, so that waiting tasks do not all ask at once.
        threading.Event().wait(0.2 + 0.3 * random.random())


def _tell(waiting: Waiting, peer: Peer, why: str) -> None:
    if sentence := waiting.sentence(awake_s(), f"an index from {peer}", why):
        log.info("%s", sentence)


def _ask(peer: Peer, request: places_pb2.PlaceRequest, waiting: Waiting) -> tuple[str, str]:
    """(task, ""), or ("", why not yet). Raises if asking again can't help or time is up."""
    start_s, deadline_s = awake_s(), waiting.deadline_s
    call = places_pb2_grpc.PlacesStub(peer.channel).Take.future(
        request, timeout=max(0.1, deadline_s - start_s), wait_for_ready=True
    )
    done = threading.Event()
    call.add_done_callback(lambda _: done.set())
    # The call's own deadline limits this.
    while not done.wait(waiting.pause_s(awake_s()) or 1.0):
        _tell(waiting, peer, peer.obstacle())
    try:
        reply = call.result()
    except grpc.RpcError as error:
        now_s = awake_s()
        code = error.code() if isinstance(error, grpc.Call) else None
        if code not in _FOLLOWED or now_s >= deadline_s - LONGEST_S:
            raise peer.failure(error, what="Take", waited_s=now_s - start_s, connecting=True) from error
        return "", f"{peer} {_FOLLOWED[code]}"
    if not (reply.task or reply.retry):
        raise MismatchError(f"{peer} refuses this {request.role} an index: {reply.reason}")
    if reply.task:
        _check(reply.task, request.role, peer)
    return str(reply.task), str(reply.reason)


def _check(task: str, role: str, peer: Peer) -> None:
    """Raise ProtocolError if this is not a task of the role: its index determines the size of the cluster spec."""
    named, _, index = task.partition("/")
    number = int(index) if index.isascii() and index.isdigit() and len(index) < 10 else MAX_TASKS
    if named != role or number >= MAX_TASKS:
        raise ProtocolError(
            f"{peer} assigned this {role} the name {task[:64]!r}; it must be {role}/0 to {role}/{MAX_TASKS - 1}. Is "
            "that the chief?"
        )


_FOLLOWED: dict[grpc.StatusCode | None, str] = {
    grpc.StatusCode.UNAVAILABLE: "disconnected",
    grpc.StatusCode.UNIMPLEMENTED: "is another task, or of an older version",
    grpc.StatusCode.DEADLINE_EXCEEDED: "did not answer while this process was stopped",
}
"""Statuses after which another chief may come up, or the same one answer, before the time is over."""
