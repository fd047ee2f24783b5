"""What a plan predicts, beside what a cluster of processes counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.job import load_job
from shardline_pipeline import schedule_named
from shardline_pipeline.cli.partition import exchanges
from shardline_pipeline.model import Pipeline
from shardline_pipeline.partition.costs import Cluster, Costs, LinkLevel, PlannedStage
from shardline_pipeline.partition.forecast import forecast_of
from shardline_pipeline.partition.measure import shapes
from shardline_pipeline.partition.profile import coded
from tests.e2e.support import PATIENCE_S, mortal_cluster, scrape, summary_of, total, wait_for_step

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline


def model():
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    return shardline.Pipeline(layers, stages=[1, 3])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = shardline.Job(
    model=model, loss=loss, dataset=TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,))),
    optimizer="SGD", optimizer_args={"lr": 0.01}, batch_size=4, accumulate=3, steps=STEPS, replicas=2, pipeline="flush",
    codec_parcels="CODEC",
)
"""
STEPS = 120


@pytest.mark.part(of=2)
@pytest.mark.parametrize("codec", ["", "bf16"])
def test_bytes_on_all_wires_are_within_five_percent_of_those_predicted(tmp_path: Path, codec: str) -> None:
    path, out = tmp_path / "job.py", tmp_path / "run"
    path.write_text(JOB.replace("STEPS", str(STEPS)).replace("CODEC", codec))
    job = load_job(path)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    profile = shapes(model, job)
    costs = Costs(
        profile=profile,
        cluster=Cluster(levels=(LinkLevel(count=6),), servers=2),
        schedule=schedule_named("flush"),
        microbatches=job.replicas * job.accumulate,
        exchange=exchanges(replace(job, pipeline="whole-model").spec(model), len(model), 2),
        coded=coded(profile, codec),
    )
    spans = [model.span(stage) for stage in range(model.num_stages)]
    plan = tuple(
        PlannedStage(first=span.start, end=span.stop, workers=(2 * number, 2 * number + 1))
        for number, span in enumerate(spans)
    )
    predicted = forecast_of(costs, plan)
    with mortal_cluster(path, out, workers=6) as cluster:
        wait_for_step(out, STEPS // 2)
        groups = json.loads((out / "prometheus-targets.json").read_text())
        pages = [scrape(one["targets"][0]) for one in groups if one["labels"]["service"] == "worker"]
        assert cluster.wait(timeout_s=PATIENCE_S) == 0
    counted = summary_of(out)["bytes"]
    exchanged = (counted["push"]["raw"] + counted["pull"]["raw"]) / STEPS
    assert exchanged == pytest.approx(predicted.parameter_bytes, rel=0.05)
    # While it runs, so counters of workers are some passes apart: what goes with each step's pushes is compared.
    pushed = sum(total(page, "shardline_push_raw_bytes_total") for page in pages)
    parcels = sum(total(page, "shardline_parcel_wire_bytes_total") for page in pages)
    assert len(pages) == 6 and parcels > 0
    each = counted["push"]["raw"] / STEPS
    assert parcels / (pushed / each) == pytest.approx(predicted.parcel_bytes, rel=0.05)
