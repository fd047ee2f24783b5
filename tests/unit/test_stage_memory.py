"""A stage that does not fit into a worker's memory is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.client.api.session import Session
from shardline.client.overlap.gate import StepAgain
from shardline.core.orders import Orders
from shardline.core.spec import JobSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError
from shardline.job import Job
from shardline_pipeline.activations.post import PostOffice
from shardline_pipeline.model import Pipeline
from shardline_pipeline.partition.activations import Activations
from shardline_pipeline.worker import memory
from shardline_pipeline.worker.memory import MemoryCheck

WEIGHTS = 4 * 64 * 64


def job_of(**changes: Any) -> Job:
    return Job(
        model=lambda: Pipeline([nn.Linear(64, 64, bias=False) for _ in range(4)], stages=[1, 2]),
        loss=lambda model, batch: model(batch[0]).square().mean(), dataset=TensorDataset(torch.zeros(16, 64)),
        batch_size=4, steps=1, **{"optimizer": "SGD", "optimizer_args": {"lr": 0.1}, "pipeline": "flush", **changes},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        # A gradient per replica of the stage; stage 2 has two layers.
        ({"replicas": 2}, {0: 2, 2: 2}),
        # stash has n - s versions, and one that pulls fill, of which one is in the model.
        ({"pipeline": "stash"}, {0: 1 + 3, 2: 2 * (1 + 1)}),
        # The average step, where a stage is late, and what divided gradients become.
        ({"pipeline": "stash:gap_aware=true"}, {0: 1 + 3 + 2, 2: 2 * (1 + 1 + 1)}),
        # Each of three versions as it is two steps later, and the first also one step later.
        ({"pipeline": "stash:predict=true", "apply": "worker"}, {0: 1 + 3 + 4, 2: 2 * (1 + 1)}),
        # Adam has two moments.
        ({"optimizer": "Adam", "optimizer_args": {}, "apply": "worker"}, {0: 3, 2: 6}),
    ],
)
def test_what_is_known_before_the_first_pass_is_counted(changes: dict[str, Any], needed: dict[int, int]) -> None:
    job = job_of(**changes)
    spec = job.spec(job.build_model())
    stages = {0: (0, 2), 1: (0,)} if spec.replicas == 2 else {0: (0, 2)}
    assert memory.needed_bytes(spec, stages) == {stage: count * WEIGHTS for stage, count in needed.items()}


def test_with_automatic_stages_activations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())]
    job = job_of(accumulate=4, replicas=2)
    job = replace(job, dataset=TensorDataset(torch.zeros(32, 64)), model=lambda: Pipeline(layers, stages="auto:3"))
    model, one = job.build_model(), 4 * 4 * 64
    assert isinstance(model, Pipeline)
    spec, cpu = job.spec(model), torch.device("cpu")
    found = memory.activation_bytes(model, spec, {0: (0, 2), 1: (0,)})
    # What came in, and tanh's output, of three microbatches of two replicas; and the gradient of a tensor, and of the
    # weights, to be added to the others'. The last stage holds one microbatch, of one replica, and the loss.
    assert found[0] == pytest.approx(2 * 3 * 2 * one + 2 * one + WEIGHTS, rel=0.1)
    assert found[2] == pytest.approx(3 * one + 2 * one + WEIGHTS, rel=0.2)
    needed = memory.needed_bytes(spec, {0: (0,)})[0] + memory.activation_bytes(model, spec, {0: (0,)})[0]
    monkeypatch.setattr(memory, "free_memory", lambda: needed)
    memory.check_memory(model, spec, {0: (0,)}, cpu)
    monkeypatch.setattr(memory, "free_memory", lambda: needed - 1)
    with pytest.raises(JobError) as refused:
        memory.check_memory(model, spec, {0: (0,)}, cpu)
    assert f"optimizer state and activations need {needed:,} bytes, and" in str(refused.value)
    # Where nobody has looked at the layers it says so.
    plain = job_of().build_model()
    assert isinstance(plain, Pipeline)
    assert memory.activation_bytes(plain, job_of().spec(plain), {0: (0,)}) == {}
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    with pytest.raises(JobError, match="activations are not in it"):
        memory.check_memory(plain, job_of().spec(plain), {0: (0,)}, cpu)


def test_replicas_of_one_worker_share_the_microbatches_that_it_is_ahead() -> None:
    def built(workers: list[int]) -> tuple[Pipeline, JobSpec]:
        layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64, bias=False), nn.Tanh())]
        job = job_of(pipeline="stash", replicas=4)
        job = replace(
            job,
            dataset=TensorDataset(torch.zeros(16, 64)),
            model=lambda: Pipeline(layers, stages="auto:3", workers=workers),
        )
        model = job.build_model()
        assert isinstance(model, Pipeline)
        return model, job.spec(model)

    model, spec = built([])
    assert model.profile is not None
    activations, stages = Activations(model.profile, recompute=False), dict.fromkeys(range(4), (0, 1, 2))
    apart, together = memory.activation_bytes(model, spec, stages), memory.activation_bytes(*built([1, 1, 1]), stages)
    for stage in range(3):
        span, held = model.span(stage), 3 - stage
        assert apart[stage] - together[stage] == 3 * held * activations.held_bytes(span.start, span.stop)


def test_it_is_refused_with_the_stage_its_layers_the_bytes_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of()
    model = job.build_model()
    assert isinstance(model, Pipeline)
    spec, cpu = job.spec(model), torch.device("cpu")
    monkeypatch.setattr(memory, "free_memory", lambda: 3 * WEIGHTS)
    memory.check_memory(model, spec, {0: (1, 2)}, cpu)
    monkeypatch.setattr(memory, "free_memory", lambda: 3 * WEIGHTS - 1)
    with pytest.raises(JobError) as refused:
        memory.check_memory(model, spec, {0: (1, 2)}, cpu)
    said = str(refused.value)
    assert "stage 2, layer 2 (Linear) to layer 3 (Linear), does not fit" in said
    assert "need 32,768 bytes, with this worker's other stages 49,152, and 49,151 are left on cpu" in said


def test_stages_that_a_worker_had_need_no_more_and_those_that_go_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(replicas=2)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    spec, cpu = job.spec(model), torch.device("cpu")
    monkeypatch.setattr(memory, "free_memory", lambda: WEIGHTS - 1)
    for had, stages in (({0: (1, 2)}, {0: (1, 2)}), ({0: (2,)}, {0: (1,), 1: (0,)}), ({0: (1,)}, {1: (0,)})):
        memory.check_memory(model, spec, stages, cpu, had=had)
    with pytest.raises(JobError, match=r"stage 1, .* need 16,384 bytes, and 16,383 are left"):
        memory.check_memory(model, spec, {0: (1, 2), 1: (1,)}, cpu, had={0: (1, 2)})


def test_whoever_has_no_room_for_stages_of_a_lost_worker_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(replicas=2)
    model, waited = job.build_model(), []
    assert isinstance(model, Pipeline)
    held: dict[int, tuple[int, ...]] = {0: (1,)}

    def wait(changed: Callable[[Orders], bool], *, timeout_s: float) -> None:
        waited.append(timeout_s)

    link = SimpleNamespace(orders=Orders(posting=(1 << 32) + 1), wait=wait, timeouts=Timeouts(total_s=30.0))
    office = SimpleNamespace(all_stages=lambda: dict(held), still_ordered=lambda: not waited, rank=0)
    session = SimpleNamespace(
        job=job.spec(model),
        device=torch.device("cpu"),
        link=link,
        config=SimpleNamespace(timeouts=link.timeouts),
    )
    here = MemoryCheck(cast(Session, session), cast(PostOffice, office), model)
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    with pytest.raises(JobError, match="does not fit"):
        here.check()
    assert not waited, "where the job begins there is nobody to wait for"
    monkeypatch.setattr(memory, "free_memory", lambda: WEIGHTS)
    here.check()
    held[0] = (1, 2)
    with pytest.raises(StepAgain):
        here.check()
    assert waited
    # One that had none of the job's stages, and takes some over.
    waited.clear()
    link.orders = Orders(posting=(1 << 32) + 2)
    with pytest.raises(StepAgain):
        MemoryCheck(cast(Session, session), cast(PostOffice, office), model).check()
    assert waited


@pytest.mark.parametrize("staged", [True, False])
def test_a_rank_needs_gradients_of_its_own_parts_and_of_what_all_ranks_have(
    monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    def made() -> nn.Module:
        layers = [
            nn.Linear(64, 64, bias=False),
            nn.ReLU(),
            nn.Linear(64, 64, bias=False),
            nn.Linear(64, 64, bias=False),
        ]
        return Pipeline(layers, stages=[3]) if staged else nn.Sequential(*layers)

    shared = {"tensor_parallel": {"0": "colwise", "2": "rowwise"}, "tensor_ranks": 2}
    job = replace(job_of(pipeline="flush" if staged else "whole-model", replicas=2, **shared), model=made)
    model, cpu = job.build_model(), torch.device("cpu")
    spec = job.spec(model)
    # Half of two layers, and where there is one stage the third layer, of two replicas.
    needed = 2 * (WEIGHTS if staged else 2 * WEIGHTS)
    assert [memory.needed_bytes(spec, {0: (0,), 1: (0,)}, rank) for rank in range(2)] == [{0: needed}] * 2
    monkeypatch.setattr(memory, "free_memory", lambda: needed - 1)
    where = "stage 0, layer 0 (Linear) to layer 2 (Linear)," if staged else "the model"
    with pytest.raises(JobError) as refused:
        memory.check_memory(model, spec, {0: (0,), 1: (0,)}, cpu, rank=1)
    assert str(refused.value).startswith(f"rank 1 of {where} does not fit: besides the model")
    assert "Choose more tensor_ranks" in str(refused.value)
