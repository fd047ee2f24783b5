"""Twice as many tensors, slices of a tensor or parameter groups take at most twice the work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from shardline.checkpoint import Checkpoint, CheckpointStore, export
from shardline.core.plan import Plan, check_plan, make_plan, span_of
from shardline.core.spec import JobSpec, TensorSpec, differences, joined, parts_of
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.rpc.messages.configuration import Configuration, configuration_from_proto, configuration_to_proto
from shardline.rpc.messages.convert import job_from_proto, job_to_proto, plan_from_proto, plan_to_proto
from shardline.rpc.v1 import parameter_server_pb2
from shardline_ps.control.configuration import memory_plan
from tests.support.checkpoints import BUFFER, PARAM, cut_of, job_of, spec
from tests.support.counting import assert_grows_at_most_linearly

QUANTUM = 16_384
Tensors = tuple[TensorSpec, ...]


def small(count: int) -> Tensors:
    return tuple(spec(f"t{n}", (3,), kind=BUFFER if n % 3 == 2 else PARAM) for n in range(count))


def long(count: int) -> Tensors:
    return (spec("long", (QUANTUM * count,)),)


def shared(count: int) -> Tensors:
    return tuple(part for n in range(count) for part in parts_of(spec(f"t{n}", (4, 2)), 1, 2))


def grouped(count: int) -> Tensors:
    return tuple(spec(f"t{n}", (3,), group=n) for n in range(count))


MODELS: dict[str, tuple[Callable[[int], Tensors], int]] = {
    "small tensors": (small, 40),
    "one long tensor": (long, 20),
    "tensors in parts": (shared, 20),
    "parameter groups": (grouped, 20),
}
"""The tensors of a model of some size, and the smaller one of the sizes that are compared."""


class Case:
    """A job with these tensors, and what is done with it. Buckets are small, so that there are many."""

    def __init__(self, tensors: Tensors, folder: Path) -> None:
        job = job_of(tensors)
        groups = job.rule.groups * (1 + max(tensor.group for tensor in tensors))
        self.job: JobSpec = dataclasses.replace(job, rule=dataclasses.replace(job.rule, groups=groups))
        self.plan = self.plan_for(2)
        self.folder = folder
        self.store = CheckpointStore(folder, keep=1)
        self.cut = cut_of(self.job, step=7, plan=self.plan)

    def plan_for(self, shards: int) -> Plan:
        return make_plan(self.job.tensors, shards, bucket_bytes=1 << 16)

    def stored(self) -> Checkpoint:
        """The checkpoint, which has been read from already."""
        self.store.commit(self.cut)
        checkpoint = self.store.open(7)
        checkpoint.tensor(checkpoint.tensors[0].name)
        return checkpoint

    # What is counted

    def planning(self) -> Callable[[], object]:
        return lambda: check_plan(self.plan_for(5))

    def pieces(self) -> Callable[[], object]:
        plan = self.plan_for(2)
        return lambda: [list(plan.pieces(number)) for number in range(len(plan.tensors))]

    def messages(self) -> Callable[[], object]:
        def act() -> None:
            assert not differences(job_from_proto(job_to_proto(self.job)), job_from_json(job_to_json(self.job)))
            assert plan_from_proto(plan_to_proto(self.plan)).plan_id == self.plan.plan_id

        return act

    def configuring(self) -> Callable[[], object]:
        command = configuration_to_proto(
            Configuration(
                job="job",
                timeline=1,
                plan=self.plan,
                shards=(0, 1),
                rule=self.job.rule,
                schedule=self.job.schedule,
                consistency=self.job.consistency,
                cut_every=1,
                **self.job.settings(),
            ),
            parameter_server_pb2.Term(number=1),
        )
        return lambda: memory_plan(configuration_from_proto(command))

    def committing(self) -> Callable[[], object]:
        return lambda: self.store.commit(self.cut)

    def states(self) -> Callable[[], object]:
        stored = self.stored()

        def act() -> None:
            for tensor in stored.tensors:
                stored.scalars(tensor.name)
                for state in stored.states(tensor.name):
                    stored.read_slice(tensor.name, 0, tensor.rows, state)

        return act

    def images(self) -> Callable[[], object]:
        stored = self.stored()
        plans = [
            make_plan(tensors, 3, bucket_bytes=1 << 16)
            for tensors in dict.fromkeys((self.job.tensors, joined(self.job.tensors)))
        ]
        return lambda: [list(stored.images(plan, n)) for plan in plans for n in range(len(plan.shards))]

    def exporting(self) -> Callable[[], object]:
        self.store.commit(self.cut)
        return lambda: export(self.folder, self.folder / "model.pt")


WORK = [
    Case.planning,
    Case.pieces,
    Case.messages,
    Case.configuring,
    Case.committing,
    Case.states,
    Case.images,
    Case.exporting,
]


@pytest.mark.part(of=3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_work_grows_as_the_model_does(work: Callable[[Case], Callable[[], object]], model: str, tmp_path: Path) -> None:
    tensors, size = MODELS[model]
    numbers = itertools.count()
    assert_grows_at_most_linearly(lambda count: work(Case(tensors(count), tmp_path / str(next(numbers)))), size)


@pytest.mark.parametrize("shape", [((1 << 32) + 5,), (3, 1 << 31), ((1 << 20) + 1, 4096)], ids=str)
def test_offsets_and_sizes_beyond_2_to_the_31_survive_the_plan_and_its_messages(shape: tuple[int, ...]) -> None:
    job = job_of((spec("long", shape), spec("short", (7,))))
    plan = make_plan(job.tensors, 3)
    check_plan(plan)
    received = plan_from_proto(plan_to_proto(plan))
    assert received == plan and received.plan_id == plan.plan_id
    assert job_from_proto(job_to_proto(job)) == job
    last = max((piece for _, _, piece in plan.pieces(0)), key=lambda piece: piece.first_row)
    assert span_of(plan, last).stop == job.tensors[0].elements > 1 << 31
