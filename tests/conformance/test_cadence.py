"""What every cadence must do, whoever wrote it: those in the table, and the toys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from shardline.cadence import CADENCES, Cadence, EveryStep, Held, LocalTraining, Outgoing, Ticks
from shardline.core.exchange import Exchanged, Sender, Sink, Standing, Want
from shardline.core.spec import TensorKind, TensorSpec
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError, UnreachableError
from shardline.lanes.base import Lane
from shardline.model import named_values
from shardline.seams import doc_line
from shardline.testing import reference
from tests.conformance.toys import toy_cadence, toy_local_steps
from tests.support.cluster import Cluster, ClusterState, assert_same_end
from tests.support.jobs import Rich, make_job, mlp
from tests.support.services import Services, backward, make_model

MORE = {"every": ("every:steps=1", "every:steps=3"), "local": ("local:steps=1", "local:steps=3")}
"""Further settings of some cadences; the others are tested with their defaults."""


def choices() -> Iterator[Cadence]:
    for resident in CADENCES:
        for text in (resident.name, *MORE.get(resident.name, ())):
            yield CADENCES.parse(text)


EACH = pytest.mark.parametrize("cadence", list(choices()), ids=str)
SPECS = (
    TensorSpec(name="w", shape=(3, 2), dtype="float32"),
    TensorSpec(name="b", shape=(2,), dtype="float32"),
    TensorSpec(name="mean", shape=(2,), dtype="float32", kind=TensorKind.BUFFER),
)


def held_by(cadence: Cadence, seed: int = 1) -> Held:
    generator = torch.Generator().manual_seed(seed)
    model = {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}
    pulled = {name: value.clone() for name, value in model.items()} if cadence.copies else model
    return Held(model=model, pulled=pulled, specs=SPECS)


def outgoing(seed: int) -> Outgoing:
    generator = torch.Generator().manual_seed(seed)
    values = {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS[:2]}
    return Outgoing(values=values, samples=4, loss=0.5)


def round_of(local: LocalTraining, cadence: Cadence, replicas: int = 2, seed: int = 0) -> dict[int, Outgoing]:
    """One step of all replicas, one after another; returns what is sent."""
    sent: dict[int, Outgoing] = {}
    for tick in range(cadence.ticks):
        for replica in range(replicas):
            local.enter(replica, tick)
            sent[replica] = local.take(replica, tick, outgoing(seed + 10 * tick + replica))
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


def trained(cadence: Cadence, ownership: list[list[int]], wrap: Any = lambda lane: lane, **more: Any) -> ClusterState:
    """The final state of a job of three steps."""
    job = make_job("momentum", cadence=str(cadence), steps=3, **{"replicas": 2, **more})
    with Cluster(job, ps=2) as cluster:
        workers = [cluster.worker(index, wrap=wrap) for index in range(len(ownership))]
        pairs = zip(workers, ownership, strict=True)
        cluster.together([lambda w=worker, o=owned: w.run(o, job.steps) for worker, owned in pairs])  # type: ignore[misc]
        return cluster.state()


@EACH
def test_it_is_written_as_it_is_read_and_says_what_it_is(cadence: Cadence) -> None:
    assert CADENCES.parse(str(cadence)) == cadence
    assert doc_line(type(cadence)).endswith(".")
    assert cadence.ticks >= 1
    # What is sent during the computation can't be held back, or be used by it.
    assert not cadence.streams or (cadence.ticks == 1 and not cadence.copies and not cadence.sends_deltas)


@EACH
def test_a_step_that_starts_over_is_the_step_that_was_never_begun(cadence: Cadence) -> None:
    plain, again = held_by(cadence), held_by(cadence)
    expected = cadence.local(plain)
    expected.began(3)
    wanted = round_of(expected, cadence)
    local = cadence.local(again)
    local.began(5)
    local.enter(0, 0)
    local.take(0, 0, outgoing(99))
    # As after a rollback: the servers' parameters, and nothing of the step that was begun.
    local.began(3)
    assert same(round_of(local, cadence), wanted)


@EACH
def test_a_replica_does_not_see_what_others_on_its_worker_compute(cadence: Cadence) -> None:
    together = cadence.local(held_by(cadence))
    together.began(0)
    both = round_of(together, cadence)
    for replica in range(2):
        alone = cadence.local(held_by(cadence))
        alone.began(0)
        for tick in range(cadence.ticks):
            alone.enter(replica, tick)
            sent = alone.take(replica, tick, outgoing(10 * tick + replica))
        assert same({replica: sent}, {replica: both[replica]})


@EACH
def test_gradients_that_are_given_and_parameters_that_were_pulled_stay_as_they_are(cadence: Cadence) -> None:
    held = held_by(cadence)
    local = cadence.local(held)
    local.began(0)
    before = {name: value.clone() for name, value in held.pulled.items()}
    given = outgoing(1)
    kept = {name: value.clone() for name, value in given.values.items()}
    for tick in range(cadence.ticks):
        local.enter(0, tick)
        local.take(0, tick, given)
    assert all(torch.equal(given.values[name], kept[name]) for name in kept)
    assert all(torch.equal(held.pulled[name], before[name]) for name in before)


@EACH
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

    def progress(self, sender: Sender, replicas: Any, *, timeout_s: float) -> Standing:
        return self._lane.progress(sender, replicas, timeout_s=timeout_s)

    def cancel(self) -> None:
        self._lane.cancel()

    def close(self) -> None:
        self._lane.close()


@EACH
def test_an_answer_that_was_lost_changes_no_bit(cadence: Cadence) -> None:
    assert_same_end(trained(cadence, [[0, 1]], wrap=Breaking), trained(cadence, [[0, 1]]))


@EACH
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
        assert_same_end(cluster.state(), trained(cadence, [[0, 1]]))


@EACH
def test_another_process_takes_over_at_the_open_step(cadence: Cadence) -> None:
    job = make_job("momentum", cadence=str(cadence), replicas=2, steps=3)
    with Cluster(job, ps=2) as cluster:
        doomed = cluster.worker(0).run([0, 1], 2)
        doomed.tick([0, 1])
        doomed.close()
        cluster.workers.remove(doomed)
        cluster.worker(1).run([0, 1], job.steps)
        assert_same_end(cluster.state(), trained(cadence, [[0, 1]]))


@EACH
def test_asynchronous_workers_follow_it_too(cadence: Cadence) -> None:
    job = make_job("sgd", cadence=str(cadence), consistency="async", steps=3)
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


@EACH
def test_a_script_trains_by_it_with_a_chief(cadence: Cadence, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.cadence.of", lambda job: cadence)
    services: Services = start(ps=1, workers=1)
    model, steps = make_model(), 4 * cadence.ticks
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
    ticks = Ticks(toy_cadence.Every(steps=3))
    numbers, step = [], 0
    for _ in range(5):
        numbers.append(ticks.number(step))
        step += ticks.advance()
    assert numbers == [0, 1, 2, 3, 4]
    ticks.restart()
    assert (ticks.number(step), ticks.last) == (3, False)


def test_what_a_cadence_can_not_do_is_refused() -> None:
    with pytest.raises(JobError, match="steps is 0"):
        make_job(cadence="every:steps=0")
    with pytest.raises(JobError, match="choose from every-step"):
        make_job(cadence="now-and-then")
    assert toy_local_steps.Local.name in CADENCES
