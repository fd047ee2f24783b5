"""The cuda lane: as shm, but the memory that both map is a GPU's. The segments that are passed hold its handles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardline.core.plan import ShardSpec
from shardline.core.tensor_bytes import Buffer
from shardline.host import device_memory
from shardline.host.device_memory import HANDLE, DeviceMemory, DeviceMemoryError
from shardline.host.segments import Segment
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_socket import CallSocket
from shardline.lanes.shm.client import Mapped, ShmLane
from shardline.rpc.channel import Peer
from shardline.rpc.messages.data import Attached
from shardline.waist import Memory, Sender


class CudaLane(ShmLane):
    """One shard of a ps on this host whose values are on the GPU of this worker's model.

    device: of the model; None = it has several, or none that memory can be shared of.
    """

    name = "cuda"

    def __init__(
        self, peer: Peer, shard: int, spec: ShardSpec, *, device: torch.device | None, timeout_s: float
    ) -> None:
        super().__init__(peer, shard, spec, timeout_s=timeout_s)
        self._device = device

    @property
    def published(self) -> None:
        """See Lane.published: a pull copies, on the device."""
        return None

    def _opened(self, sender: Sender, pushes: int, timeout_s: float) -> Mapped:
        if self._device is None:
            raise LaneUnavailable(f"{self._peer}: the model is not on one GPU")
        return super()._opened(sender, pushes, timeout_s)

    def _allocate(self, nbytes: int) -> tuple[Memory, Segment]:
        assert self._device is not None
        memory = device_memory.CREATE[self._device.type](nbytes, self._device)
        return memory.tensor, handed(memory)

    def _map(
        self,
        attached: Attached,
        sender: Sender,
        calls: CallSocket,
        gradients: tuple[Memory, Segment],
        areas: Sequence[Segment],
        replies: Segment | None,
    ) -> Mapped:
        assert self._device is not None
        published = [taken(area.memory, self._device).tensor for area in areas]
        last = taken(replies.memory, self._device).tensor if replies is not None else None
        return Mapped(attached, sender, calls, gradients[0], published, last)


def handed(memory: DeviceMemory) -> Segment:
    """A segment with a memory's handle, to be passed to another process. Raises SegmentError."""
    segment = Segment.create(HANDLE.size, name="shardline-handle")
    segment.memory[:] = memory.handle
    return segment


def taken(handle: Buffer, device: torch.device) -> DeviceMemory:
    """The memory that a handle from another process names. Raises SegmentError."""
    if len(handle) != HANDLE.size:
        raise DeviceMemoryError(f"a handle of {len(handle)} bytes; expected {HANDLE.size}")
    return device_memory.ADOPT[device.type](bytes(handle), device)
