"""Barriers of a script: the chief's rule alone, in a cluster, and under random deaths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from shardline.core.orders import BarrierPlace, BarrierState
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.v1 import chief_pb2
from shardline_chief.rules.flows.barriers import Barriers
from shardline_chief.rules.state.settings import ChiefSettings
from shardline_chief.rules.state.state import State
from tests.support.chief_cluster import Cluster, make_job


def rules(*, workers: int = 3, mode: str = "sync", first_step: int = 0) -> Barriers:
    settings = ChiefSettings(term=1, chief_uuid="u", chief_address="a:1", ps=("b:1",), workers=workers)
    state = State(settings, 0.0, resume=None)
    state.adopt(make_job(script=True, steps=0, mode=mode))
    state.progress.first_step = first_step
    return Barriers(state)


def place(step: int, number: int = 0, *, begun: bool = True) -> BarrierPlace:
    return BarrierPlace(step, begun, number)


def test_a_barrier_opens_when_all_workers_of_the_cluster_have_come() -> None:
    barriers = rules()
    assert barriers.states().get("worker/0") is None
    barriers.told("worker/0", place(4))
    barriers.told("worker/2", place(4))
    assert barriers.states().get("worker/0") == BarrierState(place=place(4), passed=False, waits_for=("worker/1",))
    barriers.told("worker/1", place(4))
    for task in ("worker/0", "worker/1", "worker/2"):
        assert barriers.states().get(task) == BarrierState(place=place(4), passed=True)
    # Who has gone on holds nobody up.
    barriers.told("worker/0", place(5))
    barriers.told("worker/0", place(5, 1))
    assert barriers.states().get("worker/1") == BarrierState(place=place(4), passed=True)
    assert barriers.states()["worker/0"].waits_for == ("worker/1", "worker/2")


def test_all_workers_get_the_value_of_the_first_also_one_that_comes_again() -> None:
    barriers = rules(workers=2)
    for step in range(1, 30):
        barriers.told("worker/1", replace(place(step), value='"not this one"'))
        barriers.told("worker/0", replace(place(step), value=f"{step}"))
        found = barriers.states()["worker/1"]
        assert found.passed and found.place.value == f"{step}"
    assert from_message(BarrierState, to_message(chief_pb2.BarrierState, found)).place.value == "29"
    barriers.told("worker/1", place(20))
    assert barriers.states()["worker/1"].place.value == "20"
    # Not kept for ever.
    barriers.told("worker/1", place(2))
    assert barriers.states()["worker/1"].place.value == ""


def test_a_worker_that_has_ended_before_it_came_is_named_at_once() -> None:
    barriers = rules()
    barriers.told("worker/1", place(4))
    barriers.told("worker/0", place(7))
    barriers.state.tasks.finished.add("worker/1")
    expected = BarrierState(place=place(7), passed=False, hopeless=True, waits_for=("worker/1",))
    assert barriers.states().get("worker/0") == expected
    barriers.told("worker/2", place(4))
    # It was there before it ended.
    assert barriers.states()["worker/2"].passed


@pytest.mark.parametrize("first_step", [0, 500])
def test_a_barrier_before_the_loop_is_met_once_in_a_run(first_step: int) -> None:
    barriers = rules(workers=2, first_step=first_step)
    start = place(first_step, begun=False)
    barriers.told("worker/0", start)
    assert not barriers.states()["worker/0"].passed
    barriers.told("worker/1", start)
    assert barriers.states()["worker/0"].passed
    # The first one within the loop is another.
    barriers.told("worker/0", place(first_step))
    assert not barriers.states()["worker/0"].passed
    # A worker that is started again later passes it alone, and has not been at what follows.
    barriers.told("worker/1", place(first_step + 9, begun=False))
    assert barriers.states()["worker/1"].passed
    barriers.told("worker/0", place(first_step + 9))
    assert barriers.states()["worker/0"].waits_for == ("worker/1",)


def test_asynchronous_workers_meet_by_the_number_of_their_barriers() -> None:
    barriers = rules(workers=2, mode="async")
    for number in range(3):
        barriers.told("worker/0", place(0, number))
        barriers.told("worker/1", place(0, number))
    barriers.told("worker/0", place(0, 3))
    # Started again, it begins with its first one: that is over.
    barriers.told("worker/1", place(0, 0))
    assert barriers.states()["worker/1"].passed
    assert not barriers.states()["worker/0"].passed
    barriers.told("worker/1", place(0, 3))
    assert barriers.states()["worker/0"].passed
    # It was there, whatever became of it.
    barriers.told("worker/1", place(0, 0))
    assert barriers.states()["worker/0"].passed


def test_orders_say_how_it_stands_with_a_workers_barrier() -> None:
    cluster = Cluster(workers=2)
    job = make_job(script=True, steps=0, replicas=0)
    for number in (0, 1):
        cluster.join("ps", number)
    for number in (0, 1):
        cluster.join("worker", number, job=job)
    cluster.initialize()
    assert cluster.orders("worker/0").barrier is None
    cluster.beat("worker/0", barrier=place(0, begun=False))
    state = cluster.orders("worker/0").barrier
    assert state == BarrierState(place=place(0, begun=False), passed=False, waits_for=("worker/1",))
    cluster.beat("worker/1", barrier=place(0, begun=False))
    assert cluster.orders("worker/0").barrier == BarrierState(place=place(0, begun=False), passed=True)


def test_barriers_survive_the_wire() -> None:
    state = BarrierState(place=place(7, 2), passed=False, hopeless=True, waits_for=("worker/1",))
    assert from_message(BarrierState, to_message(chief_pb2.BarrierState, state)) == state


# Random deaths: workers that go through steps with barriers in them, as scripts do.

STEPS, BEFORE, AFTER = 4, 1, 1
IN_STEP = (0, 2, 0, 1)
"""Barriers of each step."""


@dataclass
class Worker:
    """One worker of a synchronous script: what it does next, and where its life began."""

    index: int
    at: int = 0
    """Number of its next act in script_of()."""
    waiting: BarrierPlace | None = None
    lives: int = 1

    @property
    def task(self) -> str:
        return f"worker/{self.index}"


def script_of(step: int) -> list[tuple[str, BarrierPlace | int]]:
    """What a life that begins at this step does: barriers and exchanges, in order."""
    acts: list[tuple[str, BarrierPlace | int]] = [("barrier", place(step, n, begun=False)) for n in range(BEFORE)]
    for number in range(step, STEPS):
        acts += [("barrier", place(number, n)) for n in range(IN_STEP[number])]
        acts.append(("step", number))
    return [*acts, *(("barrier", place(STEPS, n)) for n in range(AFTER))]


@pytest.mark.parametrize("seed", range(200))
def test_barriers_neither_hang_nor_open_too_early_under_random_deaths(seed: int) -> None:
    dice = random.Random(seed)
    barriers = rules(workers=3)
    workers = [Worker(index) for index in range(3)]
    acts = {worker.index: script_of(0) for worker in workers}
    pushed: dict[int, set[int]] = {step: set() for step in range(STEPS)}
    beaten: list[tuple[str, BarrierPlace]] = []
    deaths = 0
    for _ in range(3000):
        living = [worker for worker in workers if worker.at < len(acts[worker.index])]
        if not living:
            break
        worker = dice.choice(living)
        closed = next((step for step in range(STEPS) if len(pushed[step]) < 3), STEPS)
        if deaths < 4 and dice.random() < 0.02:
            # It is started again, at the step that is open; beats that were under way still come.
            deaths += 1
            worker.at, worker.waiting, worker.lives = 0, None, worker.lives + 1
            acts[worker.index] = script_of(closed)
            continue
        if beaten and dice.random() < 0.5:
            barriers.told(*beaten.pop(0))
            continue
        kind, what = acts[worker.index][worker.at]
        if kind == "step":
            assert isinstance(what, int)
            pushed[what].add(worker.index)
            # It goes on when all have pushed.
            if len(pushed[what]) == 3:
                worker.at += 1
            continue
        assert isinstance(what, BarrierPlace)
        if worker.waiting != what:
            worker.waiting = what
            beaten.append((worker.task, what))
            continue
        state = barriers.states().get(worker.task)
        if state is not None and state.place == what and state.passed:
            if what.begun or what.step == 0:
                # Everybody has been at this one, in some life.
                for other in workers:
                    # No other way: state_of() is of the barrier at which a task waits now.
                    assert barriers._reached[other.task] >= what
            worker.at += 1
    assert all(worker.at == len(acts[worker.index]) for worker in workers), (seed, workers)
