"""The server half of the lane seam: interfaces of lanes other than the call's own stream, and the open attachments.

An attachment belongs to one incarnation of one worker and to one shard. It changes no state: references in the calls
identify its bytes, and the calls' replies report the outcome.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardline.core.plan import ShardSpec
from shardline.core.tensor_bytes import Buffer
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_server import Answers
from shardline.storage.bucket import Intact
from shardline.storage.publication import Publication
from shardline.waist import Memory

log = logging.getLogger("shardline.lanes")
MAX_ATTACHMENTS = 4096
"""Limit per server; far above what a cluster needs, so that a faulty client can't fill the memory."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    task: str
    incarnation: int
    shard: int
    beside: bool = False
    """It is the task's second one to this shard."""


@dataclass(frozen=True, kw_only=True)
class Hosted:
    """A shard's description for a lane that is opened to it."""

    shard: int
    publication: Publication
    by_reference: bool
    """Whether a pull is answered with a published step, which stays until every replica has pushed the next."""
    exact: bool
    """Whether pushes and pulls carry values as they are, not encoded."""
    pushes: int
    """Maximum number of contributions of one worker to one step."""


class Ticket(Protocol):
    """One incoming referred bucket. Used on the server's loop."""

    @property
    def memory(self) -> Memory:
        """The encoded bytes, on whatever device they are; valid when whole."""

    @property
    def whole(self) -> bool: ...

    @property
    def matches(self) -> bool | None:
        """When whole, whether the bytes have the expected digest; None = nobody has looked."""

    def tensor(self, dtype: str) -> torch.Tensor:
        """A tensor over the bytes, flat: it is read, never written. When whole; from any thread."""

    async def wait(self) -> None:
        """Wait until all bytes have arrived. Raises UnreachableError if the attachment broke or is late."""


class Attachment(Protocol):
    """One open lane, as used by push and pull. Used on the server's loop, unless a method says otherwise."""

    lane: str
    holder: Holder
    borrowed: bool
    """Whether a push's bytes are in memory that the worker writes again after the step; never write to it here."""
    window: int
    """Maximum number of buckets of a push to expect at once."""

    def expect(self, offset: int, nbytes: int, digest: int) -> Ticket:
        """Expect the next referred bucket of a push. Raises ProtocolError if its place is invalid.

        digest: of its bytes, as the sender computed it; 0 = not sent.
        """

    def published(self, bucket: int, step: int) -> tuple[int, int] | None:
        """(area, offset) at which the worker can read theta_step of a bucket; None = its bytes have to be sent."""

    def reply_slot(self, bucket: int, nbytes: int) -> tuple[int, Memory] | None:
        """(offset in area 2, memory) for bytes that the worker can read; None = send() them.

        May be called from any thread. The worker has read the previous contents: it makes one pull at a time.
        """

    async def send(self, payload: Buffer, intact: Intact | None) -> None:
        """Queue bytes for sending; returns when the queue is short enough.

        intact: looked at when they have been sent; if they were overwritten meanwhile, the attachment is broken so that
        nobody uses them. None = they can't change.
        """

    def abort(self, reason: str) -> None:
        """End it after a push or pull broke off: bytes in flight have no meaning any more. May be called twice."""

    def close(self) -> None:
        """Free everything; waiting tickets raise. May be called twice."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a worker needs to open its side of a new attachment."""

    attachment: Attachment
    port: int = 0
    up_token: bytes = field(default=b"", repr=False)
    down_token: bytes = field(default=b"", repr=False)
    call_token: bytes = field(default=b"", repr=False)
    socket: str = ""
    token: bytes = field(default=b"", repr=False)


class LaneOffer(Protocol):
    """One kind of lane that this server offers."""

    lane: str
    keeps_replies: bool
    """Whether each attachment has memory for replies to one worker; else they are sent as they are made."""

    def open(self, holder: Holder, hosted: Hosted, loop: asyncio.AbstractEventLoop, answers: Answers) -> Opening:
        """Prepare an attachment; the worker's sockets come later. Raises LaneUnavailable.

        answers: serves the calls that come over them, on the loop.
        """

    def publish(self, spec: ShardSpec, *, keeps_previous: bool) -> Publication | None:
        """Memory for a shard's published values that workers can read in place; None = any memory will do."""

    def close(self) -> None: ...


class Attachments:
    """All attachments of one server, by number. Used on the server's loop."""

    def __init__(self) -> None:
        self._offers: dict[str, LaneOffer] = {}
        self._held: dict[int, Attachment] = {}
        # Numbers given by an earlier process of this server must not match ours.
        self._numbers = itertools.count(secrets.randbits(48) + 1)

    def offer(self, offer: LaneOffer) -> None:
        self._offers[offer.lane] = offer

    @property
    def lanes(self) -> list[str]:
        return sorted(self._offers)

    def count(self) -> Mapping[str, int]:
        counts = dict.fromkeys(self._offers, 0)
        for attachment in self._held.values():
            counts[attachment.lane] = counts.get(attachment.lane, 0) + 1
        return counts

    def open(
        self, lane: str, holder: Holder, hosted: Hosted, loop: asyncio.AbstractEventLoop, answers: Answers
    ) -> tuple[int, Opening]:
        """Prepare an attachment in place of the holder's earlier one like it on this shard. Raises LaneUnavailable."""
        offer = self._offers.get(lane)
        if offer is None:
            raise LaneUnavailable(f"this ps offers the lanes grpc, {', '.join(self.lanes) or 'and no other'}")
        for number, held in list(self._held.items()):
            kept = held.holder
            if (kept.task, kept.shard, kept.beside) == (holder.task, holder.shard, holder.beside):
                self._drop(number, "its worker opened another lane")
        if len(self._held) >= MAX_ATTACHMENTS:
            raise LaneUnavailable(f"this ps already has {len(self._held)} attachments, its limit")
        opening = offer.open(holder, hosted, loop, answers)
        number = next(self._numbers)
        self._held[number] = opening.attachment
        return number, opening

    def find(self, number: int) -> Attachment | None:
        return self._held.get(number)

    def drop(self, attachment: Attachment, reason: str) -> None:
        for number, held in list(self._held.items()):
            if held is attachment:
                self._drop(number, reason)

    def keep_only(self, members: Mapping[str, int] | None) -> None:
        """End the attachments of incarnations that are not in the table of the living."""
        if members is None:
            return
        for number, held in list(self._held.items()):
            if members.get(held.holder.task) != held.holder.incarnation:
                self._drop(number, "its worker is fenced")

    def drop_all(self, reason: str) -> None:
        for number in list(self._held):
            self._drop(number, reason)

    def _drop(self, number: int, reason: str) -> None:
        attachment = self._held.pop(number)
        log.debug("closing attachment %#x (%s) of %s: %s", number, attachment.lane, attachment.holder.task, reason)
        attachment.abort(reason)
        attachment.close()

    def close(self) -> None:
        self.drop_all("this ps is ending")
        for offer in self._offers.values():
            offer.close()
        self._offers.clear()
