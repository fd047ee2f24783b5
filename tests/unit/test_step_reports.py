"""Where the time of a step went, by what a worker reports."""

from __future__ import annotations

import time

import torch

from shardline.client.api.step_reports import StepReports
from shardline.core.orders import StepReport
from shardline.data import BatchSource
from shardline.observability.metrics import Metrics
from tests.support.jobs import make_job


def report(replica: int) -> StepReport:
    return StepReport(step=0, replica=replica, loss=1.0, samples=8)


def test_waiting_for_batches_is_not_computing() -> None:
    reports = StepReports(Metrics("worker", "worker/0"), None)
    reports.began_s -= 100.0
    reports.read(40.0)
    reports.read(10.0)
    reports.add(report(0), waited_s=20.0)
    reports.read(0.0)
    reports.add(report(1), waited_s=20.0)
    first, second = reports.take(0).reports
    assert first.data_s == 50.0
    assert 30.0 <= first.compute_s < 50.0
    assert second.data_s == 0.0
    assert second.compute_s < 20.0


def test_ticks_of_a_step_add_up_and_another_step_begins_at_zero() -> None:
    reports = StepReports(Metrics("worker", "worker/0"), None)
    reports.read(2.0)
    reports.add(report(0), waited_s=0.0)
    reports.next_tick()
    reports.read(3.0)
    reports.add(report(0), waited_s=0.0)
    (whole,) = reports.take(0).reports
    assert whole.data_s == 5.0
    reports.read(7.0)
    reports.clear()
    reports.add(report(0), waited_s=0.0)
    assert reports.take(0).reports[0].data_s == 0.0


def test_a_source_tells_how_long_each_batch_took() -> None:
    class Slow:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.002)
            return torch.zeros(1)

    took: list[float] = []
    source = BatchSource(make_job(dataset=Slow(), batch_size=4, replicas=1), took.append)
    source.batch(0, 0, 0)
    source.batch(1, 0, 0)
    assert len(took) == 2
    assert min(took) >= 0.008
