from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from shardline.core.status import (
    Awaited,
    CheckpointStatus,
    ChiefStatus,
    Counting,
    EventStatus,
    ShardStatus,
    Standstill,
    TaskStatus,
    Traffic,
)
from shardline.observability.counting import made, plan, position, speed
from shardline.observability.view import STANDBY_WORDS, as_json, cluster_view, codec_text
from shardline.rpc.messages.status import STANDBY_STATES, chief_status_from_proto, chief_status_to_proto

TASKS = (
    TaskStatus(
        task="worker/1",
        state="dead",
        incarnation=1 << 32 | 4,
        step=38,
        push_bytes_per_s=5e6,
        steps_per_s=9.0,
        data_s=0.005,
        compute_s=0.02,
        exchange_s=0.01,
        blocked_s=0.004,
        drift=1.5,
        staleness=1.5,
        device="cuda:1",
    ),
    TaskStatus(task="worker/0", state="alive", last_heard_s=0.4, step=40, push_bytes_per_s=3e6, steps_per_s=10.0),
    TaskStatus(
        task="ps/0",
        state="alive",
        shards=(ShardStatus(shard=1, version=40, bytes=900, pushes=80, staleness_sum=40, waiting_for=(1,)),),
    ),
)
STATUS = ChiefStatus(
    job="digits",
    phase="running",
    step=40,
    steps=100,
    first_step=20,
    loss=0.5,
    steps_per_s=10.0,
    seconds=4.0,
    tasks=TASKS,
    missing=("evaluator/0",),
    last_metrics={"accuracy": 0.9},
    last_metrics_step=30,
    best_step=20,
    best_metrics={"accuracy": 0.95},
    checkpoints=(
        CheckpointStatus(step=20, path="/out/20", bytes=5, age_s=9.0),
        CheckpointStatus(step=30, path="/out/30", bytes=5, age_s=3.0),
    ),
    said=(EventStatus(time=1000.0, level="error", sentence="worker/1 is dead"),),
    shard_bytes=(400, 300),
)


def test_tasks_stand_in_the_order_of_cluster_specs_and_those_that_never_joined_are_missing() -> None:
    view = cluster_view(STATUS)
    assert [task.name for task in view.tasks] == ["ps/0", "worker/0", "worker/1", "evaluator/0"]
    missing = view.tasks[-1]
    assert (missing.state, missing.heard_s, missing.step, missing.incarnation) == ("missing", None, None, "")


def test_what_a_dead_task_did_last_is_no_rate_of_now() -> None:
    dead = cluster_view(STATUS).tasks[2]
    assert (dead.push_bytes_per_s, dead.steps_per_s) == (0.0, 0.0)
    assert (dead.state, dead.step, dead.incarnation, dead.staleness) == ("dead", 38, "1.4", 1.5)


def test_the_step_of_a_ps_is_what_all_its_shards_have_reached() -> None:
    shards = (ShardStatus(shard=0, step_min=9, version=7), ShardStatus(shard=1, step_min=6, version=6))
    status = replace(STATUS, tasks=(TaskStatus(task="ps/0", state="alive", shards=shards),))
    assert cluster_view(status).tasks[0].step == 6


def test_after_the_end_nothing_moves_and_the_speed_is_that_of_the_whole_run() -> None:
    view = cluster_view(replace(STATUS, phase="ended", push_bytes_per_s=9.0))
    assert (view.steps_per_s, view.push_bytes_per_s, view.left_s) == (5.0, 0.0, None)
    assert view.shards[0].waiting_for == ()
    assert {task.steps_per_s for task in view.tasks} == {0.0}


def test_time_left_follows_the_last_seconds_and_the_whole_run_and_is_unknown_while_nothing_moves() -> None:
    # 60 steps are left; 10 steps/s now, 20 in 4 s so far.
    assert cluster_view(STATUS).left_s == pytest.approx(60 / 7.5)
    assert cluster_view(replace(STATUS, steps_per_s=0.0)).left_s is None
    assert cluster_view(replace(STATUS, phase="waiting")).left_s is None
    assert cluster_view(replace(STATUS, steps=0)).left_s is None
    assert cluster_view(replace(STATUS, step=100)).left_s == 0.0


def test_progress_is_a_share_or_unknown_where_a_script_ends_the_job() -> None:
    assert cluster_view(STATUS).progress == pytest.approx(0.4)
    view = cluster_view(replace(STATUS, steps=0))
    assert (view.progress, view.steps) == (None, None)


def test_shards_have_their_size_beside_the_largest_and_who_holds_them() -> None:
    (shard,) = cluster_view(STATUS).shards
    assert (shard.shard, shard.ps, shard.bytes, shard.held_bytes) == (1, "ps/0", 300, 900)
    assert (shard.share, shard.staleness, shard.waiting_for) == (0.75, 0.5, (1,))


@pytest.mark.parametrize(
    ("state", "task", "shown"),
    [
        ("", "", ("", "none")),
        ("unprotected", "ps/1", ("ps/1", "unreachable")),
        ("copying", "ps/1", ("ps/1", "copying")),
        ("synced", "ps/1", ("ps/1", "in step")),
        ("silent", "ps/1", ("ps/1", "silent")),
    ],
)
def test_shards_say_where_their_standbys_are_and_whether_these_are_in_step(
    state: str, task: str, shown: tuple[str, str]
) -> None:
    held = ShardStatus(shard=1, standby=state, standby_task=task, standby_problem="a reason" if task else "")
    (shard,) = cluster_view(replace(STATUS, tasks=(TaskStatus(task="ps/0", state="alive", shards=(held,)),))).shards
    assert (shard.standby, shard.standby_state) == shown
    assert shard.standby_problem == ("a reason" if task else "")


def test_every_state_of_a_standby_has_a_word() -> None:
    assert STANDBY_WORDS.keys() == STANDBY_STATES.keys()


def test_checkpoints_come_newest_first_and_the_best_is_marked() -> None:
    assert [(c.step, c.best) for c in cluster_view(STATUS).checkpoints] == [(30, False), (20, True)]


def test_who_is_waited_for_is_named() -> None:
    view = cluster_view(replace(STATUS, phase="waiting"))
    assert view.doing == "waiting for evaluator/0, worker/1"
    assert cluster_view(STATUS).doing == "training"


def test_a_standstill_names_a_few_of_the_tasks_that_are_waited_for() -> None:
    awaited = tuple(Awaited(task=f"worker/{number}", why="dead") for number in range(6))
    view = cluster_view(replace(STATUS, time=100.0, standstill=Standstill(seconds=12.5, awaited=awaited)))
    assert view.standstill is not None
    assert (view.standstill.since, view.standstill.seconds) == (87.5, 12.5)
    assert view.standstill.whom == "worker/0, worker/1, worker/2, worker/3 and 2 more"
    assert view.standstill.facts.startswith("worker/0 (dead), ") and view.standstill.facts.endswith(" and 2 more")
    assert view.doing == f"standing still for 12 s, waiting for {view.standstill.whom}"
    nobody = replace(STATUS, standstill=Standstill(seconds=12.5))
    assert cluster_view(nobody).doing == "standing still for 12 s"


def test_a_view_is_json_without_nan() -> None:
    view = cluster_view(replace(STATUS, loss=math.nan, last_metrics={"loss": math.inf}))
    text = json.dumps(as_json(view), allow_nan=False)
    found = json.loads(text)
    assert found["loss"] is None
    assert found["evaluation"] == {"step": 30, "metrics": {"loss": None}}


def test_a_job_that_nothing_is_known_of_has_a_view() -> None:
    view = cluster_view(ChiefStatus())
    assert (view.loss, view.evaluation, view.best, view.tasks, view.left_s) == (None, None, None, (), None)


CODED = replace(
    STATUS,
    codec_up="topk",
    codec_down="delta:by=bf16",
    codec_parcels="bf16",
    tasks=(
        TaskStatus(task="worker/0", state="alive", traffic=Traffic(codec_error=0.8, codec_owed=3.0)),
        TaskStatus(task="worker/1", state="dead", traffic=Traffic(codec_error=0.88, codec_owed=4.0)),
        TaskStatus(task="ps/0", state="alive", traffic=Traffic(push_raw_bytes=660, push_wire_bytes=10)),
        TaskStatus(task="ps/1", state="alive", traffic=Traffic(pull_raw_bytes=80, codec_error=0.002)),
    ),
)


def test_codecs_show_what_they_save_and_what_they_cost() -> None:
    assert [codec_text(codec) for codec in cluster_view(CODED).codecs] == [
        "topk up, 66x smaller, error 88 %, owed 5",
        # Nothing went over a network.
        "delta:by=bf16 down, error 0.2 %",
        "bf16 between stages",
    ]
    assert not cluster_view(replace(CODED, codec_up="raw", codec_down="raw", codec_parcels="raw")).codecs
    assert chief_status_from_proto(chief_status_to_proto(CODED)) == CODED


def test_a_status_is_the_same_after_its_way_over_the_wire() -> None:
    status = replace(
        STATUS, time=7.5, rule="SGD", replicas=2, staleness=0.5, staleness_max=3, dead_s=20.0, page="http://x/"
    )
    assert chief_status_from_proto(chief_status_to_proto(status)) == status
    awaited = tuple(Awaited(task=f"worker/{number}", why="last heard 11 s ago") for number in range(6))
    counting = Counting(unit="update", asked="batch", passes=1, all_passes=100)
    status = replace(status, standstill=Standstill(seconds=12.5, awaited=awaited), counting=counting, done=80)
    assert chief_status_from_proto(chief_status_to_proto(status)) == status


STEPS = Counting()
ROUNDS = Counting(unit="round", asked="round", passes=10, all_passes=1200)
UNEVEN = Counting(unit="round", asked="round", passes=0, all_passes=1020)
BATCHES = Counting(unit="update", asked="batch", all_passes=120)
PUSHED_ROUNDS = Counting(unit="update", asked="round", passes=10, all_passes=1200)


@pytest.mark.parametrize(
    ("counting", "step", "where", "whole", "rate"),
    [
        (STEPS, 118, "step 118/120", "118 steps", "2.0 steps/s"),
        (ROUNDS, 118, "round 118/120 of 10 passes", "118 rounds of 10 passes", "2.0 rounds/s"),
        (UNEVEN, 118, "round 118/120", "118 rounds", "2.0 rounds/s"),
        (BATCHES, 61, "batch 118/120, update 61", "118 batches, 61 updates", "2.0 updates/s"),
        (
            PUSHED_ROUNDS,
            1,
            "round 118/120 of 10 passes, update 1",
            "118 rounds of 10 passes, 1 update",
            "2.0 updates/s",
        ),
    ],
)
def test_steps_rounds_batches_and_updates_are_called_what_they_are(
    counting: Counting, step: int, where: str, whole: str, rate: str
) -> None:
    assert position(counting, step, 118, 120) == where
    assert made(counting, step, 118) == whole
    assert speed(counting, "2.0") == rate


def test_a_script_that_ends_its_job_by_itself_has_no_total() -> None:
    assert position(STEPS, 61, 61, 0) == "step 61"
    assert position(PUSHED_ROUNDS, 61, 0, 0) == "update 61 of 10 passes"


def test_steps_of_several_passes_are_said_with_their_sum() -> None:
    assert plan(STEPS, 120) == plan(BATCHES, 120) == plan(ROUNDS, 0) == ""
    assert plan(ROUNDS, 120) == "120 rounds of 10 passes: 1,200 passes of every replica"
    assert plan(UNEVEN, 120) == "120 rounds: 1,020 passes of every replica"
    assert plan(PUSHED_ROUNDS, 120) == "120 rounds of 10 passes: 1,200 passes of all workers together"


def test_a_job_with_fewer_updates_than_batches_ends_at_its_last_batch() -> None:
    status = replace(STATUS, step=30, first_step=0, steps=100, done=60, counting=BATCHES, steps_per_s=7.5)
    view = cluster_view(status)
    # 20 updates of 2 batches each.
    assert (view.progress, view.done, view.left_s) == (0.6, 60, pytest.approx(20 / 7.5))
    # A chief of an earlier version says nothing of it.
    assert cluster_view(replace(status, counting=Counting(), done=0)).progress == 0.3
