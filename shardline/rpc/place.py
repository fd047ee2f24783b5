"""A task with no index of its own asks the chief for one, before anything else of it is made."""

from __future__ import annotations

import logging
import random
import threading
import time

import grpc

from shardline.config import Timeouts
from shardline.errors import MismatchError, UnreachableError
from shardline.rpc.channel import Peer
from shardline.rpc.v1 import places_pb2, places_pb2_grpc
from shardline.security import PLAIN, Security

log = logging.getLogger("shardline.rpc")


def take_place(chief: str, role: str, address: str, timeouts: Timeouts, security: Security = PLAIN) -> str:
    """The task to be, such as "worker/1"; waits up to the timeout for the chief, and for a place to come free.

    address: host:port at which this task will answer; the chief keeps the index for it. Raises UnreachableError,
    MismatchError where the chief refuses for good, UsageError where it asks for a token.
    """
    peer = Peer("chief", chief, timeouts, security)
    stub = places_pb2_grpc.PlacesStub(peer.channel)
    request = places_pb2.PlaceRequest(role=role, address=address)
    deadline_s = time.monotonic() + timeouts.join_s
    told = ""
    try:
        while True:
            start_s = time.monotonic()
            try:
                reply = stub.Take(request, timeout=max(0.1, deadline_s - start_s), wait_for_ready=True)
            except grpc.RpcError as error:
                now_s = time.monotonic()
                # A chief that goes away while it is asked may be followed by another.
                if not (is_unavailable(error) and now_s < deadline_s):
                    raise peer.failure(error, what="Take", waited_s=now_s - start_s, connecting=True) from error
                reason = f"{peer} went away"
            else:
                if reply.task:
                    return str(reply.task)
                if not reply.retry:
                    raise MismatchError(f"{peer} gives this {role} no index: {reply.reason}")
                reason = reply.reason
            if time.monotonic() >= deadline_s:
                raise UnreachableError(f"{peer} gave this {role} no index within {timeouts.join_s:.0f} s: {reason}")
            if reason != told:
                told = reason
                log.info("waiting for an index: %s", reason)
            # Jitter, so that those who wait do not ask all at once.
            threading.Event().wait(0.2 + 0.3 * random.random())
    finally:
        peer.close()


def is_unavailable(error: grpc.RpcError) -> bool:
    """Whether the chief was lost in the middle of a call."""
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE
