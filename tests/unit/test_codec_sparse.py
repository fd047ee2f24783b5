"""The codec of entries that are not zero, for gradients and as exact changes of parameters."""

from __future__ import annotations

import struct

import pytest
import torch

from shardline.codecs import CODECS
from shardline.codecs.base import PLAIN_TURN, MemoryKey, Turn
from shardline.codecs.coding import BucketCoding, Coding
from shardline.codecs.delta import Delta
from shardline.core.plan import make_plan
from shardline.core.spec import DTYPES
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import ProtocolError
from tests.support.cluster import Cluster
from tests.support.codecs import first, model, spec
from tests.support.jobs import Rich, make_job

ROWS, COLUMNS = 400, 100


def embedding() -> BucketCoding:
    return Coding(CODECS.parse("sparse"), make_plan([spec("embedding", (ROWS, COLUMNS))], 1)).bucket(0, 0)


def payload_of(bucket: BucketCoding, values: torch.Tensor) -> bytes:
    return bytes(bucket.coder.encode(values, PLAIN_TURN))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_pattern_of_bits_comes_back(dtype: str) -> None:
    bucket = first(CODECS.parse("sparse"), model(dtype))
    elements, generator = bucket.layout.bucket.elements, torch.Generator().manual_seed(1)
    size = DTYPES[dtype].itemsize
    patterns = torch.randint(0, 256, (elements * size,), generator=generator, dtype=torch.uint8).view(elements, size)
    inside = torch.zeros(elements, dtype=torch.bool)
    for piece in bucket.layout.bucket.slices:
        inside[piece.offset : piece.end] = True
    for share in (0.0, 0.01, 0.3, 1.0):
        chosen = inside & (torch.rand(elements, generator=generator) < share)
        values = torch.where(chosen[:, None], patterns, 0).reshape(-1).view(DTYPES[dtype])
        values[1], values[2] = -0.0, float("nan")
        payload = payload_of(bucket, values)
        assert len(payload) <= bucket.max_bytes <= bucket.layout.bucket.nbytes
        back = bucket.coder.decode(payload, PLAIN_TURN)
        assert bytes(tensor_bytes(back)) == bytes(tensor_bytes(values))


def test_an_embedding_takes_the_bytes_of_the_rows_that_were_used() -> None:
    bucket, used = embedding(), [3, 77, 300, 399]
    values = torch.zeros(ROWS, COLUMNS)
    values[used] = torch.randn(len(used), COLUMNS, generator=torch.Generator().manual_seed(1))
    assert len(payload_of(bucket, values.reshape(-1))) == 4 + 5 + len(used) * COLUMNS * (2 + 4)
    # Of as many as half of all entries the bitmap is shorter; beyond 31 of 32 the entries themselves.
    half = torch.where(torch.arange(ROWS * COLUMNS) % 2 == 0, 1.0, 0.0)
    assert len(payload_of(bucket, half)) == 4 + 5 + ROWS * COLUMNS * (2 + 1 / 8)
    assert len(payload_of(bucket, torch.ones(ROWS * COLUMNS))) == 4 * ROWS * COLUMNS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "of 40000 entries"),
        (lambda data: data + b"\x00", "of 40000 entries"),
        (lambda data: struct.pack("<I", 40_001) + data[4:], "40001 of 40000 entries"),
        (lambda data: data[:4] + b"\x07" + data[5:], "form 7"),
        (lambda data: data[:7] + b"\x00\x00" + data[9:], "not 3 ascending"),
        (lambda data: data[:9] + b"\xff\xff" + data[11:], "not 3 ascending"),
        (lambda data: b"", "0 bytes have no count"),
    ],
)
def test_what_no_encoder_makes_is_refused(change: object, message: str) -> None:
    codec, bucket = CODECS.parse("sparse"), embedding()
    (part,) = bucket.layout.parts(codec.scope)
    values = torch.zeros(ROWS * COLUMNS)
    values[[5, 6, 7]] = 1.0
    data = payload_of(bucket, values)[4:]
    with pytest.raises(ProtocolError, match=message):
        codec.decode_part(memoryview(change(data)), part)  # type: ignore[attr-defined, operator]


@pytest.mark.parametrize("by", ["sparse", "lossless"])
def test_exact_changes_leave_no_error_and_need_no_refresh(by: str) -> None:
    codec, memory, held = Delta(by=by), dict[MemoryKey, torch.Tensor](), dict[MemoryKey, torch.Tensor]()
    assert not codec.memory.reset_every
    bucket = Coding(codec, make_plan([spec("embedding", (ROWS, COLUMNS))], 1)).bucket(0, 0)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS * COLUMNS, generator=generator)
    sizes = []
    for step in range(250):
        turn = Turn(step, receiver="worker/0", base=step - 1 if step else None, changed=step, memory=memory)
        payload = bytearray(bucket.coder.encode(values, turn))
        found = bucket.coder.decode(payload, Turn(step, memory=held))
        assert bytes(tensor_bytes(found)) == bytes(tensor_bytes(values))
        sizes.append(len(payload))
        values = values.clone()
        at = torch.randint(0, len(values), (40,), generator=generator)
        values[at] += 1e-3 * torch.randn(40, generator=generator)
        values[at[0]] = -0.0
    assert sizes[0] == bucket.layout.bucket.nbytes and max(sizes[1:]) < sizes[0] / 20


def test_the_union_of_sparse_pushes_comes_down_and_the_bits_stay_those_of_raw() -> None:
    ends, pulled = [], []
    for down in ("raw", "delta:by=sparse"):
        job = make_job("sgd", replicas=2, steps=12, codec_up="topk:ratio=0.01", codec_down=down, checkpoint_every=5)
        with Cluster(job, ps=2, lane="tcp") as cluster:
            worker, *_ = cluster.train([[0, 1]])
            ends.append(cluster.state().params)
            pulled.append(worker.trainer.meter.total[3])
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert pulled[1] < pulled[0]


@pytest.mark.parametrize("by", ["sparse", "lossless"])
def test_exact_changes_of_every_dtype_come_down_to_the_bit(by: str) -> None:
    ends = []
    for down in ("raw", f"delta:by={by}"):
        job = make_job("adam", model=Rich, replicas=2, steps=4, codec_down=down)
        with Cluster(job, ps=2, lane="tcp") as cluster:
            cluster.train([[0], [1]])
            ends.append(cluster.state().params)
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
