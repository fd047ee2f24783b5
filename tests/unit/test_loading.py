"""Forecasts of what loaders read next, and how a batch travels from them."""

from __future__ import annotations

import collections
import os
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from shardline.loading.packed import opened, pack, unpack
from shardline.loading.pool import Place, UpcomingBatches


def asked(batches: UpcomingBatches, *places: Place) -> None:
    for place in places:
        batches.ask(place)


def after(batches: UpcomingBatches, count: int, end: int | None = None) -> list[Place]:
    return list(islice(batches.after(end), count))


def test_each_step_is_expected_to_ask_for_the_batches_of_the_step_before() -> None:
    batches = UpcomingBatches(accumulate=2)
    asked(batches, (5, 1, 0))
    # Of the first step only this is known.
    assert after(batches, 3) == [(5, 1, 1), (6, 1, 0), (6, 1, 1)]
    asked(batches, (5, 1, 1), (5, 3, 0), (5, 3, 1), (6, 1, 0))
    assert after(batches, 4) == [(6, 1, 1), (6, 3, 0), (6, 3, 1), (7, 1, 0)]
    # Batches of a pipeline come in the order of its passes.
    asked(batches, (6, 3, 0), (6, 1, 1), (6, 3, 1), (7, 1, 0))
    assert after(batches, 3) == [(7, 3, 0), (7, 1, 1), (7, 3, 1)]


def test_a_rollback_and_another_replica_change_what_is_expected() -> None:
    batches = UpcomingBatches(accumulate=1)
    asked(batches, (8, 0, 0), (8, 1, 0), (9, 0, 0), (9, 1, 0), (4, 0, 0))
    assert after(batches, 3) == [(4, 1, 0), (5, 0, 0), (5, 1, 0)]
    # The step again, now with a replica of a worker that was lost.
    asked(batches, (4, 0, 0), (4, 1, 0), (4, 2, 0))
    assert after(batches, 1) == [(5, 2, 0)]
    asked(batches, (5, 0, 0))
    assert after(batches, 3) == [(5, 1, 0), (5, 2, 0), (6, 0, 0)]


def test_nothing_is_expected_beyond_the_end_of_a_lease() -> None:
    batches = UpcomingBatches(accumulate=1)
    asked(batches, (14, 0, 0))
    assert after(batches, 8, end=16) == [(15, 0, 0)]
    asked(batches, (15, 0, 0))
    assert after(batches, 8, end=16) == []


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


Pair = collections.namedtuple("Pair", ["points", "labels"])
GENERATOR = torch.Generator().manual_seed(3)
BATCHES: dict[str, Any] = {
    "a list": [torch.randn(4, 3, generator=GENERATOR), torch.arange(4)],
    "a named tuple": Pair(torch.randn(2, generator=GENERATOR), torch.tensor(7)),
    "dtypes": [
        torch.ones(3, dtype=one) for one in (torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.cdouble)
    ],
    "numpy": {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(2),
        "of objects": np.array([None]),
    },
    "layouts": [
        torch.randn(2, 3, 4, 5, generator=GENERATOR).contiguous(memory_format=torch.channels_last),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(20)[3::4],
        torch.ones(3, 1).expand(3, 4),
    ],
    "no elements": [torch.empty(0, 3), torch.tensor(4)],
    "no tensor": {"name": "one", "number": 3},
    "not plain": [
        torch.eye(3).to_sparse(),
        torch.randn(3, dtype=torch.cfloat, generator=GENERATOR).conj(),
        torch.randn(3, dtype=torch.cfloat, generator=GENERATOR).conj().imag,
    ],
    "with a gradient": torch.ones(2, requires_grad=True),
    "of a subclass": [torch.nn.Parameter(torch.ones(2)), torch.ones(3).as_subclass(Tagged)],
}


def check_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout)
        assert found.requires_grad == expected.requires_grad
        if expected.layout is torch.strided:
            assert found.stride() == expected.stride()
        assert torch.equal(found.to_dense(), expected.to_dense())
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            check_equal(found[name], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            check_equal(ours, theirs)
    else:
        assert found == expected


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_arrives_as_it_was(name: str) -> None:
    check_equal(unpack(opened(pack(BATCHES[name]))), BATCHES[name])


def test_a_batch_stays_in_host_memory_whatever_the_default_device_is() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    with torch.device("meta"):
        found = unpack(opened(pack([rows, rows[1]])))
    assert found[0].device.type == "cpu"
    assert torch.equal(found[0], rows) and torch.equal(found[1], rows[1])


def test_tensors_that_share_memory_still_do_and_neither_side_writes_to_the_others() -> None:
    whole = torch.arange(100.0).reshape(10, 10)
    packed = pack({"rows": whole[2:4], "columns": whole.t()[1:], "again": whole[5], "array": np.zeros(3)})
    whole.zero_()
    found = unpack(opened(packed))
    assert found["rows"][0, 4] == 24.0
    found["rows"][0, 4] = -1.0
    assert found["columns"][3, 2] == -1.0
    found["again"].add_(1.0)
    assert found["columns"][0, 5] == 52.0
    found["array"][0] = 2.0
    assert not whole.any()


def test_a_view_of_a_large_storage_takes_the_memory_of_the_view() -> None:
    whole = torch.empty(2**28)
    whole[2**27] = 7.0
    packed = pack([whole[2**27 : 2**27 + 2], whole[2**27 + 8 :][:2]])
    assert os.fstat(packed).st_blocks * 512 < 2**16
    assert unpack(opened(packed))[0][0] == 7.0
