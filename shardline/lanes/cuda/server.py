"""The server half of lane cuda: the shard's values and each worker's gradients are in memory of one GPU.

A worker can write to what the shard publishes, since CUDA can't share memory for reading alone, and could name more
memory than it has: it has the shard's token, and runs as the same user.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from shardline.core.plan import ShardSpec
from shardline.host.device_memory import HANDLE
from shardline.host.segments import Segment, SegmentError
from shardline.lanes.attachments import Hosted
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.cuda.client import allocated, handed, taken
from shardline.lanes.shm.server import SegmentPublication, ShmAttachment, ShmOffer
from shardline.storage.publication import PlainPublication, Publication
from shardline.waist import Memory

log = logging.getLogger("shardline.lanes")


class DevicePublication(SegmentPublication):
    """Published parameters in one or two allocations of a device that others can map; see Publication."""

    def __init__(self, spec: ShardSpec, *, keeps_previous: bool, device: torch.device) -> None:
        self.device = device
        super().__init__(spec, keeps_previous=keeps_previous)

    def _allocate(self, count: int) -> tuple[list[torch.Tensor], list[Segment]]:
        made = [allocated(self.nbytes, self.device) for _ in range(count)]
        return [memory.tensor for memory in made], [handed(memory) for memory in made]


class CudaAttachment(ShmAttachment):
    """One worker's memory on the shard's device; see attachments.Attachment."""

    lane = "cuda"
    _publication: DevicePublication

    def _adopt(self, fd: int, nbytes: int) -> tuple[Memory, torch.Tensor]:
        if nbytes != HANDLE.size:
            os.close(fd)
            raise SegmentError(f"the worker passed {nbytes} bytes; a handle has {HANDLE.size}")
        handle = bytes(Segment.adopt(fd, nbytes).memory)
        self._check(HANDLE.unpack(handle)[2])
        memory = taken(handle, self._publication.device).tensor
        return memory, memory

    def _allocate(self, nbytes: int) -> tuple[Memory, Segment]:
        memory = allocated(nbytes, self._publication.device)
        return memory.tensor, handed(memory)


class CudaOffer(ShmOffer):
    """Offers lane cuda at one unix socket; see ShmOffer. device: of the shards."""

    lane = "cuda"
    _attachment = CudaAttachment

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(**settings)
        self._device = device

    def publish(self, spec: ShardSpec, *, keeps_previous: bool) -> Publication:
        try:
            return DevicePublication(spec, keeps_previous=keeps_previous, device=self._device)
        except SegmentError as error:
            device = self._device
            log.warning("parameters can't be shared on %s: %s; lane cuda is not available for them", device, error)
            return PlainPublication(spec, device)

    def _shared(self, hosted: Hosted) -> SegmentPublication:
        if not isinstance(hosted.publication, DevicePublication):
            raise LaneUnavailable(f"shard {hosted.shard} is not in shared memory of a GPU on this ps")
        if not hosted.exact:
            raise LaneUnavailable("the job's codec encodes what it carries")
        return hosted.publication
