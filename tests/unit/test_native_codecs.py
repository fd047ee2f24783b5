"""Codecs write and read the same bits with and without the native library, at every level of the processor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from shardline.codecs import CODECS, JobCodec, keep_whole
from shardline.codecs.base import Direction, MemoryKey, Turn
from shardline.codecs.coding import Coding
from shardline.codecs.parts import NOT_FINITE, Lossy
from shardline.codecs.quantizing.base import LANES, blocks, lane_sum, norms, pack, packed_bytes, unpack
from shardline.codecs.random import splitmix, uniforms
from shardline.codecs.sparse.entries import largest
from shardline.core.plan import make_plan
from shardline.errors import ProtocolError
from shardline.native import codecs, library
from tests.conformance.test_codec_lossy import part
from tests.support.codecs import choices, spec
from tests.support.covering import covering
from tests.unit.test_native import LEVELS, SEEDS, SHIFTS, SIZES, at_every_level, numbers, same, using

LOSSY = [codec for codec in choices() if isinstance(codec, Lossy)]
EACH = pytest.mark.parametrize("codec", LOSSY, ids=str)
NATIVE = pytest.mark.skipif(not library.levels(), reason="there is no native library")
"""For what goes through all levels itself, to compute once what they are compared with."""
BITS = st.integers(1, 7)
BLOCKS = st.sampled_from([8, 9, 64, 255, 256, 257, 16_384])


def placed(data: bytes, shift: int) -> memoryview:
    """The bytes, writable, `shift` bytes past an allocation that ends with them."""
    return memoryview(bytearray(shift) + bytearray(data))[shift:]


# Whole payloads


def steps(codec: Lossy, dtype: str, width: int) -> list[bytes]:
    """Payloads, decoded values and memories of three steps, of rows that are three quanta and a rest."""
    tensors = [spec("matrix", (-(-50_000 // width), width), dtype), spec("bias", (77,), dtype)]
    plan = make_plan(keep_whole(JobCodec.both(codec), tensors), 1)
    coding, memory, found = Coding(codec, plan), {}, []
    for step in range(3):
        for number, bucket in enumerate(plan.shards[0].buckets):
            values = numbers(step, torch.float32, bucket.elements, finite=True).to(getattr(torch, dtype))
            turn = Turn(step, 0, 7, memory=dict[MemoryKey, torch.Tensor](memory))
            coder = coding.bucket(0, number)
            data = bytes(coder.coder.encode(values, turn))
            memory = turn.memory
            found += [data, coder.coder.decode(placed(data, 0), turn).numpy().tobytes()]
            found += [memory[key].numpy().tobytes() for key in sorted(memory)]
    return found


@pytest.mark.part(of=3, first=1)
@NATIVE
@pytest.mark.parametrize(("codec", "dtype", "width"), covering(LOSSY, ["float32", "float64"], [500, 20_011]), ids=str)
def test_payloads_and_decoded_values_are_the_same_without_the_library(codec: Lossy, dtype: str, width: int) -> None:
    with using(None):
        expected = steps(codec, dtype, width)
    for level in library.levels():
        with using(level):
            assert steps(codec, dtype, width) == expected, level


@pytest.mark.part(of=3)
@NATIVE
@EACH
@given(count=st.one_of(st.integers(1, 200), SIZES), shift=SHIFTS, seed=SEEDS)
def test_parts_of_any_length_at_any_address_are_the_same(codec: Lossy, count: int, shift: int, seed: int) -> None:
    values, where = numbers(seed, torch.float32, count, shift, finite=True), part(1, count)

    def found(level: str | None) -> tuple[bytes, torch.Tensor, torch.Tensor]:
        with using(level):
            data = bytes(codec.encode_part(values, where, Turn(0, 0, seed)))
            return data, codec.decode_part(placed(data, shift), where), codec.decode_part(data, where)

    expected, *decoded = found(None)
    assert same(*decoded)
    for level in library.levels():
        data, *others = found(level)
        assert data == expected, level
        assert all(same(one, decoded[0]) for one in others), level


@pytest.mark.part(of=3, first=2)
@EACH
@given(count=SIZES, seed=SEEDS, where=st.floats(0, 1, exclude_max=True), bad=st.sampled_from([1, -1, 0]))
def test_one_value_that_is_not_finite_is_found_anywhere(
    codec: Lossy, count: int, seed: int, where: float, bad: int
) -> None:
    values = numbers(seed, torch.float32, count, finite=True)
    values[int(where * count)] = bad * math.inf
    for level in (*library.levels(), None):
        with using(level):
            assert codec.encode_part(values, part(1, count), Turn()) == NOT_FINITE, level


# Kernels


@at_every_level
@given(count=SIZES, block=BLOCKS, shift=SHIFTS, seed=SEEDS, factor=st.sampled_from([1.0, 1e-43, 1e37]))
def test_int8_is_the_same_in_blocks_of_any_size(
    level: str, count: int, block: int, shift: int, seed: int, factor: float
) -> None:
    codec, where = CODECS.parse(f"int8:block={block}"), part(1, count)
    assert isinstance(codec, Lossy)
    values = numbers(seed, torch.float32, count, shift, finite=True).mul_(factor)
    with using(None):
        expected = bytes(codec.encode_part(values, where, Turn()))
        decoded = codec.decode_part(expected, where)
    with using(level):
        data = codecs.int8_encode(values, block)
        assert data is not None and data.tobytes() == expected
        found = codecs.int8_decode(placed(expected, shift), count, block)
    assert found is not None and same(found, decoded)


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize(
    ("at", "bad"),
    [(8, -128), (307, -128), *((at, number) for at in (0, 1) for number in (math.nan, math.inf, -math.inf, -1.0))],
)
def test_int8_refuses_what_no_encoder_makes(level: str | None, at: int, bad: float) -> None:
    codec, where = CODECS.parse("int8"), part(1, 300)
    assert isinstance(codec, Lossy)
    data = bytearray(codec.encode_part(torch.ones(300), where, Turn()))
    if bad == -128:
        data[at] = 0x80
    else:
        np.frombuffer(data, "<f4", 2)[at] = bad
    with using(level), pytest.raises(ProtocolError, match="matrix"):
        codec.decode_part(data, where)


@at_every_level
@given(count=st.one_of(st.integers(1, 200), SIZES), bits=BITS, shift=SHIFTS, seed=SEEDS)
def test_codes_are_packed_as_by_numpy(level: str, count: int, bits: int, shift: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, count + shift, np.uint8)[shift:]
    with using(None):
        expected = bytes(pack(codes, bits))
        assert unpack(expected, bits, count).tobytes() == codes.tobytes()
    with using(level):
        found = codecs.pack(codes, bits)
        back = codecs.unpack(np.frombuffer(placed(expected, shift), np.uint8), bits, count)
    assert found is not None and len(expected) == packed_bytes(count, bits) and found.tobytes() == expected
    assert back is not None and back.tobytes() == codes.tobytes()


@at_every_level
@given(count=st.one_of(st.integers(2, 200), SIZES), shift=SHIFTS, seed=SEEDS)
def test_signs_and_their_sums_are_the_same(level: str, count: int, shift: int, seed: int) -> None:
    values = numbers(seed, torch.float32, count, shift, finite=True)
    with using(level):
        found = codecs.signs(values)
    assert found is not None
    codes, negative, below, above = found
    assert codes.tobytes() == (values < 0).numpy().tobytes() and negative == int((values < 0).sum())
    assert (below, above) == (lane_sum(values.clamp(max=0.0)), lane_sum(values.clamp(min=0.0)))


@at_every_level
@given(count=SIZES, block=BLOCKS, shift=SHIFTS, seed=SEEDS, factor=st.sampled_from([1.0, 1e-43, 1e37]))
def test_qsgd_and_random_int8_are_the_same_in_blocks_of_any_size(
    level: str, count: int, block: int, shift: int, seed: int, factor: float
) -> None:
    values = numbers(seed, torch.float32, count, shift, finite=True).mul_(factor)
    for text in (f"qsgd:block={block},levels=5", f"int8:block={block},stochastic=true"):
        codec = CODECS.parse(text)
        assert isinstance(codec, Lossy)
        with using(None):
            expected = bytes(codec.encode_part(values, part(1, count), Turn(seed=seed)))
        with using(level):
            assert bytes(codec.encode_part(values, part(1, count), Turn(seed=seed))) == expected


@at_every_level
@given(count=SIZES, block=BLOCKS, shift=SHIFTS, seed=SEEDS)
def test_norms_and_largest_magnitudes_of_blocks_are_the_same(
    level: str, count: int, block: int, shift: int, seed: int
) -> None:
    values = numbers(seed, torch.float32, count, shift, finite=True)
    with using(None):
        expected = norms(values, block)
    with using(level):
        found, largest = codecs.norms(values, block), codecs.tops(values, block)
    assert found is not None and found.tobytes() == expected.tobytes()
    assert largest is not None and largest.tobytes() == blocks(values, block).abs().amax(dim=1).numpy().tobytes()


@at_every_level
def test_norms_beyond_float32_are_not_finite(level: str) -> None:
    values = torch.full((300,), 3e38)
    with using(level):
        assert codecs.norms(values, 256) is not None and np.isinf(norms(values, 256)).any()


@pytest.mark.parametrize("level", [*LEVELS, None])
@given(count=SIZES, seed=SEEDS, share=st.floats(0, 1), few=st.booleans())
def test_the_largest_are_found_and_of_equal_ones_the_first(
    level: str | None, count: int, seed: int, share: float, few: bool
) -> None:
    values = numbers(seed, torch.float32, count, finite=True)
    magnitudes = (values.round() if few else values).abs().numpy()
    wanted = max(1, int(share * count))
    with using(level):
        found = largest(magnitudes, wanted)
    expected = sorted(range(count), key=lambda index: (-magnitudes[index], index))[:wanted]
    assert found.tolist() == sorted(expected)


def test_random_numbers_are_those_of_splitmix() -> None:
    # The first of seed 0, as published with the algorithm.
    assert [hex(number) for number in splitmix(0, 2).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    assert uniforms(0, 3).tolist() == [0x7B1DCD / 2**24, 0xE220A8 / 2**24, 0xA1B965 / 2**24]


@given(count=st.integers(1, 5 * LANES), seed=SEEDS)
def test_sums_follow_the_order_that_is_written_down(count: int, seed: int) -> None:
    values = numbers(seed, torch.float32, count, finite=True)
    lanes = [0.0] * LANES
    for number, value in enumerate(values.tolist()):
        lanes[number % LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [one + other for one, other in zip(lanes[:half], lanes[half:], strict=True)]
    assert lane_sum(values) == lanes[0]


@pytest.mark.parametrize(
    "values", [torch.ones(8, dtype=torch.float64), torch.ones(16)[::2], torch.ones(8, device="meta"), torch.ones(1)]
)
def test_other_values_are_left_to_torch(values: torch.Tensor) -> None:
    assert codecs.int8_encode(values, 8) is None
    assert codecs.signs(values) is None
    assert codecs.tops(values, 8) is None
    assert codecs.norms(values, 8) is None
    assert codecs.rounded(values, np.ones(1, np.float32), 8, 1, 0, 0) is None
    assert codecs.ternary(values, 1.0, 0) is None
    assert codecs.without(values, np.ones(8, np.uint8), 1.0, 2.0) is None


def test_nothing_is_native_where_it_is_turned_off() -> None:
    values, codes = torch.ones(64), np.ones(64, np.uint8)
    with using(None):
        assert codecs.int8_encode(values, 8) is None
        assert codecs.int8_decode(memoryview(bytes(96)), 64, 8) is None
        assert codecs.pack(codes, 2) is None
        assert codecs.unpack(codes, 2, 64) is None
        assert codecs.signs(values) is None
        assert codecs.either(codes, 1.0, 2.0) is None
        assert codecs.norms(values, 8) is None
        assert codecs.rounded(values, np.ones(8, np.float32), 8, 1, 0, 0) is None
        assert codecs.ternary(values, 1.0, 0) is None
        assert codecs.without(values, codes, 1.0, 2.0) is None


def test_every_codec_of_gradients_that_loses_something_is_tried() -> None:
    names = {kind.name for kind in CODECS if issubclass(kind, Lossy) and kind.direction is Direction.PUSH}
    assert {codec.name for codec in LOSSY} == names
