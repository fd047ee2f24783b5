"""What every update rule in the table must do: torch.optim's classes and plugin rules alike."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.conformance.toys.toy_compensation
import tests.conformance.toys.toy_rule  # noqa: F401  # the toys are in the table from here on
from shardline.checkpoint import CheckpointStore
from shardline.core.contributions import Contributions, Partial
from shardline.core.image import BucketImage
from shardline.core.plan import BucketSpec, Plan, make_plan
from shardline.core.push_context import PushContext
from shardline.core.spec import DTYPES, ConsistencySpec, JobSpec, RuleSpec, TensorSpec
from shardline.errors import CheckpointError, JobError, ProtocolError
from shardline.fit import check_fit
from shardline.rpc.messages.configuration import PsConfiguration
from shardline.rpc.messages.convert import rule_from_proto, rule_to_proto
from shardline.schedule import cosine
from shardline.storage.bucket import Bucket
from shardline.update import (
    ALLOWED,
    BROUGHT,
    RULES,
    bucket_rule,
    check_tensors,
    chosen,
    completed,
    parse_state_key,
    rule,
    rule_from_optimizer,
    wants_whole,
)
from shardline.update.base import Need
from shardline_ps.control.configuration import optimizer_bytes
from tests.support.checkpoints import cut_of
from tests.support.covering import covering
from tests.support.jobs import Lion

CPU = torch.device("cpu")
SHAPES = {"big": (301, 67), "bias": (33,), "scale": (), "nothing": (0, 3), "fc": (130, 51), "late": (17, 5)}
MATRICES = {"big": (301, 67), "row": (1, 17), "fc": (130, 51), "late": (17, 5)}
WORKERS = ("worker/0", "worker/1", "worker/12")
SCHEDULE = cosine(20, 0.1, warmup_steps=2)


@dataclass(frozen=True)
class Case:
    """A choice from the table with an optimizer that it runs with."""

    method: str
    optimizer: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.optimizer if self.method == "torch" else f"{self.method}-{self.optimizer}"

    @functools.cached_property
    def spec(self) -> RuleSpec:
        if self.optimizer == "Lion":
            spec = rule_from_optimizer(Lion([torch.nn.Parameter(torch.zeros(1))], **self.arguments))
            assert spec.method == self.method
            return spec
        return rule(self.optimizer, [self.arguments], method=self.method)

    @functools.cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        filled = {k: s for k, s in SHAPES.items() if 0 not in s}
        shapes = {"Muon": MATRICES, "Adafactor": filled, "Lion": filled}
        return tuple(
            TensorSpec(name=name, shape=shape, dtype="float32", whole=wants_whole(self.spec, shape))
            for name, shape in shapes.get(self.optimizer, SHAPES).items()
        )


ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
}
CASES = [
    *(Case("torch", name, ARGUMENTS.get(name, {"lr": 0.01})) for name in ALLOWED),
    *(Case(method, "SGD", ARGUMENTS["SGD"]) for method in RULES.names if method != "torch"),
    Case("onebit-adam:warmup=4", "AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    *(Case(method, "SGD", ARGUMENTS["SGD"]) for method in ("dc-asgd:kind=c", "dana:kind=zero", "dana:kind=dc")),
    Case("own:keeps=exp_avg-same+step-int", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    Case("gap-aware", "Adafactor", {"lr": 0.01, "weight_decay": 0.01}),
    Case("toy-compensation:strength=0.5", "AdamW", {"lr": 0.01}),
]
every_rule = pytest.mark.parametrize("case", CASES, ids=str)


def draw(shape: tuple[int, ...], *seed: object) -> Tensor:
    generator = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(60))
    return torch.randn(shape, generator=generator)


class Servers:
    """The buckets of all shards, as on parameter servers."""

    def __init__(self, case: Case, shards: int = 1, *, bucket_bytes: int = 50_000) -> None:
        self.case = case
        self.plan: Plan = make_plan(case.tensors, shards, bucket_bytes=bucket_bytes)
        self.job = JobSpec(name="toy", tensors=case.tensors, rule=case.spec, schedule=SCHEDULE)
        self.buckets = [
            Bucket(
                shard,
                number,
                spec,
                self.plan.tensors,
                functools.partial(bucket_rule, case.spec, SCHEDULE, spec, self.plan.tensors),
                contributions=Contributions(spec, 1),
                pub=self._memory(spec, number),
            )
            for shard, of in enumerate(self.plan.shards)
            for number, spec in enumerate(of.buckets)
        ]
        for bucket in self.buckets:
            bucket.initialize(self.flat(bucket.spec, lambda tensor: draw(tensor.shape, tensor.name)))

    @staticmethod
    def _memory(spec: BucketSpec, number: int) -> tuple[Tensor, Tensor]:
        """One buffer or two, alternating: updated in place, or beside the previous values."""
        first = torch.zeros(spec.elements, dtype=DTYPES[spec.dtype])
        return first, torch.zeros_like(first) if number % 2 else first

    def flat(self, spec: BucketSpec, make: Callable[[TensorSpec], Tensor]) -> Tensor:
        flat = torch.zeros(spec.elements)
        for piece in spec.slices:
            tensor = self.plan.tensors[piece.tensor]
            if piece.elements:
                rows = make(tensor).reshape(tensor.rows, -1)[piece.first_row : piece.first_row + piece.rows]
                flat[piece.offset : piece.end] = rows.reshape(-1)
        return flat

    def push(self, step: int, worker: str, *, whole: bool = False) -> None:
        """One worker's gradients; the tensor "late" has none in the first steps, and others now and then."""
        chance = random.Random(step)
        absent = {tensor.name for tensor in self.case.tensors if chance.random() < 0.2}
        if step < 3:
            absent.add("late")
        context = PushContext(task=worker, staleness=step % 3, base_version=max(0, step - step % 3))
        for bucket in self.buckets:
            gradient = self.flat(bucket.spec, lambda tensor: draw(tensor.shape, tensor.name, step))
            names = [self.plan.tensors[piece.tensor].name for piece in bucket.spec.slices]
            present = tuple(whole or name not in absent for name in names)
            kept = gradient.clone()
            bucket.apply(Partial(gradient, present), context=context)
            assert torch.equal(gradient, kept)

    def pull(self, worker: str) -> dict[str, Tensor]:
        """The values that the worker gets, by tensor."""
        return self.joined([bucket.answer(bucket.step, worker) for bucket in self.buckets])

    def train(self, steps: Sequence[int]) -> None:
        """In each step one worker pulls and another one pushes."""
        for step in steps:
            self.pull(WORKERS[step % 3])
            self.push(step, WORKERS[(step + step // 3) % 3])

    def members(self, *workers: str) -> None:
        for bucket in self.buckets:
            bucket.members_changed(workers)

    @property
    def values(self) -> dict[str, Tensor]:
        return self.joined([bucket.values for bucket in self.buckets])

    def joined(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        found = {tensor.name: torch.full((tensor.rows, tensor.row_elements), 9.0) for tensor in self.plan.tensors}
        for flat, bucket in zip(flats, self.buckets, strict=True):
            for piece in bucket.spec.slices:
                name = self.plan.tensors[piece.tensor].name
                if piece.elements:
                    rows = slice(piece.first_row, piece.first_row + piece.rows)
                    found[name][rows] = flat[piece.offset : piece.end].view(piece.rows, -1)
        return found

    def images(self) -> dict[int, list[BucketImage]]:
        found: dict[int, list[BucketImage]] = {number: [] for number in range(len(self.plan.shards))}
        for bucket in self.buckets:
            found[bucket.shard].append(bucket.image())
        return found

    def restore(self, images: Mapping[int, Sequence[BucketImage]]) -> None:
        for bucket in self.buckets:
            (image,) = (image for image in images[bucket.shard] if image.bucket == bucket.number)
            bucket.restore(image, bucket.rule_of(image))

    @property
    def states(self) -> list[Any]:
        return [bucket.rule.export() for bucket in self.buckets if bucket.rule is not None]

    @property
    def state_bytes(self) -> int:
        return sum(bucket.rule.nbytes for bucket in self.buckets if bucket.rule is not None)


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Equal, bit for bit."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        octets = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, right[name]) if t.numel()]
        assert not octets or torch.equal(*octets), name


def assert_same_states(left: Sequence[Any], right: Sequence[Any]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert_same(ours.tensors, theirs.tensors)
        assert ours.scalars == theirs.scalars and ours.initialized == theirs.initialized


def test_every_rule_of_the_table_is_tried() -> None:
    assert {case.method.partition(":")[0] for case in CASES} == {*RULES.names, *BROUGHT.names}
    assert {case.optimizer for case in CASES if case.method == "torch"} == set(ALLOWED)


@every_rule
def test_the_state_kept_is_the_state_declared(case: Case) -> None:
    servers = Servers(case, 2)
    for step, worker in enumerate(WORKERS):
        servers.pull(worker)
        servers.push(step, worker, whole=True)
    for bucket in servers.buckets:
        assert bucket.rule is not None
        exported = bucket.rule.export()
        declared = chosen(case.spec).states(case.spec, bucket.rule.site.group, torch.float32, CPU)
        assert not any("/" in name or "@" in name for name in declared)
        kept = {parse_state_key(key)[0] for key in (*exported.tensors, *exported.scalars)}
        # Adafactor's factors and variance are for tensors of other shapes.
        assert kept == {n for n, s in declared.items() if s.scalar or bucket.rule.length_of(n)}
        for key, tensor in exported.tensors.items():
            name, worker = parse_state_key(key)
            assert tensor.dtype == declared[name].dtype and bool(worker) == declared[name].per_worker
            assert tensor.shape == (bucket.rule.length_of(key),)
        assert all(exported.initialized)
        assert all(len(numbers) == len(bucket.spec.slices) for numbers in exported.scalars.values())


@every_rule
def test_the_memory_sum_printed_at_start_is_what_training_comes_to(case: Case) -> None:
    servers = Servers(case, 2)
    configuration = PsConfiguration(
        job="toy",
        timeline=1,
        plan=servers.plan,
        shards=(0, 1),
        rule=case.spec,
        schedule=SCHEDULE,
        consistency=ConsistencySpec(mode="async"),
        replicas=len(WORKERS),
        cut_every=0,
    )
    for step, worker in enumerate(WORKERS):
        servers.pull(worker)
        servers.push(step, worker, whole=True)
    planned, held = optimizer_bytes(configuration), servers.state_bytes
    padding = sum(
        bucket.spec.nbytes - sum(4 * piece.elements for piece in bucket.spec.slices) for bucket in servers.buckets
    )
    whole = any(tensor.whole for tensor in case.tensors)
    # A whole-tensor rule keeps no padding, which is included in the plan since images contain it.
    assert held == planned if not whole else held <= planned <= held + 2 * padding


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize(("case", "shards"), covering(CASES, [1, 2, 3]), ids=str)
def test_a_cut_goes_on_with_equal_bits_on_any_number_of_servers(tmp_path: Path, case: Case, shards: int) -> None:
    straight = Servers(case, 2)
    straight.train(range(5))
    store = CheckpointStore(tmp_path, keep=5)
    store.commit(cut_of(straight.job, step=5, plan=straight.plan, images=straight.images()))
    resumed = Servers(case, shards, bucket_bytes=20_000)
    checkpoint = store.open(5)
    resumed.restore({number: list(checkpoint.images(resumed.plan, number)) for number in range(shards)})
    assert_same(resumed.values, straight.values)
    for servers in (straight, resumed):
        servers.train(range(5, 9))
    assert_same(resumed.values, straight.values)
    for worker in WORKERS:
        assert_same(resumed.pull(worker), straight.pull(worker))
    path = store.commit(cut_of(straight.job, step=9, plan=straight.plan, images=straight.images()))
    # Content that differs in a single bit of values or state would be refused here.
    assert store.commit(cut_of(resumed.job, step=9, plan=resumed.plan, images=resumed.images())) == path


@every_rule
def test_a_standby_made_of_images_goes_on_with_equal_bits(case: Case) -> None:
    primary, standby = Servers(case, 2), Servers(case, 2)
    primary.train(range(4))
    standby.restore(primary.images())
    assert_same_states(standby.states, primary.states)
    for servers in (primary, standby):
        servers.train(range(4, 8))
        servers.members(*WORKERS[:2])
        servers.train([9, 12])
    assert_same(standby.values, primary.values)
    assert_same_states(standby.states, primary.states)


@every_rule
def test_the_number_of_servers_and_the_cuts_do_not_change_the_bits(case: Case) -> None:
    one, three = Servers(case, 1, bucket_bytes=2 << 20), Servers(case, 3, bucket_bytes=20_000)
    for servers in (one, three):
        servers.train(range(7))
    assert_same(one.values, three.values)
    assert_same(one.pull(WORKERS[0]), three.pull(WORKERS[0]))


@every_rule
def test_a_pull_leaves_the_parameters_alone(case: Case) -> None:
    servers = Servers(case)
    servers.train(range(5))
    before = {name: value.clone() for name, value in servers.values.items()}
    answer = servers.pull(WORKERS[0])
    assert_same(servers.values, before)
    differs = any(not torch.equal(answer[name], before[name]) for name in before)
    assert differs == chosen(case.spec).looks_ahead
    for bucket in servers.buckets:
        assert bucket.answer(bucket.step, WORKERS[0]).shape == bucket.values.shape
        assert torch.equal(bucket.answer(bucket.step, ""), bucket.values)


@every_rule
def test_what_is_refused_changes_nothing(case: Case) -> None:
    servers = Servers(case)
    servers.train(range(3))
    states = servers.states
    for bucket in servers.buckets:
        assert bucket.rule is not None
        values = bucket.values.clone()
        like = torch.ones_like(values)
        wrong: list[dict[str, Any]] = [
            {"hyper": {"no_such_number": 0.5}},
            {"hyper": {"lr": float("nan")}},
            {"present": [True] * (len(bucket.spec.slices) + 1)},
            {"source": like[:-1]},
        ]
        for given in wrong:
            with pytest.raises(ProtocolError):
                bucket.rule.apply(bucket.values, like, clock=3, **given)
        for gradient in (like[:-1], like.double()):
            with pytest.raises(ProtocolError, match="gradient of a bucket"):
                bucket.rule.apply(bucket.values, gradient, clock=3)
        with pytest.raises(ProtocolError, match="'no_such_number' is not a setting"):
            bucket.rule.check_hyper({"no_such_number": 0.5})
        assert torch.equal(bucket.values, values)
    assert_same_states(servers.states, states)


@every_rule
def test_a_state_that_does_not_fit_is_refused_and_the_old_one_stays(case: Case) -> None:
    servers = Servers(case)
    servers.train(range(3))
    for bucket in servers.buckets:
        assert bucket.rule is not None
        before = bucket.rule.export()
        tensors, scalars, flags = before
        foreign = torch.zeros(bucket.spec.elements)
        wrong = [
            ({**tensors, "unheard_of": foreign}, scalars, flags),
            ({**tensors, "unheard_of@worker.0": foreign}, scalars, flags),
            (tensors, {**scalars, "unheard_of": (0.0,) * len(flags)}, flags),
            (tensors, scalars, (*flags, True)),
            *(({**tensors, key: tensor[:-1]}, scalars, flags) for key, tensor in tensors.items()),
            *(({**tensors, key: tensor.to(torch.int8)}, scalars, flags) for key, tensor in tensors.items()),
            *((tensors, {**scalars, key: numbers[:-1]}, flags) for key, numbers in scalars.items()),
            *((tensors, {**scalars, key: (float("nan"),) * len(numbers)}, flags) for key, numbers in scalars.items()),
        ]
        for state in wrong:
            with pytest.raises(CheckpointError):
                bucket.rule.load(*state)
        assert_same_states([bucket.rule.export()], [before])


@every_rule
def test_a_worker_that_leaves_takes_its_state_along(case: Case) -> None:
    servers, never = Servers(case), Servers(case)
    for number in range(4):
        servers.pull(WORKERS[0])
        servers.push(number, WORKERS[0], whole=True)
    per_worker = servers.state_bytes
    servers.pull(WORKERS[1])
    servers.push(4, WORKERS[1], whole=True)
    kept = set().union(*(bucket.rule.workers for bucket in servers.buckets if bucket.rule is not None))
    keeps = any(
        s.per_worker for s in chosen(case.spec).states(case.spec, case.spec.groups[0], torch.float32, CPU).values()
    )
    assert kept == (set(WORKERS[:2]) if keeps else set())
    before = {name: value.clone() for name, value in servers.values.items()}
    servers.members(WORKERS[0])
    assert_same(servers.values, before)
    assert servers.state_bytes == per_worker
    for state in servers.states:
        assert not any(parse_state_key(key)[1] == WORKERS[1] for key in (*state.tensors, *state.scalars))
    servers.members()
    assert all(parse_state_key(key)[1] == "" for state in servers.states for key in (*state.tensors, *state.scalars))
    # Nothing has been pushed: members change nothing.
    never.members(*WORKERS)
    never.members()
    assert never.state_bytes == 0 and all(not any(state.initialized) for state in never.states)


@every_rule
def test_slices_without_a_gradient_keep_values_and_state(case: Case) -> None:
    servers = Servers(case)
    servers.train(range(4))
    values, states = {name: value.clone() for name, value in servers.values.items()}, servers.states
    for bucket in servers.buckets:
        gradient = torch.ones_like(bucket.values)
        bucket.apply(Partial(gradient, (False,) * len(bucket.spec.slices)), context=PushContext(task=WORKERS[0]))
    assert_same(servers.values, values)
    assert_same_states(servers.states, states)


@every_rule
def test_the_choice_travels_as_text(case: Case) -> None:
    resident = chosen(case.spec)
    table = BROUGHT if resident.name in BROUGHT else RULES
    assert table.parse(str(resident)) == resident
    assert rule_from_proto(rule_to_proto(case.spec)) == case.spec
    assert case.spec.label.endswith(case.spec.name)
    with pytest.raises(JobError, match="no setting 'no_such_setting'"):
        table.parse(f"{resident.name}:no_such_setting=1")
    check_tensors(case.spec, case.tensors)
    with pytest.raises(JobError, match="floating-point tensors only"):
        check_tensors(case.spec, [TensorSpec(name="w", shape=(2, 2), dtype="int64", whole=True)])
    with pytest.raises(JobError, match="parameter group 3"):
        check_tensors(case.spec, [TensorSpec(name="w", shape=(2, 2), dtype="float32", whole=True, group=3)])


def test_a_rule_may_refuse_an_optimizer() -> None:
    with pytest.raises(JobError, match="takes the learning rate of SGD"):
        completed(RuleSpec(name="AdamW", groups=({},), method="toy-momentum"))
    with pytest.raises(JobError, match="it must be at least 0 and below 1"):
        RULES.parse("toy-momentum:momentum=1.5")


def job_of(case: Case, **changes: Any) -> JobSpec:
    tensor = TensorSpec(name="w", shape=(3,), dtype="float32")
    apply = "worker" if case.optimizer == "Lion" else "server"
    return JobSpec(name="job", tensors=(tensor,), rule=case.spec, apply=apply, **changes)


@every_rule
def test_a_rule_that_tells_workers_apart_is_refused_where_their_pushes_are_added_up(case: Case) -> None:
    resident = chosen(case.spec)
    if Need.MOMENTUM in resident.needs:
        with pytest.raises(JobError, match="codec raw sends gradients"):
            check_fit(job_of(case))
        return
    check_fit(job_of(case, consistency=ConsistencySpec(mode="async")))
    if resident.needs or resident.looks_ahead:
        with pytest.raises(JobError, match="choose consistency='async', or another rule"):
            check_fit(job_of(case))
    else:
        check_fit(job_of(case))


@every_rule
def test_a_rule_that_has_to_know_what_was_sent_is_refused_with_standbys(case: Case) -> None:
    job = job_of(case, consistency=ConsistencySpec(mode="async"))
    if Need.PULLS in chosen(case.spec).needs or job.apply == "worker":
        with pytest.raises(JobError, match="leave out --standbys"):
            check_fit(job, standbys=1)
    elif Need.MOMENTUM not in chosen(case.spec).needs:
        check_fit(job, standbys=1)


def test_the_sum_of_momenta_stays_that_of_the_workers_that_are_left() -> None:
    servers = Servers(Case("toy-momentum", "SGD", {"lr": 0.1}))
    servers.train(range(9))
    servers.members(*WORKERS[1:])
    for state in servers.states:
        held = [tensor for key, tensor in state.tensors.items() if key.startswith("velocity@")]
        assert len(held) == 2
        torch.testing.assert_close(state.tensors["velocities"], held[0] + held[1], rtol=1e-5, atol=1e-5)


def test_a_fresh_gradient_is_not_compensated() -> None:
    plain, compensated = (
        Servers(Case("torch", "SGD", {"lr": 0.1})),
        Servers(Case("toy-compensation", "SGD", {"lr": 0.1})),
    )
    for servers in (plain, compensated):
        servers.pull(WORKERS[0])
        servers.push(0, WORKERS[0])
    assert_same(plain.values, compensated.values)
    compensated.push(1, WORKERS[0])
    plain.push(1, WORKERS[0])
    assert any(not torch.equal(plain.values[name], compensated.values[name]) for name in ("big", "fc"))
