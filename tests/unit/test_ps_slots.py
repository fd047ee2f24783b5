"""A bucket whose push ends while the pool has it: it counts with all of its bytes, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardline.codecs import coding_of
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import digest
from shardline.errors import ProtocolError
from shardline.server import incoming_push
from shardline.server.buffers import Buffers
from shardline.server.incoming_push import Slot, opened

PLAN = make_plan((TensorSpec(name="w", shape=(64,), dtype="float32"),), 1)
VALUES = torch.arange(64, dtype=torch.float32)
PAYLOAD = VALUES.numpy().tobytes()
TAKE = Buffers(lambda: 1 << 20).take


def in_one_message() -> Slot:
    slot = empty()
    slot.parts, slot.digest = [PAYLOAD], digest(PAYLOAD)
    return slot


def in_pieces() -> Slot:
    slot = empty()
    slot.parts, slot.digest = [PAYLOAD[:100], PAYLOAD[100:]], digest(PAYLOAD)
    return slot


def in_a_workers_memory() -> Slot:
    slot = empty()
    slot.memory, slot.borrowed, slot.moved = memoryview(PAYLOAD), True, False
    return slot


def empty() -> Slot:
    coding = coding_of("raw", PLAN).push.bucket(0, 0)
    return Slot(3, coding.layout.bucket, coding, (), memoryview(b""), size=len(PAYLOAD))


WAYS = pytest.mark.parametrize("arrived", [in_one_message, in_pieces, in_a_workers_memory])


@WAYS
def test_bucket_whose_push_ended_before_the_pool_began_with_it_is_not_counted(arrived: Callable[[], Slot]) -> None:
    slot = arrived()
    slot.release()
    with pytest.raises(ProtocolError, match="bucket 3: its push ended before it was counted"):
        opened(slot, TAKE, repeated=True)


@WAYS
def test_bucket_whose_push_ends_while_its_digest_is_made_has_all_of_its_values(
    arrived: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = arrived()
    slot.moved = True

    def while_it_ends(data: memoryview) -> int:
        slot.release()
        return digest(data)

    monkeypatch.setattr(incoming_push, "digest", while_it_ends)
    slot.digest = digest(PAYLOAD)
    values = opened(slot, TAKE, repeated=True).values
    assert values is not None
    assert torch.equal(values, VALUES)
