"""Tasks that come one after another, minutes apart, in any order: who is waited for, how long, and what is said."""

from __future__ import annotations

import pytest

from shardline.core.orders import Phase
from shardline.core.timeouts import Timeouts
from shardline.core.waiting import Waiting, duration
from shardline.errors import UsageError
from tests.support.chief_cluster import JOIN, Cluster, T, make_job, phase


def test_joining_has_a_deadline_of_its_own_that_is_minutes_by_default() -> None:
    assert Timeouts().join_s == Timeouts(total_s=5.0).join_s == 600.0
    assert Timeouts(total_s=5.0).lost_s == 5.0
    with pytest.raises(UsageError, match=r"--join-timeout is 0\.5; it must be between 1 and 86400"):
        Timeouts(join_s=0.5)


@pytest.mark.parametrize("last", ["ps", "worker"])
def test_a_task_that_comes_later_than_the_deadline_of_silence_is_no_failure(last: str) -> None:
    cluster = Cluster(job=make_job())
    first = "worker" if last == "ps" else "ps"
    for role in (first, last):
        for index in (0, 1):
            cluster.join(role, index)
            cluster.tick(T / 2)
        if role == first:
            cluster.tick(T + 5)
    cluster.initialize()
    assert phase(cluster) is Phase.RUNNING
    assert cluster.orders("worker/0").replicas == (0, 1)


def test_the_chief_says_every_ten_seconds_who_is_missing_and_how_long_it_still_waits() -> None:
    cluster = Cluster(job=make_job())
    cluster.join("ps", 0)
    cluster.tick(1)
    cluster.tick(30)
    assert cluster.told[0] == "waiting for ps/1 at host1:1, worker/0, worker/1, 2 min 57 s left"
    assert 3 <= len(cluster.told) <= 4, cluster.told
    cluster.join("ps", 1)
    cluster.tick(12)
    assert cluster.told[-1].startswith("waiting for worker/0, worker/1, 2 min ")
    # It comes again and again, and would push everything else out of the list of events.
    assert "waiting for worker/0" not in cluster.text()


def test_a_task_that_has_joined_is_told_for_whom_the_job_waits_until_it_begins() -> None:
    cluster = Cluster(job=make_job())
    cluster.join("ps", 0)
    cluster.join("worker", 1)
    assert cluster.orders("ps/0").awaited == ("ps/1 at host1:1", "worker/0")
    cluster.join("ps", 1)
    cluster.join("worker", 0)
    assert cluster.orders("worker/1").awaited == ()
    cluster.initialize()
    cluster.tick(T / 3 + 1, silent=("worker/1",))
    assert cluster.orders("worker/0").awaited == ()


def test_a_task_that_waits_for_a_taken_place_is_told_of_once_a_minute() -> None:
    cluster = Cluster(job=make_job())
    cluster.join("ps", 0, stable_id="first")

    def refused() -> int:
        return cluster.text().count("is not admitted")

    for _ in range(100):
        (answer,) = cluster.ask("ps", 0, stable_id="second")
        assert not answer.accepted and answer.retry
        cluster.tick(0.5)
    assert refused() == 1
    # Another cause, and another task, are news.
    cluster.ask("ps", 99, stable_id="second")
    assert refused() == 2
    cluster.tick(30)
    cluster.ask("ps", 0, stable_id="second")
    assert refused() == 3
    # Nor does it help to use many names.
    for index in range(100, 300):
        cluster.ask("ps", index, stable_id="second")
    assert refused() < 60


def test_the_wait_for_the_last_workers_is_short_and_begins_when_all_others_are_there() -> None:
    cluster = Cluster(job=make_job())
    for index in (0, 1):
        cluster.join("ps", index)
    cluster.tick(T + 10)
    cluster.join("worker", 1)
    cluster.initialize()
    cluster.tick(T - 10)
    assert phase(cluster) is Phase.INIT
    assert cluster.told[-1].startswith("waiting for worker/0, ")
    cluster.tick(12)
    assert phase(cluster) is Phase.RUNNING
    told = len(cluster.told)
    cluster.tick(30)
    assert len(cluster.told) == told


def test_a_script_waits_for_all_of_its_workers_as_long_as_joining_may_take() -> None:
    cluster = Cluster()
    for index in (0, 1):
        cluster.join("ps", index)
    cluster.join("worker", 0, job=make_job(script=True, steps=0))
    cluster.initialize()
    cluster.tick(JOIN - 20)
    assert phase(cluster) is Phase.INIT
    cluster.join("worker", 1, job=make_job(script=True, steps=0))
    assert phase(cluster) is Phase.RUNNING


def test_an_index_that_was_handed_out_is_not_kept_for_minutes() -> None:
    cluster = Cluster(job=make_job(), workers=1, max_workers=1)
    assert cluster.program.place("worker", "a:1", 0.0).task == "worker/0"
    assert cluster.program.place("worker", "b:1", T - 1).task == ""
    assert cluster.program.place("worker", "b:1", T + 1).task == "worker/0"


def test_lengths_of_time_are_told_to_the_second() -> None:
    assert [duration(s) for s in (0.2, 45, 59.6, 60, 560, 3605)] == [
        "0 s",
        "45 s",
        "1 min 00 s",
        "1 min 00 s",
        "9 min 20 s",
        "60 min 05 s",
    ]


def test_a_wait_says_nothing_at_first_then_every_ten_seconds_and_its_first_reason_at_once() -> None:
    waiting = Waiting(100.0, 700.0)
    assert waiting.sentence(100.5, "chief/0") == ""
    assert waiting.pause_s(100.5) == 0.5
    assert waiting.sentence(101.0, "chief/0") == "waiting for chief/0, 9 min 59 s left"
    assert waiting.sentence(105.0, "chief/0") == ""
    assert waiting.sentence(105.0, "chief/0", "it has gone") == "waiting for chief/0, 9 min 55 s left: it has gone"
    assert waiting.sentence(106.0, "chief/0", "it is away (2.0 s)") == ""
    assert waiting.sentence(115.0, "chief/0", "it is away (11.0 s)").endswith(": it is away (11.0 s)")
    assert waiting.pause_s(116.0) == 9.0 and waiting.pause_s(130.0) == 0.0
    assert Waiting(0.0).sentence(2.0, "ps/1, worker/0") == "waiting for ps/1, worker/0"
