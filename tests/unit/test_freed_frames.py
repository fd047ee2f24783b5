"""What ended a call holds nothing that the call worked on: an old shard must be free before a new one is made."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, cast

import pytest

from shardline.core.image import BucketImage
from shardline.errors import ProtocolError, UnreachableError
from shardline.server.calls import OpenCalls, all_ended
from shardline.server.conversation import PushPullTalk, Replies
from shardline_ps.standby.record_log import RecordLog


class Shard:
    """Stands for what a call works on."""


async def fails(call: Coroutine[Any, Any, None]) -> bool:
    """Whether the call ends with UnreachableError; nothing of it is kept."""
    try:
        await call
    except UnreachableError:
        return True
    return False


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_error_of_a_task_that_is_waited_for() -> None:
    async def run() -> weakref.ref[Shard]:
        shard = Shard()
        ref = weakref.ref(shard)

        async def apply(held: Shard) -> None:
            raise UnreachableError(f"{held} is gone")

        async def call(held: Shard) -> None:
            await all_ended([asyncio.create_task(apply(held))])

        assert await fails(call(shard))
        return ref

    assert asyncio.run(run())() is None


def test_an_answer_that_waited_for_a_standby_whose_history_ended() -> None:
    async def run() -> weakref.ref[Shard]:
        shard = Shard()
        ref = weakref.ref(shard)
        log = RecordLog(on_entry=lambda: None, run=lambda release: None)
        log.restart(1)
        assert log.image(1, 0, BucketImage(shard=0, bucket=0, step=0, version=0, tensors={}))

        async def answer(held: Shard) -> None:
            await log.passed()
            raise AssertionError(f"{held} was answered for")

        asyncio.get_running_loop().call_soon(log.abandon)
        assert await fails(answer(shard))
        return ref

    assert asyncio.run(run())() is None


def test_an_error_that_nobody_took_from_a_conversation() -> None:
    async def run() -> weakref.ref[Shard]:
        shard = Shard()
        ref = weakref.ref(shard)

        async def requests(held: Shard) -> AsyncIterator[Any]:
            error = ProtocolError(f"{held} is not here")
            raise error
            yield

        nothing = cast(Any, None)
        replies = Replies()
        talk = PushPullTalk(nothing, nothing, replies, OpenCalls().enter(), lambda result: None)
        await talk.run(requests(shard))
        assert isinstance(await replies.get(), ProtocolError)
        return ref

    assert asyncio.run(run())() is None
