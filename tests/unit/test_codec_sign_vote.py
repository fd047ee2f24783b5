"""Sign vote: what most workers say is done, on every tensor, whatever the size of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardline.codecs.base import Turn
from shardline.codecs.coding import Coding
from shardline.codecs.quantizing.sign_vote import SignVote
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, TensorSpec
from shardline.errors import JobError, UsageError
from shardline.fit import check_fit
from shardline_lab.simulator.gradients import training_contents
from shardline_lab.simulator.simulation import Setup
from shardline_lab.simulator.times import Gamma
from tests.support.cluster import Cluster
from tests.support.jobs import make_job

LR = 0.05
PLAN = make_plan([TensorSpec(name="w", shape=(64, 64), dtype="float32")], 1)


def through(values: torch.Tensor, *, step: int = 0) -> torch.Tensor:
    written = Coding(SignVote(), PLAN).bucket(0, 0)
    data = bytearray(written.coder.encode(values, Turn(step)))
    assert len(data) == 4 + 64 * 64 // 8
    return written.coder.decode(data, Turn(step))


def test_a_value_becomes_its_sign_and_zeros_one_or_the_other() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert torch.equal(through(values), values.sign())
    zeros = through(torch.zeros(4096))
    assert set(zeros.tolist()) == {-1.0, 1.0} and abs(float(zeros.mean())) < 0.1
    assert torch.equal(zeros, through(torch.zeros(4096))) and not torch.equal(zeros, through(torch.zeros(4096), step=1))


@pytest.mark.parametrize("ps", [1, 2])
def test_parameters_move_by_the_learning_rate_where_most_point_and_stay_where_nobody_wins(ps: int) -> None:
    job = make_job("sgd", steps=2, replicas=4, codec="sign-vote")
    with Cluster(job, ps=ps) as cluster:
        worker = cluster.worker(0)
        before = {name: value.clone() for name, value in cluster.state().params.items()}
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(4), cluster.timeline)
        # By replica: of a size that would decide, if sizes counted.
        sizes = {0: 1e-6, 1: 1e-6, 2: 1e-6, 3: -1e6}
        worker.trainer.begin()
        for replica, size in sizes.items():
            gradients = {name: torch.full_like(value, size) for name, value in worker.values.items()}
            worker.trainer.contribute(replica, gradients, samples=4, loss=1.0)
        worker.trainer.finish()
        after = {name: value.clone() for name, value in cluster.state().params.items()}
        assert all(torch.equal(after[name], before[name] - LR) for name in before)
        worker.trainer.begin()
        for replica, size in {0: 1.0, 1: 2.0, 2: -3.0, 3: -4.0}.items():
            gradients = {name: torch.full_like(value, size) for name, value in worker.values.items()}
            worker.trainer.contribute(replica, gradients, samples=4, loss=1.0)
        worker.trainer.finish()
        assert all(torch.equal(cluster.state().params[name], after[name]) for name in before)


def test_what_signs_make_meaningless_is_refused() -> None:
    job = make_job("sgd", steps=2, codec="sign-vote")
    spec = job.spec(job.build_model())
    check_fit(spec)
    with pytest.raises(JobError, match=r"so clip_norm=0.5 would change nothing"):
        check_fit(replace(spec, consistency=ConsistencySpec(clip_norm=0.5)))
    local = make_job("sgd", steps=2, codec="sign-vote", cadence="local-sgd:every=2")
    with pytest.raises(JobError, match="applies signs, but cadence local-sgd:every=2 sends how far"):
        check_fit(local.spec(local.build_model()))
    with pytest.raises(UsageError, match="has the servers vote, which can't be simulated"):
        training_contents(job, Setup(job=spec, workers=1, times=(Gamma(1.0, 0.1),)))
