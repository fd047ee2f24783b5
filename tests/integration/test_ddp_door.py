"""shardline.init_process_group(), DistributedModel and DistributedOptimizer in one process: ranks, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardline
from shardline.errors import JobError
from shardline.integrations.processes import attach
from tests.support.services import SEEDING, Services, make_model


@pytest.fixture
def alone(start: Callable[..., Services]) -> Iterator[shardline.Session]:
    session = shardline.init_process_group()
    yield session
    torch.distributed.destroy_process_group()
    session.close()


def test_ranks_and_small_tensors_and_what_is_refused(alone: shardline.Session) -> None:
    dist = torch.distributed
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "shardline")
    model = shardline.DistributedModel(make_model())
    assert model.session is alone
    with pytest.raises(JobError, match="already rank 0 of 1 in a process group"):
        shardline.init_process_group()
    with pytest.raises(JobError, match="given a Sequential as model"):
        shardline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.module)  # type: ignore[arg-type]
    # Nothing is exchanged before there is a job.
    dist.barrier()
    optimizer = shardline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_norm=0.5)
    assert alone.job.consistency.clip_norm == 0.5
    dist.barrier()
    seed = torch.tensor([[3, 4]])
    dist.broadcast(seed, 0)
    assert seed.tolist() == [[3, 4]]
    with pytest.raises(JobError, match=r"leave dist\.all_reduce"):
        dist.all_reduce(torch.ones(1))
    with model.no_sync():
        nn.functional.cross_entropy(model(torch.ones(2, 6)), torch.tensor([0, 1])).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert alone.step == 1


def test_a_model_in_ddp_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(JobError, match="DistributedDataParallel, whose processes would exchange"):
            shardline.DistributedModel(nn.parallel.DistributedDataParallel(make_model()))
        with pytest.raises(JobError, match="already rank 0 of 1 in a process group"):
            shardline.init_process_group()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("differs", ["0.weight", "2.running_mean", None])
def test_frozen_weights_and_buffers_are_compared_with_the_first_workers(
    start: Callable[..., Services], differs: str | None
) -> None:
    services = start(ps=1, workers=2)

    def worker(index: int) -> str:
        session = services.connect(index)
        with SEEDING:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        if index == 1 and differs is not None:
            model.state_dict()[differs][-1] += 1.0
        trained = [one for one in model.parameters() if one.requires_grad]
        try:
            attach(session, model, torch.optim.SGD(trained, lr=0.1))
        except JobError as error:
            session.fail(error)
            session.shutdown()
            return str(error)
        session.close()
        return ""

    first, second = services.workers(lambda: worker(0), lambda: worker(1))
    assert first == ""
    if differs is None:
        assert second == ""
        services.end()
    else:
        assert second.startswith(f"worker/1: {differs}, which is not trained, had other values than in worker/0")
        services.end(code=2)
