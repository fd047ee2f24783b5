"""How many acknowledged updates are gone, where shards go back one by one: who counts them if their worker dies too."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shardline.consistency.worker import OwnPushes
from shardline.core.image import WorkerSequence
from shardline.core.orders import ACKNOWLEDGED, LOST, SINCE, Phase
from shardline.core.outcome import Outcome
from shardline.waist import Standing
from shardline_chief.rules.messages import Beat
from shardline_chief.rules.state.losses import Losses, Recovered, WentBack
from tests.support.chief_cluster import Cluster, make_job, phase
from tests.support.mortal_chief import Mortal, hear_twice, mortal

T = 60.0


def figures(lost: int, since: int, *numbers: int) -> dict[str, float]:
    """What a worker says of itself; numbers: of its last acknowledged push at each shard."""
    known = {f"{ACKNOWLEDGED}{shard}": float(number) for shard, number in enumerate(numbers)}
    return {LOST: float(lost), SINCE: float(since), **known}


def back(timeline: int, **shards: Mapping[str, WorkerSequence]) -> WentBack:
    return WentBack(timeline=timeline, sequences={int(name[1:]): table for name, table in shards.items()})


def table(incarnation: int, last_seq: int) -> dict[str, WorkerSequence]:
    return {"worker/0": WorkerSequence(incarnation, last_seq)}


@pytest.mark.parametrize(
    ("told", "went_back", "lost"),
    [
        (figures(0, 1, 20, 20), [], 0),
        (figures(0, 1, 20, 20), [back(2, s1=table(7, 12))], 8),
        (figures(0, 1, 20, 20), [back(2, s0=table(7, 12), s1=table(7, 15))], 13),
        (figures(0, 1, 20, 20), [back(2, s1={})], 20),
        (figures(0, 1, 20, 20), [back(2, s1=table(6, 50))], 20),
        (figures(0, 1, 20, 20), [back(2, s1=table(8, 1))], 0),
        (figures(8, 2, 20, 14), [back(2, s1=table(7, 12))], 8),
        (figures(8, 2, 20, 14), [back(2, s1=table(7, 12)), back(3, s1=table(7, 12))], 10),
        (figures(0, 1, 20, 20), [back(2, s1=table(7, 12)), back(3, s1=table(7, 12), s0=table(7, 19))], 9),
        ({LOST: 3.0}, [back(2, s1={})], 3),
    ],
    ids=[
        "nothing went back",
        "one shard",
        "two shards",
        "the checkpoint knows nothing of it",
        "the checkpoint knows an earlier life",
        "the checkpoint knows a later life, which had come after all of it",
        "it has counted them itself",
        "it has counted the first time only",
        "twice, with no report between",
        "it doesn't say what was acknowledged",
    ],
)
def test_a_life_lost_what_it_counted_and_what_was_acknowledged_before_shards_went_back_unseen_by_it(
    told: Mapping[str, float], went_back: list[WentBack], lost: int
) -> None:
    assert Losses(back=went_back).updates({("worker/0", 7): told}) == lost


def test_what_servers_had_reported_counts_where_no_worker_lives_to_tell() -> None:
    recovered = Recovered(task="ps/1", at_step=20, from_step=10, seconds=1.0, lost=9)
    assert Losses(recoveries=[recovered], back=[back(2, s1={})]).updates({}) == 9
    assert Losses(recoveries=[recovered]).updates({}) == 0, "of a synchronous job these are steps"


def test_a_worker_says_together_what_was_acknowledged_what_it_lost_and_since_when() -> None:
    half = OwnPushes(make_job(mode="async"))

    def located(timeline: int, *numbers: int) -> None:
        half.located(
            {
                shard: Standing(
                    outcome=Outcome.SERVED,
                    reason="",
                    timeline=timeline,
                    replicas={},
                    step_max=0,
                    version=number,
                    last_seq=number,
                )
                for shard, number in enumerate(numbers)
            },
            (0,),
        )

    located(5, 0, 0)
    for step in range(3):
        half.closed(step, (0, 1), {0: step, 1: step}, dropped=False)
    assert half.figures == figures(0, 5, 3, 3)
    located(6, 3, 1)
    assert half.figures == figures(2, 6, 3, 1)


def tell(cluster: Cluster, task: str, told: Mapping[str, float]) -> None:
    assert cluster.program.beat(Beat(task=task, incarnation=cluster.lives[task], figures=told), cluster.now_s)
    cluster.settle()


def train(cluster: Cluster) -> None:
    """Both workers have 12 pushes in the checkpoint, and 20 acknowledged."""
    for task in ("worker/0", "worker/1"):
        assert cluster.program.lease(task, cluster.lives[task], (), cluster.now_s).count
    for ps in cluster.ps:
        ps.version = 24
    cluster.tick()
    cluster.sequences = {task: WorkerSequence(cluster.lives[task], 12) for task in ("worker/0", "worker/1")}
    timeline = cluster.program.state.layout.timeline
    for task in ("worker/0", "worker/1"):
        tell(cluster, task, figures(0, timeline, 20, 20))


def lost(cluster: Cluster) -> int:
    state = cluster.program.state
    return state.losses.updates(state.figures.lives)


def lose_both(cluster: Cluster) -> None:
    """A server, and a worker with it."""
    train(cluster)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2, silent=("worker/1",))


def ps_returns(cluster: Cluster) -> None:
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING
    assert lost(cluster) == 16


def test_the_updates_of_a_worker_that_dies_with_its_server_are_counted_too() -> None:
    cluster = Cluster(job=make_job(mode="async", checkpoint_every=10))
    cluster.start()
    lose_both(cluster)
    ps_returns(cluster)
    # The one that lives has more to say: two more were acknowledged after its last heartbeat.
    tell(cluster, "worker/0", figures(10, cluster.program.state.layout.timeline, 22, 12))
    assert lost(cluster) == 18


def test_the_next_chief_knows_what_a_worker_lost_that_died_before_the_last_one() -> None:
    cluster = mortal(mode="async", checkpoint_every=10)
    lose_both(cluster)
    ps_returns(cluster)
    del cluster.lives["worker/1"]
    next_chief(cluster)
    assert lost(cluster) == 16


def test_the_next_chief_knows_what_was_acknowledged_when_a_server_was_lost_that_the_last_one_did_not_see_return() -> (
    None
):
    cluster = mortal(mode="async", checkpoint_every=10)
    lose_both(cluster)
    del cluster.lives["worker/1"]
    next_chief(cluster)
    assert {task for task, _ in cluster.program.state.figures.lives} == {"worker/0", "worker/1"}


def test_the_journal_has_what_a_life_told_once_it_is_gone_only_once() -> None:
    cluster = mortal(mode="async", checkpoint_every=10)
    train(cluster)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2)
    noted = [
        line.fields for line in cluster.journal if line.kind in ("gone", "figures") and "ps" not in str(line.fields)
    ]
    assert [line["task"] for line in noted[:-1]] == ["worker/1"]
    assert [task for task, *_ in noted[-1]["lives"]] == ["worker/0"]


def next_chief(cluster: Mortal) -> None:
    assert cluster.next_chief().back == cluster.program.state.losses.back
    hear_twice(cluster)
