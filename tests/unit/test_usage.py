"""Cores, memory and GPU of a task's process: measured, told, and shown."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from shardline.cli.status_frame import Frame
from shardline.cli.terminal import PlainConsole
from shardline.core.status import ChiefStatus, TaskStatus, Usage
from shardline.errors import ProtocolError
from shardline.host.awake import awake_s
from shardline.observability.metrics import Metrics
from shardline.observability.view import cluster_view
from shardline.rpc import usage
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.usage import UsageMeter
from shardline.rpc.v1 import chief_pb2
from tests.support.chief_cluster import running

USAGE = Usage(cores=1.53, resident_bytes=412_000_000, gpu_bytes=4_100_000_000, gpu_share=0.93)
WORKER = TaskStatus(task="worker/0", state="alive", device="cuda:1", usage=USAGE)


def test_a_process_measures_its_cores_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = UsageMeter("cpu")
    until_s = awake_s() + 0.3
    while awake_s() < until_s:
        pass
    found = meter.read()
    assert found.cores > 0.05
    assert found.resident_bytes > 20_000_000
    assert (found.gpu_bytes, found.gpu_share) == (0, 0.0)
    assert meter.read() is found
    monkeypatch.setattr(usage, "EVERY_S", 0.0)
    assert meter.read() is not found


class Refused(Exception):
    """pynvml's error."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU 1 and nvidia-ml-py, as torch sees them."""
    stand_in = types.ModuleType("pynvml")
    stand_in.NVMLError = Refused  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(torch.cuda, "device_memory_used", {"cuda:1": 4_100_000_000}.__getitem__)
    monkeypatch.setattr(torch.cuda, "utilization", {"cuda:1": 93}.__getitem__)
    return monkeypatch


def test_a_gpu_is_measured_where_its_driver_tells(driver: pytest.MonkeyPatch) -> None:
    found = UsageMeter("cuda:1").read()
    assert (found.gpu_bytes, found.gpu_share) == (4_100_000_000, 0.93)
    metrics = Metrics("ps", "ps/0")
    metrics.serve("127.0.0.1", 0, device="cuda:1")
    try:
        assert metrics.registry.get_sample_value("shardline_gpu_used_bytes", {"task": "ps/0"}) == 4_100_000_000
        assert metrics.registry.get_sample_value("shardline_gpu_busy_ratio", {"task": "ps/0"}) == 0.93
    finally:
        metrics.close()

    def refuse(_: str) -> int:
        raise Refused

    driver.setattr(torch.cuda, "utilization", refuse)
    assert usage.gpu("cuda:1") == (0, 0.0)
    driver.setitem(sys.modules, "pynvml", None)
    assert usage.gpu("cuda:1") == (0, 0.0)


def test_without_a_gpu_there_is_no_figure_of_one() -> None:
    metrics = Metrics("ps", "ps/0")
    metrics.serve("127.0.0.1", 0, device="cpu")
    try:
        assert metrics.registry.get_sample_value("shardline_gpu_used_bytes", {"task": "ps/0"}) is None
    finally:
        metrics.close()


def test_a_heartbeat_tells_the_usage_and_the_chief_its_status() -> None:
    assert from_message(Usage, to_message(chief_pb2.Usage, USAGE)) == USAGE
    cluster = running()
    assert cluster.beat("worker/0", usage=USAGE)
    assert {row.task: row.usage for row in cluster.program.rows(cluster.now_s)}["worker/0"] == USAGE
    with pytest.raises(ProtocolError, match="usage: cores is nan; it must be a number from 0 to"):
        cluster.beat("worker/0", usage=replace(USAGE, cores=float("nan")))


def test_the_usage_of_a_living_task_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    view = cluster_view(ChiefStatus(phase="running", tasks=(WORKER, replace(WORKER, task="ps/0", state="dead"))))
    dead, alive = view.tasks
    assert (alive.cores, alive.resident_bytes, alive.gpu_share, alive.gpu_bytes) == (1.53, 412_000_000, 0.93, 4.1e9)
    assert (dead.cores, dead.resident_bytes, dead.gpu_share, dead.gpu_bytes) == (None, None, None, None)
    PlainConsole(width=200).print(Frame(view=view))
    said = capsys.readouterr().out
    assert all(text in said for text in ("153%", "412.0 MB", "93%", "4.1 GB"))
