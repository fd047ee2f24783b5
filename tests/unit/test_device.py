"""Shared memory that a GPU copies into by itself; CUDA is played."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shardline.client.exchange import device
from shardline.client.exchange.device import HostPath
from shardline.client.step.staging import GradientStaging
from shardline.codecs import coding_of
from shardline.codecs.coding import PushEncoders
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.errors import UsageError
from shardline.host.process import device_index, resolve_device
from shardline.host.segments import Segment


class Cuda:
    """The two calls, and what is registered. Unregistering looks whether the memory is mapped still."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.flags: list[int] = []
        self.watched: memoryview | None = None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.flags.append(flags)
        self.calls.append("register")
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        maps = open("/proc/self/maps").read()  # noqa: SIM115
        assert any(int(line.split("-")[0], 16) == address for line in maps.splitlines()), "it was unmapped before"
        del self.registered[address]
        return 0

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    played = Cuda()

    @contextlib.contextmanager
    def on_device(_device: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    return played


def test_a_segment_is_locked_once_and_let_go_before_it_is_unmapped(cuda: Cuda) -> None:
    host = HostPath(torch.device("cuda"))
    segment = Segment.create(8192, name="test")
    address = np.frombuffer(segment.memory, np.uint8).ctypes.data
    assert host.lock_pages(segment.memory[64:128])
    assert host.lock_pages(segment.memory[4096:])
    assert cuda.registered == {address: 8192}
    del segment
    gc.collect()
    assert cuda.calls == ["register", "synchronize", "unregister"]


def test_a_segment_stays_locked_until_the_step_that_is_copied_into_it_is_over(cuda: Cuda) -> None:
    plan = make_plan([TensorSpec(name="w", shape=(1024,), dtype="float32")], 1)
    held = [Segment.create(plan.shards[0].buckets[0].nbytes, name="test")]
    host = HostPath(torch.device("cuda"))
    encoders = PushEncoders(coding_of("raw", plan).push)
    staging = GradientStaging(plan, 1, encoders, lambda shard, bucket, nbytes: held[0].memory, host)
    assert staging._lane_memory((0, 0)) is not None
    # Its lane has broken, while another thread may be about to have the next bucket copied.
    held.clear()
    gc.collect()
    assert cuda.calls == ["register"]
    staging.clear()
    gc.collect()
    assert cuda.calls == ["register", "synchronize", "unregister"]


def test_a_device_that_has_failed_costs_no_descriptor(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    segment = Segment.create(4096, name="test")
    assert HostPath(torch.device("cuda")).lock_pages(segment.memory)
    descriptor = os.fstat(segment.fd)
    with caplog.at_level(logging.WARNING, logger="shardline.device"):
        fd = segment.fd
        del segment
        gc.collect()
    assert "can't unlock the shared memory of cuda: CUDA error: device-side assert" in caplog.text
    with contextlib.suppress(OSError):
        assert os.fstat(fd).st_ino != descriptor.st_ino


def test_another_segment_is_locked_for_itself(cuda: Cuda) -> None:
    host = HostPath(torch.device("cuda"))
    segments = [Segment.create(4096, name="test") for _ in range(2)]
    assert all(host.lock_pages(segment.memory) for segment in segments)
    assert len(cuda.registered) == 2


def test_ordinary_memory_is_not_locked(cuda: Cuda) -> None:
    host = HostPath(torch.device("cuda"))
    assert not host.lock_pages(memoryview(bytearray(4096)))
    assert not cuda.calls


@pytest.mark.parametrize(("able", "private"), [(True, False), (True, True), (False, False)])
def test_what_the_server_publishes_is_locked_for_reading_where_the_device_can_and_nothing_is_written_to_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, able: bool, private: bool
) -> None:
    # Locking pages that could be written to in private would copy them: the device would read old values.
    monkeypatch.setattr(device, "reads_locked_pages", lambda _device: able)
    published = Segment.create(4096, name="test", read_only=True)
    seen = Segment.adopt(os.dup(published.fd), 4096, private=private)
    assert HostPath(torch.device("cuda")).lock_pages(seen.memory[64:128]) == (able and not private)
    assert cuda.flags == ([device.READ_ONLY] if able and not private else [])


def test_a_refusal_is_said_once_and_the_memory_not_used(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.error = 2
    host = HostPath(torch.device("cuda"))
    segment = Segment.create(4096, name="test")
    with caplog.at_level(logging.WARNING, logger="shardline.device"):
        assert not host.lock_pages(segment.memory)
        assert not host.lock_pages(segment.memory)
    assert len(caplog.records) == 1
    assert "4096 bytes of shared memory can't be page-locked for cuda (CUDA error 2)" in caplog.text
    del segment
    gc.collect()
    assert cuda.calls == ["register"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_device_copies_into_locked_shared_memory() -> None:
    host = HostPath(torch.device("cuda"))
    segment = Segment.create(1 << 20, name="test")
    assert host.lock_pages(segment.memory)
    target = torch.frombuffer(segment.memory, dtype=torch.float32)
    assert target.is_pinned()
    source = torch.randn(target.numel(), device="cuda")
    with host.after([host.mark()]) as copy:
        copy([target], [source])
    torch.testing.assert_close(target, source.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "version", "count", "visible", "says"),
    [
        (
            "cuda",
            None,
            0,
            None,
            r"--device cuda: this torch \(\S+\) is a CPU build; install a CUDA build .*--device cpu$",
        ),
        ("cuda", "12.8", 0, None, r"--device cuda: torch sees 0 CUDA devices; check that nvidia-smi shows it"),
        ("cuda:1", "12.8", 1, "0", r"--device cuda:1: torch sees 1 CUDA device \(CUDA_VISIBLE_DEVICES='0'\); check"),
    ],
)
def test_device_that_is_not_there_is_one_sentence_that_says_what_to_do(
    name: str, version: str | None, count: int, visible: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match=says) as refusal:
        resolve_device(name)
    assert "\n" not in str(refusal.value)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("environ", "neighbours", "expected"),
    [
        ({}, 0, 0),
        ({}, 3, 3),
        ({}, 5, 1),
        ({"SLURM_LOCALID": "2"}, 0, 2),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "2"}, 3, 1),
        ({"LOCAL_RANK": "", "SLURM_LOCALID": "6"}, 0, 2),
    ],
)
def test_each_task_of_a_machine_gets_a_gpu_of_its_own_while_there_are_some(
    environ: dict[str, str], neighbours: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_index(environ, neighbours, 4) == expected
    # Where Slurm shows each task its own GPU only.
    assert device_index(environ, neighbours, 1) == 0
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.setenv(name, environ.get(name, ""))
    assert resolve_device("cuda", neighbours=neighbours) == torch.device("cuda", expected)
    assert resolve_device("cuda:3", neighbours=neighbours) == torch.device("cuda", 3)


def test_a_number_on_this_machine_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cuda: LOCAL_RANK is 'first'; it must be a number"):
        device_index({"LOCAL_RANK": "first"}, 0, 4)
