"""Who waits for room: woken, told, cancelled, and never left holding anything."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shardline.consistency.intake import TREE
from shardline.core.reduce import Block, sums_of
from shardline.server.staging import Ask, Ledger, Staging, StagingLease


def full_staging(masks: dict[int, int]) -> tuple[Staging, dict[tuple[int, int], tuple[int, int]]]:
    """Two replicas, two buckets of 100 bytes, no room but for tree order."""
    view = {(0, number): (0, masks.get(number, 0)) for number in range(2)}
    staging = Staging()
    made = Ledger(200, dict.fromkeys(view, 100), 2, intake=TREE, view=lambda shard, bucket: view.get((shard, bucket)))
    held = lambda: sum(100 * sums_of(2, mask)[0] for _, mask in view.values())  # noqa: E731
    staging.configure(made, held)
    return staging, view


def test_a_contribution_waits_until_the_lower_one_is_counted() -> None:
    async def run() -> None:
        staging, view = full_staging({})
        waits: list[float] = []
        staging.on_wait = waits.append
        waiting = asyncio.create_task(staging.reserve(Ask(0, 0, Block(1, 1), 100, step=0), 10.0))
        await asyncio.sleep(0)
        lease = await staging.reserve(Ask(0, 0, Block(0, 1), 100, step=0), 10.0)
        assert (staging.in_use, staging.waiting, waiting.done()) == (100, 1, False)
        view[0, 0] = (0, 0b01)
        lease.release()
        lease.release()
        other = await waiting
        # Both the sum of replica 0 and the slot.
        assert (staging.in_use, staging.peak, staging.waiting) == (200, 200, 0)
        view[0, 0] = (1, 0)
        other.release()
        assert staging.in_use == 0 and len(waits) == 1

    asyncio.run(run())


def test_a_change_in_another_thread_wakes_who_waits() -> None:
    async def run() -> None:
        staging, view = full_staging({})
        waiting = asyncio.create_task(staging.reserve(Ask(0, 0, Block(1, 1), 100), 10.0))
        await asyncio.sleep(0)
        assert staging.waiting == 1

        def count() -> None:
            view[0, 0] = (0, 0b01)
            staging.changed()

        thread = threading.Thread(target=count)
        thread.start()
        lease = await asyncio.wait_for(waiting, 10.0)
        thread.join(10.0)
        releasing = threading.Thread(target=lease.release)
        releasing.start()
        releasing.join(10.0)
        for _ in range(100):
            if staging.in_use == 100:
                break
            await asyncio.sleep(0.01)
        assert staging.in_use == 100

    asyncio.run(run())


def test_who_waits_too_long_is_told_and_holds_nothing() -> None:
    async def run() -> None:
        staging, _ = full_staging({})
        with pytest.raises(TimeoutError, match=r"shard 0, bucket 1, replicas 1: no room for 100 bytes after 0\.0 s"):
            await staging.reserve(Ask(0, 1, Block(1, 1), 100), 0.01)
        assert (staging.waiting, staging.in_use) == (0, 0)
        with await staging.reserve(Ask(0, 1, Block(0, 1), 100), 0.01):
            assert staging.in_use == 100
        assert staging.in_use == 0

    asyncio.run(run())


def test_a_cancelled_wait_leaves_nothing_behind_even_where_it_was_just_granted() -> None:
    async def run() -> None:
        for grant_first in (False, True):
            staging, view = full_staging({})
            waiting = asyncio.create_task(staging.reserve(Ask(0, 0, Block(1, 1), 100), 10.0))
            await asyncio.sleep(0)
            if grant_first:
                view[0, 0] = (0, 0b01)
                staging.changed()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert staging.waiting == 0
            assert staging.in_use == (100 if grant_first else 0)  # the sum of replica 0, and no slot

    asyncio.run(run())


def test_a_lease_of_before_a_new_configuration_ends_without_harm() -> None:
    async def run() -> None:
        staging, _ = full_staging({})
        lease = await staging.reserve(Ask(0, 0, Block(0, 1), 100), 1.0)
        waiting = asyncio.create_task(staging.reserve(Ask(0, 0, Block(1, 1), 100), 10.0))
        await asyncio.sleep(0)
        staging.configure(Ledger(500, {}, 1, intake=TREE, view=lambda shard, bucket: None), lambda: 0)
        late = await waiting
        assert isinstance(late, StagingLease) and staging.in_use == 200
        lease.release()
        late.release()
        assert (staging.in_use, staging.limit) == (0, 500)

    asyncio.run(run())
