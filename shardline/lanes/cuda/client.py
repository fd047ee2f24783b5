"""The cuda lane: as shm, but the memory that both map is a GPU's. The segments that are passed hold its handles."""

from __future__ import annotations

import torch

from shardline.core.plan import ShardSpec
from shardline.core.tensor_bytes import Buffer
from shardline.host.device_memory import HANDLE, KINDS, DeviceMemory, DeviceMemoryError
from shardline.host.segments import Segment
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.shm.client import Mapped, ShmLane
from shardline.rpc.channel import Peer
from shardline.waist import Memory, Sender


class CudaLane(ShmLane):
    """One shard of a ps on this host whose values are on the GPU of this worker's model.

    device: of the model; None = it is on several.
    """

    name = "cuda"

    def __init__(
        self, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None, timeout_s: float
    ) -> None:
        super().__init__(peer, shard, spec, timeout_s=timeout_s)
        self._device = device or torch.device("cpu")

    @property
    def published(self) -> None:
        """See Lane.published: a pull copies, on the device."""
        return None

    def _opened(self, sender: Sender, pushes: int, timeout_s: float) -> Mapped:
        if self._device.type not in KINDS:
            raise LaneUnavailable(f"{self._peer}: the model is not on one GPU")
        return super()._opened(sender, pushes, timeout_s)

    def _allocate(self, nbytes: int) -> tuple[Memory, Segment]:
        memory = allocated(nbytes, self._device)
        return memory.tensor, handed(memory)

    def _memory(self, segment: Segment) -> Memory:
        return taken(segment.memory, self._device).tensor


def allocated(nbytes: int, device: torch.device) -> DeviceMemory:
    """New memory of a device. Raises SegmentError."""
    return KINDS[device.type].create(nbytes, device)


def handed(memory: DeviceMemory) -> Segment:
    """A segment with a memory's handle, to be passed to another process. Raises SegmentError."""
    segment = Segment.create(HANDLE.size, name="shardline-handle")
    segment.memory[:] = memory.handle
    return segment


def taken(handle: Buffer, device: torch.device) -> DeviceMemory:
    """The memory that a handle from another process names. Raises SegmentError."""
    if len(handle) != HANDLE.size:
        raise DeviceMemoryError(f"a handle of {len(handle)} bytes; expected {HANDLE.size}")
    return KINDS[device.type].adopt(bytes(handle), device)
