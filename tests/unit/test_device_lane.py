"""Memory of a device between two processes: what is refused, and who frees it. Host memory plays the device."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch

from shardline.client.exchange.device import device_magnitude
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.host.device_memory import HANDLE, CudaMemory, DeviceMemoryError
from shardline.host.segments import Segment, SegmentError
from shardline.lanes.cuda.client import handed, taken
from shardline.lanes.cuda.server import CudaOffer, DevicePublication
from shardline.storage.publication import PlainPublication
from shardline.update.torch_optim import adam
from tests.support.device_memory import HostMemory, played
from tests.support.segments import descriptors

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SPEC = make_plan([TensorSpec(name="w", shape=(300, 7), dtype="float32")], 1).shards[0]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with played():
        yield


def test_what_one_side_writes_the_other_reads() -> None:
    made = HostMemory.create(4096, CPU)
    seen = taken(handed(made).memory, CPU)
    made.tensor[5] = 7
    assert seen.tensor[5] == 7 and seen.tensor.nbytes == 4096


def test_a_handle_that_is_none_is_refused() -> None:
    made = HostMemory.create(4096, CPU)
    place, owner, nbytes = HANDLE.unpack(made.handle)
    for wrong in (
        b"short",
        HANDLE.pack(place, b"another GPU", nbytes),
        HANDLE.pack(place, owner, 2 * nbytes),
        HANDLE.pack(b"", owner, nbytes),
    ):
        with pytest.raises(SegmentError):
            taken(wrong, CPU)


def test_a_device_without_cuda_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(DeviceMemoryError, match="the package cuda-bindings is missing"):
        CudaMemory.create(64, GPU)


def test_memory_is_given_back_with_its_last_view() -> None:
    gc.collect()
    before = descriptors("shardline-device")
    published = DevicePublication(SPEC, keeps_previous=True, device=CPU)
    view = published.tensor(1, 0)
    seen = [taken(segment.memory, CPU).tensor for segment in published.areas]
    view.fill_(3.0)
    assert torch.equal(seen[1][published.offset(0) :][: view.nbytes].view(torch.float32), view)
    del published, view, seen
    gc.collect()
    assert descriptors("shardline-device") == before


def test_a_server_whose_device_has_no_memory_left_publishes_in_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(nbytes: int, device: torch.device) -> HostMemory:
        raise DeviceMemoryError(f"can't allocate {nbytes:,} bytes on {device}: cudaErrorMemoryAllocation")

    monkeypatch.setattr(HostMemory, "create", full)
    offer = CudaOffer(CPU, run_dir=None, timeout_s=1.0)
    try:
        assert isinstance(offer.publish(SPEC, keeps_previous=True), PlainPublication)
    finally:
        offer.close()
    assert "can't be shared on cpu: can't allocate" in caplog.text and "lane cuda is not available" in caplog.text


def test_adam_is_fused_on_a_gpu_unless_something_else_was_chosen() -> None:
    nothing = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
    fused = {**nothing, "fused": True}
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        assert adam.placed(cls, nothing, torch.float32, GPU) == fused
        for chosen in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"capturable": True}):
            assert adam.placed(cls, {**nothing, **chosen}, torch.float32, GPU) == {**nothing, **chosen}
        assert adam.placed(cls, nothing, torch.float32, CPU) == nothing
        assert adam.placed(cls, nothing, torch.complex64, GPU) == nothing
    assert adam.placed(torch.optim.SGD, nothing, torch.float32, GPU) == nothing


def test_segments_of_handles_are_as_small_as_a_handle() -> None:
    segment = handed(HostMemory.create(1 << 20, CPU))
    assert isinstance(segment, Segment) and segment.nbytes == HANDLE.size


def test_the_magnitude_of_several_tensors_is_that_of_the_largest_element() -> None:
    found = device_magnitude([torch.tensor([0.5, -3.0]), torch.empty(0), torch.tensor([[2.0]])])
    assert found == 3.0 and device_magnitude([torch.empty(0)]) == 0.0
    assert device_magnitude([torch.tensor([3.0 + 4.0j])]) == 5.0
    assert device_magnitude([torch.tensor([1.0, -2.0], dtype=torch.bfloat16)]) == 2.0
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not math.isfinite(device_magnitude([torch.ones(3), torch.tensor([1.0, bad])]))
