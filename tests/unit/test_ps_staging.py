"""Who may bring the next bucket: every schedule ends, and memory stays within the limit and one bucket per stream."""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import dataclass, field

import pytest
import torch

from shardline.consistency.intake import APART, TREE, VOTED_TREE
from shardline.core.contributions import Contributions
from shardline.core.plan import BucketSpec, ShardSpec, Slice
from shardline.core.reduce import Block, cover, nodes, replica_mask, sibling, sums_of
from shardline.core.spec import TensorKind
from shardline.server.staging import (
    Ask,
    AsyncPush,
    Entry,
    Grant,
    Ledger,
    Staging,
    limit_bytes,
)
from tests.support.covering import number_of_schedules

MB = 1_000_000


def shard_of(*sizes: int, kind: TensorKind = TensorKind.PARAM) -> ShardSpec:
    """One float32 slice per bucket; sizes in bytes."""
    pieces = [Slice(tensor=n, first_row=0, rows=1, offset=0, elements=size // 4) for n, size in enumerate(sizes)]
    return ShardSpec(
        buckets=tuple(
            BucketSpec(dtype="float32", kind=kind, elements=piece.elements, slices=(piece,)) for piece in pieces
        )
    )


# What a bucket holds


@pytest.mark.parametrize("replicas", range(1, 9))
def test_partial_sums_are_those_that_contributions_keep(replicas: int) -> None:
    (spec,) = shard_of(64 * 4).buckets
    for mask in range(1, (1 << replicas) - 1):
        sums = Contributions(spec, replicas)
        for replica in range(replicas):
            if mask >> replica & 1:
                sums.add(Block(replica, 1), torch.ones(64), (True,), 0)
        assert sums.mask == mask
        assert sums_of(replicas, mask)[0] == len(sums.partials()) == sums.held_bytes // (64 * 4)


@functools.cache
def explored(mask: int, replicas: int) -> int:
    """Most sums on any way on which each next block is the lowest that lacks or finds its sibling."""
    everything = (1 << replicas) - 1
    if mask == everything:
        return 0
    most = sums_of(replicas, mask)[0]
    for block in nodes(Block(0, replicas)):
        mine = replica_mask(block)
        if mask & mine:
            continue
        family = sibling(block, replicas)
        merges = family is not None and (replica_mask(family[0]) ^ mine) & ~mask == 0
        if merges or not ~mask & ((1 << block.first) - 1):
            most = max(most, explored(mask | mine, replicas))
    return most


@pytest.mark.parametrize("replicas", range(1, 8))
def test_what_is_set_aside_is_exactly_what_privileged_contributions_can_need(replicas: int) -> None:
    for mask in range((1 << replicas) - 1):
        assert TREE.sums(mask, replicas) == explored(mask, replicas), f"{mask:b}"


@pytest.mark.parametrize(("replicas", "depth"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 3), (63, 5), (64, 6)])
def test_an_empty_bucket_needs_the_depth_of_the_tree(replicas: int, depth: int) -> None:
    assert TREE.sums(0, replicas) == depth
    assert VOTED_TREE.sums(0, replicas) == max(1, depth)
    assert limit_bytes([shard_of(400, 800)], replicas, TREE, 0) == depth * 1200


def test_the_limit_is_never_below_what_can_be_promised_to_end() -> None:
    shards = [shard_of(2 * MB, 4 * MB), shard_of(2 * MB)]
    spare = 64 << 20
    for replicas, floor in ((1, 0), (2, 8 * MB), (4, 16 * MB)):
        assert limit_bytes(shards, replicas, TREE) == floor + spare
        assert limit_bytes(shards, replicas, TREE, MB) == max(floor, MB)
        assert limit_bytes(shards, replicas, TREE, 99 * MB) == 99 * MB
    assert limit_bytes([shard_of(400 * MB)], 1, TREE) == 800 * MB
    assert limit_bytes(shards, 1, APART) == spare
    assert limit_bytes([shard_of(400 * MB)], 1, APART) == 800 * MB
    assert limit_bytes(shards, 1, APART, 5) == 5
    assert limit_bytes([shard_of(400, kind=TensorKind.FROZEN)], 8, VOTED_TREE, 0) == 0


# Random schedules


@dataclass
class Stream:
    """Brings one block's buckets, each in an order of its own."""

    worker: int
    block: Block
    weight: float
    step: int = 0
    left: list[int] = field(default_factory=list)
    receiving: tuple[int, Entry] | None = None
    received: list[tuple[int, Entry]] = field(default_factory=list)
    counted: list[Entry] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        there = [entry for _, entry in self.received] + ([self.receiving[1]] if self.receiving else [])
        return there + self.counted

    @property
    def idle(self) -> bool:
        return not self.left and not self.entries()


class World:
    """Workers, streams and buckets; one random action after another until all steps are done."""

    STEPS = 3

    def __init__(self, chance: random.Random, *, privileges: bool = True, deaths: bool = True) -> None:
        self.chance = chance
        self.replicas = chance.randint(1, 9)
        self.sizes = [chance.choice([1, 1, 2, 5]) * 64 for _ in range(chance.randint(1, 5))]
        self.open_step = [0] * len(self.sizes)
        self.masks = [0] * len(self.sizes)
        self.deaths = chance.randint(0, 3) if deaths else 0
        spec = shard_of(*self.sizes)
        limit = limit_bytes([spec], self.replicas, TREE, 0) + chance.choice([0, 0, 64, 200, 700])
        sizes = {(0, number): size for number, size in enumerate(self.sizes)}
        kind = Ledger if privileges else Unprivileged
        self.ledger = kind(limit, sizes, self.replicas, intake=TREE, view=self.view)
        workers = chance.randint(1, self.replicas)
        owners = [chance.randrange(workers) for _ in range(self.replicas)]
        self.streams = [
            Stream(worker, block, chance.choice([0.05, 1.0, 1.0, 10.0]))
            for worker in range(workers)
            for block in cover([r for r in range(self.replicas) if owners[r] == worker], self.replicas)
        ]
        self.side_by_side = chance.random() < 0.5
        for stream in self.streams:
            self.begin(stream)

    def view(self, shard: int, bucket: int) -> tuple[int, int]:
        assert shard == 0
        return self.open_step[bucket], self.masks[bucket]

    def begin(self, stream: Stream) -> None:
        stream.left = list(range(len(self.sizes)))
        self.chance.shuffle(stream.left)

    def may_ask(self, stream: Stream) -> bool:
        if stream.receiving is not None or not stream.left:
            return False
        before = [s for s in self.streams if s.worker == stream.worker and s.block < stream.block]
        return self.side_by_side or all(s.idle and s.step >= stream.step for s in before)

    def actions(self) -> list[tuple[Stream, str]]:
        found = []
        for stream in self.streams:
            if self.may_ask(stream):
                found.append((stream, "ask"))
            if stream.receiving is not None:
                found.append((stream, "receive"))
            if stream.received:
                found.append((stream, "count"))
            if stream.counted:
                found.append((stream, "free"))
            # Every replica of the next step has pulled all of this one.
            if stream.idle and stream.step + 1 < self.STEPS and min(self.open_step) > stream.step:
                found.append((stream, "next"))
        return found

    def ask(self, stream: Stream) -> Ask:
        bucket = stream.left[0]
        return Ask(0, bucket, stream.block, self.sizes[bucket], stream.step)

    def act(self, stream: Stream, action: str) -> bool:
        """False where the stream has to wait."""
        if action == "ask":
            entry = self.ledger.decide(self.ask(stream))
            if entry.grant is Grant.WAIT:
                return False
            self.ledger.note(entry)
            stream.receiving = (stream.left.pop(0), entry)
        elif action == "receive":
            assert stream.receiving is not None
            stream.received.append(stream.receiving)
            stream.receiving = None
        elif action == "count":
            bucket, entry = stream.received.pop(self.chance.randrange(len(stream.received)))
            self.count(stream, bucket)
            stream.counted.append(entry)
        elif action == "free":
            self.ledger.free(stream.counted.pop())
        else:
            stream.step += 1
            self.begin(stream)
        return True

    def count(self, stream: Stream, bucket: int) -> None:
        mine = replica_mask(stream.block)
        if stream.step != self.open_step[bucket] or self.masks[bucket] & mine:
            assert stream.step <= self.open_step[bucket]
            return
        self.masks[bucket] |= mine
        if self.masks[bucket] == (1 << self.replicas) - 1:
            self.open_step[bucket] += 1
            self.masks[bucket] = 0

    def die(self, stream: Stream) -> None:
        """The stream is cut; a replacement brings the whole step again."""
        for entry in stream.entries():
            self.ledger.free(entry)
        stream.receiving, stream.received, stream.counted = None, [], []
        self.begin(stream)

    def check_memory(self) -> None:
        sums = sum(sums_of(self.replicas, m)[0] * size for m, size in zip(self.masks, self.sizes, strict=True))
        slots = beyond = 0
        for stream in self.streams:
            there = [entry for entry in stream.entries() if entry not in stream.counted]
            slots += sum(entry.ask.nbytes for entry in there)
            privileged = [entry.ask.nbytes for entry in stream.entries() if entry.grant is Grant.PRIVILEGED]
            assert len(privileged) <= 1
            beyond += sum(privileged)
        assert sums + slots <= self.ledger.limit + beyond

    @property
    def done(self) -> bool:
        return min(self.open_step) == self.STEPS and all(stream.idle for stream in self.streams)

    def run(self) -> bool:
        """False where nothing could happen any more."""
        while not self.done:
            found = self.actions()
            while found:
                number = self.chance.choices(range(len(found)), [stream.weight for stream, _ in found])[0]
                if self.act(*found.pop(number)):
                    break
            else:
                return False
            if self.deaths and self.chance.random() < 0.02:
                self.deaths -= 1
                self.die(self.chance.choice(self.streams))
            self.check_memory()
        return True


class Unprivileged(Ledger):
    """A plain limit, first come, first served: what the rule is there to avoid."""

    def decide(self, ask: Ask) -> Entry:
        held = sum(entry.ask.nbytes for entry in self.entries)
        for (shard, bucket), size in self._sizes.items():
            seen = self._view(shard, bucket)
            assert seen is not None
            held += sums_of(self._replicas, seen[1])[0] * size
        return Entry(ask, Grant.ROOM if held + ask.nbytes <= self.limit else Grant.WAIT, 0, False)


@number_of_schedules(200, 2000)
def test_every_schedule_ends_and_stays_within_the_limit(schedules: int) -> None:
    for seed in range(schedules):
        assert World(random.Random(seed)).run(), f"schedule {seed} stopped"


def test_without_privileges_some_schedules_stop() -> None:
    stopped = sum(not World(random.Random(seed), privileges=False, deaths=False).run() for seed in range(100))
    assert stopped > 10


# The rule, case by case


def ledger(masks: dict[int, int], *, limit: int, replicas: int = 4, step: int = 0, sizes: int = 3) -> Ledger:
    keys = {(0, number): 100 for number in range(sizes)}
    view = {key: (step, masks.get(key[1], 0)) for key in keys}
    made = Ledger(limit, keys, replicas, intake=TREE, view=lambda shard, bucket: view.get((shard, bucket)))
    made.refresh()
    return made


def granted(rule_: Ledger, bucket: int, first: int, count: int = 1, **more: int) -> Grant:
    entry = rule_.decide(Ask(0, bucket, Block(first, count), 100, more.get("step")))
    if entry.grant is not Grant.WAIT:
        rule_.note(entry)
    return entry.grant


def test_tree_order_is_set_aside_and_out_of_order_needs_room() -> None:
    full = ledger({}, limit=3 * 2 * 100)
    assert granted(full, 0, 0) is Grant.ROOM
    assert granted(full, 0, 2) is Grant.WAIT
    assert granted(ledger({}, limit=700), 0, 2) is Grant.ROOM


def test_a_sibling_and_a_repetition_go_over_the_limit_one_per_stream() -> None:
    full = ledger({0: 0b0001, 1: 0b0100, 2: 0b0010}, limit=600)
    assert granted(full, 0, 1) is Grant.PRIVILEGED
    assert granted(full, 1, 3) is Grant.PRIVILEGED
    # Replica 1 is counted in bucket 2; its stream still holds the slot of bucket 0.
    assert granted(full, 2, 1) is Grant.WAIT
    assert granted(full, 0, 0) is Grant.PRIVILEGED
    assert granted(full, 1, 2, step=7) is Grant.PRIVILEGED


def test_a_block_of_several_replicas_is_judged_by_its_first() -> None:
    full = ledger({0: 0b0011}, limit=600)
    assert granted(full, 0, 2, 2) is Grant.PRIVILEGED
    assert granted(full, 1, 2, 2) is Grant.WAIT
    assert granted(full, 1, 0, 2) is Grant.ROOM


def test_what_holds_nothing_is_never_kept_waiting() -> None:
    full = ledger({}, limit=600)
    assert full.decide(Ask(0, 0, Block(3, 1), 0)).grant is Grant.ROOM


def test_a_codecs_slot_beside_its_decoded_values_is_charged() -> None:
    roomy = ledger({}, limit=650)
    # 100 of the 150 bytes are set aside for the lowest block.
    assert roomy.decide(Ask(0, 0, Block(0, 1), 150)).charge == 50
    assert roomy.decide(Ask(0, 0, Block(2, 1), 30)).grant is Grant.WAIT


def test_whole_pushes_that_do_not_fit_go_one_at_a_time() -> None:
    pushes = Ledger(250, {}, 1, intake=TREE, view=lambda shard, bucket: (0, 0))
    first = pushes.decide(Ask(0, None, Block(0, 1), 300))
    assert first.grant is Grant.PRIVILEGED
    pushes.note(first)
    second = pushes.decide(Ask(0, None, Block(1, 1), 300))
    assert second.grant is Grant.WAIT
    assert pushes.decide(Ask(1, None, Block(1, 1), 200)).grant is Grant.ROOM
    pushes.free(first)
    assert pushes.decide(Ask(0, None, Block(1, 1), 300)).grant is Grant.PRIVILEGED
    assert pushes.reserved == 0


# Asynchronous pushes, bucket by bucket


def pushes_ledger(limit: int) -> Ledger:
    return Ledger(limit, {}, 1, intake=TREE, view=lambda shard, bucket: (0, 0))


class FirstComeFirstServed(Ledger):
    """A plain limit on asynchronous pushes: what the rule is there to avoid."""

    def decide(self, ask: Ask) -> Entry:
        if self.reserved + ask.nbytes <= self.limit:
            return Entry(ask, Grant.ROOM, ask.nbytes, False)
        return Entry(ask, Grant.WAIT if self.entries else Grant.PRIVILEGED, 0, False)


def all_pushes_end(rule_: Ledger, chance: random.Random) -> bool:
    """Workers bring the buckets of three pushes each, in any order; False where nobody can go on."""
    sizes = [chance.choice([1, 2, 5]) * 100 for _ in range(chance.randint(1, 5))]
    left = [[list(sizes) for _ in range(3)] for _ in range(chance.randint(2, 6))]
    open_: dict[int, tuple[AsyncPush, list[Entry]]] = {}
    begun: set[AsyncPush] = set()
    while any(left):
        workers = [worker for worker, pushes in enumerate(left) if pushes]
        chance.shuffle(workers)
        for worker in workers:
            push, entries = open_.setdefault(worker, (AsyncPush(sum(sizes)), []))
            begun.add(push)
            if left[worker][0]:
                entry = rule_.decide(Ask(0, None, Block(worker, 1), left[worker][0][-1], push=push))
                if entry.grant is Grant.WAIT:
                    continue
                rule_.note(entry)
                entries.append(entry)
                left[worker][0].pop()
            else:
                for entry in entries:
                    rule_.free(entry)
                del open_[worker], left[worker][0]
            break
        else:
            return False
        within = [e.ask.nbytes for _, entries in open_.values() for e in entries if e.grant is Grant.ROOM]
        beyond = [e.ask.push for _, entries in open_.values() for e in entries if e.grant is Grant.PRIVILEGED]
        assert sum(within) == rule_.reserved <= rule_.limit and len(set(beyond)) <= 1
    assert rule_.reserved == 0 and not rule_.entries
    assert all(rule_.begins(Ask(0, None, Block(0, 1), 1, push=push)) for push in begun)
    return True


def test_pushes_that_come_bucket_by_bucket_all_end_whatever_their_order() -> None:
    for seed in range(1000):
        chance = random.Random(seed)
        assert all_pushes_end(pushes_ledger(chance.randint(1, 30) * 100), chance), f"schedule {seed} stopped"


def test_first_come_first_served_some_of_them_stop() -> None:
    stopped = 0
    for seed in range(100):
        chance = random.Random(seed)
        view = lambda shard, bucket: (0, 0)  # noqa: E731
        rule_ = FirstComeFirstServed(chance.randint(1, 30) * 100, {}, 1, intake=TREE, view=view)
        stopped += not all_pushes_end(rule_, chance)
    assert stopped > 10


def test_a_push_is_charged_for_what_has_come_of_it_and_no_more() -> None:
    rule_ = pushes_ledger(300)
    slow, quick = AsyncPush(200), AsyncPush(200)
    rule_.note(rule_.decide(Ask(0, None, Block(0, 1), 100, push=slow)))
    assert rule_.reserved == 100
    for _ in range(2):
        entry = rule_.decide(Ask(0, None, Block(1, 1), 100, push=quick))
        assert entry.grant is Grant.ROOM
        rule_.note(entry)
    assert rule_.decide(Ask(0, None, Block(0, 1), 100, push=slow)).grant is Grant.WAIT


def test_the_last_room_goes_to_who_can_end_with_it() -> None:
    rule_ = pushes_ledger(400)
    pushes = [AsyncPush(300), AsyncPush(300)]
    for push in pushes:
        rule_.note(rule_.decide(Ask(0, None, Block(0, 1), 100, push=push)))
    first = rule_.decide(Ask(0, None, Block(0, 1), 100, push=pushes[0]))
    rule_.note(first)
    # 100 are left: the second would take them from the first, and neither could end.
    assert rule_.decide(Ask(0, None, Block(1, 1), 100, push=pushes[1])).grant is Grant.WAIT
    assert rule_.decide(Ask(0, None, Block(0, 1), 100, push=pushes[0])).grant is Grant.ROOM


def test_no_push_begins_while_one_that_has_begun_waits() -> None:
    async def run() -> None:
        staging = Staging()
        staging.configure(pushes_ledger(400), lambda: 0)
        first, second, late = AsyncPush(300), AsyncPush(300), AsyncPush(100)
        held = [await staging.reserve(Ask(0, None, Block(0, 1), 100, push=first), 1.0) for _ in range(2)]
        began = await staging.reserve(Ask(0, None, Block(1, 1), 100, push=second), 1.0)
        waiting = asyncio.create_task(staging.reserve(Ask(0, None, Block(1, 1), 100, push=second), 20.0))
        await asyncio.sleep(0)
        newcomer = asyncio.create_task(staging.reserve(Ask(0, None, Block(2, 1), 100, push=late), 20.0))
        await asyncio.sleep(0)
        assert staging.waiting == 2
        held.append(await staging.reserve(Ask(0, None, Block(0, 1), 100, push=first), 1.0))
        for lease in held:
            lease.release()
        leases = [began, await waiting, await newcomer]
        for lease in leases:
            lease.release()
        assert staging.in_use == 0

    asyncio.run(run())
