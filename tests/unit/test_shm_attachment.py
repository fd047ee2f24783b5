"""A worker's segments at the server: what is there when the worker hears that it may push."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.host import segments
from shardline.host.segments import Segment
from shardline.lanes.attachments import Holder
from shardline.lanes.call_server import CallServer
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
