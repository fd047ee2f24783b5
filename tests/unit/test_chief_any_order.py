"""Whatever dies, in whatever order, and however long servers take to answer: drawn from seeds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardline.core.orders import Phase
from shardline.core.spec import TensorSpec
from tests.support.chief_cluster import Cluster, FakePs, T, make_job, phase
from tests.support.mortal_chief import Mortal

TENSORS = tuple(TensorSpec(name=f"layer{number}", shape=(64, 64), dtype="float32") for number in range(6))
EVENTS = ("ps", "ps", "worker", "another", "steps", "time", "hold", "some", "release")


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whatever_dies_in_whatever_order_the_job_ends_well_when_all_come_back(mode: str, standbys: int) -> None:
    for seed in range(24):
        draw = random.Random(seed)
        job = make_job(mode=mode, checkpoint_every=10 if mode == "async" else 0, tensors=TENSORS)
        # Every fourth time the chief may die too.
        mortal = seed % 4 == 3
        cluster: Any = (Mortal if mortal else Cluster)(job=job, ps=3, workers=2, standbys=standbys)
        cluster.start()
        for _ in range(14):
            if cluster.finish is None:
                happens(cluster, draw.choice((*EVENTS, "chief") if mortal else EVENTS), draw)
        cluster.release_commands()
        for _ in range(30):
            if cluster.finish is None:
                all_are_there(cluster)
        if cluster.finish is not None:
            assert "losses in a row without a step in between" in cluster.finish.reason, (seed, cluster.finish)
            continue
        state = cluster.program.state
        assert phase(cluster) is Phase.RUNNING, (seed, cluster.text())
        assert state.layout.settled and not state.after_table, (seed, state.layout.have)
        held = sorted(number for ps in cluster.ps for number in ps.shards)
        assert held == [place.shard for place in state.layout.placement], seed
        assert all(bool(place.standby_task) == bool(standbys) for place in state.layout.placement), seed
        assert all(ps.active and ps.timeline == state.layout.timeline for ps in cluster.ps if ps.shards), seed
        if mode == "sync":
            cluster.advance(100)
            assert cluster.finish is not None, seed
            assert cluster.finish.exit_code == 0


def happens(cluster: Any, event: str, draw: random.Random) -> None:
    if event == "ps":
        number = draw.randrange(3)
        if cluster.program.state.tasks.members.get(f"ps/{number}").living:
            cluster.kill_ps(number)
        if draw.random() < 0.5:
            cluster.tick(draw.choice([1, T / 3 + 2]))
        start_ps(cluster, number)
    elif event == "worker":
        index = draw.randrange(2)
        cluster.program.stream_broken(f"worker/{index}", cluster.lives[f"worker/{index}"], cluster.now_s)
        cluster.settle()
        cluster.ask("worker", index)
    elif event == "another":
        cluster.ask("worker", 2)
    elif event == "time":
        cluster.tick(draw.choice([0.1, 3]))
    elif event == "hold":
        cluster.hold_commands = True
    elif event == "some":
        for _ in range(draw.randrange(len(cluster.held) + 1)):
            cluster.carry_out(cluster.held.pop(0))
            cluster.settle()
    elif event == "release":
        cluster.release_commands()
    elif event == "chief":
        cluster.hold_commands = False
        cluster.next_chief()
        cluster.hear()
        cluster.hear()
    elif phase(cluster) is Phase.RUNNING:
        for ps in cluster.ps:
            ps.advance(ps.step + 3)
            ps.version = max(ps.version, ps.step)
        cluster.tick()


def start_ps(cluster: Any, number: int) -> None:
    """A new, empty process takes the place of one that is gone."""
    if cluster.finish is None:
        cluster.ps[number] = FakePs(number, restored=cluster.ps[number].restored)
        cluster.ask("ps", number)


def all_are_there(cluster: Any) -> None:
    """A second passes, and whoever is gone is started again."""
    cluster.tick(1)
    for task in ("ps/0", "ps/1", "ps/2", "worker/0", "worker/1"):
        role, _, index = task.partition("/")
        if not cluster.program.state.tasks.members.get(task).living:
            start_ps(cluster, int(index)) if role == "ps" else cluster.ask(role, int(index))
    if cluster.finish is None and cluster.program.state.work.initializer:
        cluster.initialize()
