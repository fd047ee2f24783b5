"""What lossy codecs promise: unbiasedness or contraction, sizes, the same bits wherever a tensor is cut, bad input."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from benchmarks.reproductions.compressors import resnet18
from shardline.codecs import CODECS, JobCodec, keep_whole
from shardline.codecs.base import Direction, Memory, MemoryKey, Part, Scope, Turn
from shardline.codecs.coding import Coding
from shardline.codecs.parts import Lossy
from shardline.codecs.quantizing.onebit_adam import OneBitAdam
from shardline.codecs.quantizing.ternary import TernGrad
from shardline.codecs.sparse.dgc import DGC
from shardline.codecs.sparse.randomk import drawn
from shardline.core.plan import make_plan
from shardline.core.spec import TensorKind
from shardline.errors import JobError, ProtocolError
from tests.support.codecs import choices, spec
from tests.support.covering import covering

LOSSY = [codec for codec in choices() if isinstance(codec, Lossy)]
EACH = pytest.mark.parametrize("codec", LOSSY, ids=str)
UNBIASED = [codec for codec in LOSSY if codec.is_unbiased or isinstance(codec, TernGrad)]
WIDTH = 500
ROWS = 4
SEEDS = 200


def part(rows: int = ROWS, width: int = WIDTH, dtype: str = "float32") -> Part:
    tensor = spec("matrix", (rows, width), dtype)
    return Part(tensor=tensor, first_row=0, offset=0, elements=tensor.elements, piece=0)


def draw(kind: str, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(elements, generator=generator)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: normal,
        "heavy": lambda: normal**5,
        "small": lambda: normal * 1e-30,
        "shifted": lambda: normal + 3.0,
        "constant": lambda: torch.full((elements,), -0.1),
        "single": lambda: 1.0 * (torch.arange(elements) == elements // 2),
        "sparse": lambda: normal * (torch.rand(elements, generator=generator) < 0.01),
    }
    return kinds[kind]()


DRAWS = ["normal", "heavy", "small", "shifted", "constant", "single", "sparse"]


def sent(codec: Lossy, values: torch.Tensor, where: Part, seed: int = 0, step: int = 0) -> torch.Tensor:
    data = codec.encode_part(values, where, Turn(step, 0, seed))
    return codec.decode_part(bytes(data), where)


def of_all_seeds(codec: Lossy, values: torch.Tensor, where: Part) -> torch.Tensor:
    """What is decoded, a row per seed; one row if it doesn't depend on that."""
    probe = draw("normal", where.elements)
    seeds = 1 if torch.equal(sent(codec, probe, where, 0), sent(codec, probe, where, 1)) else SEEDS
    return torch.stack([sent(codec, values, where, seed) for seed in range(seeds)])


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    values, decoded = values.double(), decoded.double()
    return float((decoded - values).square().sum() / values.square().sum())


@EACH
def test_only_large_matrices_of_gradients_are_taken(codec: Lossy) -> None:
    assert codec.direction is Direction.PUSH and codec.scope in (Scope.QUANTUM, Scope.TENSOR)
    # What works on whole tensors depends on where they are cut.
    assert codec.wants_whole((32, 32)) is (codec.scope is Scope.TENSOR)
    assert codec.takes(spec("m", (32, 32))) and codec.takes(spec("conv", (32, 32, 3, 3), "float64"))
    assert not codec.takes(spec("m", (32, 32), kind=TensorKind.BUFFER))
    for shape in ((1 << 20,), (31, 33), (1, 1023), ()):
        # A codec with momentum has to add it to all of them.
        assert codec.takes(spec("m", shape)) is isinstance(codec, DGC | OneBitAdam)


# What the decoded values have to do with the numbers


@pytest.mark.parametrize(("codec", "kind"), covering(LOSSY, DRAWS), ids=str)
def test_the_error_stays_within_the_declared_bound(codec: Lossy, kind: str) -> None:
    where = part()
    values = draw(kind, where.elements)
    bound = codec.error_bound(where.elements)
    errors = torch.tensor([relative_error(values, decoded) for decoded in of_all_seeds(codec, values, where)])
    # Five standard errors of the mean, and the rounding of float32.
    allowed = 5 * float(errors.std(correction=0)) / math.sqrt(len(errors)) + 1e-5
    assert float(errors.mean()) <= bound + allowed
    if codec.memory is not Memory.NONE:
        assert bound <= 1.0 and float(errors.max()) <= 1.0 + 1e-5


@pytest.mark.parametrize(("codec", "kind"), covering(UNBIASED, DRAWS), ids=str)
def test_the_mean_over_seeds_is_what_was_encoded(codec: Lossy, kind: str) -> None:
    where = part()
    values = draw(kind, where.elements).double()
    decoded = of_all_seeds(codec, values.float(), where).double()
    if isinstance(codec, TernGrad) and codec.clip:
        limit = codec.clip * float(values.square().mean().sqrt())
        values = values.clamp(-limit, limit)
    off = decoded.mean(dim=0) - values
    # If it is unbiased, the squared distance of the mean is about the variance over the number of seeds; five standard
    # deviations more are allowed, as for independent normal errors, and the rounding of float32.
    variances = decoded.var(dim=0, correction=0) / max(1, len(decoded) - 1)
    allowed = float(variances.sum()) + 5 * math.sqrt(2 * float(variances.square().sum()))
    assert float(off.square().sum()) <= allowed + 1e-12 * float(values.square().sum())


MEASURED = {
    "ef-sign": lambda x: 1.0 - float(x.abs().sum() ** 2 / (len(x) * x.square().sum())),
    "topk": lambda x: 1.0 - float(x.square().topk(math.ceil(0.01 * len(x))).values.sum() / x.square().sum()),
}
"""Exact relative errors on given numbers."""


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("kind", DRAWS)
def test_some_errors_are_known_exactly(name: str, kind: str) -> None:
    codec, where = CODECS.parse(name), part()
    assert isinstance(codec, Lossy)
    values = draw(kind, where.elements)
    assert relative_error(values, sent(codec, values, where)) == pytest.approx(
        MEASURED[name](values.double()), abs=1e-5
    )


def test_onebit_keeps_the_mean_of_a_part() -> None:
    codec, where = CODECS.parse("onebit"), part()
    assert isinstance(codec, Lossy)
    for kind in ("normal", "heavy", "shifted", "sparse"):
        values = draw(kind, where.elements).double()
        decoded = sent(codec, values.float(), where).double()
        torch.testing.assert_close(decoded.mean(), values.mean(), rtol=1e-6, atol=1e-7)


@EACH
def test_zeros_stay_zeros(codec: Lossy) -> None:
    where = part()
    assert not bool(sent(codec, torch.zeros(where.elements), where).any())


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_float32_can_barely_hold(codec: Lossy, dtype: torch.dtype) -> None:
    where = part(dtype=str(dtype).removeprefix("torch."))
    for scale in (1e-45, 1e-38, 3e38):
        decoded = sent(codec, draw("constant", where.elements).to(dtype) * 10 * scale, where)
        assert decoded.dtype == dtype and (scale > 1.0 or bool(decoded.isfinite().all()))


# Sizes

BITS = {
    "int8": 8 + 32 / 256,
    "int8:stochastic=true": 8 + 32 / 256,
    "int8:block=64": 8 + 32 / 64,
    "qsgd": 8 + 32 / 256,
    "qsgd:levels=7": 4 + 32 / 256,
    "qsgd:levels=5,block=64": 4 + 32 / 64,
    "qsgd:levels=3": 3 + 32 / 256,
    "qsgd:levels=1": 2 + 32 / 256,
    "fp8": 8 + 32 / 256,
    "fp8:kind=e5m2": 8 + 32 / 256,
    "terngrad": 2,
    "twobit": 2,
    "onebit": 1,
    "ef-sign": 1,
    "topk": 0.01 * (32 + 16),
    "topk:ratio=0.05": 0.05 * (32 + 16),
    "topk:ratio=0.25": 0.25 * 32 + 1,
    "randomk": 0.01 * 32,
    "dgc:ratio=0.01": 0.01 * (32 + 16),
    "onebit-adam:warmup=1": 1,
    "powersgd": 2 * (512 + 512) * 32 / 512**2,
    "powersgd:rank=1": (512 + 512) * 32 / 512**2,
}
"""Bits per float32 of a large matrix, as docs/codecs.md has them."""


def test_every_lossy_codec_has_a_size() -> None:
    assert {codec.name for codec in LOSSY} == {text.partition(":")[0] for text in BITS}


@pytest.mark.parametrize("text", BITS)
def test_a_payload_has_the_size_that_is_documented(text: str) -> None:
    codec = CODECS.parse(text)
    plan = make_plan(keep_whole(JobCodec.both(codec), [spec("matrix", (512, 512))]), 1)
    total = 0
    for number, bucket in enumerate(plan.shards[0].buckets):
        encoder = Coding(codec, plan).bucket(0, number).coder
        total += len(encoder.encode(draw("normal", bucket.elements), Turn(1)))
    assert 8 * total / 512**2 == pytest.approx(BITS[text], rel=0.02)


# Cuts


@EACH
def test_the_bits_do_not_depend_on_where_the_plan_cuts(codec: Lossy) -> None:
    shapes = {"large": (700, 300), "small": (50,), "wide": (3, 70_000)}
    tensors = keep_whole(JobCodec.both(codec), [spec(name, shape) for name, shape in shapes.items()])
    whole = {tensor.name: draw("heavy", tensor.elements) for tensor in tensors}
    ends: list[dict[str, torch.Tensor]] = []
    for servers, bucket_bytes in ((1, 1 << 22), (2, 1 << 20), (3, 1 << 16)):
        plan = make_plan(tensors, servers, bucket_bytes=bucket_bytes)
        coding = Coding(codec, plan)
        end = {name: torch.zeros_like(values) for name, values in whole.items()}
        for shard, held in enumerate(plan.shards):
            for number, bucket in enumerate(held.buckets):
                values = torch.zeros(bucket.elements)
                memory: dict[MemoryKey, torch.Tensor] = {}
                places = []
                for piece in bucket.slices:
                    tensor = plan.tensors[piece.tensor]
                    start = piece.first_row * tensor.row_elements
                    places.append((tensor.name, slice(start, start + piece.elements), slice(piece.offset, piece.end)))
                    values[places[-1][2]] = whole[tensor.name][places[-1][1]]
                written = coding.bucket(shard, number)
                for step in range(2):
                    payload = bytes(written.coder.encode(values, Turn(step, 1, 7, memory=memory)))
                back = written.coder.decode(payload, Turn())
                for name, mine, there in places:
                    end[name][mine] = back[there]
        ends.append(end)
    for end in ends[1:]:
        assert all(torch.equal(end[name], ends[0][name]) for name in whole)


# What strangers send


def edited(data: bytes, at: int, form: str, value: float) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


@dataclass(frozen=True)
class Bad:
    """A payload that no encoder makes."""

    codec: str
    change: Callable[[bytes], bytes]
    message: str


HEAD = 5
"""Bytes before the indices of a sparse payload."""


def gaps(count: int, *values: int) -> Callable[[bytes], bytes]:
    """A sparse payload with indices given by their distances."""
    return lambda data: struct.pack(f"<IB{len(values)}H{count}f", count, 0, *values, *(1.0,) * count)


def indices(*values: int) -> Callable[[bytes], bytes]:
    count = len(values)
    return lambda data: struct.pack(f"<IB{count}I{count}f", count, 1, *values, *(1.0,) * count)


BAD = {
    "int8 without a byte": Bad("int8", lambda data: data[:-1], "bytes for 2000 elements; expected 2032"),
    "int8 with a block more": Bad("int8", lambda data: data + bytes(4), "bytes for 2000 elements; expected 2032"),
    "int8 with the scale NaN": Bad("int8", lambda data: edited(data, 4, "<f", math.nan), "a scale is not finite"),
    "int8 with the scale inf": Bad("int8", lambda data: edited(data, 28, "<f", math.inf), "a scale is not finite"),
    "int8 with the scale -1": Bad("int8", lambda data: edited(data, 0, "<f", -1.0), "a scale is negative"),
    "int8 with the code -128": Bad("int8", lambda data: edited(data, 40, "<b", -128), "a code is -128"),
    "qsgd with the norm NaN": Bad("qsgd", lambda data: edited(data, 4, "<f", math.nan), "a scale is not finite"),
    "qsgd with the norm -1": Bad("qsgd", lambda data: edited(data, 4, "<f", -1.0), "a norm is negative"),
    "qsgd with a level too high": Bad("qsgd", lambda data: edited(data, 40, "<B", 255), "a code is above 254"),
    "qsgd with an odd code": Bad("qsgd:levels=1", lambda data: data[:-1] + b"\xff", "a code is above 2"),
    "onebit with the mean NaN": Bad("onebit", lambda data: edited(data, 0, "<f", math.nan), "a scale is not finite"),
    "onebit with swapped means": Bad("onebit", lambda data: data[4:8] + data[:4] + data[8:], "the first is of negat"),
    "onebit too short": Bad("onebit", lambda data: data[:-1], "expected 258"),
    "ef-sign with a negative": Bad("ef-sign", lambda data: edited(data, 0, "<f", -1.0), "magnitude is -1.0"),
    "ef-sign with inf": Bad("ef-sign", lambda data: edited(data, 0, "<f", math.inf), "a scale is not finite"),
    "ef-sign too long": Bad("ef-sign", lambda data: data + b"\x00", "expected 254"),
    "topk without a count": Bad("topk", lambda data: data[:3], "3 bytes have no count"),
    "topk with too many": Bad("topk", gaps(21, *(1,) * 21), "21 of 2000 entries, at most 20"),
    "topk with k beyond the tensor": Bad("topk", lambda data: edited(data, 0, "<I", 1 << 31), "2147483648 of 2000"),
    "topk of an unknown form": Bad("topk", lambda data: edited(data, 4, "<B", 3), "form 3"),
    "topk with an index too high": Bad("topk", gaps(2, 1000, 1000), "not 2 ascending ones within 2000"),
    "topk with a repeated index": Bad("topk", gaps(3, 5, 0, 4), "not 3 ascending ones within 2000"),
    "topk with unsorted indices": Bad("topk", indices(7, 3), "not 2 ascending ones within 2000"),
    "topk with a far index": Bad("topk", indices(0, (1 << 32) - 1), "not 2 ascending ones within 2000"),
    "topk without a value": Bad("topk", lambda data: data[:-4], "20 of 2000 entries"),
    "topk with a bit too few": Bad("topk:ratio=0.25", lambda data: edited(data, HEAD, "<I", 0), "not 500 ascending"),
    "fp8 with the scale NaN": Bad("fp8", lambda data: edited(data, 4, "<f", math.nan), "a scale is not finite"),
    "fp8 with the value NaN": Bad("fp8", lambda data: edited(data, 40, "<B", 0x7F), "a value is not finite"),
    "fp8 with the value inf": Bad("fp8:kind=e5m2", lambda data: edited(data, 40, "<B", 0x7C), "a value is not finite"),
    "fp8 with a scale too few": Bad("fp8", lambda data: data[4:], "expected 2032"),
    "terngrad with the scale NaN": Bad("terngrad", lambda data: edited(data, 0, "<f", math.nan), "is not finite"),
    "terngrad with a fourth code": Bad("terngrad", lambda data: edited(data, 4, "<B", 0xC0), "a code is above 2"),
    "twobit with a negative scale": Bad("twobit", lambda data: edited(data, 0, "<f", -1.0), "the scale is negative"),
    "twobit too short": Bad("twobit", lambda data: data[:-1], "expected 504"),
    "randomk with a value more": Bad("randomk", lambda data: data + bytes(4), "expected 88"),
    "randomk without a seed": Bad("randomk", lambda data: data[:7], "expected 88"),
    "dgc with more than it sends": Bad("dgc", gaps(3, 1, 1, 1), "3 of 2000 entries, at most 2"),
    "dgc with a repeated index": Bad("dgc", gaps(2, 5, 0), "not 2 ascending ones within 2000"),
    "onebit-adam with a value too few": Bad("onebit-adam", lambda data: data[:-4], "expected 8000"),
    "onebit-adam's signs with a byte too many": Bad("onebit-adam", lambda data: data[:259], "expected 8000"),
    "onebit-adam's signs with the mean NaN": Bad(
        "onebit-adam", lambda data: edited(data[:258], 0, "<f", math.nan), "a scale is not finite"
    ),
    "powersgd with a row too few": Bad("powersgd", lambda data: data[:-8], "expected 4032"),
    "powersgd with NaN": Bad("powersgd", lambda data: edited(data, 8, "<f", math.nan), "a factor is not finite"),
    "powersgd with inf": Bad("powersgd", lambda data: edited(data, 400, "<f", math.inf), "a factor is not finite"),
    "powersgd with a long vector": Bad("powersgd", lambda data: edited(data, 8, "<f", 2.0), "orthonormal factor"),
    "a marker that is none": Bad("topk", lambda data: b"\x01", "1 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_payload_that_no_encoder_makes_is_refused(case: str) -> None:
    bad = BAD[case]
    codec, where = CODECS.parse(bad.codec), part()
    assert isinstance(codec, Lossy)
    data = bytes(codec.encode_part(draw("normal", where.elements), where, Turn()))
    codec.decode_part(data, where)
    with pytest.raises(ProtocolError, match=bad.message):
        codec.decode_part(bad.change(data), where)


def test_every_lossy_codec_refuses_something() -> None:
    assert {codec.name for codec in LOSSY} == {bad.codec.partition(":")[0] for bad in BAD.values()}


@pytest.mark.parametrize(
    "text",
    [
        "int8:block=7",
        "int8:block=20000",
        "qsgd:levels=0",
        "qsgd:levels=128",
        "qsgd:block=0",
        "topk:ratio=0",
        "fp8:kind=e3m4",
        "fp8:block=1",
        "terngrad:clip=-1",
        "twobit:threshold=2",
        "twobit:threshold=0",
        "randomk:ratio=1.5",
        "dgc:ratio=0",
        "dgc:momentum=1",
        "dgc:warmup=-1",
        "dgc:clip=-1",
        "powersgd:rank=0",
        "onebit-adam:warmup=0",
        "onebit-adam:momentum=1",
    ],
)
def test_a_setting_out_of_range_is_refused(text: str) -> None:
    name, _, setting = text.partition(":")
    key, _, value = setting.partition("=")
    with pytest.raises(JobError, match=f"codec {name}: {key} is '?{value}.*; give "):
        CODECS.parse(text)


# Top-k of rows that are longer than a part should be


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "single", "sparse", "sorted"])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2])
def test_a_sampled_threshold_finds_about_as_many_and_the_largest(kind: str, ratio: float) -> None:
    codec, where = CODECS.parse(f"topk:ratio={ratio}"), part(1, 200_000)
    assert isinstance(codec, Lossy)
    values = torch.arange(200_000.0) if kind == "sorted" else draw(kind, where.elements)
    data = codec.encode_part(values, where, Turn())
    assert len(data) <= codec.max_part_bytes(where)
    decoded = codec.decode_part(bytes(data), where)
    wanted = min(math.ceil(ratio * where.elements), int(values.count_nonzero()))
    chosen = decoded != 0.0
    assert 0.8 * wanted - 1 <= int(chosen.sum()) <= 1.3 * wanted + 1
    assert torch.equal(decoded[chosen], values[chosen])
    if bool(values[~chosen].any()):
        assert float(values[chosen].abs().min()) >= float(values[~chosen].abs().max())


def test_random_entries_do_not_depend_on_a_library() -> None:
    # The first numbers of SplitMix64 from 0, as published with it.
    numbers = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    run = 1 << 60
    assert drawn(0, 3, 3 * run).tolist() == [place * run + number % run for place, number in enumerate(numbers)]
    assert drawn(2**64 - 1, 7, 7).tolist() == list(range(7))


def test_indices_take_the_shortest_form() -> None:
    codec = CODECS.parse("topk:ratio=0.00002")
    assert isinstance(codec, Lossy)
    where = part(1, 1_000_000)
    values = torch.zeros(where.elements)
    # Two neighbours, then two that are further apart than 16 bits can say.
    for places, form in (((3, 4), 0), ((3, 900_000), 1)):
        values.zero_()
        values[list(places)] = 1.0
        data = bytes(codec.encode_part(values, where, Turn()))
        assert data[4] == form
        assert np.flatnonzero(codec.decode_part(data, where).numpy()).tolist() == list(places)
    dense = replace(codec, ratio=0.5)
    assert bytes(dense.encode_part(draw("normal", where.elements), where, Turn()))[4] == 2


# PowerSGD


def powersgd(rank: int) -> Lossy:
    codec = CODECS.parse(f"powersgd:rank={rank}")
    assert isinstance(codec, Lossy)
    return codec


def through(codec: Lossy, values: torch.Tensor, where: Part, turn: Turn) -> torch.Tensor:
    """A push: what is decoded, while the turn's memory becomes that of the next, without what was left to be sent."""
    data = codec.encode_part(values, where, turn)
    for name, tensor in codec.remembered(values, values, data, where, turn).items():
        turn.memory[where.tensor.name, where.first_row, name] = tensor
    return codec.decode_part(bytes(data), where)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse"])
def test_powersgd_finds_the_best_approximation_of_a_matrix_that_stays(rank: int, kind: str) -> None:
    codec, where = powersgd(rank), part(40, 50)
    values = draw(kind, where.elements)
    singular = torch.linalg.svdvals(values.view(40, 50).double()).square()
    best = float(singular[rank:].sum() / singular.sum())
    turn = Turn()
    errors = [relative_error(values, through(codec, values, where, turn)) for _ in range(200)]
    assert errors[0] >= best - 1e-6
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_powersgd_is_exact_for_matrices_of_its_rank_and_their_growth() -> None:
    codec, where = powersgd(2), part(40, 50)
    left, right = draw("normal", 80).view(40, 2), draw("heavy", 100).view(2, 50)
    turn = Turn()
    # From nothing over rank 1 to rank 2: a basis that has a column of zeros still finds what is new.
    for rank in (0, 1, 2):
        values = (left[:, :rank] @ right[:rank]).reshape(-1)
        torch.testing.assert_close(through(codec, values, where, turn), values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243.3), (2, 135.8), (4, 72.1)])
def test_powersgd_sends_as_little_of_resnet18_as_its_paper_says(rank: int, ratio: float) -> None:
    codec, tensors = powersgd(rank), resnet18()
    total, sent_bytes = sum(tensor.elements for tensor in tensors), 0
    assert total == 11_173_962
    for tensor in tensors:
        where = Part(tensor=tensor, first_row=0, offset=0, elements=tensor.elements, piece=0)
        sent_bytes += codec.max_part_bytes(where) if codec.takes(tensor) else 4 * tensor.elements
    assert 4 * total / sent_bytes == pytest.approx(ratio, abs=0.05)
