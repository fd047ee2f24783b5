"""A person's own loop that is not over session.steps(): a standby that takes over under it is never seen.

Real sessions and servers in this process; the test plays the chief.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardline.client.api import joining, workplace
from shardline.client.api.session import Session
from shardline.client.step.trainer import RetainedContribution
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.consistency import of
from shardline.consistency.worker import ComputedAt, WorkerHalf
from shardline.core.orders import JobView, Orders, Phase
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import RolledBackError, UnreachableError
from shardline.lanes.base import Lane
from shardline.rpc.link import ChiefLink
from shardline.update import rule
from shardline.waist import Exchanged
from tests.integration.test_deaths import Between
from tests.support.cluster import ClusterState, same_bits
from tests.support.jobs import make_job, mse
from tests.support.standbys import Protected
from tests.support.waiting import wait_for

STEPS = 4
AT = 2
"""The step whose push is disturbed: the third, so that gradients may leave early."""
ARGUMENTS: dict[str, Any] = {"lr": 0.01}
State = Mapping[str, torch.Tensor]


class Norm(nn.Module):
    """Batch norm, whose buffers belong to what replica 0 contributes, and a parameter that half of the passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.some = nn.Parameter(torch.full((6,), 0.1))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.out(torch.relu(self.norm(self.inner(x))))
        return value + self.some.sum() if float(x[0, 0]) > 0 else value


class Link(ChiefLink):
    """A tie to a chief that the test plays."""

    cluster: Scripts

    def join(self) -> bool:
        self.incarnation = 1
        self.client.get_job = lambda who: self.cluster.view  # type: ignore[method-assign]
        self.cluster.links.append(self)
        self.tell(Phase.RUNNING)
        return True

    def tell(self, phase: Phase) -> None:
        self.obey(
            Orders(
                version=self.orders.version + 1,
                phase=phase,
                timeline=self.cluster.timeline,
                replicas=(int(self.task.rpartition("/")[2]),),
            )
        )

    def finish(self) -> None:
        super().finish()
        self.tell(Phase.ENDED)


class Scripts(Protected):
    """Servers with standbys for the job of a script."""

    def __init__(self, *, mode: str = "sync", replicas: int = 2, clip_norm: float = 0.0, **options: Any) -> None:
        self.links: list[Link] = []
        count = replicas if mode == "sync" else 1
        job = make_job("adam", model=Norm, consistency=mode, replicas=count, steps=STEPS, clip_norm=clip_norm)
        super().__init__(job, bucket_bytes=512, **options)

    @property
    def view(self) -> JobView:
        return replace(super().view, job=replace(self.spec, script=True))

    def fail_over(self, lost: int, *, zombie: bool = False) -> None:
        for link in self.links:
            link.tell(Phase.WAITING)
        super().fail_over(lost, zombie=zombie)
        for link in self.links:
            link.tell(Phase.RUNNING)

    def session(self, index: int, lane: str) -> Session:
        any_port = ("127.0.0.1:0",)
        spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": any_port * 2, "worker": any_port * 2})
        return Session(RoleConfig(role="worker", index=index, cluster=spec, timeouts=self.timeouts, lane=lane))


class Trap:
    """Makes a server go while one worker's push of step AT is on its way to one shard.

    when: "before" any of it has left, "between" two of its buckets, or "after" it counts everywhere, its answer lost.
    times: how often.
    """

    def __init__(self, *, when: str, shard: int, lose: Callable[[], None], worker: str = "worker/0", times: int = 1):
        self._when, self._shard, self._lose, self._worker = when, shard, lose, worker
        self.left = times
        self.cluster: Scripts | None = None
        self._lock = threading.Lock()

    def set_in(self, lane: Lane, shard: int) -> Lane:
        original = lane.exchange

        def exchange(sender: Any, contributions: Any, want: Any, sink: Any, *, timeout_s: float) -> Exchanged:
            call = functools.partial(original, sender, timeout_s=timeout_s)
            with self._lock:
                due = self._is_due(sender.who.task, contributions)
                self.left -= due
            if not due:
                return call(contributions, want, sink)
            if self._when == "before":
                self._lose()
            elif self._when == "between":
                first, *rest = contributions
                held = Between(first.payloads, 1, self._lose)
                return call([replace(first, payloads=held), *rest], want, sink)
            else:
                call(contributions, None, sink)
                wait_for(self._counts_everywhere, "the push to count at all shards")
                self._lose()
                raise UnreachableError("the answer was lost on its way")
            return call(contributions, want, sink)

        if shard == self._shard:
            lane.exchange = exchange  # type: ignore[method-assign]
        return lane

    def _is_due(self, task: str, contributions: Any) -> bool:
        number = contributions[0].step or contributions[0].seq - 1 if contributions else -1
        return task == self._worker and self.left > 0 and number == AT

    def _counts_everywhere(self) -> bool:
        assert self.cluster is not None
        if self.cluster.spec.consistency.mode == "sync":
            return all(bucket.step > AT for shard in self.cluster.shards for bucket in shard.buckets)
        return all(shard.mode.last_push(self._worker) > AT for shard in self.cluster.shards)


@pytest.fixture
def set_trap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scripts, Trap | None], None]:
    opened = workplace.open_lane

    def use(cluster: Scripts, trap: Trap | None) -> None:
        def open_lane(config: Any, peer: Any, shard: int, *others: Any, **named: Any) -> Lane:
            lane = opened(config, peer, shard, *others, **named)
            return lane if trap is None else trap.set_in(lane, shard)

        monkeypatch.setattr(workplace, "open_lane", open_lane)
        monkeypatch.setattr(joining, "ChiefLink", type("Tied", (Link,), {"cluster": cluster}))
        if trap is not None:
            trap.cluster = cluster

    return use


def batch(step: int, replica: int) -> list[torch.Tensor]:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step * 10 + replica))
    return [x, x.mean(dim=1, keepdim=True)]


def plain_loop(cluster: Scripts, index: int, lane: str = "grpc", **how: bool) -> State:
    """What a person writes who knows nothing of steps(); where it ends."""
    torch.manual_seed(index)
    model = Norm()
    with cluster.session(index, lane) as session:
        optimizer = session.attach(model, torch.optim.Adam(model.parameters(), **ARGUMENTS), **how)
        for step in range(STEPS):
            # A rate that changes travels with the push.
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            optimizer.zero_grad()
            mse(model, batch(step, index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert session.step == step + 1
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def run(cluster: Scripts, workers: int = 2, lane: str = "grpc", **how: bool) -> tuple[list[State], ClusterState]:
    bodies = [functools.partial(plain_loop, cluster, index, lane, **how) for index in range(workers)]
    cluster.await_synced()
    return cluster.together(bodies), cluster.state()


def assert_same(mine: tuple[list[State], ClusterState], theirs: tuple[list[State], ClusterState]) -> None:
    for ours, other in zip(mine[0], theirs[0], strict=True):
        for name, value in other.items():
            assert same_bits(ours[name], value), name
    assert mine[1].step == theirs[1].step
    for one, two in ((mine[1].params, theirs[1].params), (mine[1].buffers, theirs[1].buffers)):
        assert one.keys() == two.keys()
        for name in one:
            assert same_bits(one[name], two[name]), name
    for name, state in theirs[1].optimizer.items():
        for key, item in state.items():
            assert torch.equal(mine[1].optimizer[name][key], item), (name, key)


@pytest.fixture
def undisturbed(set_trap: Any) -> Callable[..., tuple[list[State], ClusterState]]:
    """Where the same loops end when nobody is lost."""

    def end(workers: int = 2, **settings: Any) -> tuple[list[State], ClusterState]:
        key = (workers, *sorted(settings.items()))
        if key not in ENDS:
            with Scripts(**settings) as cluster:
                set_trap(cluster, None)
                ENDS[key] = run(cluster, workers)
        return ENDS[key]

    return end


ENDS: dict[tuple[Any, ...], tuple[list[State], ClusterState]] = {}
"""Of undisturbed loops, each made once."""


HOW = {
    "private": ("grpc", {}),
    "overlap": ("grpc", {"overlap": True}),
    "zero_copy": ("shm", {"zero_copy": True}),
}


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("private", "between"),
        ("overlap", "before"),
        ("zero_copy", "after"),
        pytest.param("private", "before", marks=pytest.mark.long),
        pytest.param("private", "after", marks=pytest.mark.long),
        pytest.param("overlap", "after", marks=pytest.mark.long),
        pytest.param("zero_copy", "before", marks=pytest.mark.long),
    ],
)
def test_a_synchronous_loop_of_ones_own_ends_with_the_same_bits_when_a_standby_takes_over(
    how: str, when: str, set_trap: Any, undisturbed: Any
) -> None:
    lane, settings = HOW[how]
    with Scripts(lane=lane) as cluster:
        trap = Trap(when=when, shard=1, lose=lambda: cluster.fail_over(1))
        set_trap(cluster, trap)
        found = run(cluster, 2, lane, **settings)
        assert trap.left == 0 and cluster.host_of(1) == 0
        assert [shard.tally.duplicate_mismatches for shard in cluster.shards] == [0, 0]
    assert_same(found, undisturbed())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_voted_step_is_taken_along_too(when: str, set_trap: Any, undisturbed: Any) -> None:
    with Scripts(clip_norm=0.05) as cluster:
        trap = Trap(when=when, shard=0, lose=lambda: cluster.fail_over(0))
        set_trap(cluster, trap)
        found = run(cluster)
        assert trap.left == 0 and cluster.host_of(0) == 1
    assert_same(found, undisturbed(clip_norm=0.05))


def test_a_second_server_may_go_while_what_was_taken_along_is_sent_again(set_trap: Any, undisturbed: Any) -> None:
    with Scripts(ps=1, spare=2) as cluster:
        lost = iter((0, 1))

        def lose() -> None:
            number = next(lost)
            cluster.fail_over(number)
            if number == 0:
                cluster.place_standby(0, 2)
                cluster.await_synced()

        trap = Trap(when="before", shard=0, lose=lose, times=2)
        set_trap(cluster, trap)
        found = run(cluster)
        assert trap.left == 0 and cluster.host_of(0) == 2
    assert_same(found, undisturbed())


@pytest.mark.parametrize(
    ("when", "overlap"),
    [
        ("before", False),
        pytest.param("between", False, marks=pytest.mark.long),
        ("after", False),
        ("between", True),
    ],
)
def test_an_asynchronous_loop_of_ones_own_loses_nothing_and_nothing_counts_twice(
    overlap: bool, when: str, set_trap: Any, undisturbed: Any
) -> None:
    with Scripts(mode="async") as cluster:
        trap = Trap(when=when, shard=1, lose=lambda: cluster.fail_over(1, zombie=True))
        set_trap(cluster, trap)
        found = run(cluster, 1, overlap=overlap)
        assert trap.left == 0 and cluster.host_of(1) == 0
        for shard in cluster.shards:
            assert (shard.version, shard.mode.last_push("worker/0")) == (STEPS, STEPS)
    # One worker is plain torch, to the bit.
    assert_same(found, undisturbed(1, mode="async"))


def test_two_asynchronous_loops_lose_nothing_when_one_of_them_meets_the_end_of_a_server(set_trap: Any) -> None:
    with Scripts(mode="async") as cluster:
        trap = Trap(when="between", shard=0, lose=lambda: cluster.fail_over(0))
        set_trap(cluster, trap)
        run(cluster)
        assert trap.left == 0
        for shard in cluster.shards:
            assert {task: held.last_seq for task, held in shard.mode.settle().items() if held.last_seq} == {
                "worker/0": STEPS,
                "worker/1": STEPS,
            }
            assert shard.version == 2 * STEPS


@pytest.mark.parametrize("zero_copy", [False, True], ids=["private", "shared"])
def test_named_gradients_that_a_person_pushes_are_taken_along(zero_copy: bool, set_trap: Any) -> None:
    lane = "shm" if zero_copy else "grpc"

    def ends(cluster: Scripts) -> State:
        model = Norm()
        with cluster.session(0, lane) as session:
            session.attach(model, torch.optim.Adam(model.parameters(), **ARGUMENTS), zero_copy=zero_copy)
            for step in range(STEPS):
                gradient = session.gradient("inner.weight")
                gradient.copy_(torch.full((8, 5), 0.5 + step))
                session.push({"inner.weight": gradient})
            return session.pull()

    found = []
    for disturbed in (True, False):
        with Scripts(replicas=1, ps=2, lane=lane) as cluster:
            home = next(s for s, shard in enumerate(cluster.plan.shards) if holds(cluster, s, "inner.weight"))
            lose = functools.partial(cluster.fail_over, home)
            trap = Trap(when="before", shard=home, lose=lose, times=int(disturbed))
            set_trap(cluster, trap)
            cluster.await_synced()
            found.append(ends(cluster))
            assert trap.left == 0 and (cluster.host_of(home) != home) == disturbed
    for name, value in found[1].items():
        assert same_bits(found[0][name], value), name


def holds(cluster: Scripts, shard: int, name: str) -> bool:
    tensors = [cluster.plan.tensors[p.tensor].name for b in cluster.plan.shards[shard].buckets for p in b.slices]
    return name in tensors


def test_where_the_job_went_back_the_loop_is_told_the_step_and_holds_its_parameters(
    set_trap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not really go back here: the contribution is taken for one of a later step."""
    with Scripts(replicas=1) as cluster:
        trap = Trap(when="before", shard=0, lose=lambda: cluster.fail_over(0))
        set_trap(cluster, trap)
        cluster.await_synced()
        made = RetainedContribution.__init__

        def later(self: RetainedContribution, mark: ComputedAt, parts: Any) -> None:
            made(self, replace(mark, step=mark.step + trap.left), parts)

        monkeypatch.setattr(RetainedContribution, "__init__", later)
        model = Norm()
        with cluster.session(0, "grpc") as session:
            optimizer = session.attach(model, torch.optim.Adam(model.parameters(), **ARGUMENTS))
            step, told = 0, []
            first: dict[int, State] = {}
            while step < STEPS:
                held = {name: value.detach().clone() for name, value in model.state_dict().items()}
                assert all(same_bits(first.setdefault(step, held)[name], value) for name, value in held.items())
                optimizer.zero_grad()
                mse(model, batch(step, 0)).backward()  # type: ignore[no-untyped-call]
                try:
                    optimizer.step()
                except RolledBackError as error:
                    told.append((step, error.step, str(error)))
                    step = error.step
                else:
                    step += 1
        assert [(before, to) for before, to, _ in told] == [(AT, AT)]
        assert "was rolled back to step 2" in told[0][2] and "--standbys 1" in told[0][2]
        assert cluster.state().step == STEPS and len(first) == STEPS


def standing(mode: str, step: int, acknowledged: dict[int, int], base: dict[int, int]) -> WorkerHalf:
    job = JobSpec(name="j", tensors=(), rule=rule("SGD", ({"lr": 0.1},)), consistency=ConsistencySpec(mode=mode))
    half = of(job.consistency).worker_half(job)
    half.step, half.acknowledged, half.base = step, acknowledged, base
    return half


@pytest.mark.parametrize(
    ("mode", "found", "back", "counted"),
    [
        ("sync", (6, {}, {}), True, False),
        ("sync", (7, {}, {}), False, False),
        ("sync", (8, {}, {}), False, True),
        ("async", (7, {0: 4, 1: 4}, {0: 9, 1: 9}), False, False),
        ("async", (7, {0: 5, 1: 4}, {0: 10, 1: 9}), False, False),
        ("async", (7, {0: 5, 1: 5}, {0: 10, 1: 12}), False, True),
        ("async", (7, {0: 4, 1: 3}, {0: 9, 1: 9}), True, False),
        # Nothing of this worker's is lost, but of others, with which it has computed.
        ("async", (7, {0: 4, 1: 4}, {0: 9, 1: 8}), True, False),
    ],
)
def test_where_a_job_stands_says_what_becomes_of_a_contribution(
    mode: str, found: tuple[int, dict[int, int], dict[int, int]], back: bool, counted: bool
) -> None:
    made = RetainedContribution(standing(mode, 7, {0: 4, 1: 4}, {0: 9, 1: 9}).mark(), {})
    assert standing(mode, *found).went_back(made.mark) == back
    assert back or standing(mode, *found).counted(made.mark) == counted
