"""Parcels of a pipeline as messages: see worker.proto."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from shardline.core.fixed import fixed
from shardline.core.identity import Identity
from shardline.core.parcel import Form, Parcel, ParcelKey, flat, memory_order, unflat
from shardline.core.spec import DTYPES, dtype_name
from shardline.core.tensor_bytes import Buffer, copy_bytes, digest, memory_of, tensor_bytes
from shardline.errors import ProtocolError
from shardline.rpc.limits import (
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_PARCEL_BYTES,
    MAX_PARCEL_TENSORS,
    PARCEL_CHUNK_BYTES,
    at_most,
)
from shardline.rpc.messages.convert import DTYPE_TO_PROTO, dtype_from_proto
from shardline.rpc.messages.fields import to_message
from shardline.rpc.v1 import worker_pb2


@fixed()
class Packed:
    key: ParcelKey
    header: worker_pb2.ParcelHeader
    payloads: Sequence[memoryview]
    """The bytes of its tensors, in order: views of them, as long as they are on the CPU and contiguous."""
    raw_bytes: int
    """Bytes of all tensors, before the codec."""

    @property
    def nbytes(self) -> int:
        return self.header.payload_bytes


def packed(job: str, timeline: int, parcel: Parcel, posting: int = 0) -> Packed:
    """The message of one parcel; its tensors may be on any device. posting: of the orders by which it was computed."""
    key = parcel.key
    tensors: list[worker_pb2.ParcelTensor] = []
    payloads: list[memoryview] = []
    for number, value in enumerate(parcel.values):
        tensor, data = _tensor(value, parcel.form(number), str(key))
        tensor.needs_grad = bool(parcel.needs_grad) and parcel.needs_grad[number]
        tensor.digest = digest(data)
        tensors.append(tensor)
        payloads.append(data)
    header = worker_pb2.ParcelHeader(
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
        payload_bytes=sum(map(len, payloads)),
        posting=posting,
    )
    return Packed(key, header, payloads, parcel.raw_bytes)


def _tensor(value: torch.Tensor, form: Form | None, where: str) -> tuple[worker_pb2.ParcelTensor, memoryview]:
    """The message of one tensor, without its digest, and its bytes."""
    if form is None:
        order, dtype, shape = memory_order(value), dtype_name(value.dtype, where), tuple(value.shape)
        # Each operation of torch between two passes takes ten times as long as in a loop.
        there = value.is_contiguous() and value.device.type == "cpu"
        found, data = worker_pb2.ParcelTensor(), tensor_bytes(value if there else flat(value, order))
    else:
        order, dtype, shape = form.order, form.dtype, form.shape
        found, data = worker_pb2.ParcelTensor(codec=form.codec, encoded_bytes=value.nbytes), tensor_bytes(value)
    found.dtype = DTYPE_TO_PROTO[dtype]
    found.shape.extend(shape)
    if list(order) != sorted(order):
        found.order.extend(order)
    return found, data


def parcel_frames(packed: Packed, who: Identity) -> Iterator[worker_pb2.ParcelFrame]:
    """The frames of one parcel for a call of Deliver by this sender."""
    header: worker_pb2.ParcelHeader | None = to_message(worker_pb2.ParcelHeader, who)
    assert header is not None
    header.MergeFrom(packed.header)
    for data in packed.payloads:
        for start in range(0, len(data), PARCEL_CHUNK_BYTES):
            yield worker_pb2.ParcelFrame(header=header, payload=bytes(data[start : start + PARCEL_CHUNK_BYTES]))
            header = None
    if header is not None:
        yield worker_pb2.ParcelFrame(header=header)


class _TensorReader:
    """The bytes of one tensor of a parcel, as they come."""

    def __init__(self, tensor: worker_pb2.ParcelTensor, where: str) -> None:
        self._where = where
        at_most(len(tensor.shape), MAX_DIMENSIONS, f"{where}: dimensions")
        self._shape = tuple(tensor.shape)
        self._order = tuple(tensor.order) or tuple(range(len(self._shape)))
        if sorted(self._order) != list(range(len(self._shape))):
            raise ProtocolError(f"{where}: order {self._order} of a tensor with {len(self._shape)} dimensions")
        dtype = dtype_from_proto(tensor.dtype, where)
        self._dtype = DTYPES[dtype]
        if tensor.needs_grad and not (self._dtype.is_floating_point or self._dtype.is_complex):
            raise ProtocolError(f"{where}: a gradient is asked for a tensor of {dtype}, which has none")
        self.raw_bytes = raw_bytes = math.prod(self._shape) * self._dtype.itemsize
        """Before the codec: what decoding takes."""
        self.form = Form(tensor.codec, dtype, self._shape, self._order) if tensor.codec else None
        """What has been encoded, if it was."""
        self.nbytes = tensor.encoded_bytes if tensor.codec else raw_bytes
        if self.nbytes > raw_bytes:
            raise ProtocolError(
                f"{where}: {self.nbytes} bytes of codec {tensor.codec[:MAX_NAME]!r} announced for {dtype} "
                f"{self._shape}, which is {raw_bytes} bytes; no codec makes more of it"
            )
        self._digest = tensor.digest
        self._octets = torch.empty(0, dtype=torch.uint8)
        self.came = 0
        """Bytes that have come."""

    def room(self) -> memoryview:
        """Memory for the bytes that are missing; it is taken with the first call."""
        if len(self._octets) != self.nbytes:
            self._octets = torch.empty(self.nbytes, dtype=torch.uint8)
        return memory_of(self._octets)[self.came :]

    def tensor(self) -> torch.Tensor:
        """The tensor, or what a codec has made of it, over its memory, once all its bytes have come."""
        if digest(memory_of(self._octets)) != self._digest:
            raise ProtocolError(f"{self._where}: the digest does not match, so its bytes were changed on their way")
        if self.form is not None:
            return self._octets
        return unflat(self._octets.view(self._dtype), self._shape, self._order)


class ParcelReader:
    """Reads one parcel. Raises ProtocolError for a header or bytes that make none.

    Sizes are checked against dtypes and shapes first; memory is taken by room() and add().
    """

    def __init__(self, header: worker_pb2.ParcelHeader) -> None:
        self.job = header.job
        self.timeline = header.timeline
        self.posting = header.posting
        self.key = ParcelKey(header.step, header.replica, header.stage, header.microbatch, header.back)
        self.sender = Identity(header.task, header.incarnation, header.secret)
        """Of a call of Deliver."""
        at_most(len(header.tensors), MAX_PARCEL_TENSORS, f"{self.key}: tensors")
        at_most(len(header.places), MAX_PARCEL_TENSORS, f"{self.key}: places")
        # A gradient has a place for each tensor; an activation has tensors, and a place is one of them.
        places, tensors = list(header.places), len(header.tensors)
        if self.key.back:
            fits = len(places) == tensors == len(set(places))
        else:
            fits = set(places) == set(range(tensors)) if places else tensors == 1
        if not fits:
            raise ProtocolError(f"{self.key}: places {places} of {tensors} tensors")
        self._readers = [_TensorReader(tensor, str(self.key)) for tensor in header.tensors]
        size = sum(reader.nbytes for reader in self._readers)
        # A few encoded bytes may stand for many.
        raw_bytes = sum(reader.raw_bytes for reader in self._readers)
        if header.payload_bytes != size or raw_bytes > MAX_PARCEL_BYTES:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in header.tensors)
            decoded = f", {raw_bytes} decoded" if raw_bytes != size else ""
            raise ProtocolError(
                f"{self.key}: {header.payload_bytes} bytes announced for shapes {shapes}, which take {size}{decoded}; "
                f"the limit is {MAX_PARCEL_BYTES}"
            )
        self.nbytes = size
        """Bytes that follow the header."""
        self.codecs = {reader.form.codec for reader in self._readers if reader.form is not None}
        """What has encoded some of it."""
        self._header = header
        self._open = deque(reader for reader in self._readers if reader.nbytes)

    def room(self) -> memoryview:
        """Where the next bytes belong; empty once all have come."""
        return self._open[0].room() if self._open else memoryview(b"")

    def filled(self, nbytes: int) -> None:
        """Note that the first bytes of room() have come."""
        self._open[0].came += nbytes
        if self._open[0].came == self._open[0].nbytes:
            self._open.popleft()

    def add(self, payload: Buffer) -> None:
        left = memoryview(payload)
        while len(left):
            room = self.room()[: len(left)]
            if not len(room):
                raise ProtocolError(f"{self.key}: more than the announced {self.nbytes} bytes")
            copy_bytes(room, left[: len(room)])
            self.filled(len(room))
            left = left[len(room) :]

    def parcel(self) -> Parcel:
        if self._open:
            came = sum(reader.came for reader in self._readers)
            raise ProtocolError(f"{self.key}: {came} bytes of {self.nbytes} came; nothing was kept")
        return Parcel(
            self.key,
            tuple(reader.tensor() for reader in self._readers),
            needs_grad=() if self.key.back else tuple(tensor.needs_grad for tensor in self._header.tensors),
            places=tuple(self._header.places),
            random_state=self._header.random_state,
            forms=tuple(reader.form for reader in self._readers) if self.codecs else (),
        )
