"""Parcels of a pipeline as messages: see worker.proto."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shardline.core.spec import DTYPES, dtype_name
from shardline.core.tensor_bytes import digest, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.rpc.limits import MAX_DIMENSIONS, MAX_PARCEL_BYTES, MAX_PARCEL_TENSORS, PARCEL_CHUNK_BYTES, at_most
from shardline.rpc.messages.convert import DTYPE_TO_PROTO, dtype_from_proto
from shardline.rpc.v1 import worker_pb2


def parcel_frames(job: str, timeline: int, parcel: Parcel) -> Iterator[worker_pb2.ParcelFrame]:
    """The frames of one parcel; its tensors may be on any device."""
    key = parcel.key
    tensors: list[worker_pb2.ParcelTensor] = []
    parts: list[memoryview] = []
    for number, value in enumerate(parcel.values):
        values = value.detach().cpu()
        order = _order(values)
        data = tensor_bytes(values.permute(order).contiguous().reshape(-1))
        tensors.append(
            worker_pb2.ParcelTensor(
                dtype=DTYPE_TO_PROTO[dtype_name(values.dtype, str(key))],
                shape=values.shape,
                order=order if order != sorted(order) else (),
                needs_grad=bool(parcel.needs_grad) and parcel.needs_grad[number],
                digest=digest(data),
            )
        )
        parts += [data[start : start + PARCEL_CHUNK_BYTES] for start in range(0, len(data), PARCEL_CHUNK_BYTES)]
    header: worker_pb2.ParcelHeader | None = worker_pb2.ParcelHeader(
        job=job,
        timeline=timeline,
        step=key.step,
        replica=key.replica,
        stage=key.stage,
        microbatch=key.microbatch,
        back=key.back,
        places=parcel.places,
        random_state=parcel.random_state,
        tensors=tensors,
        payload_bytes=sum(map(len, parts)),
    )
    for part in parts or [memoryview(b"")]:
        yield worker_pb2.ParcelFrame(header=header, payload=bytes(part))
        header = None


def _order(values: torch.Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest, so that the receiver's kernels see the same memory layout."""
    strides = values.stride()
    return sorted(range(values.dim()), key=lambda number: -strides[number])


class _TensorReader:
    """The bytes of one tensor of a parcel, as they come."""

    def __init__(self, tensor: worker_pb2.ParcelTensor, where: str) -> None:
        self._where = where
        at_most(len(tensor.shape), MAX_DIMENSIONS, f"{where}: dimensions")
        self._shape = tuple(tensor.shape)
        self._order = tuple(tensor.order) or tuple(range(len(self._shape)))
        if sorted(self._order) != list(range(len(self._shape))):
            raise ProtocolError(f"{where}: order {self._order} of a tensor with {len(self._shape)} dimensions")
        self._dtype = dtype_from_proto(tensor.dtype, where)
        self.nbytes = math.prod(self._shape) * DTYPES[self._dtype].itemsize
        self._digest = tensor.digest
        self._memory = bytearray()

    @property
    def missing(self) -> int:
        """Bytes that are still to come."""
        return self.nbytes - len(self._memory)

    def add(self, payload: memoryview) -> None:
        """Append bytes, no more than are missing."""
        self._memory += payload

    def tensor(self) -> torch.Tensor:
        """The tensor, once all its bytes have come."""
        if digest(self._memory) != self._digest:
            raise ProtocolError(f"{self._where}: the digest does not match, so its bytes were changed on their way")
        shape = [self._shape[number] for number in self._order]
        values = tensor_from_bytes(self._memory, self._dtype).reshape(shape)
        return values.permute([self._order.index(number) for number in range(len(shape))])


class ParcelReader:
    """Reads the frames of one parcel. Raises ProtocolError for frames that don't make one."""

    def __init__(self, header: worker_pb2.ParcelHeader) -> None:
        self.job = header.job
        self.timeline = header.timeline
        self.key = ParcelKey(header.step, header.replica, header.stage, header.microbatch, header.back)
        at_most(len(header.tensors), MAX_PARCEL_TENSORS, f"{self.key}: tensors")
        at_most(len(header.places), MAX_PARCEL_TENSORS, f"{self.key}: places")
        self._check_places(header)
        self._readers = [_TensorReader(tensor, str(self.key)) for tensor in header.tensors]
        size = sum(reader.nbytes for reader in self._readers)
        if header.payload_bytes != size or size > MAX_PARCEL_BYTES:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in header.tensors)
            raise ProtocolError(
                f"{self.key}: {header.payload_bytes} bytes announced for shapes {shapes}, which take {size}; the limit "
                f"is {MAX_PARCEL_BYTES}"
            )
        self._header = header
        self._at = 0

    def _check_places(self, header: worker_pb2.ParcelHeader) -> None:
        """A gradient has a place for each tensor; an activation has tensors, and a place is one of them."""
        places, tensors = list(header.places), len(header.tensors)
        if self.key.back:
            fits = len(places) == tensors == len(set(places))
        else:
            fits = set(places) == set(range(tensors)) if places else tensors == 1
        if not fits:
            raise ProtocolError(f"{self.key}: places {places} of {tensors} tensors")

    def add(self, payload: bytes) -> None:
        """Append the bytes of a frame."""
        left = memoryview(payload)
        while left:
            while self._at < len(self._readers) and not self._readers[self._at].missing:
                self._at += 1
            if self._at == len(self._readers):
                raise ProtocolError(f"{self.key}: more than the announced {self._header.payload_bytes} bytes")
            reader = self._readers[self._at]
            part = left[: reader.missing]
            reader.add(part)
            left = left[len(part) :]

    def parcel(self) -> Parcel:
        """The parcel, once all its frames have come."""
        missing = sum(reader.missing for reader in self._readers)
        if missing:
            size = self._header.payload_bytes
            raise ProtocolError(f"{self.key}: {size - missing} bytes of {size} came; nothing was kept")
        return Parcel(
            self.key,
            tuple(reader.tensor() for reader in self._readers),
            needs_grad=() if self.key.back else tuple(tensor.needs_grad for tensor in self._header.tensors),
            places=tuple(self._header.places),
            random_state=self._header.random_state,
        )
