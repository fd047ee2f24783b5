"""A worker's segments at the server: what is there when the worker hears that it may push."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.errors import ProtocolError, UnreachableError
from shardline.host import segments
from shardline.host.segments import Segment
from shardline.lanes.attachments import Holder
from shardline.lanes.call_server import CallServer
from shardline.lanes.shm import server as shm_server
from shardline.lanes.shm.server import SegmentPublication, ShmAttachment
from tests.support.lanes import no_calls

Make = Callable[[bool], tuple[SegmentPublication, ShmAttachment]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an attachment that passes what is published by reference, or else as replies."""
    loop = asyncio.new_event_loop()

    def make(by_reference: bool) -> tuple[SegmentPublication, ShmAttachment]:
        spec = make_plan((TensorSpec(name="w", shape=(64,), dtype="float32"),), 1).shards[0]
        publication = SegmentPublication(spec, keeps_previous=by_reference)
        return publication, ShmAttachment(
            Holder(task="worker/0", incarnation=1, shard=0),
            publication,
            lambda broke: CallServer(loop, no_calls, who="worker/0", broke=broke),
            by_reference=by_reference,
            pushes=1,
            forget=lambda: None,
        )

    yield make
    loop.close()


def test_a_worker_that_was_welcomed_can_push_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    publication, attachment = make(True)
    mine = Segment.create(max(publication.nbytes, segments.ALIGNMENT_BYTES), name="gradients")
    mine.memory[:4] = b"push"
    read: list[bytes] = []
    plain = segments.welcome

    def welcome(sock: socket.socket, areas: list[Segment], replies: Segment | None) -> None:
        # What the loop's thread does for a worker that is faster than this one.
        read.append(bytes(attachment.expect(0, 4, 0).memory))
        plain(sock, areas, replies)

    monkeypatch.setattr(segments, "welcome", welcome)
    here, there = socket.socketpair()
    with here, there:
        attachment.take(here, os.dup(mine.fd), mine.nbytes)
        areas, replies = segments.hear_welcome(there)
    assert read == [b"push"]
    assert len(areas) == 2 and replies is None
    attachment.close()


def test_a_place_is_the_same_ticket_in_every_step_until_the_segment_goes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication, attachment = make(True)
    mine = Segment.create(max(publication.nbytes, segments.ALIGNMENT_BYTES), name="gradients")
    monkeypatch.setattr(shm_server, "MAX_TICKETS", 2)
    here, there = socket.socketpair()
    with here, there:
        attachment.take(here, os.dup(mine.fd), mine.nbytes)
        segments.hear_welcome(there)
    first, other = attachment.expect(0, 256, 0), attachment.expect(64, 64, 0)
    assert attachment.expect(0, 256, 0) is first and first.tensor("float32") is first.tensor("float32")
    mine.memory[64:68] = b"\0\0\x80\x3f"
    assert [float(first.tensor("float32")[16]), float(other.tensor("float32")[0])] == [1.0, 1.0]
    # No more than so many are remembered.
    assert attachment.expect(128, 64, 0) is not attachment.expect(128, 64, 0)
    with pytest.raises(ProtocolError, match="a reference to 64 bytes at 32 of the segment"):
        attachment.expect(32, 64, 0)
    attachment.close()
    with pytest.raises(UnreachableError, match="has no segment of worker/0"):
        attachment.expect(0, 256, 0)


def test_an_attachment_that_closes_while_a_reply_is_placed_keeps_its_place_until_then(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publication, attachment = make(False)

    def offset(bucket: int) -> int:
        # The loop's thread, in between.
        attachment.close()
        return 0

    monkeypatch.setattr(publication, "offset", offset)
    place = attachment.reply_slot(0, 256)
    assert place is not None and place[0] == 0 and len(place[1]) == 256
    assert attachment.reply_slot(0, 256) is None
