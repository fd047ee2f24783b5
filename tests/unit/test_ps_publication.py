"""The memory of a shard's published values: one flat area per parity, laid out by the plan alone."""

from __future__ import annotations

import asyncio
import mmap

import pytest
import torch

from shardline.core.gradients import Gradient
from shardline.core.plan import Plan, ShardSpec, make_plan
from shardline.core.reduce import Block
from shardline.core.spec import DTYPES, ConsistencySpec, ScheduleSpec, TensorKind, TensorSpec
from shardline.host.segments import FIRST_BYTES
from shardline.storage.publication import PlainPublication, bucket_offsets, view_of
from shardline.update import rule
from shardline_ps.shard.shard import Shard, ShardSettings
from shardline_ps.store import ParameterStore, PsConfiguration
from tests.support.builders import make_settings
from tests.support.pushes import configure

TENSORS = (
    TensorSpec(name="w", shape=(301, 257), dtype="float32"),
    TensorSpec(name="half", shape=(33,), dtype="bfloat16"),
    TensorSpec(name="frozen", shape=(7,), dtype="float64", kind=TensorKind.FROZEN),
    TensorSpec(name="mask", shape=(5,), dtype="bool", kind=TensorKind.BUFFER),
    TensorSpec(name="nothing", shape=(0, 3), dtype="complex64", kind=TensorKind.BUFFER),
    TensorSpec(name="count", shape=(), dtype="int64", kind=TensorKind.BUFFER),
)


def plan() -> Plan:
    return make_plan(TENSORS, 1, bucket_bytes=150_000)


class Mapped:
    """Both areas in one anonymous mapping, as a segment has them."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec, self.offsets = spec, bucket_offsets(spec)
        self.memory = mmap.mmap(-1, 2 * self.nbytes)
        self.areas = [
            torch.frombuffer(self.memory, dtype=torch.uint8)[n * self.nbytes :][: self.nbytes] for n in (0, 1)
        ]
        self.asked: set[tuple[int, int]] = set()

    def tensor(self, which: int, bucket: int) -> torch.Tensor:
        self.asked.add((which, bucket))
        return view_of(self.areas[which], self.spec.buckets[bucket], self.offsets[bucket])

    def offset(self, bucket: int) -> int:
        return self.offsets[bucket]

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]


def settings(mode: str = "sync") -> ShardSettings:
    momentum = rule("SGD", ({"lr": 0.5, "momentum": 0.5},))
    return make_settings(plan(), rule=momentum, consistency=ConsistencySpec(mode=mode))


def train(shard: Shard) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for bucket in shard.buckets:
        shard.initialize(bucket.number, torch.ones(bucket.spec.elements).to(bucket.values.dtype))
    for step in range(3):
        for bucket in shard.buckets:
            present = (bucket.spec.kind is not TensorKind.FROZEN,) * len(bucket.spec.slices)
            values = torch.randn(bucket.spec.elements, generator=generator).to(bucket.values.dtype)
            shard.contribute(bucket.number, step, Block(0, 1), Gradient(values if present[0] else None, present))
    return [bucket.values.clone() for bucket in shard.buckets]


def test_buckets_lie_one_after_another_aligned_to_cache_lines() -> None:
    spec = plan().shards[0]
    area = PlainPublication(spec, torch.device("cpu"))
    end = FIRST_BYTES
    for number, bucket in enumerate(spec.buckets):
        assert area.offset(number) % 64 == 0 and end <= area.offset(number) < end + 64
        end = area.offset(number) + bucket.nbytes
        for which in (0, 1):
            values = area.tensor(which, number)
            assert (values.dtype, values.numel()) == (DTYPES[bucket.dtype], bucket.elements)
            assert not values.any()
            begin = area.tensor(which, 0).data_ptr() - FIRST_BYTES
            assert values.numel() == 0 or values.data_ptr() == begin + area.offset(number)
    assert end <= area.nbytes < end + 64


def test_a_shard_trains_in_the_memory_that_it_is_given_and_gets_the_same_bits() -> None:
    spec = plan().shards[0]
    memory = Mapped(spec)
    shard = Shard(0, settings(), publication=memory)
    values = train(shard)
    for number, (mine, plain) in enumerate(zip(values, train(Shard(0, settings())), strict=True)):
        assert torch.equal(mine, plain)
        assert torch.equal(memory.tensor(3 & 1, number), plain) or spec.buckets[number].kind is TensorKind.FROZEN


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_frozen_and_asynchronous_buckets_use_the_first_area_only(mode: str) -> None:
    spec = plan().shards[0]
    memory = Mapped(spec)
    Shard(0, settings(mode), publication=memory)
    second = {number for which, number in memory.asked if which == 1}
    moving = {number for number, bucket in enumerate(spec.buckets) if bucket.kind is not TensorKind.FROZEN}
    assert second == (moving if mode == "sync" else set())
    assert {number for which, number in memory.asked if which == 0} == set(range(len(spec.buckets)))


def test_configure_takes_its_memory_from_the_store() -> None:
    store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
    made: list[tuple[Mapped, bool]] = []

    def make(spec: ShardSpec, sync: bool) -> Mapped:
        made.append((Mapped(spec), sync))
        return made[-1][0]

    store.make_publication = make
    configuration = PsConfiguration(
        job="job",
        timeline=1,
        plan=plan(),
        shards=(0,),
        rule=rule("SGD", ({"lr": 0.5},)),
        schedule=ScheduleSpec(),
        consistency=ConsistencySpec(),
        replicas=1,
        cut_every=0,
        codec="raw",
    )
    loop = asyncio.new_event_loop()
    try:
        assert configure(store, configuration, loop)
        ((memory, sync),) = made
        assert sync and store.shards[0].publication is memory
    finally:
        loop.close()
        store.close()
