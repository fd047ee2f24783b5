"""The whole contents of one bucket as a value: copied by a cut, stored in a checkpoint, restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

VALUE = "value"
"""Name of the parameters themselves among a bucket's tensors; the others are optimizer states."""


def origin(replica: int) -> str:
    """Who makes updates in a pipeline whose replicas don't wait for each other: by this, not by worker, they count."""
    return f"replica/{replica}"


def replica_of(task: str) -> int:
    """The replica of an origin(); -1 for anybody else."""
    role, _, number = task.partition("/")
    return int(number) if role == "replica" else -1


@dataclass(frozen=True)
class WorkerSequence:
    """Asynchronous mode: the last push of an incarnation of a worker that a shard has applied. See also origin()."""

    incarnation: int
    last_seq: int


@dataclass(frozen=True, kw_only=True)
class BucketImage:
    """A bucket at one step.

    tensors: VALUE and each optimizer state ("exp_avg"), all flat CPU tensors in the bucket's layout, padding included.
    A state may have another dtype than the values, never another length. Whole-tensor rules with states of other shapes
    store them flat in a layout of their own (see shardline.update).
    scalars: per-tensor states ("step"), one number per slice of the bucket.
    initialized: per slice, whether its optimizer state exists yet.
    """

    shard: int
    bucket: int
    step: int
    version: int
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    initialized: tuple[bool, ...] = ()
    counted: tuple[int, ...] = ()
    """By replica: its steps up to here, where each contribution is an update. It does not travel with the image."""

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())
