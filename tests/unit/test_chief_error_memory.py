"""Lost error memory: the job goes back to a checkpoint, or goes on and counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardline import codecs
from shardline.core.orders import Phase
from shardline.core.spec import JobSpec, TensorSpec
from shardline.errors import JobError, UsageError
from shardline.fit import check_fit
from shardline_chief.rules.actions import Cut, Restore
from shardline_chief.rules.events import EndAsked
from shardline_chief.rules.state.state import Work
from tests.support.chief_cluster import Cluster, FakeResume, T, make_job, phase, running
from tests.support.mortal_chief import Mortal, cut, mortal

EXACT = {"codec": "onebit", "error_memory": "exact"}
STAGED = tuple(TensorSpec(name=f"w{stage}", shape=(4,), dtype="float32", fragment=stage) for stage in (0, 1))


def at_checkpoint_and_beyond(**fields: object) -> Cluster:
    """A cluster with a checkpoint of step 10, in step 17."""
    cluster = running(**fields)
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=10))
    cluster.advance(10)
    cluster.advance(17)
    return cluster


def steps(cluster: Cluster) -> list[int]:
    return [ps.step for ps in cluster.ps]


def test_a_lost_worker_takes_the_job_back_to_where_nobody_had_any() -> None:
    cluster = at_checkpoint_and_beyond(**EXACT)
    before = cluster.orders("worker/0").timeline
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [10, 10]
    orders = cluster.orders("worker/0")
    assert (orders.replicas, orders.first_step) == ((0, 1, 2, 3), 10) and orders.timeline > before
    (recovered,) = cluster.program.state.losses.recoveries
    assert (recovered.at_step, recovered.from_step, recovered.lost) == (17, 10, 7)
    (restore,) = cluster.kinds(Restore)
    assert restore.keep == frozenset()
    assert "the error memory of replicas 2, 3 is lost (error_memory is 'exact'); rolling back all" in cluster.text()
    assert cluster.program.state.figures.dropped_memories == 0


@pytest.mark.parametrize(
    ("owes", "settings", "warned"), [(True, EXACT, True), (False, EXACT, False), (True, {"codec": "onebit"}, False)]
)
def test_a_job_that_promises_equal_bits_says_when_it_is_resumed_where_something_was_owed(
    owes: bool, settings: dict[str, str], warned: bool
) -> None:
    cluster = Cluster(job=make_job(**settings), resume=FakeResume(owes=owes))
    cluster.start()
    said = [say.sentence for say in cluster.said if say.kind == "resume"]
    assert [text.startswith("resuming from step 40, where replicas still owed") for text in said] == [True] * warned


@pytest.mark.parametrize(
    ("step", "settings", "owes"),
    [
        (0, EXACT, False),
        (20, EXACT, False),
        (100, EXACT, False),
        (23, EXACT, True),
        (20, {"codec": "onebit"}, True),
        (23, {"codec": "bf16", "error_memory": "reset"}, False),
        (23, {}, False),
    ],
)
def test_something_is_owed_at_checkpoints_that_nobody_planned(step: int, settings: dict[str, str], owes: bool) -> None:
    assert codecs.owes_at(make_job(checkpoint_every=10, steps=100, **settings), step) is owes


def test_where_workers_run_the_optimizer_those_that_have_followed_take_over_and_a_new_one_takes_the_job_back() -> None:
    cluster = at_checkpoint_and_beyond(apply="worker")
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [17, 17]
    assert cluster.orders("worker/0").replicas == (0, 1, 2, 3)
    cluster.join("worker", 1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [10, 10]
    assert "takes replicas 2, 3 over lacks the optimizer's state (apply is 'worker'); rolling back" in cluster.text()


def test_where_workers_run_the_optimizer_a_new_one_waits_for_the_first_checkpoint() -> None:
    cluster = running(apply="worker")
    cluster.advance(5)
    saves = cluster.program.state.saves
    first, saves.checkpoint_step = saves.checkpoint_step, -1
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.join("worker", 1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [5, 5]
    saves.checkpoint_step = first
    cluster.tick()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [0, 0]
    assert cluster.text().count("lacks the optimizer's state") == 1


def test_where_workers_run_the_optimizer_a_job_that_can_not_go_back_ends() -> None:
    cluster = Cluster(workers=2)
    job = make_job(script=True, steps=0, replicas=0, apply="worker")
    for number in (0, 1):
        cluster.join("ps", number)
    for number in (0, 1):
        cluster.join("worker", number, job=job)
    cluster.initialize()
    cluster.beat("worker/0", finished=True)
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.join("worker", 1, job=job)
    cluster.tick()
    assert cluster.finish is not None
    assert "lacks the optimizer's state (apply is 'worker'), so the job ends: worker/0 has finished" in (
        cluster.finish.reason
    )


def test_a_worker_that_joins_or_is_started_again_does_too_and_nobody_else() -> None:
    cluster = at_checkpoint_and_beyond(**EXACT)
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.join("worker", 1)
    cluster.tick()
    assert steps(cluster) == [10, 10] and len(cluster.program.state.losses.recoveries) == 1
    cluster.advance(17)
    cluster.join("worker", 2)
    cluster.tick()
    assert steps(cluster) == [10, 10] and len(cluster.program.state.losses.recoveries) == 2
    cluster.advance(17)
    cluster.join("evaluator")
    cluster.tick()
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    cluster.tick()
    # The server's shard went back, as always, and with it whatever had moved.
    assert steps(cluster) == [10, 10] and len(cluster.program.state.losses.recoveries) == 3


def test_a_worker_lost_while_servers_are_filled_costs_nothing_more() -> None:
    cluster = at_checkpoint_and_beyond(**EXACT)
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.restart_ps(1)
    cluster.tick()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [10, 10]
    assert len(cluster.program.state.losses.recoveries) == 1


@pytest.mark.parametrize("fields", [{"codec": "onebit"}, {"codec": "int8", "error_memory": "exact"}, {}], ids=str)
def test_otherwise_the_job_goes_on(fields: dict[str, str]) -> None:
    cluster = at_checkpoint_and_beyond(**fields)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [17, 17]
    assert not cluster.program.state.losses.recoveries
    dropped = fields.get("codec") == "onebit"
    assert cluster.program.state.figures.dropped_memories == 2 * dropped
    assert ("the error memory of replicas 2, 3 is dropped: what it still owed" in cluster.text()) is dropped


@pytest.mark.parametrize("mode", ["async", "ssp:slack=2", "softsync:n=2"])
def test_without_common_steps_there_is_no_checkpoint_to_go_back_to(mode: str) -> None:
    message = r"goes back to a checkpoint .*, but consistency .* has no checkpoint of one step"
    with pytest.raises(JobError, match=message):
        check_fit(make_job(mode=mode, **EXACT))


def test_what_would_depend_on_deaths_all_the_same_is_refused() -> None:
    with pytest.raises(JobError, match="doesn't cover what cadence local-sgd:every=2 keeps on each worker"):
        check_fit(make_job(**EXACT, cadence="local-sgd:every=2"))
    check_fit(make_job(codec="int8", error_memory="exact"))


def test_without_a_checkpoint_or_with_a_finished_script_the_job_goes_on() -> None:
    cluster = running(**EXACT)
    cluster.advance(5)
    cluster.program.state.saves.checkpoint_step = -1
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [5, 5]
    assert cluster.program.state.figures.dropped_memories == 2


def test_a_chief_that_restarts_beside_a_lost_server_goes_back_though_a_standby_stands_in() -> None:
    cluster = Mortal(job=make_job(**EXACT), standbys=1)
    cluster.start()
    cluster.tick()
    # Replicas are no more where a chief would put them that begins with all these workers.
    cluster.tick(T / 3 + 2, silent=("worker/0",))
    cluster.join("worker", 0)
    cluster.tick()
    cut(cluster, 10)
    cluster.advance(17)
    cluster.next_chief()
    for task in ("ps/0", "ps/1"):
        cluster.beat(task)
    cluster.program.stream_broken("ps/1", cluster.lives["ps/1"], cluster.now_s)
    cluster.restart_ps(1)
    cluster.hear()
    cluster.tick()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [10, 10]


def test_what_was_dropped_is_counted_over_all_chiefs() -> None:
    cluster = mortal(codec="onebit")
    cluster.advance(5)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.next_chief()
    cluster.hear()
    assert cluster.program.state.figures.dropped_memories == 2


def test_an_asynchronous_workers_memory_goes_with_it() -> None:
    cluster = running(mode="async", codec="topk")
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    assert cluster.program.state.figures.dropped_memories == 1
    assert "the error memory of worker/1 is dropped" in cluster.text()


def test_the_next_chief_goes_back_since_it_cannot_know_who_had_what() -> None:
    cluster = mortal(**EXACT)
    cut(cluster, 10)
    cluster.advance(17)
    cluster.next_chief()
    cluster.hear()
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING and steps(cluster) == [10, 10]
    assert "the new chief does not know who held which error memory; rolling back all shards to" in cluster.text()
    cluster.advance(100)
    assert cluster.finish is not None and cluster.finish.exit_code == 0


def give(work: Work, lives: dict[str, int], job: JobSpec) -> None:
    work.reassign(lives, job, machines=dict.fromkeys(lives, "here"), own=False)


def test_where_workers_run_the_optimizer_one_that_has_other_stages_lacks_the_state_of_this_one() -> None:
    work, job = Work(), replace(make_job(apply="worker", replicas=2, pipeline="flush"), tensors=STAGED)
    give(work, {"worker/0": 1, "worker/1": 2, "worker/2": 3, "worker/3": 4}, job)
    assert not work.unready
    owners = dict(work.assignment)
    assert len(owners) == 4
    # Units 0 and 1 are stage 0.
    gone = owners[0]
    lives = {task: number for number, task in enumerate(("worker/0", "worker/1", "worker/2", "worker/3"), 1)}
    del lives[gone]
    give(work, lives, job)
    (moved,) = work.moved
    assert moved == 0 and work.unready == (set() if work.assignment[0] == owners[1] else {0})
    # A worker that has given a replica away does not follow any more.
    give(work, {owners[2]: lives[owners[2]], owners[3]: lives[owners[3]]}, job)
    assert {0, 1} <= work.unready


def staged(mode: str) -> Cluster:
    """Pipelines of two stages that can't begin a step again, in step 17, with a checkpoint of step 10."""
    weights = tuple(
        TensorSpec(name=f"w{number}", shape=(64, 4), dtype="float32", fragment=number % 2) for number in range(4)
    )
    pipeline = "stash" if mode == "sync" else "flush"
    return at_checkpoint_and_beyond(tensors=weights, mode=mode, pipeline=pipeline, replicas=2)


def lose(cluster: Cluster) -> None:
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.join("worker", 1)
    cluster.tick()


EITHER = pytest.mark.parametrize("mode", ["sync", "async:in_stages=true"])


@EITHER
def test_a_job_that_loses_a_stage_while_it_goes_to_an_early_end_goes_back_first_and_ends_well(mode: str) -> None:
    cluster = staged(mode)
    cluster.program.stop("SIGTERM", cluster.now_s)
    lose(cluster)
    cluster.tick()
    assert "stage 1 of replicas 0, 1 moved, and what was in the pipeline is lost; rolling back all" in cluster.text()
    (recovered,) = cluster.program.state.losses.recoveries
    assert (recovered.at_step, recovered.from_step) == (17, 10)
    stop = cluster.program.state.progress.stop_step
    assert phase(cluster) is Phase.STOPPING and 10 < stop < 100
    cluster.advance(stop)
    assert cluster.finish is not None and (cluster.finish.exit_code, cluster.finish.reason) == (0, "stopped: SIGTERM")
    assert cluster.saves[-1].step == stop


@pytest.mark.parametrize("fields", [EXACT, {"codec": "onebit"}], ids=str)
def test_error_memory_that_is_lost_on_the_way_to_an_early_end_costs_what_it_does_before(fields: dict[str, str]) -> None:
    cluster = at_checkpoint_and_beyond(**fields)
    cluster.program.stop("SIGTERM", cluster.now_s)
    lose(cluster)
    cluster.tick()
    state, back = cluster.program.state, fields == EXACT
    assert [(one.at_step, one.from_step) for one in state.losses.recoveries] == [(17, 10)] * back
    assert state.figures.dropped_memories == (0 if back else 2)
    cluster.advance(state.progress.stop_step)
    assert cluster.finish is not None and (cluster.finish.exit_code, cluster.finish.reason) == (0, "stopped: SIGTERM")


@EITHER
def test_a_job_that_fails_does_not_go_back_and_a_stop_that_is_not_reached_says_what_has_moved(mode: str) -> None:
    cluster = staged(mode)
    cluster.ps[0].step += 1
    cluster.program.machine.handle(EndAsked("worker/0 has failed", UsageError.exit_code), cluster.now_s)
    lose(cluster)
    for _ in range(8):
        cluster.tick(T / 20)
    assert not cluster.program.state.losses.recoveries
    assert "was not reached (shards are at 17 to 18; stage 1 of replicas 0, 1 moved, and" in cluster.text()
    assert cluster.finish is not None and cluster.finish.exit_code == UsageError.exit_code
