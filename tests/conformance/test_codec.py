"""What every codec must do, whoever wrote it: those in the table, and the toy."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, strategies as st

from shardline.codecs import CODECS, coding_of, keep_whole, of
from shardline.codecs.base import PLAIN_TURN, Codec, Direction, Memory, MemoryKey, Turn
from shardline.codecs.coding import PLAIN, BucketCoding, Coding, JobCodec, JobCoding, PushEncoders, pulled, pushed
from shardline.codecs.parts import ERROR
from shardline.core.plan import BUCKET_BYTES, Plan, make_plan
from shardline.core.settings import Settings
from shardline.core.spec import DTYPES, TensorKind
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import JobError, ProtocolError
from shardline.seams import settings_of, usage
from tests.conformance.toys import toy_codec
from tests.support.codecs import FLOATS, choices, first, model, numbers, spec, turn

EACH = pytest.mark.parametrize("codec", list(choices()), ids=str)


@dataclass(frozen=True)
class Kept(toy_codec.Top):
    """The toy, with memory that is restored after a rollback."""

    name: ClassVar[str] = "kept"
    memory = Memory.RESTORED


WITH_MEMORY = [*(codec for codec in choices() if pushed(codec).memory is not Memory.NONE), Kept(ratio=0.25)]
REMEMBERING = pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)


# What it reports about itself


@EACH
def test_a_choice_is_written_in_one_way_and_read_back(codec: Codec) -> None:
    assert CODECS.parse(str(codec)) == codec
    assert usage(type(codec)).startswith(codec.name) and type(codec).__doc__
    assert all(kind in (bool, int, float, str) for kind in settings_of(type(codec)).values())


@EACH
def test_what_it_says_of_itself_agrees(codec: Codec) -> None:
    assert isinstance(codec.direction, Direction)
    assert codec.exact or not codec.is_view
    assert not codec.exact or codec.memory is Memory.NONE
    # What is read in place can't be made for one receiver.
    for shape in ((), (3,), (4, 5), (2, 3, 4)):
        assert codec.wants_whole(shape) in (True, False)


@EACH
def test_a_job_uses_it_in_its_direction_alone(codec: Codec) -> None:
    assert pushed(codec) == (PLAIN if codec.direction is Direction.PULL else codec)
    assert pulled(codec) == (PLAIN if codec.direction is Direction.PUSH else codec)
    job = JobCoding(codec, model())
    assert job.of_push(job.push.name) is job.push and job.of_pull(job.pull.name) is job.pull
    for name in ("", PLAIN.name):
        assert job.of_push(name).codec == PLAIN == job.of_pull(name).codec
    for name in ("zip", str(codec) + "x", "x" * 1000):
        with pytest.raises(ProtocolError, match=r"pushed with codec '.{1,100}'; the job uses"):
            job.of_push(name)
        with pytest.raises(ProtocolError, match=r"pulled with codec '.{1,100}'; the job uses"):
            job.of_pull(name)


@EACH
def test_numbers_that_it_has_decoded_pass_through_it_again_unchanged_if_it_says_so(codec: Codec) -> None:
    down = pulled(codec)
    if not down.relayable or down.memory.shared:
        # Of the second, see test_codec_delta.py.
        return
    written = first(down, model())
    once = written.coder.decode(bytearray(written.coder.encode(numbers(written.layout, seed=3), turn())), turn())
    again = written.coder.decode(bytearray(written.coder.encode(once, turn())), turn())
    assert torch.equal(once.view(torch.uint8), again.view(torch.uint8))


def test_each_direction_may_have_a_codec_of_its_own() -> None:
    both = of(Settings(codec="top", codec_down="bf16"))
    assert (str(both.ups[0]), str(both.downs[0]), str(both)) == ("top", "bf16", "top up, bf16 down")
    assert str(of(Settings(codec="bf16"))) == str(of(Settings(codec_up="bf16", codec_down="bf16"))) == "bf16"
    # One for gradients alone leaves the parameters as they are.
    assert of(Settings(codec="top")).downs == (PLAIN,) == of(Settings(codec_up="top")).downs
    coding = coding_of(Settings(codec_up="fp16", codec_down="bf16"), model())
    assert (coding.push.name, coding.pull.name) == ("fp16", "bf16")
    with pytest.raises(JobError, match="codec_down is 'top', which does not encode parameters; choose from raw, "):
        of(Settings(codec_down="top"))


@EACH
def test_what_it_changes_is_measured_from_time_to_time(codec: Codec) -> None:
    coding = Coding(pushed(codec), model())
    written = first(pushed(codec), model())
    number = next(n for n in range(9) if coding.bucket(0, n).layout.bucket == written.layout.bucket)
    encoders_of, values = PushEncoders(coding), numbers(written.layout, seed=3)
    for step in (0, 1):
        encoders_of.begin(0, step)
        encoders_of.encode(0, number, 0, values)
        encoders_of.settle()
        if pushed(codec).exact:
            assert coding.relative_error is None and encoders_of.memory_norm is None
            continue
        # What unbiased codecs change may be larger than the values; what is left to be sent is not.
        most = 10.0 if pushed(codec).memory is Memory.NONE else 1.5
        assert coding.relative_error is not None and 0.0 <= coding.relative_error <= most
        owed = encoders_of.memory_norm
        assert (owed is None) == (pushed(codec).memory is Memory.NONE)
        if owed is not None and {name for held in encoders_of.state_dict(0).values() for name in held} == {ERROR}:
            error = coding.relative_error * float(torch.linalg.vector_norm(values))
            assert owed == pytest.approx(error, rel=1e-3, abs=1e-6)


@EACH
def test_after_a_warm_up_payloads_are_as_short_as_it_says(codec: Codec) -> None:
    written, late = first(codec, model()), 10**6
    assert written.usual_bytes <= written.max_bytes
    memory: dict[MemoryKey, torch.Tensor] = {}
    for seed in range(3):
        payload = written.coder.encode(numbers(written.layout, seed=seed), Turn(late + seed, memory=memory))
        assert len(payload) <= written.usual_bytes or codec.direction is Direction.PULL


def test_one_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(JobError, match="codec 'zip' does not exist; choose from raw, auto, bf16, fp16"):
        coding_of("zip", model())


@EACH
def test_tensors_that_it_does_not_take_travel_to_the_bit(codec: Codec) -> None:
    for dtype, kind in itertools.product(DTYPES, set(TensorKind) - {TensorKind.TABLE}):
        if kind is TensorKind.PARAM and not DTYPES[dtype].is_floating_point:
            # Only dtypes that can have gradients are trained.
            continue
        written = first(codec, model(dtype, kind))
        taken = any(codec.takes(part.tensor) for part in written.layout.parts(codec.scope))
        assert taken == codec.takes(spec("matrix", (40, 32), dtype, kind)), (dtype, kind)
        if taken and not codec.exact:
            assert kind is TensorKind.PARAM and dtype in FLOATS and written.codec == codec, (dtype, kind)
            continue
        values = numbers(written.layout)
        payload = bytes(written.coder.encode(values, PLAIN_TURN))
        back = written.coder.decode(payload, PLAIN_TURN)
        assert written.codec.exact and bytes(tensor_bytes(back)) == bytes(tensor_bytes(values)), (dtype, kind)


@EACH
def test_tensors_that_it_needs_whole_are_not_cut(codec: Codec) -> None:
    tensors = (spec("large", (2048, 1024)), spec("counts", (2048, 1024), "int64", TensorKind.BUFFER))
    marked = keep_whole(JobCodec.both(codec), tensors)
    assert [tensor.whole for tensor in marked] == [codec.wants_whole((2048, 1024)), False]
    plan = make_plan(marked, 2)
    for number in range(len(plan.shards[0].buckets)):
        Coding(codec, plan).bucket(0, number)


def test_one_that_needs_whole_tensors_refuses_a_plan_that_cuts_them() -> None:
    @dataclass(frozen=True)
    class Whole(toy_codec.Top):
        name: ClassVar[str] = "whole"

        def wants_whole(self, shape: Sequence[int]) -> bool:
            return len(shape) == 2

    plan = make_plan([spec("large", (2048, 1024)), spec("small", (4,))], 2)
    with pytest.raises(JobError, match="codec whole needs whole tensors, but the plan cuts 'large'"):
        Coding(Whole(), plan).bucket(0, 0)


# Size


@EACH
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_payload_is_never_longer_than_it_said(codec: Codec, dtype: str) -> None:
    written = first(codec, model(dtype))
    assert written.max_bytes <= written.layout.bucket.nbytes
    for scale in (0.0, 1e-30, 1.0, 1e30):
        payload = written.coder.encode(numbers(written.layout, scale=scale), turn())
        assert len(payload) <= written.max_bytes, scale
        assert len(payload) == written.max_bytes or not written.fixed_size, scale
        assert written.misfit(len(payload)) == "", scale
    assert f"codec {codec} makes" in written.misfit(written.max_bytes + 1)
    assert written.misfit(-1)


@EACH
def test_a_view_is_one_and_what_is_none_keeps_nothing_of_its_source(codec: Codec) -> None:
    written = first(codec, model())
    values = numbers(written.layout)
    before = values.clone()
    payload = written.coder.encode(values, turn())
    assert torch.equal(values, before)
    kept = bytes(payload)
    values.zero_()
    assert (bytes(payload) != kept) is codec.is_view
    memory = bytearray(kept)
    back = written.coder.decode(memory, turn())
    assert not codec.is_view or back.data_ptr() == torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    # Decoding must not write through to read-only bytes.
    written.coder.decode(kept, turn()).zero_()
    assert kept == bytes(memory)


# There and back

RELATIVE_ERROR = {"raw": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative to a number well inside the wire type's range; half a unit in its last place."""
FIXED = pytest.mark.parametrize("codec", [c for c in choices() if c.name in RELATIVE_ERROR], ids=str)


@FIXED
@pytest.mark.parametrize("dtype", FLOATS)
@given(values=st.lists(st.floats(-60_000.0, 60_000.0, width=32), min_size=1, max_size=70))
def test_element_wise_codecs_come_back_within_their_bound(codec: Codec, dtype: str, values: list[float]) -> None:
    plan = make_plan([spec("matrix", (len(values),), dtype)], 1)
    written = first(codec, plan)
    tensor = torch.zeros(written.layout.bucket.elements, dtype=DTYPES[dtype])
    tensor[: len(values)] = torch.tensor(values, dtype=DTYPES[dtype])
    payload = bytes(written.coder.encode(tensor, PLAIN_TURN))
    back = written.coder.decode(payload, PLAIN_TURN)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    tiny = 2.0**-25 if codec.name == "fp16" else 1e-38 if codec.name == "bf16" else 0.0
    assert bool(((back - tensor).abs() <= RELATIVE_ERROR[codec.name] * tensor.abs() + tiny).all())
    # What has been sent once is sent again unchanged.
    assert bytes(written.coder.encode(back, PLAIN_TURN)) == payload


def test_rounding_codecs_halve_float32_and_quarter_float64() -> None:
    for name in ("bf16", "fp16"):
        for dtype, part in (("float32", 2), ("float64", 4)):
            written = first(CODECS.parse(name), model(dtype))
            assert part * written.max_bytes == written.layout.bucket.nbytes


@EACH
@pytest.mark.parametrize("dtype", FLOATS)
def test_padding_and_absent_slices_come_back_as_zeros(codec: Codec, dtype: str) -> None:
    written = first(codec, model(dtype))
    values, slices = numbers(written.layout), written.layout.bucket.slices
    absent = next(n for n, piece in enumerate(slices) if piece.elements > 1)
    values[slices[absent].offset : slices[absent].end] = 0.0
    present = tuple(number != absent for number in range(len(slices)))
    payload = bytes(written.coder.encode(values, Turn(seed=7, present=present)))
    back = written.coder.decode(payload, Turn(present=present))
    assert back.shape == values.shape and back.dtype == values.dtype
    covered = torch.zeros(len(values), dtype=torch.bool)
    for number, piece in enumerate(slices):
        covered[piece.offset : piece.end] = present[number]
    assert not bool(back[~covered].any())


@EACH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_so_on_the_other_side_and_in_no_memory(codec: Codec, bad: float) -> None:
    written = first(codec, model())
    values = numbers(written.layout)
    values[5] = bad
    memory: dict[MemoryKey, torch.Tensor] = {}
    back = written.coder.decode(bytes(written.coder.encode(values, turn(memory=memory))), turn())
    assert not bool(back.isfinite().all())
    assert all(bool(held.isfinite().all()) for held in memory.values())


@EACH
def test_the_same_turn_gives_the_same_bits_whatever_the_process_drew_before(codec: Codec) -> None:
    written = first(codec, model())
    values = numbers(written.layout)

    def encoded(step: int, replica: int, noise: int) -> bytes:
        torch.manual_seed(noise)
        random.seed(noise)
        return bytes(written.coder.encode(values, turn(step, replica)))

    for step, replica in ((0, 0), (3, 1)):
        assert encoded(step, replica, 1) == encoded(step, replica, 2)
    payload = encoded(0, 0, 1)
    ways = [written.coder.decode(payload, turn()) for _ in range(2)]
    assert torch.equal(*ways)


def test_random_numbers_depend_on_seed_step_replica_and_tensor() -> None:
    parts = [part for part in first(PLAIN, model()).layout.parts(PLAIN.scope) if part.elements]
    turns = [Turn(0, 0, 0), Turn(1, 0, 0), Turn(0, 1, 0), Turn(0, 0, 1)]
    drawn = {float(torch.rand((), generator=t.generator(part), dtype=torch.float64)) for t in turns for part in parts}
    assert len(drawn) == len(turns) * len(parts)
    again = torch.rand((), generator=turns[0].generator(parts[0]), dtype=torch.float64)
    assert float(again) in drawn


# What strangers send


@functools.cache
def sample(codec: Codec) -> tuple[BucketCoding, bytes]:
    written = first(codec, model())
    return written, bytes(written.coder.encode(numbers(written.layout), turn()))


@EACH
@given(data=st.data())
def test_a_malformed_payload_is_refused_or_stays_within_the_bucket(codec: Codec, data: st.DataObject) -> None:
    is_refused_or_stays_within_the_bucket(codec, data)


@pytest.mark.long
@EACH
@given(data=st.data())
def test_so_are_many_more_malformed_payloads(codec: Codec, data: st.DataObject) -> None:
    is_refused_or_stays_within_the_bucket(codec, data)


def is_refused_or_stays_within_the_bucket(codec: Codec, data: st.DataObject) -> None:
    written, whole = sample(codec)
    payload = bytearray(whole)
    match data.draw(st.sampled_from(["cut", "longer", "changed", "any"])):
        case "cut":
            payload = payload[: data.draw(st.integers(0, max(0, len(payload) - 1)))]
        case "longer":
            payload += data.draw(st.binary(min_size=1, max_size=9))
        case "changed":
            for _ in range(data.draw(st.integers(1, 4))):
                payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        case "any":
            payload = bytearray(data.draw(st.binary(max_size=200)))
    try:
        back = written.coder.decode(payload, turn())
    except ProtocolError:
        return
    assert written.misfit(len(payload)) == "" or len(payload) <= written.layout.bucket.nbytes
    assert back.shape == (written.layout.bucket.elements,) and back.dtype == DTYPES[written.layout.bucket.dtype]


@FIXED
@pytest.mark.parametrize("extra", [-1, 1, 2, 4])
def test_a_fixed_size_allows_no_other_length(codec: Codec, extra: int) -> None:
    written = first(codec, model())
    size = written.max_bytes + extra
    assert written.misfit(size) == f"codec {codec} makes {written.max_bytes} bytes"
    with pytest.raises(ProtocolError, match=f"payload of {size} bytes for {written.layout.bucket.elements} "):
        written.coder.decode(bytes(size), PLAIN_TURN)


@EACH
def test_a_lying_payload_takes_no_memory(codec: Codec) -> None:
    written = first(codec, model())
    lie = b"\xff" * (written.max_bytes - 1)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            written.coder.decode(lie, turn())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * written.layout.bucket.nbytes + (64 << 10)


# Memory


def encoders(codec: Codec, plan: Plan, **more: Any) -> PushEncoders:
    return PushEncoders(Coding(pushed(codec), plan), seed=7, **more)


def push(worker: PushEncoders, step: int, values: torch.Tensor, replica: int = 0) -> bytes:
    worker.begin(0, step)
    return bytes(worker.encode(0, 0, replica, values))


def decoded(worker: PushEncoders, payload: bytes) -> torch.Tensor:
    return worker.coding.bucket(0, 0).coder.decode(payload, turn())


def remembered(worker: PushEncoders, replica: int = 0) -> torch.Tensor:
    """Error memory of the bucket, flat."""
    written = worker.coding.bucket(0, 0)
    state, values = worker.state_dict(replica), torch.zeros(written.layout.bucket.elements)
    for part in written.layout.parts(worker.coding.codec.scope):
        if part.tensor.name in state:
            start = part.first_row * part.tensor.row_elements
            held = state[part.tensor.name].get(ERROR, torch.zeros(part.tensor.elements))
            values[part.offset : part.end] = held.reshape(-1)[start : start + part.elements]
    return values


@EACH
def test_a_codec_without_memory_leaves_none(codec: Codec) -> None:
    memory: dict[MemoryKey, torch.Tensor] = {}
    written = first(codec, model())
    written.coder.encode(numbers(written.layout), turn(memory=memory))
    assert bool(memory) is (codec.memory is not Memory.NONE)


@pytest.mark.parametrize("codec", [codec for codec in WITH_MEMORY if not codec.has_momentum], ids=str)
def test_what_was_decoded_and_what_is_remembered_are_what_was_pushed(codec: Codec) -> None:
    plan = model()
    worker = encoders(codec, plan)
    layout = worker.coding.bucket(0, 0).layout
    total, sent = torch.zeros(layout.bucket.elements, dtype=torch.float64), torch.zeros(layout.bucket.elements)
    for step in range(50):
        values = numbers(layout, seed=step)
        total += values
        sent += decoded(worker, push(worker, step, values))
        worker.settle()
    torch.testing.assert_close((sent + remembered(worker)).double(), total, rtol=1e-5, atol=1e-3)


@REMEMBERING
def test_a_step_that_is_computed_again_is_encoded_to_the_same_bits(codec: Codec) -> None:
    plan = model()
    worker, other = encoders(codec, plan), encoders(codec, plan)
    layout = worker.coding.bucket(0, 0).layout
    for step in range(4):
        values = numbers(layout, seed=step)
        sent = push(worker, step, values)
        # Given up, and started again: other replicas' steps don't matter to this one.
        worker.locate({(0, 0): step})
        assert push(worker, step, values) == sent == push(other, step, values)
        worker.settle()
        other.settle()


@REMEMBERING
def test_a_push_that_counts_though_its_answer_was_lost_leaves_its_memory(codec: Codec) -> None:
    plan = model()
    worker, other = encoders(codec, plan), encoders(codec, plan)
    values = numbers(worker.coding.bucket(0, 0).layout)
    push(worker, 0, values)
    push(other, 0, values)
    other.settle()
    worker.locate({(0, 0): 1})
    assert torch.equal(remembered(worker), remembered(other))
    assert push(worker, 1, values) == push(other, 1, values)


@REMEMBERING
def test_a_push_that_arrives_after_the_worker_has_asked_for_it_leaves_its_memory(codec: Codec) -> None:
    plan = model()
    worker, other = encoders(codec, plan), encoders(codec, plan)
    values = numbers(worker.coding.bucket(0, 0).layout)
    push(worker, 0, values)
    push(other, 0, values)
    other.settle()
    # It was under way, and counts before the step is computed again.
    worker.locate({(0, 0): 0})
    worker.locate({(0, 0): 1})
    assert push(worker, 1, values) == push(other, 1, values)


@REMEMBERING
def test_a_push_that_counts_at_some_shards_and_is_sent_again_to_all_leaves_its_memory_once(codec: Codec) -> None:
    plan = model()
    worker, other = encoders(codec, plan), encoders(codec, plan)
    layout = worker.coding.bucket(0, 0).layout
    push(worker, 0, numbers(layout))
    push(other, 0, numbers(layout))
    # One shard has it and another does not, so a loop that can't be repeated sends all of it again.
    worker.locate({(0, 0): 1})
    push(worker, 0, numbers(layout))
    worker.settle()
    other.settle()
    assert torch.equal(remembered(worker), remembered(other))
    assert push(worker, 1, numbers(layout, seed=1)) == push(other, 1, numbers(layout, seed=1))


@REMEMBERING
def test_a_skipped_step_leaves_memory_as_it_was(codec: Codec) -> None:
    worker = encoders(codec, model())
    values = numbers(worker.coding.bucket(0, 0).layout)
    push(worker, 0, values)
    worker.settle()
    before = remembered(worker)
    push(worker, 1, values)
    worker.settle(skipped=True)
    assert torch.equal(remembered(worker), before)
    worker.locate({(0, 0): 2})
    assert torch.equal(remembered(worker), before)


@REMEMBERING
@pytest.mark.parametrize("why", ["a checkpoint follows", "the worker leaves"])
def test_a_whole_push_sends_all_that_is_owed_and_leaves_nothing(codec: Codec, why: str) -> None:
    plan = model()
    checkpoint = why == "a checkpoint follows"
    worker = encoders(codec, plan, keep_every=4, cut_after=lambda number: checkpoint and number % 4 == 3)
    written = worker.coding.bucket(0, 0)
    sent, total = torch.zeros(written.layout.bucket.elements), torch.zeros(written.layout.bucket.elements)
    for step in range(4):
        worker.leaving = step == 3 and not checkpoint
        values = numbers(written.layout, seed=step)
        payload = push(worker, step, values)
        assert step < 3 or len(payload) == written.layout.bucket.nbytes
        assert not written.misfit(len(payload))
        assert push(worker, step, values) == payload
        sent, total = sent + decoded(worker, payload), total + values
        worker.settle()
    if not codec.has_momentum:
        torch.testing.assert_close(sent, total, rtol=1e-5, atol=1e-4)
    assert not worker.state_dict(0)
    # Whoever has the replica from here on encodes the same bits.
    worker.leaving = False
    assert push(worker, 4, values) == push(encoders(codec, plan), 4, values)


@REMEMBERING
@pytest.mark.parametrize("event", ["skipped", "its answer was lost", "both", "gone back to"])
def test_nothing_is_owed_at_a_checkpoint_whatever_became_of_the_push_before_it(codec: Codec, event: str) -> None:
    worker = encoders(codec, model(), keep_every=2, cut_after=lambda number: number % 2 == 1)
    layout = worker.coding.bucket(0, 0).layout
    for step in range(2):
        push(worker, step, numbers(layout, seed=step))
        if step == 0 or event == "gone back to":
            worker.settle()
    if event == "skipped":
        worker.settle(skipped=True)
    elif event != "gone back to":
        worker.locate({(0, 0): 2}, skipped=event == "both")
    else:
        push(worker, 2, numbers(layout, seed=2))
        worker.settle()
        assert worker.state_dict(0)
        worker.locate({(0, 0): 2})
    assert not worker.state_dict(0)


@REMEMBERING
def test_a_skipped_step_whose_answer_was_lost_leaves_memory_as_it_was(codec: Codec) -> None:
    worker = encoders(codec, model())
    layout = worker.coding.bucket(0, 0).layout
    push(worker, 0, numbers(layout))
    worker.settle()
    before = remembered(worker)
    push(worker, 1, numbers(layout, seed=1))
    worker.locate({(0, 0): 2}, skipped=True)
    assert torch.equal(remembered(worker), before)


def owed(of: PushEncoders, replica: int) -> float:
    """The norm of what a replica's error memory holds."""
    held = [tensors[ERROR] for tensors in of.state_dict(replica).values() if ERROR in tensors]
    return math.hypot(*(float(torch.linalg.vector_norm(values)) for values in held))


@REMEMBERING
def test_memory_is_each_replicas_own_and_goes_with_it(codec: Codec) -> None:
    plan = model()
    both, alone = encoders(codec, plan), encoders(codec, plan)
    layout = both.coding.bucket(0, 0).layout
    for step in range(3):
        for replica in (0, 1):
            sent = push(both, step, numbers(layout, seed=10 * step + replica), replica)
            if replica == 1:
                assert push(alone, step, numbers(layout, seed=10 * step + 1), 1) == sent
        both.settle()
        alone.settle()
        if step == 0:
            norms = [owed(one, replica) for one, replica in ((both, 0), (both, 1), (alone, 1))]
            assert both.memory_norm == pytest.approx(math.hypot(*norms[:2]))
            assert alone.memory_norm == pytest.approx(norms[2])
    # Replica 1 now belongs to another worker; when it comes back, it starts from zero.
    both.locate({(0, 0): 3})
    assert both.memory_norm == pytest.approx(norms[0])
    assert not both.state_dict(1) and both.state_dict(0)
    assert push(both, 3, numbers(layout), 1) == push(encoders(codec, plan), 3, numbers(layout), 1)


@REMEMBERING
@pytest.mark.parametrize("back_to", [0, 2, 4])
def test_after_a_rollback_memory_is_what_the_codec_says(codec: Codec, back_to: int) -> None:
    plan = model()
    worker, fresh = encoders(codec, plan, keep_every=2), encoders(codec, plan)
    layout = worker.coding.bucket(0, 0).layout
    states = {0: torch.zeros(layout.bucket.elements)}
    for step in range(5):
        push(worker, step, numbers(layout, seed=step))
        worker.settle()
        states[step + 1] = remembered(worker)
    after = encoders(codec, plan, keep_every=2)
    after.inherit(worker)
    after.locate({(0, 0): back_to})
    expected = states[back_to] if codec.memory is Memory.RESTORED and back_to else states[0]
    assert torch.equal(remembered(after), expected)
    if not after.state_dict(0):
        assert push(after, back_to, numbers(layout)) == push(fresh, back_to, numbers(layout))


@pytest.mark.part(of=3)
@REMEMBERING
def test_memory_is_part_of_a_replicas_state_on_any_number_of_servers(codec: Codec) -> None:
    tensors = keep_whole(JobCodec.both(codec), [spec("large", (512, 1024)), spec("small", (10,))])
    one, two = make_plan(tensors, 1, bucket_bytes=2 * BUCKET_BYTES), make_plan(tensors, 2)
    if not tensors[0].whole:
        assert len(list(one.pieces(0))) != len(list(two.pieces(0)))
    worker = encoders(codec, one)
    for shard, shard_spec in enumerate(one.shards):
        worker.begin(shard, 0)
        for number in range(len(shard_spec.buckets)):
            worker.encode(shard, number, 3, numbers(worker.coding.bucket(shard, number).layout))
    worker.settle()
    state = worker.state_dict(3)
    assert set(state) == {tensor.name for tensor in tensors if codec.takes(tensor)}
    for plan in (one, two):
        other = encoders(codec, plan)
        other.load_state_dict(3, state, number=1)
        again = other.state_dict(3)
        assert {name: list(held) for name, held in again.items()} == {name: list(held) for name, held in state.items()}
        for name, held in state.items():
            assert all(torch.equal(again[name][what], values) for what, values in held.items())
        moved = encoders(codec, plan)
        moved.inherit(worker)
        assert set(moved.state_dict(3)) == set(state)


# Uses of the codec


def test_nobody_outside_asks_for_a_codec_by_name() -> None:
    root = Path(__file__).parents[2]
    places = [root / "shardline", root / "services", root / "chief", root / "worker", root / "evaluator"]
    asks = re.compile(
        r"""\bRAW\b|codec(_name|\.name)?\s*([!=]=|\bis\b( not)?)\s*(["'A-Z]\w)|isinstance\(.*(Raw|Cast)\b"""
    )
    files = [path for place in places for path in place.rglob("*.py") if path.parts[-2] != "codecs"]
    assert len(files) > 100
    found = [f"{path}: {line.strip()}" for path in files for line in path.read_text().splitlines() if asks.search(line)]
    assert not found


def test_pulls_are_remembered_for_each_receiver_and_bucket() -> None:
    @dataclass(frozen=True)
    class Delta(toy_codec.Top):
        name: ClassVar[str] = "delta"
        direction = Direction.PULL

    large = make_plan([spec("matrix", (512, 1024))], 1, bucket_bytes=BUCKET_BYTES // 4)
    coding = JobCoding(Delta(), large).pull
    held = coding.memory(0, 0, "worker/0")
    held["matrix", 0, "sent"] = torch.ones(1280)
    assert coding.memory(0, 0, "worker/0") == held
    assert not coding.memory(0, 0, "worker/1") and not coding.memory(0, 1, "worker/0")
    plain = JobCoding(Delta(), large).push
    assert plain.memory(0, 0, "worker/0") is not plain.memory(0, 0, "worker/0")


# The toy


def test_the_toy_is_in_the_table_and_says_what_is_wrong_with_a_ratio() -> None:
    assert CODECS["top"] is toy_codec.Top
    for ratio in ("0", "1.5", "-1"):
        with pytest.raises(JobError, match="ratio is"):
            CODECS.parse(f"top:ratio={ratio}")


def test_the_toys_size_depends_on_the_numbers() -> None:
    written = first(CODECS.parse("top:ratio=0.25"), model())
    dense, sparse = numbers(written.layout), numbers(written.layout)
    sparse[1:] = 0.0
    assert len(written.coder.encode(sparse, turn())) < len(written.coder.encode(dense, turn())) <= written.max_bytes
