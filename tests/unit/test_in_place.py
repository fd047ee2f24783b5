"""Parameters in windows: which of them move there, and how the buckets of one pull come to be seen, whatever way."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch

from shardline.client.layout import ModelLayout
from shardline.client.step.in_place import InPlace, place
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.division import Key
from shardline.host import window
from shardline.host.segments import Segment
from shardline.lanes.base import Lane
from shardline.storage.publication import bucket_offsets

SIZES = (700, 1500, 64, 3000, 10, 900, 5000, 1024, 2000)
"""Elements; pages have 1024."""
PLAN = make_plan(
    tuple(TensorSpec(name=f"t{n}", shape=(size,), dtype="float32") for n, size in enumerate(SIZES)),
    1,
    bucket_bytes=9000,
)
(SHARD,) = PLAN.shards
OFFSETS = bucket_offsets(SHARD)
KEYS = [(0, bucket) for bucket in range(len(SHARD.buckets))]


class Shared(Lane):
    """A lane whose server's areas the test fills. Also what it publishes."""

    by_reference = True
    is_read = False

    def __init__(self) -> None:
        self.theirs = [Segment.create(OFFSETS[-1], name="test-area", read_only=True) for _ in range(2)]
        self.ours = [Segment.adopt(os.dup(one.fd), OFFSETS[-1], private=True) for one in self.theirs]
        self.open = True

    @property
    def published(self) -> Shared | None:  # type: ignore[override]  # no gradients here
        return self if self.open else None

    def area(self, number: int) -> memoryview:
        return self.ours[number].memory

    def publish(self, step: int, key: Key, value: int | None = None) -> memoryview:
        """Where the worker finds a bucket of a step; all its elements are this value, else the step's number."""
        start, end = OFFSETS[key[1]], OFFSETS[key[1]] + SHARD.buckets[key[1]].nbytes
        np.frombuffer(self.theirs[step & 1].memory, np.float32)[start // 4 : end // 4] = (
            step if value is None else value
        )
        return self.area(step & 1)[start:end]


class Pulls:
    """A worker's tensors, and pulls of them."""

    def __init__(self, *, moves: bool = True) -> None:
        self.moves = moves
        """Whether pages are moved, as in large windows, and not copied."""
        self.tensors = {spec.name: torch.full(spec.shape, -1.0) for spec in PLAN.tensors}
        self.lane = Shared()
        self.lanes: Mapping[int, Lane] = {0: self.lane}
        places = place(PLAN, self.tensors, self.lanes)
        self.layout = ModelLayout(PLAN, self.tensors)
        self.memory = InPlace(PLAN, self.layout, self.lanes, places, lends=False)

    def copy(self, step: int, key: Key) -> None:
        """A bucket comes by another lane."""
        self.memory.loaded(key)
        self.layout.load(*key, torch.full((SHARD.buckets[key[1]].elements,), float(step)))

    def values(self, bucket: int) -> set[float]:
        return {float(value) for p in SHARD.buckets[bucket].slices for value in self.layout.tensors[p.tensor].unique()}


@pytest.fixture(params=["moved", "copied"])
def pulls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulls]:
    moves = request.param == "moved"
    if moves:
        monkeypatch.setattr(window, "COPIED_BYTES", 0)
    made = Pulls(moves=moves)
    yield made
    made.memory.release()


def test_the_plan_here_has_buckets_that_share_pages(pulls: Pulls) -> None:
    near = {key: set(pulls.memory.with_neighbours([key])) for key in KEYS}
    assert len(KEYS) > 5 and all(key in found for key, found in near.items())
    assert all(other in near[key] for key in KEYS for other in KEYS if key in near[other])
    assert {(0, 1)} < near[0, 1] < set(KEYS)


@pytest.mark.parametrize("seed", range(8))
def test_a_bucket_is_there_as_soon_as_its_neighbours_are_whatever_the_order(pulls: Pulls, seed: int) -> None:
    order = random.Random(seed)
    places = [tensor.data_ptr() for tensor in pulls.layout.tensors]
    for step in range(1, 6):
        pulls.memory.begin()
        pulls.memory.pulling()
        came: set[Key] = set()
        for key in order.sample(KEYS, len(KEYS)):
            assert pulls.memory.take(key, pulls.lane.publish(step, key)) and pulls.memory.pending
            came.add(key)
            if order.random() < 0.5:
                pulls.memory.show()
                assert not pulls.memory.pending
                for other in KEYS:
                    if came.issuperset(pulls.memory.with_neighbours([other])):
                        assert pulls.values(other[1]) == {step}
                    elif other not in came:
                        assert step not in pulls.values(other[1])
        pulls.memory.settle()
        assert all(pulls.values(bucket) == {step} for _, bucket in KEYS)
        pulls.layout.tensors[seed % 9].fill_(77.0)
    assert places == [tensor.data_ptr() for tensor in pulls.layout.tensors]
    assert len(pulls.memory.shared) == len(SIZES) * pulls.moves


def test_values_are_pending_until_they_are_shown(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads of the user wait for what is pending."""
    seen: list[bool] = []
    show = window.Window.show

    def watched(*args: Any) -> None:
        seen.append(pulls.memory.pending)
        show(*args)

    monkeypatch.setattr(window.Window, "show", watched)
    pulls.memory.begin()
    for key in KEYS:
        pulls.memory.take(key, pulls.lane.publish(1, key))
    pulls.memory.show()
    assert seen == [True]
    assert not pulls.memory.pending


def test_what_read_a_tensor_before_its_values_were_shown_fails_in_backward(pulls: Pulls) -> None:
    tensor = pulls.layout.tensors[0].requires_grad_()
    pulls.memory.begin()
    for key in KEYS:
        pulls.memory.take(key, pulls.lane.publish(1, key))
    early = tensor.square().sum()
    pulls.memory.show()
    late = tensor.square().sum()
    pulls.memory.settle()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()
    late.backward()
    assert tensor.grad is not None and (tensor.grad == 2.0).all()


@pytest.mark.parametrize("seed", range(8))
def test_a_pull_that_comes_in_part_by_another_lane_is_complete_and_private(pulls: Pulls, seed: int) -> None:
    order = random.Random(seed)
    for step in range(1, 9):
        pulls.lane.open = True
        pulls.memory.begin()
        for count, key in enumerate(order.sample(KEYS, len(KEYS))):
            if step % 2 and count >= len(KEYS) // 2:
                # The lane is lost in mid-pull; what its segments have is what came by it.
                pulls.lane.open = False
                pulls.copy(step, key)
            else:
                assert pulls.memory.take(key, pulls.lane.publish(step, key))
            if order.random() < 0.3:
                pulls.memory.show()
        pulls.memory.settle()
        assert all(pulls.values(bucket) == {step} for _, bucket in KEYS)
        assert bool(pulls.memory.shared) == (pulls.moves and step % 2 == 0)
        # Nothing that the server does now is seen: the next values come with a pull.
        for key in KEYS:
            pulls.lane.publish(step + 1, key)
            assert pulls.values(key[1]) == {step}


def test_a_pull_from_two_generations_of_segments_has_what_each_of_them_had(pulls: Pulls) -> None:
    later = Shared()
    pulls.memory.begin()
    for key in KEYS[:4]:
        pulls.memory.take(key, pulls.lane.publish(1, key))
    pulls.memory.show()
    for key in KEYS[4:]:
        pulls.memory.take(key, later.publish(1, key))
    pulls.memory.settle()
    assert all(pulls.values(bucket) == {1} for _, bucket in KEYS)
    pulls.memory.begin()
    for key in KEYS:
        pulls.memory.take(key, later.publish(2, key))
    pulls.memory.settle()
    assert all(pulls.values(bucket) == {2} for _, bucket in KEYS) and bool(pulls.memory.shared) == pulls.moves


def test_what_is_unchanged_is_shown_where_it_will_not_be_overwritten(pulls: Pulls) -> None:
    for step in range(1, 7):
        pulls.memory.begin()
        for key in KEYS:
            if key[1] % 2 and step > 1:
                # As a shard does that skips the bucket: both areas have its values.
                pulls.lane.publish(step, key, value=1)
                pulls.memory.stands(key, step)
            else:
                pulls.memory.take(key, pulls.lane.publish(step, key))
        pulls.memory.settle()
        # The area of the step before is the one that the server writes to next.
        for key in KEYS:
            pulls.lane.publish(step + 1, key, value=55)
        assert all(pulls.values(bucket) == {1 if bucket % 2 else step} for _, bucket in KEYS)
        # A write to what is unchanged is gone all the same.
        for tensor in pulls.layout.tensors:
            tensor.add_(1000.0)


def test_what_is_unchanged_while_the_lane_is_lost_is_kept(pulls: Pulls) -> None:
    pulls.memory.begin()
    for key in KEYS:
        pulls.memory.take(key, pulls.lane.publish(1, key))
    pulls.memory.settle()
    pulls.memory.begin()
    for key in KEYS[:3]:
        pulls.memory.take(key, pulls.lane.publish(2, key))
    pulls.lane.open = False
    for key in KEYS[3:]:
        pulls.memory.stands(key, 2)
    pulls.memory.settle()
    for key in KEYS:
        pulls.lane.publish(3, key)
        pulls.lane.publish(4, key)
    assert [pulls.values(bucket) for _, bucket in KEYS] == [{2.0}] * 3 + [{1.0}] * (len(KEYS) - 3)


def test_after_a_release_nothing_stays_in_shared_memory(pulls: Pulls) -> None:
    pulls.memory.begin()
    for key in KEYS[:-1]:
        pulls.memory.take(key, pulls.lane.publish(1, key))
    pulls.memory.show()
    pulls.memory.release()
    assert not pulls.memory.take(KEYS[-1], pulls.lane.publish(1, KEYS[-1]))
    pulls.copy(1, KEYS[-1])
    pulls.memory.settle()
    for key in KEYS:
        pulls.lane.publish(3, key)
    assert all(pulls.values(bucket) == {1} for _, bucket in KEYS) and not pulls.memory.shared


def test_memory_that_does_not_lie_as_the_window_does_is_left_to_be_copied(pulls: Pulls) -> None:
    other = pulls.lane.publish(1, KEYS[0])
    assert not pulls.memory.take(KEYS[1], other)
    assert not pulls.memory.take(KEYS[0], memoryview(bytearray(other)))
    assert not pulls.memory.take((1, 0), other)


def test_the_next_trainer_of_a_plan_finds_the_tensors_where_they_are(pulls: Pulls) -> None:
    before = {name: tensor.data_ptr() for name, tensor in pulls.tensors.items()}
    # The layout of before refers to the same memory, so they could not move.
    again = place(PLAN, pulls.tensors, pulls.lanes)
    assert set(again.regions) == set(range(len(SIZES)))
    assert {name: tensor.data_ptr() for name, tensor in pulls.tensors.items()} == before
    # Where another plan has them elsewhere they are copied.
    assert not place(make_plan(PLAN.tensors, 2), pulls.tensors, {0: pulls.lane, 1: pulls.lane}).regions
    assert {name: tensor.data_ptr() for name, tensor in pulls.tensors.items()} == before


def alone() -> torch.Tensor:
    return torch.zeros(SIZES[3])


MEMORY = {
    "of torch": (alone, True),
    "a parameter": (lambda: torch.nn.Parameter(alone()), True),
    "of numpy": (lambda: torch.from_numpy(np.zeros(SIZES[3], np.float32)), False),
    "shared with processes": (lambda: alone().share_memory_(), False),
    "part of another": (lambda: torch.zeros(2, SIZES[3])[1], False),
    "strided": (lambda: torch.zeros(SIZES[3], 2)[:, 0], False),
    "of another size": (lambda: torch.zeros(SIZES[3] + 1), False),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_only_memory_that_a_tensor_has_for_itself_moves(kind: str) -> None:
    make, moves = MEMORY[kind]
    tensors = {spec.name: torch.zeros(spec.shape) for spec in PLAN.tensors}
    tensors["t3"] = make()
    assert (3 in place(PLAN, tensors, {0: Shared()}).regions) == moves


def test_a_tensor_with_an_alias_moves_only_when_that_is_gone() -> None:
    tensors = {spec.name: torch.zeros(spec.shape) for spec in PLAN.tensors}
    alias = tensors["t3"].view(-1)
    assert 3 not in place(PLAN, tensors, {0: Shared()}).regions
    tensors["t3"].fill_(3.0)
    assert (alias == 3.0).all()
    del alias
    assert 3 in place(PLAN, tensors, {0: Shared()}).regions
    assert (tensors["t3"] == 3.0).all()


def test_without_shared_memory_or_the_kernel_for_it_no_tensor_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {spec.name: torch.zeros(spec.shape) for spec in PLAN.tensors}
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert not place(PLAN, tensors, {0: cast(Lane, Remote())}).regions

    def unknown(address: int, nbytes: int, advice: int) -> None:
        raise OSError("madvise: Invalid argument")

    monkeypatch.setattr(window, "advise", unknown)
    with caplog.at_level(logging.INFO):
        assert not place(PLAN, tensors, {0: Shared()}).regions
    assert "parameters are copied, not read in place: madvise: Invalid argument" in caplog.text
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == before


class Remote:
    """A lane that shares no memory."""

    by_reference = False


def test_a_torch_that_can_not_tell_who_shares_memory_leaves_tensors_where_they_are(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What tensor_bytes has where torch has no torch._C._storage_Use_Count.
    monkeypatch.setattr("shardline.core.tensor_bytes.count_memory", lambda storage: -1)
    tensors = {spec.name: torch.full(spec.shape, -1.0) for spec in PLAN.tensors}
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    places = place(PLAN, tensors, pulls.lanes)
    assert not places.regions and {name: tensor.data_ptr() for name, tensor in tensors.items()} == before
