"""How far parameters move while a worker pushes."""

from __future__ import annotations

import pytest
import torch

from shardline.client.step.weights import EVERY, SAMPLE, GapMeter
from tests.support.cluster import Cluster
from tests.support.jobs import make_job


def test_it_is_the_root_mean_square_of_how_far_the_elements_moved() -> None:
    tensors = [torch.zeros(3), torch.zeros(1, 5)]
    meter = GapMeter(tensors)
    found = []
    for _ in range(1 + 2 * EVERY):
        meter.begin()
        meter.begin()  # the exchange is repeated
        tensors[0].add_(2.0)
        meter.end()
        found.append(meter.last)
    # The first exchange is a pull.
    assert [number for number, gap in enumerate(found) if gap is not None] == [1, 1 + EVERY]
    assert found[1] == pytest.approx((3 * 4 / 8) ** 0.5)


def test_of_a_large_model_a_sample_is_compared() -> None:
    tensors = [torch.zeros(SAMPLE), torch.zeros(SAMPLE)]
    meter = GapMeter(tensors)
    meter.end()
    meter.begin()
    tensors[0].add_(1.0)
    meter.end()
    assert meter.last == pytest.approx(0.5**0.5)


def test_what_is_given_up_is_not_measured() -> None:
    meter = GapMeter([torch.zeros(3)])
    meter.end()
    meter.begin()
    meter.start_over()
    meter.end()
    assert meter.last is None


@pytest.mark.parametrize(("changes", "measured"), [({"consistency": "async"}, True), ({}, False)])
def test_workers_that_push_for_themselves_measure_it(changes: dict[str, str], measured: bool) -> None:
    job = make_job("sgd", replicas=1, steps=3, **changes)
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0)
        before = {name: value.detach().clone() for name, value in worker.values.items()}
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(1), cluster.timeline)
        worker.compute(0, 0)
        figures = worker.trainer.finish()
        if not measured:
            assert figures.gap is None
            return
        trained = [name for name, value in worker.values.items() if value.requires_grad]
        moved = torch.cat([(worker.values[name].detach() - before[name]).reshape(-1) for name in trained])
        assert figures.gap == pytest.approx(float(moved.norm()) / len(moved) ** 0.5, rel=1e-5)
