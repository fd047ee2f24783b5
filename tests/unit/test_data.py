"""Data order and random numbers are functions of the place alone, and cover the data exactly."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from shardline.data import BatchSource, DataOrder, derive, epoch_order, replica_gradients, seed_everything, to_device
from shardline.errors import JobError
from shardline.job import Job


def make_job(dataset: Any, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": lambda model, batch: model(batch[0]).mean(),
        "dataset": dataset,
        "optimizer": "SGD",
        "batch_size": 2,
        "steps": 10,
    }
    return Job(**{**settings, **changes})


class Noisy(Dataset[torch.Tensor]):
    """Augments every sample from all three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class Counting(IterableDataset[int]):
    """Numbers 0 ... length - 1 plus 100 per epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epochs[-1], 100 * self.epochs[-1] + self.length))


class Shuffling(IterableDataset[int]):
    """A shuffle buffer that draws from the default generator at each sample."""

    def __iter__(self) -> Iterator[int]:
        held = list(range(8))
        for new in range(8, 30):
            place = random.randrange(8)
            yield held[place]
            held[place] = new
        yield from held


def test_derived_seeds_differ_by_place_and_never_change_between_releases() -> None:
    places = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0, 0)]
    seeds = {derive(seed, *place) for seed in (0, 1) for place in places}
    assert len(seeds) == 2 * len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(7, 1, 2, 3) == 7939847786301517798


def test_seed_everything_fixes_all_three_generators() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    seed_everything(2**63 - 1)
    first = draw()
    seed_everything(2**63 - 1)
    assert draw() == first
    seed_everything(1)
    assert draw() != first
    torch.manual_seed(5)
    plain = torch.rand(3)
    seed_everything(5)
    assert torch.equal(torch.rand(3), plain)


def test_epoch_order_is_a_permutation_that_never_changes_between_releases() -> None:
    assert sorted(epoch_order(3, 0, 1000).tolist()) == list(range(1000))
    assert epoch_order(3, 0, 1000).tolist() != epoch_order(3, 1, 1000).tolist()
    assert epoch_order(0, 0, 8).tolist() == [3, 2, 4, 1, 5, 6, 7, 0]


@settings(max_examples=40, deadline=None)
@given(
    replicas=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    batch_size=st.integers(1, 4),
    extra=st.integers(0, 70),
    seed=st.integers(0, 2**62),
)
def test_an_epoch_gives_every_sample_to_at_most_one_replica_and_leaves_less_than_a_step(
    replicas: int, accumulate: int, batch_size: int, extra: int, seed: int
) -> None:
    samples = replicas * accumulate * batch_size + extra
    order = DataOrder(seed=seed, samples=samples, replicas=replicas, accumulate=accumulate, batch_size=batch_size)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = [
            int(index)
            for step in steps
            for replica in range(replicas)
            for microbatch in range(accumulate)
            for index in order.indices(step, replica, microbatch)
        ]
        assert len(set(seen)) == len(seen)
        assert samples - order.step_samples < len(seen) <= samples


def test_all_replicas_batches_joined_are_the_batch_of_one_process() -> None:
    cut = DataOrder(seed=5, samples=100, replicas=3, accumulate=2, batch_size=4)
    whole = DataOrder(seed=5, samples=100, replicas=1, accumulate=1, batch_size=24)
    for step in range(9):
        parts = [cut.indices(step, replica, microbatch) for replica in range(3) for microbatch in range(2)]
        assert np.concatenate(parts).tolist() == whole.indices(step, 0, 0).tolist()


def test_samples_left_out_at_an_epochs_end_are_others_in_the_next() -> None:
    order = DataOrder(seed=0, samples=100, replicas=1, accumulate=1, batch_size=60)
    assert set(order.indices(0, 0, 0).tolist()) != set(order.indices(1, 0, 0).tolist())


def test_too_little_data_for_one_step_is_refused_with_the_numbers() -> None:
    with pytest.raises(JobError, match=r"31 samples; one step needs 32 \(2 replicas x 4 microbatches x batch_size 4"):
        DataOrder(seed=0, samples=31, replicas=2, accumulate=4, batch_size=4)


def test_a_place_the_job_does_not_have_is_refused() -> None:
    order = DataOrder(seed=0, samples=32, replicas=2, accumulate=1, batch_size=4)
    with pytest.raises(ValueError, match="step 0 has no microbatch 0 of replica 2: a step has 2 replicas"):
        order.indices(0, 2, 0)


def test_augmented_samples_depend_on_epoch_and_index_and_not_on_who_fetches_when() -> None:
    job = make_job(Noisy, replicas=2)
    forward, backward = BatchSource(job), BatchSource(job)
    places = [(step, replica) for step in range(12) for replica in range(2)]
    first = {place: forward.batch(*place, 0) for place in places}
    for place in reversed(places):
        torch.rand(3)
        assert torch.equal(backward.batch(*place, 0), first[place])
    by_index = {int(row[0]): row for place in places if place[0] < 10 for row in first[place]}
    again = [row for place in places if place[0] >= 10 for row in first[place]]
    assert all(not torch.equal(row, by_index[int(row[0])]) for row in again)


def test_tensor_data_sets_are_indexed_at_once_with_the_batch_that_collating_gives() -> None:
    data = TensorDataset(torch.arange(60.0).view(30, 2), torch.arange(30))
    for dataset in (data, Subset(data, range(5, 30)), Subset(Subset(data, range(29, -1, -1)), range(3, 25))):
        whole = BatchSource(make_job(dataset, batch_size=5))
        single = BatchSource(make_job([dataset[i] for i in range(len(dataset))], batch_size=5))
        for step in range(9):
            ours, theirs = whole.batch(step, 0, 0), single.batch(step, 0, 0)
            assert type(ours) is type(theirs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 3, 4, 4),
        torch.randn(8, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(8).to(torch.uint16),
        torch.randn(8, 2) > 0,
        torch.randn(8, 0),
        torch.randn(4, 8, 2).transpose(0, 1),
    ],
    ids=["images", "channels-last", "uint16", "bool", "nothing", "turned"],
)
def test_rows_of_a_tensor_keep_its_memory_layout(tensor: torch.Tensor) -> None:
    found = BatchSource(make_job(TensorDataset(tensor), batch_size=4)).batch(0, 0, 0)[0]
    same = tensor[torch.from_numpy(epoch_order(0, 0, 8)[:4].copy())]
    assert torch.equal(found, same)
    assert (found.dtype, found.stride()) == (same.dtype, same.stride())


def test_a_subclass_that_augments_a_tensor_data_set_is_asked_sample_by_sample() -> None:
    class Shifted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return (self.tensors[0][index] + torch.rand(()),)

    batch = BatchSource(make_job(Shifted(torch.zeros(8)))).batch(0, 0, 0)
    assert float(batch[0].min()) > 0


def test_collate_makes_the_batch() -> None:
    source = BatchSource(make_job(list(range(10)), collate=sorted))
    assert source.batch(0, 0, 0) == sorted(epoch_order(0, 0, 10)[:2].tolist())


def test_asynchronous_batches_are_numbered_as_one_replicas_steps() -> None:
    data = TensorDataset(torch.arange(40))
    several = BatchSource(make_job(data, replicas=4, consistency="async"))
    one = BatchSource(make_job(data, replicas=1))
    for number in range(25):
        assert torch.equal(several.batch(number, 0, 0)[0], one.batch(number, 0, 0)[0])


def test_an_iterable_is_dealt_out_in_blocks_and_wraps_into_the_next_pass() -> None:
    sources = [BatchSource(make_job(Counting(7), replicas=2)) for _ in range(2)]
    seen = [sources[replica].batch(step, replica, 0).tolist() for step in range(4) for replica in range(2)]
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 100], [101, 102], [103, 104], [105, 106], [200, 201]]


def test_an_earlier_batch_of_an_iterable_is_found_again_from_its_pass() -> None:
    data = Counting(7)
    source = BatchSource(make_job(data))
    late = source.batch(8, 0, 0)
    assert data.epochs == [0, 1, 2]
    assert source.batch(5, 0, 0).tolist() == [103, 104]
    assert data.epochs == [0, 1, 2, 1]
    assert torch.equal(source.batch(8, 0, 0), late)
    assert source.batch(0, 0, 0).tolist() == [0, 1]
    assert torch.equal(source.batch(8, 0, 0), late)
    assert data.epochs == [0, 1, 2, 1, 2, 0, 2], "a pass whose start is known is entered directly"


def test_an_iterables_own_random_shuffle_is_the_same_for_every_replica() -> None:
    def read(replicas: int) -> list[int]:
        sources = [BatchSource(make_job(Shuffling(), replicas=replicas)) for _ in range(replicas)]
        batches = []
        for step in range(24 // replicas):
            for replica, source in enumerate(sources):
                random.seed(replica + 10 * step)
                batches += source.batch(step, replica, 0).tolist()
        return batches

    assert read(1) == read(2) == read(3)
    assert sorted(read(1)[:30]) == list(range(30))
    assert read(1)[:15] != read(1)[30:45]


def test_a_generator_function_is_called_anew_for_every_pass() -> None:
    source = BatchSource(make_job(lambda: (i for i in range(3))))
    assert [source.batch(step, 0, 0).tolist() for step in (0, 1, 2, 0)] == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_an_iterable_without_samples_is_refused() -> None:
    with pytest.raises(JobError, match="yields nothing in epoch 0; it has no samples"):
        BatchSource(make_job(Counting(0))).batch(0, 0, 0)


def test_an_iterable_that_can_be_read_only_once_is_refused_at_its_second_pass() -> None:
    class Once:
        def __init__(self) -> None:
            self.samples = iter(range(4))

        def __iter__(self) -> Iterator[int]:
            return self.samples

    source = BatchSource(make_job(Once()))
    source.batch(1, 0, 0)
    with pytest.raises(
        JobError, match="yields nothing in epoch 1, although it did before; its __iter__ must start from the beginning"
    ):
        source.batch(2, 0, 0)


def test_an_iterable_whose_pass_changes_length_is_refused_when_read_again() -> None:
    data = Counting(5)
    source = BatchSource(make_job(data))
    source.batch(3, 0, 0)
    data.length = 4
    with pytest.raises(JobError, match="yields 4 samples in epoch 0, where it yielded 5 before"):
        [source.batch(step, 0, 0) for step in (0, 2)]


def test_a_data_set_that_raises_is_named_with_the_sample_and_the_line() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError("no such image")

    with pytest.raises(
        JobError, match=r"dataset\[\d+\] \(of 40\) raised OSError: no such image \(.*test_data.py, line"
    ):
        BatchSource(make_job(Broken())).batch(0, 0, 0)


def test_to_device_follows_containers() -> None:
    Pair = namedtuple("Pair", "x y")
    x = torch.ones(2)
    moved = to_device({"a": [x, (x, "text")], "b": Pair(x, 3)}, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair) and moved["b"].x.is_meta and moved["b"].y == 3


class Encoding(UserDict):
    """As a tokenizer returns it: keys are attributes, and it can move itself."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()})


class Rows(list):
    pass


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    label: str = "seven"


def batches() -> dict[str, tuple[Any, Callable[[Any], torch.Tensor]]]:
    """Batches by class, each with a function that finds its tensor."""
    x = torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([x])
    return {
        "tokenizer": (Encoding(x=x), lambda batch: batch.x),
        "user dict": (UserDict(x=x), lambda batch: batch["x"]),
        "ordered": (OrderedDict(x=x), lambda batch: batch["x"]),
        "with a default": (defaultdict(int, x=x), lambda batch: batch["x"] if batch["y"] == 0 else None),
        "read-only": (MappingProxyType({"x": x}), lambda batch: batch["x"]),
        "list": (Rows([x, 3]), lambda batch: batch[0]),
        "dataclass": (Sample(x), lambda batch: batch.x),
        "packed": (packed, lambda batch: batch.data),
        "nested": ({"a": [Sample(x)]}, lambda batch: batch["a"][0].x),
    }


@pytest.mark.parametrize("case", batches())
def test_a_batch_keeps_its_class_and_is_what_collate_returned_where_nothing_moves(case: str) -> None:
    batch, tensor = batches()[case]
    stays = to_device(batch, torch.device("cpu"))
    assert stays is batch or case == "tokenizer", "its own to() decides"
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert tensor(moved).is_meta and not tensor(batch).is_meta


def test_gradients_are_the_mean_over_microbatches() -> None:
    data = TensorDataset(torch.randn(24, 1))
    model = nn.Linear(1, 1)
    once, parts = make_job(data, batch_size=12), make_job(data, batch_size=3, accumulate=4)
    loss, samples = replica_gradients(model, once, BatchSource(once), 1, 0)
    expected = [p.grad.clone() for p in model.parameters()]
    loss_of_parts, samples_of_parts = replica_gradients(model, parts, BatchSource(parts), 1, 0)
    assert samples == samples_of_parts == 12
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_dropout_depends_on_the_place_and_not_on_what_ran_before() -> None:
    job = make_job(
        TensorDataset(torch.randn(24, 1)), replicas=2, model=lambda: nn.Sequential(nn.Linear(1, 50), nn.Dropout())
    )
    model, source = job.build_model(), BatchSource(job)
    losses = {replica: replica_gradients(model, job, source, 3, replica)[0] for replica in (0, 1)}
    assert {replica: replica_gradients(model, job, BatchSource(job), 3, replica)[0] for replica in (1, 0)} == losses


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, batch: model(batch[0]), r"tensor of shape \(2, 1\); it must be a scalar"),
        (lambda model, batch: 1.0, r"returned float; it must return a scalar tensor"),
        (lambda model, batch: model(batch[0]).detach().mean(), "doesn't depend on the model's parameters"),
        (lambda model, batch: batch["x"], r"in step 0 of replica 0, raised TypeError: .* \(.*test_data.py, line \d+\)"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, sentence: str) -> None:
    job = make_job(TensorDataset(torch.randn(8, 1)), loss=loss)
    with pytest.raises(JobError, match=sentence):
        replica_gradients(nn.Linear(1, 1), job, BatchSource(job), 0, 0)
