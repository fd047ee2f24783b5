"""What every cadence must do, whoever wrote it: those in the table, and the toys."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from _pytest.mark import MarkDecorator

from shardline.cadence import CADENCES, Cadence, EveryStep, Held, LocalTraining, Outgoing, Sends, Ticks, fragmented
from shardline.core.spec import InnerSpec, TensorKind, TensorSpec
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError, UnreachableError
from shardline.lanes.base import Lane
from shardline.model import named_values
from shardline.seams import doc_line
from shardline.testing import reference
from shardline.update import rule
from shardline.update.torch_optim.inner import InnerOptimizers
from shardline.waist import Exchanged, Sender, Sink, Standing, Want
from tests.conformance.toys import toy_cadence, toy_local_steps
from tests.support.cluster import Cluster, ClusterState, assert_same_end
from tests.support.jobs import Rich, make_job, mlp
from tests.support.services import Services, backward, make_model

MORE = {
    "every": ("every:steps=1", "every:steps=3"),
    "local": ("local:steps=1", "local:steps=3"),
    "local-sgd": ("local-sgd:every=1", "local-sgd:every=3"),
    "post-local-sgd": ("post-local-sgd:start=4,every=3", "post-local-sgd:start=1,every=3"),
    "easgd": ("easgd:every=3,pull=0.5", "easgd:every=1"),
    "slowmo": ("slowmo:every=3", "slowmo:every=2,outer_lr=0.5,outer_momentum=0.9"),
    "diloco": ("diloco:every=3", "diloco:every=2,outer_lr=1.0,outer_momentum=0.0"),
    "streaming-diloco": (
        "streaming-diloco:every=4,fragments=2",
        "streaming-diloco:every=2,fragments=2,alpha=0.5",
        "streaming-diloco:every=3,fragments=1",
        "streaming-diloco:every=6,fragments=2,overlap=2",
        "streaming-diloco:every=3,fragments=1,alpha=0.5,overlap=1",
    ),
}
"""Settings of some cadences, with few passes in a step; the others are tested with their defaults."""


CHOICES = [[CADENCES.parse(text) for text in MORE.get(resident.name, (resident.name,))] for resident in CADENCES]
EACH = pytest.mark.parametrize("cadence", list(itertools.chain(*CHOICES)), ids=str)


def in_turn(turn: int) -> MarkDecorator:
    """For what trains on servers: all settings, of which one of each cadence is short. Tests take turns with them."""
    each = [
        pytest.param(choice, marks=[] if number == turn % len(of_one) else [pytest.mark.long])
        for of_one in CHOICES
        for number, choice in enumerate(of_one)
    ]
    return pytest.mark.parametrize("cadence", each, ids=str)


DEFAULTS = pytest.mark.parametrize("cadence", [CADENCES.parse(resident.name) for resident in CADENCES], ids=str)
SPECS = (
    TensorSpec(name="w", shape=(3, 2), dtype="float32"),
    TensorSpec(name="b", shape=(2,), dtype="float32"),
    TensorSpec(name="mean", shape=(2,), dtype="float32", kind=TensorKind.BUFFER),
)


def held_by(cadence: Cadence, seed: int = 1) -> Held:
    generator = torch.Generator().manual_seed(seed)
    specs = fragmented(cadence, SPECS)
    model = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
    pulled = {name: value.clone() for name, value in model.items()} if cadence.sends is Sends.DELTAS else model
    # With a state after every pass, and bits that depend on it.
    spec = InnerSpec(rule=rule("AdamW", ({"lr": 0.01},)), clip_norm=1.0)
    inner = InnerOptimizers(spec, specs, model) if cadence.outer_rule is not None else None
    return Held(model=model, pulled=pulled, specs=specs, inner=inner, replicas=2, contributors=2)


def outgoing(seed: int) -> Outgoing:
    generator = torch.Generator().manual_seed(seed)
    values = {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS[:2]}
    return Outgoing(values=values, samples=4, loss=0.5)


def round_of(local: LocalTraining, cadence: Cadence, step: int, replicas: int = 2) -> dict[int, Outgoing]:
    """One step of all replicas, one after another; returns what is sent."""
    local.arrived(step)
    return passes(local, range(cadence.rounds.ticks_in(step)), replicas)


def passes(local: LocalTraining, ticks: range, replicas: int = 2) -> dict[int, Outgoing]:
    sent: dict[int, Outgoing] = {}
    for tick in ticks:
        for replica in range(replicas):
            local.enter(replica, tick)
            sent[replica] = local.take(replica, tick, outgoing(10 * tick + replica))
    return sent


def same(a: Mapping[int, Outgoing], b: Mapping[int, Outgoing]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        a[number].samples == b[number].samples
        and a[number].values.keys() == b[number].values.keys()
        and all(torch.equal(a[number].values[name], b[number].values[name]) for name in a[number].values)
        for number in a
    )


def trained(
    cadence: Cadence,
    ownership: list[list[int]],
    wrap: Any = lambda lane: lane,
    optimizer: str = "momentum",
    **more: Any,
) -> ClusterState:
    """The final state of a job of three steps."""
    job = make_job(optimizer, cadence=str(cadence), **{"replicas": 2, "steps": 3, **more})
    with Cluster(job, ps=2) as cluster:
        workers = [cluster.worker(index, wrap=wrap) for index in range(len(ownership))]
        pairs = zip(workers, ownership, strict=True)
        cluster.together([lambda w=worker, o=owned: w.run(o, job.steps) for worker, owned in pairs])  # type: ignore[misc]
        return cluster.state()


@functools.cache
def undisturbed(cadence: Cadence, optimizer: str = "momentum") -> ClusterState:
    """What one worker ends with that nobody interrupts."""
    return trained(cadence, [[0, 1]], optimizer=optimizer)


@EACH
def test_its_settings_are_written_as_they_are_read(cadence: Cadence) -> None:
    assert CADENCES.parse(str(cadence)) == cadence


@DEFAULTS
def test_it_is_written_as_it_is_read_and_says_what_it_is(cadence: Cadence) -> None:
    assert CADENCES.parse(str(cadence)) == cadence
    assert doc_line(type(cadence)).endswith(".")
    numbers = [cadence.rounds.ticks_before(step) for step in range(6)]
    assert numbers[0] == 0
    assert [end - start for start, end in itertools.pairwise(numbers)] == [cadence.rounds.ticks_in(s) for s in range(5)]
    assert cadence.rounds.ticks >= 1 and all(cadence.rounds.ticks_in(step) >= 1 for step in range(5))
    assert not cadence.rounds.uniform or {cadence.rounds.ticks_in(step) for step in range(5)} == {cadence.rounds.ticks}
    assert cadence.rounds.together or (cadence.rounds.uniform and cadence.rounds.fragments == 1)
    # The model's own tensors are trained, and what is sent is how far they moved.
    assert cadence.outer_rule is None or cadence.sends is Sends.DELTAS
    # What is sent during the computation can't be held back, or be used by it.
    assert cadence.sends is not Sends.GRADIENTS or cadence.rounds.ticks == 1
    assert 0 <= cadence.rounds.overlap < min(cadence.rounds.ticks_in(step) for step in range(5))
    # A replica has something to go on with before the servers' parameters are here, and these arrive elsewhere.
    assert not cadence.rounds.overlap or (cadence.keeps_copies and cadence.sends is Sends.DELTAS)


@EACH
def test_a_step_sends_parameters_of_one_fragment(cadence: Cadence) -> None:
    held = held_by(cadence)
    fragments = {spec.name: spec.fragment for spec in held.specs if spec.kind is TensorKind.PARAM}
    assert set(fragments.values()) == set(range(cadence.rounds.fragments))
    local = cadence.local(held)
    for step in range(4):
        local.began(step)
        for sent in round_of(local, cadence, step).values():
            assert sent.values.keys() == {n for n, own in fragments.items() if own == step % cadence.rounds.fragments}


@EACH
def test_a_step_that_starts_over_is_the_step_that_was_never_begun(cadence: Cadence) -> None:
    plain, again = held_by(cadence), held_by(cadence)
    expected = cadence.local(plain)
    expected.began(3)
    wanted = round_of(expected, cadence, 3)
    local = cadence.local(again)
    local.began(5)
    local.arrived(5)
    local.enter(0, 0)
    local.take(0, 0, outgoing(99))
    # As after a rollback: the servers' parameters, and nothing of the step that was begun.
    local.began(3)
    assert same(round_of(local, cadence, 3), wanted)


@EACH
def test_a_replica_does_not_see_what_others_on_its_worker_compute(cadence: Cadence) -> None:
    together = cadence.local(held_by(cadence))
    together.began(0)
    both = round_of(together, cadence, 0)
    for replica in range(2):
        alone = cadence.local(held_by(cadence))
        alone.began(0)
        alone.arrived(0)
        for tick in range(cadence.rounds.ticks_in(0)):
            alone.enter(replica, tick)
            sent = alone.take(replica, tick, outgoing(10 * tick + replica))
        assert same({replica: sent}, {replica: both[replica]})


@EACH
def test_gradients_that_are_given_and_parameters_that_were_pulled_stay_as_they_are(cadence: Cadence) -> None:
    held = held_by(cadence)
    local = cadence.local(held)
    local.began(0)
    local.arrived(0)
    before = {name: value.clone() for name, value in held.pulled.items()}
    given = outgoing(1)
    kept = {name: value.clone() for name, value in given.values.items()}
    for tick in range(cadence.rounds.ticks_in(0)):
        local.enter(0, tick)
        local.take(0, tick, given)
    assert all(torch.equal(given.values[name], kept[name]) for name in kept)
    assert all(torch.equal(held.pulled[name], before[name]) for name in before)


OVERLAPPING = pytest.mark.parametrize(
    "cadence", [one for one in itertools.chain(*CHOICES) if one.rounds.overlap], ids=str
)


def in_two_steps(cadence: Cadence, *, late: bool) -> dict[int, Outgoing]:
    """What the second step sends. late: its parameters arrive as late as they may, and until then are not numbers."""
    held = held_by(cadence)
    local, ticks = cadence.local(held), cadence.rounds.ticks_in(1)
    local.began(0)
    round_of(local, cadence, 0)
    first = cadence.rounds.overlap if late else 0
    local.began(1)
    new = {name: value * 0.5 for name, value in held.pulled.items()}
    for value in held.pulled.values():
        value.fill_(math.nan)
    passes(local, range(first))
    for name, value in held.pulled.items():
        value.copy_(new[name])
    local.arrived(1)
    return passes(local, range(first, ticks))


@OVERLAPPING
def test_when_parameters_arrive_during_the_overlap_changes_no_bit(cadence: Cadence) -> None:
    assert same(in_two_steps(cadence, late=True), in_two_steps(cadence, late=False))


@pytest.mark.part(of=2)
@in_turn(2)
def test_who_runs_a_replica_does_not_change_a_bit(cadence: Cadence) -> None:
    assert_same_end(trained(cadence, [[0, 1]], model=Rich), trained(cadence, [[0], [1]], model=Rich))


class Breaking(Lane):
    """Loses the answer to every second exchange that pushes."""

    name = "breaking"

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._count = 0

    def exchange(
        self, sender: Sender, contributions: Any, want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        done = self._lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)
        self._count += bool(contributions)
        if contributions and self._count % 2:
            raise UnreachableError("the reply was lost")
        return done

    def standing(self, sender: Sender, replicas: Any, *, timeout_s: float) -> Standing:
        return self._lane.standing(sender, replicas, timeout_s=timeout_s)

    def cancel(self) -> None:
        self._lane.cancel()

    def close(self) -> None:
        self._lane.close()


class Cut(Breaking):
    """A line that can be cut before a push arrives, or after."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self.cut = ""
        self.tried = threading.Event()

    def exchange(
        self, sender: Sender, contributions: Any, want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        if self.cut != "before":
            # What was pulled is dropped too.
            wanted = None if self.cut else want
            done = self._lane.exchange(sender, contributions, wanted, sink, timeout_s=timeout_s)
        self.tried.set()
        if self.cut:
            raise UnreachableError("the line is cut")
        return done


@OVERLAPPING
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_is_found_again_during_the_overlap_changes_no_bit(cadence: Cadence, where: str) -> None:
    # Cut before: the step that was sent is computed again, from what the replicas had then. After: the open one.
    job, lanes = make_job("momentum", cadence=str(cadence), replicas=2, steps=4), list[Cut]()
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0, wrap=lambda lane: lanes.append(Cut(lane)) or lanes[-1])  # type: ignore[func-returns-value]
        worker.run([0, 1], 2)
        for lane in lanes:
            lane.cut = where
            lane.tried.clear()
        worker.step([0, 1])
        worker.tick([0, 1])
        assert all(lane.tried.wait(10.0) for lane in lanes)
        worker.trainer.give_up()
        for lane in lanes:
            lane.cut = ""
        worker.trainer.exchange.arm()
        worker.trainer.locate([0, 1], cluster.timeline)
        assert worker.trainer.step == (2 if where == "before" else 3)
        worker.run([0, 1], job.steps)
        assert_same_end(cluster.state(), trained(cadence, [[0, 1]], steps=4))


@pytest.mark.part(of=2, first=1)
@in_turn(1)
def test_an_answer_that_was_lost_changes_no_bit(cadence: Cadence) -> None:
    assert_same_end(trained(cadence, [[0, 1]], wrap=Breaking), undisturbed(cadence))


@in_turn(1)
def test_a_worker_that_is_told_to_start_its_step_over_ends_in_the_same_bits(cadence: Cadence) -> None:
    job = make_job("momentum", cadence=str(cadence), replicas=2, steps=3)
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0).run([0, 1], 1)
        worker.tick([0, 1])
        if not worker.trainer.methods.ticks.last:
            worker.trainer.methods.ticks.advance()
        # Its orders have changed in mid-step.
        worker.trainer.give_up()
        worker.run([0, 1], job.steps)
        assert_same_end(cluster.state(), undisturbed(cadence))


@pytest.mark.part(of=2)
@in_turn(1)
def test_another_process_takes_over_at_the_open_step(cadence: Cadence) -> None:
    # Where workers keep the optimizer's state it dies with them, and the bits are the same only if it has none.
    optimizer = "sgd" if cadence.outer_rule is not None else "momentum"
    found, whole = taken_over(cadence, optimizer), undisturbed(cadence, optimizer)
    if cadence.keeps_copies:
        # Its replicas start again from the servers' parameters.
        assert found.step == whole.step == 3
        assert any(not torch.equal(found.params[name], value) for name, value in whole.params.items())
    else:
        assert_same_end(found, whole)


def taken_over(cadence: Cadence, optimizer: str) -> ClusterState:
    """The final state of a job of three steps whose first worker dies in the last one."""
    job = make_job(optimizer, cadence=str(cadence), replicas=2, steps=3)
    with Cluster(job, ps=2) as cluster:
        doomed = cluster.worker(0).run([0, 1], 1 if cadence.rounds.overlap else 2)
        if cadence.rounds.overlap:
            # Its exchange is left running.
            doomed.step([0, 1])
        doomed.tick([0, 1])
        doomed.close()
        cluster.workers.remove(doomed)
        cluster.worker(1).run([0, 1], job.steps)
        return cluster.state()


@EACH
def test_asynchronous_workers_follow_it_too(cadence: Cadence) -> None:
    job = make_job("sgd", cadence=str(cadence), consistency="async", steps=3)
    if cadence.rounds.together:
        with pytest.raises(JobError, match="no common steps"):
            job.spec(job.build_model())
        return
    with Cluster(job) as cluster:
        worker = cluster.worker(0)
        worker.trainer.exchange.arm()
        worker.trainer.locate([0], cluster.timeline)
        for _ in range(3):
            worker.step([0])
        state = cluster.state()
        assert (worker.trainer.step, state.version) == (3, 3)
        for name, value in named_values(worker.model).items():
            assert torch.equal(value, {**state.params, **state.buffers}[name]), name


@pytest.mark.part(of=2, first=1)
@in_turn(0)
def test_a_script_trains_by_it_with_a_chief(cadence: Cadence, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.cadence.of", lambda job: cadence)
    services: Services = start(ps=1, workers=1)
    model, steps = make_model(), cadence.rounds.ticks_before(4)
    with services.connect() as session:
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
        seen = []
        for number in session.steps(steps):
            seen.append(number)
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()
        assert session.step == 4
    assert seen == list(range(steps))
    assert services.end()["steps"] == 4


# The residents


def test_every_step_costs_nothing() -> None:
    cadence = EveryStep()
    held = held_by(cadence)
    assert held.pulled is held.model
    given = outgoing(1)
    assert cadence.local(held).take(0, 0, given) is given
    job = make_job("momentum", replicas=2, steps=3)
    assert_same_end(trained(cadence, [[0, 1]]), reference(job))


def test_a_mean_of_several_passes_is_what_is_sent() -> None:
    job = make_job("sgd", model=mlp, replicas=1, steps=2, cadence="every:steps=2")
    with Cluster(job) as cluster:
        cluster.train([[0]])
        model, source = job.build_model(), BatchSource(job)
        for step in range(2):
            sums: dict[str, torch.Tensor] = {}
            for number in (2 * step, 2 * step + 1):
                replica_gradients(model, job, source, number, 0)
                for name, value in model.named_parameters():
                    assert value.grad is not None
                    sums[name] = sums[name] + value.grad if name in sums else value.grad.clone()
            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.sub_(sums[name] / 2, alpha=0.05)
        for name, value in model.named_parameters():
            torch.testing.assert_close(cluster.state().params[name], value.detach(), rtol=1e-6, atol=1e-7)


def test_one_local_step_and_a_server_that_takes_the_delta_is_synchronous_sgd() -> None:
    plain = make_job("sgd", replicas=2, steps=3)
    delta = make_job("sgd", replicas=2, steps=3, cadence="local:steps=1,lr=0.05", optimizer_args={"lr": 1.0})
    with Cluster(delta) as cluster:
        cluster.train([[0], [1]])
        end = reference(plain)
        for name, value in cluster.state().params.items():
            torch.testing.assert_close(value, end.params[name], rtol=1e-5, atol=1e-6)


def test_the_mean_of_replicas_that_train_alone_for_a_while() -> None:
    job = make_job("sgd", replicas=2, steps=1, cadence="local:steps=3,lr=0.05", optimizer_args={"lr": 1.0})
    ends = []
    for replica in range(2):
        model, source = job.build_model(), BatchSource(job)
        for number in range(3):
            replica_gradients(model, job, source, number, replica)
            with torch.no_grad():
                for value in model.parameters():
                    assert value.grad is not None
                    value.sub_(value.grad, alpha=0.05)
        ends.append({name: value.detach() for name, value in model.named_parameters()})
    with Cluster(job) as cluster:
        cluster.train([[0, 1]])
        for name, value in cluster.state().params.items():
            torch.testing.assert_close(value, (ends[0][name] + ends[1][name]) / 2, rtol=1e-5, atol=1e-6)


def test_ticks_number_all_passes_of_a_job() -> None:
    ticks = Ticks(toy_cadence.Every(steps=3).rounds)
    numbers, step = [], 0
    for _ in range(5):
        numbers.append(ticks.number(step))
        step += ticks.advance()
    assert numbers == [0, 1, 2, 3, 4]
    ticks.begin(step)
    assert (ticks.number(step), ticks.last) == (3, False)


def test_what_a_cadence_can_not_do_is_refused() -> None:
    with pytest.raises(JobError, match="steps is 0"):
        make_job(cadence="every:steps=0")
    with pytest.raises(JobError, match="choose from every-step"):
        make_job(cadence="now-and-then")
    assert toy_local_steps.Local.name in CADENCES
