"""A replica's samples and random numbers: pure functions of (seed, epoch, step, replica, microbatch).

So neither a restart nor the number of machines changes the result. PROTOCOL 1.4.3.

    source = BatchSource(job)
    batch = source.batch(step=7, replica=1, microbatch=0)

A step uses G = replicas x accumulate x batch_size samples. Replicas have neighbouring blocks of batch_size samples, so
that all replicas' batches of a step, joined, are the batch of one process with batch size G.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import hashlib
import operator
import random
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset, default_collate

from shardline.errors import JobError, calling

Batch = Any
"""Result of a job's collate; only its loss function knows the type."""


def derive(seed: int, *numbers: int) -> int:
    """A seed in [0, 2^63) for one place of the job, such as (step, replica, microbatch).

    BLAKE2b over the numbers, so that neighbouring places get unrelated seeds, and places of different kinds ((epoch,
    index) and (step, replica, microbatch)) never share one.
    """
    packed = struct.pack(f"<{1 + len(numbers)}q", seed, *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_everything(value: int) -> None:
    """Seed the default generators of torch (CUDA's too, once CUDA is in use), numpy and random; value in [0, 2^63)."""
    # torch.manual_seed formats a stack trace per call while CUDA is not initialised (80 us); this runs per sample.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """Order of the samples in an epoch: a permutation of range(samples), int64, read-only.

    Computed by stable sorting of PCG64's raw numbers: numpy guarantees a bit generator's raw stream across versions,
    but not its own shuffles.
    """
    keys = np.random.PCG64(derive(seed, epoch)).random_raw(samples)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


class DataSource(Protocol):
    """The part of a job that is used here; see shardline.job.Job."""

    @property
    def seed(self) -> int:
        """Seed of all random numbers."""

    @property
    def samples(self) -> int:
        """Length of a map-style data set; 0 if it is iterable."""

    @property
    def batch_size(self) -> int:
        """Samples of one microbatch."""

    @property
    def accumulate(self) -> int:
        """Microbatches of one replica and step."""

    @property
    def contributors(self) -> int:
        """Number of replicas whose gradients make one update."""

    @property
    def codec_parcels(self) -> object:
        """Codec of activations and their gradients between stages, as text; "" = they travel as they are."""

    @property
    def collate(self) -> Callable[[list[Any]], Batch] | None:
        """Makes a batch of a list of samples; None = torch's default_collate."""

    @property
    def data(self) -> Any:
        """The data set."""

    @property
    def loss(self) -> Callable[[nn.Module, Batch], torch.Tensor]:
        """Mean loss of a batch, a scalar."""

    def data_order(self) -> DataOrder:
        """The samples of each place."""

    def one_pass(self) -> Iterable[Any]:
        """One pass over an iterable data set."""


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Which indices of a map-style data set each (step, replica, microbatch) takes.

    Every epoch is another permutation; samples at its end that don't fill a whole step are left out (others in each
    epoch). In asynchronous mode replicas is 1 and `step` is the number of the batch. Raises JobError if the data set is
    too small for one step.
    """

    seed: int
    samples: int
    replicas: int
    accumulate: int
    batch_size: int

    def __post_init__(self) -> None:
        if self.samples < self.step_samples:
            raise JobError(
                f"the data set has {self.samples} samples; one step needs {self.step_samples} ({self.replicas} "
                f"replicas x {self.accumulate} microbatches x batch_size {self.batch_size}); lower batch_size, "
                "replicas or accumulate, or add data"
            )

    @property
    def step_samples(self) -> int:
        """Number of samples of all replicas in a step."""
        return self.replicas * self.accumulate * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole steps in one pass over the data."""
        return self.samples // self.step_samples

    def epoch(self, step: int) -> int:
        """Epoch of a step, from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int, replica: int, microbatch: int) -> npt.NDArray[np.int64]:
        """Indices into the data set of one microbatch: int64, shape (batch_size,)."""
        order = epoch_order(self.seed, self.epoch(step), self.samples)
        block = block_number(
            step % self.steps_per_epoch, replica, microbatch, replicas=self.replicas, accumulate=self.accumulate
        )
        return order[block * self.batch_size : (block + 1) * self.batch_size]


def block_number(step: int, replica: int, microbatch: int, *, replicas: int, accumulate: int) -> int:
    """Position of a microbatch among all of the job's: by step, then replica, then microbatch.

    Raises ValueError for a place that the job doesn't have.
    """
    if not (step >= 0 and 0 <= replica < replicas and 0 <= microbatch < accumulate):
        raise ValueError(
            f"step {step} has no microbatch {microbatch} of replica {replica}: a step has {replicas} replicas x "
            f"{accumulate} microbatches"
        )
    return (step * replicas + replica) * accumulate + microbatch


class Ahead(Protocol):
    """Reads batches ahead, in other processes."""

    def batch(self, place: tuple[int, int, int], end: int | None) -> Batch:
        """The batch for (step, replica, microbatch). end: first step that won't be computed here, if known."""


class BatchSource:
    """A job's batches by place, for the tasks that run its replicas. Not thread-safe; reseeds the global generators.

    Map-style data: any place at any time. The generators are seeded with (seed, epoch, index) before dataset[index], so
    that random augmentation doesn't depend on the process that reads a sample. A torch TensorDataset (or a Subset of
    one) with the default collate is indexed with a whole batch at once.

    Iterable data: one endless stream, pass after pass; a batch may span two. The generators are seeded with (seed,
    pass, position) before each sample, and `set_epoch(pass)` is called before each pass if the data set has it. Every
    replica also reads the samples of the others; going back means reading a pass from its start.
    """

    def __init__(
        self,
        job: DataSource,
        took: Callable[[float], None] = lambda seconds: None,
        *,
        ahead: Ahead | None = None,
        end: Callable[[], int | None] = lambda: None,
    ) -> None:
        """took: called with the seconds that each batch took to come. ahead: processes that read them. end: first step
        that won't be computed here, if known.
        """
        self._took = took
        self._ahead = ahead
        self._end = end
        self._source: _Indexed | _Tensors | _Streamed
        collate = job.collate or default_collate
        if not job.samples:
            self._source = _Streamed(job, collate)
            return
        order = job.data_order()
        tensors = None if job.collate else _plain_tensors(job.data)
        self._source = _Indexed(order, job.data, collate) if tensors is None else _Tensors(order, *tensors)

    @property
    def ordered(self) -> bool:
        """Whether batches have to be read in the order of the data, because going back takes long."""
        return isinstance(self._source, _Streamed)

    @property
    def at_once(self) -> bool:
        """True if a batch is rows of tensors, taken without a call of the user's code."""
        return isinstance(self._source, _Tensors)

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        """The collated batch_size samples of one microbatch, on the data set's device.

        In asynchronous mode `step` is the number of the batch and replica is 0. Raises JobError for an iterable that
        yields nothing, or a data set that raises, naming the sample; ValueError for a place that the job doesn't have.
        """
        began_s = time.monotonic()
        if self._ahead is not None:
            batch = self._ahead.batch((step, replica, microbatch), self._end())
        else:
            batch = self._source.batch(step, replica, microbatch)
        self._took(time.monotonic() - began_s)
        return batch


@dataclass(frozen=True)
class _Indexed:
    """Batches of a map-style data set, sample by sample."""

    order: DataOrder
    data: Any
    collate: Callable[[list[Any]], Batch]

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        epoch = self.order.epoch(step)
        samples = [self._sample(epoch, int(i)) for i in self.order.indices(step, replica, microbatch)]
        with calling("collate(samples)"):
            return self.collate(samples)

    def _sample(self, epoch: int, index: int) -> Any:
        seed_everything(derive(self.order.seed, epoch, index))
        with calling(f"dataset[{index}] (of {self.order.samples})"):
            return self.data[index]


@dataclass(frozen=True)
class _Tensors:
    """Batches of a TensorDataset, or of Subsets of one, taken from its tensors at once."""

    order: DataOrder
    tensors: tuple[torch.Tensor, ...]
    rows: npt.NDArray[np.int64] | None
    """Row of the tensors by index of the data set; None if they are equal."""

    def batch(self, step: int, replica: int, microbatch: int) -> list[torch.Tensor]:
        indices = self.order.indices(step, replica, microbatch)
        rows = torch.from_numpy(indices.copy() if self.rows is None else self.rows[indices])
        return [_rows_of(tensor, rows.to(tensor.device)) for tensor in self.tensors]


def _rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """tensor[rows], in its memory layout. Rows that are contiguous are copied whole, in a fifth of the time."""
    return tensor.index_select(0, rows) if tensor.dim() > 1 and tensor.is_contiguous() else tensor[rows]


def _plain_tensors(data: Any) -> tuple[tuple[torch.Tensor, ...], npt.NDArray[np.int64] | None] | None:
    """(tensors, rows) if the data is just rows of tensors; None for data that is read sample by sample."""
    rows: npt.NDArray[np.int64] | None = None
    while isinstance(data, Subset) and type(data).__getitem__ is Subset.__getitem__:
        outer = np.asarray(data.indices, dtype=np.int64)
        rows = outer if rows is None else outer[rows]
        data = data.dataset
    if isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__:
        return tuple(data.tensors), rows
    return None


_END = object()


class _Streamed:
    """Batches of an iterable data set: block k is samples [k * batch_size, (k + 1) * batch_size) of its stream.

    starts[e] is the position in the stream of the first sample of pass e, for all passes read so far: it allows finding
    an earlier batch without reading from the very first pass.
    """

    def __init__(self, job: DataSource, collate: Callable[[list[Any]], Batch]) -> None:
        self._job = job
        self._collate = collate
        self._starts = [0]
        self._epoch = 0
        self._next = 0
        self._samples: Iterator[Any] | None = None

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        job = self._job
        block = block_number(step, replica, microbatch, replicas=job.contributors, accumulate=job.accumulate)
        first = block * job.batch_size
        known = bisect.bisect_right(self._starts, first) - 1
        if self._samples is None or first < self._next or known > self._epoch:
            self._open(known)
        while self._next < first:
            self._read()
        samples = [self._read() for _ in range(job.batch_size)]
        with calling("collate(samples)"):
            return self._collate(samples)

    def _open(self, epoch: int) -> None:
        self._epoch, self._next = epoch, self._starts[epoch]
        seed_everything(derive(self._job.seed, epoch))
        data = self._job.one_pass()
        if hasattr(data, "set_epoch"):
            with calling(f"set_epoch({epoch}) of the data set"):
                data.set_epoch(epoch)
        with calling("iter(dataset)"):
            self._samples = iter(data)

    def _read(self) -> Any:
        assert self._samples is not None
        while True:
            position = self._next - self._starts[self._epoch]
            # Before every sample, including those of other replicas: a shuffle buffer inside the iterable draws for
            # each of them.
            seed_everything(derive(self._job.seed, self._epoch, position))
            with calling(f"the iterable data set, at sample {position} of epoch {self._epoch},"):
                sample = next(self._samples, _END)
            if sample is not _END:
                self._next += 1
                return sample
            self._turn(position)

    def _turn(self, length: int) -> None:
        """Begin the next pass after one of `length` samples."""
        epoch = self._epoch
        if length == 0:
            raise JobError(
                f"the iterable data set yields nothing in epoch {epoch}"
                + (
                    ", although it did before; its __iter__ must start from the beginning each time"
                    if epoch
                    else "; it has no samples"
                )
            )
        if epoch + 1 == len(self._starts):
            self._starts.append(self._next)
        elif self._starts[epoch + 1] != self._next:
            before = self._starts[epoch + 1] - self._starts[epoch]
            raise JobError(
                f"the iterable data set yields {length} samples in epoch {epoch}, where it yielded {before} before; "
                "its samples may depend only on set_epoch and the seeded random generators"
            )
        self._open(epoch + 1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in it on `device`; the same object if nothing in it has to move.

    Followed are lists, tuples, mappings and dataclasses of any class, which stay what they are. Everything else that
    has a method to() is moved by it, such as a tokenizer's batch or a graph.
    """
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        items = [to_device(value, device) for value in batch]
        if all(map(operator.is_, items, batch)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Not replace(), which would run __post_init__ again; frozen ones refuse setattr().
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        same = all(getattr(moved, field.name) is getattr(batch, field.name) for field in dataclasses.fields(batch))
        return batch if same else moved
    return batch


def _with_items(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same class with these items, which have its keys."""
    if all(items[key] is value for key, value in batch.items()):
        return batch
    if type(batch) is dict:
        return items
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update(items)
        return moved
    return type(batch)(items)  # type: ignore[call-arg]  # as most mappings can be made


class Watch:
    """Callbacks while a replica's gradients are computed. This one does nothing."""

    def unread(self) -> AbstractContextManager[None]:
        """Context manager around code that goes through the model's parameters and reads no values."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Context manager around every call of the job's loss."""
        return nullcontext()

    def backward(self, loss: Callable[[], float], samples: int) -> None:
        """Called right before the last backward pass. loss: the replica's mean loss (waits for a GPU)."""


UNWATCHED = Watch()


def replica_gradients(
    model: nn.Module, job: DataSource, source: BatchSource, step: int, replica: int, watch: Watch = UNWATCHED
) -> tuple[float, int]:
    """Compute one replica's gradients of one step into the parameters' .grad; returns (mean loss, number of samples).

    .grad is the mean over the microbatches; None if a parameter took no part. The forward passes change the model's
    buffers. In asynchronous mode `step` is the number of the batch and replica is 0. The worker, the training chief and
    shardline.testing.reference all compute through this function. The loss may be NaN: handling it is up to the caller.
    Raises JobError if the job's loss or its backward pass raises, or it isn't a scalar that depends on the parameters.
    """
    with watch.unread():
        model.zero_grad(set_to_none=True)
        device = next(model.parameters()).device
    samples = job.batch_size * job.accumulate
    total = 0.0
    for microbatch in range(job.accumulate):
        batch = source.batch(step, replica, microbatch)
        with calling(f"moving a batch to {device}"):
            batch = to_device(batch, device)
        # After reading the batch, which uses the same generators.
        seed_everything(derive(job.seed, step, replica, microbatch))
        with calling(f"loss(model, batch), in step {step} of replica {replica},"), watch.forward():
            found = job.loss(model, batch)
        loss = checked_loss(found)
        if microbatch == job.accumulate - 1:
            watch.backward(functools.partial(_mean, total, loss, job.accumulate), samples)
        with calling(f"backward(), in step {step} of replica {replica},"):
            (loss / job.accumulate).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total / job.accumulate, samples


def _mean(total: float, last: torch.Tensor, count: int) -> float:
    return (total + float(last.detach())) / count


def checked_loss(found: Any) -> torch.Tensor:
    """The loss in what loss(model, batch) returned: that itself, or the "loss" of a mapping or an output of a model.

    Raises JobError unless it is a real scalar tensor that depends on the parameters.
    """
    if isinstance(found, Mapping) and "loss" not in found:
        raise JobError(f'loss(model, batch) returned a mapping without "loss"; it has {", ".join(map(repr, found))}')
    loss = found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)
    if not isinstance(loss, torch.Tensor):
        raise JobError(f"loss(model, batch) returned {type(loss).__name__}; it must return a scalar tensor")
    if loss.numel() != 1:
        raise JobError(
            f"loss(model, batch) returned a tensor of shape {tuple(loss.shape)}; it must be a scalar, the mean over "
            "the batch: call .mean() on it"
        )
    if loss.is_complex():
        raise JobError(
            f"loss(model, batch) returned a tensor of dtype {loss.dtype}; it must be real: return its .abs() or .real"
        )
    if not loss.requires_grad:
        raise JobError(
            "loss(model, batch) doesn't depend on the model's parameters (no gradient flows); compute it from "
            "model(...), outside of torch.no_grad()"
        )
    return loss
