"""Parcels of a pipeline as messages: see worker.proto."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardline.core.spec import DTYPES, dtype_name
from shardline.core.tensor_bytes import digest, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.rpc.limits import MAX_DIMENSIONS, MAX_PARCEL_BYTES, PARCEL_CHUNK_BYTES, at_most
from shardline.rpc.messages.convert import DTYPE_TO_PROTO, dtype_from_proto
from shardline.rpc.v1 import worker_pb2


def parcel_frames(job: str, timeline: int, parcel: Parcel) -> Iterator[worker_pb2.ParcelFrame]:
    """The frames of one parcel; its tensor may be on any device."""
    values = parcel.values.detach().cpu()
    order = _order(values)
    flat = values.permute(order).contiguous()
    data = tensor_bytes(flat.reshape(-1))
    key = parcel.key
    header: worker_pb2.ParcelHeader | None = worker_pb2.ParcelHeader(
        job=job,
        timeline=timeline,
        step=key.step,
        replica=key.replica,
        stage=key.stage,
        microbatch=key.microbatch,
        back=key.back,
        needs_grad=parcel.needs_grad,
        dtype=DTYPE_TO_PROTO[dtype_name(values.dtype, str(key))],
        shape=values.shape,
        order=order if order != sorted(order) else (),
        random_state=parcel.random_state,
        payload_bytes=len(data),
        digest=digest(data),
    )
    for start in range(0, max(1, len(data)), PARCEL_CHUNK_BYTES):
        yield worker_pb2.ParcelFrame(header=header, payload=bytes(data[start : start + PARCEL_CHUNK_BYTES]))
        header = None


def _order(values: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest, so that the receiver's kernels see the same memory layout."""
    strides = values.stride()
    return sorted(range(values.dim()), key=lambda number: -strides[number])


class ParcelReader:
    """Reads the frames of one parcel. Raises ProtocolError for frames that don't make one."""

    def __init__(self, header: worker_pb2.ParcelHeader) -> None:
        self.job = header.job
        self.timeline = header.timeline
        self.key = ParcelKey(header.step, header.replica, header.stage, header.microbatch, header.back)
        at_most(len(header.shape), MAX_DIMENSIONS, f"{self.key}: dimensions")
        self._shape = tuple(header.shape)
        self._order = tuple(header.order) or tuple(range(len(self._shape)))
        if sorted(self._order) != list(range(len(self._shape))):
            raise ProtocolError(f"{self.key}: order {self._order} of a tensor with {len(self._shape)} dimensions")
        self._dtype = dtype_from_proto(header.dtype, str(self.key))
        size = math.prod(self._shape) * DTYPES[self._dtype].itemsize
        if header.payload_bytes != size or size > MAX_PARCEL_BYTES:
            raise ProtocolError(
                f"{self.key}: {header.payload_bytes} bytes announced for shape {self._shape} of {self._dtype}; the "
                f"limit is {MAX_PARCEL_BYTES}"
            )
        self._memory = bytearray()
        self._header = header

    def add(self, payload: bytes) -> None:
        """Append the bytes of a frame."""
        if len(self._memory) + len(payload) > self._header.payload_bytes:
            raise ProtocolError(f"{self.key}: more than the announced {self._header.payload_bytes} bytes")
        self._memory += payload

    def parcel(self) -> Parcel:
        """The parcel, once all its frames have come."""
        if len(self._memory) != self._header.payload_bytes:
            raise ProtocolError(
                f"{self.key}: {len(self._memory)} bytes of {self._header.payload_bytes} came; nothing was kept"
            )
        if digest(self._memory) != self._header.digest:
            raise ProtocolError(f"{self.key}: the digest does not match, so its bytes were changed on their way")
        shape = [self._shape[number] for number in self._order]
        values = tensor_from_bytes(self._memory, self._dtype).reshape(shape)
        back = [self._order.index(number) for number in range(len(shape))]
        return Parcel(self.key, values.permute(back), self._header.needs_grad, self._header.random_state)
