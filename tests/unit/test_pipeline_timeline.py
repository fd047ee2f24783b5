"""What is seen of a pipeline: figures of its stages, trace files, and passes on a common clock."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from shardline.core.orders import PassReport
from shardline_pipeline import bubble, schedule_named
from shardline_pipeline.timeline import TaskPass, Timeline, trace
from shardline_pipeline.timeline.board import ClockOffsets, PassBoard

FLUSHING = ["gpipe", "flush"]


def report(step: int = 0, stage: int = 0, microbatch: int = 0, *, back: bool = False, at: float = 0.0) -> PassReport:
    return PassReport(
        step=step,
        replica=0,
        stage=stage,
        microbatch=microbatch,
        back=back,
        start_s=at,
        end_s=at + 1.0,
        version=0,
        held=1,
    )


def step_of(name: str, step: int, stages: int, microbatches: int, begin_s: float) -> list[PassReport]:
    """A step in which every pass takes a second and nothing else takes any time."""
    schedule = schedule_named(name)
    todo = [list(schedule.passes(stage, stages, microbatches)) for stage in range(stages)]
    done: dict[tuple[int, int, bool], int] = {}
    found, tick = [], 0
    while any(todo):
        ran = []
        for stage, passes in enumerate(todo):
            if passes:
                one = passes[0]
                near = stage + 1 if one.back else stage - 1
                if near in (-1, stages) or done.get((near, one.microbatch, one.back), tick) < tick:
                    ran.append((stage, passes.pop(0)))
        for stage, one in ran:
            done[stage, one.microbatch, one.back] = tick
            found.append(report(step, stage, one.microbatch, back=one.back, at=begin_s + tick))
        tick += 1
    return found


@pytest.mark.parametrize("name", FLUSHING)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (2, 8), (4, 4), (3, 1)])
def test_the_bubble_of_equal_passes_is_the_formula(name: str, stages: int, microbatches: int) -> None:
    timeline = Timeline(stages, 1, microbatches)
    for step in range(5):
        # The time between two steps, in which parameters are exchanged, is no bubble.
        timeline.add("worker/0", step_of(name, step, stages, microbatches, 100.0 * step))
    figures = timeline.figures()
    assert [one.stage for one in figures] == list(range(stages))
    for one in figures:
        assert one.bubble == pytest.approx(bubble(stages, microbatches), abs=1e-9)
        assert (one.forward_s, one.backward_s, one.tasks) == (1.0, 1.0, ("worker/0",))


def test_passes_of_other_steps_fill_the_bubble_of_a_step() -> None:
    timeline = Timeline(2, 1, 1)
    # Step 0 takes from 0 to 4; stage 0 begins step 1 in the middle of it, which is not whole.
    timeline.add("worker/0", [report(0, 0, at=0.0), report(1, 0, at=1.0), report(0, 0, back=True, at=3.0)])
    timeline.add("worker/1", [report(0, 1, at=1.0), report(0, 1, back=True, at=2.0)])
    assert [one.bubble for one in timeline.figures()] == [0.25, 0.5]
    assert [one.report.step for one in timeline.of([0])] == [0] * 4
    assert [one.report.step for one in timeline.around([0])] == [0, 1, 0, 0, 0]


def test_a_step_counts_when_all_its_passes_are_known_and_again_when_it_was_begun_again() -> None:
    timeline = Timeline(1, 1, 1)
    timeline.add("worker/0", [report(at=0.0)])
    assert timeline.figures() == ()
    timeline.add("worker/0", [report(back=True, at=1.0)])
    assert timeline.figures()[0].bubble == 0.0
    timeline.add("worker/1", [report(at=10.0)])
    assert timeline.figures() == ()
    timeline.add("worker/1", [report(back=True, at=12.0)])
    assert timeline.figures()[0].bubble == pytest.approx(1 / 3)
    assert timeline.figures()[0].tasks == ("worker/1",)


@pytest.mark.parametrize(
    "odd",
    [
        replace(report(), stage=2),
        replace(report(), replica=1),
        replace(report(), microbatch=1),
        replace(report(), start_s=math.nan),
        replace(report(), end_s=math.inf),
        replace(report(), start_s=5.0),
    ],
)
def test_passes_that_the_job_can_not_have_are_ignored(odd: PassReport) -> None:
    timeline = Timeline(2, 1, 1)
    timeline.add("worker/0", [odd])
    assert not timeline.passes


def test_memory_is_bounded_however_long_the_run() -> None:
    timeline = Timeline(2, 1, 2, kept=100)
    for step in range(200):
        timeline.add("worker/0", step_of("gpipe", step, 2, 2, 10.0 * step))
    assert len(timeline.passes) == 100
    assert timeline.whole(1000) == list(range(200 - 100 // 8, 200))
    assert len(timeline.figures()) == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.booleans(), st.floats(0, 50)), max_size=40))
def test_a_bubble_is_a_share_whatever_is_reported(told: Sequence[tuple[int, int, bool, float]]) -> None:
    timeline = Timeline(2, 1, 1)
    timeline.add("worker/0", [report(step, stage, back=back, at=at) for step, stage, back, at in told])
    assert all(0.0 <= one.bubble <= 1.0 for one in timeline.figures())
    json.dumps(trace(timeline.of(timeline.whole())), allow_nan=False)


def test_a_trace_has_a_row_per_stage_of_a_worker_and_arrows_from_sender_to_receiver() -> None:
    passes = [TaskPass(f"worker/{one.stage}", one) for one in step_of("flush", 7, 2, 2, 50.0)]
    found = json.loads(json.dumps(trace(passes, "digits", "flush")))
    events = found["traceEvents"]
    named = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    slices = [one for one in events if one["ph"] == "X"]
    assert [(named[one["pid"]], one["name"], one["ts"], one["dur"]) for one in slices][:3] == [
        ("worker/0", "forward 0", 0.0, 1e6),
        ("worker/0", "forward 1", 1e6, 1e6),
        ("worker/1", "forward 0", 1e6, 1e6),
    ]
    assert {one["args"]["step"] for one in slices} == {7}
    begins = {one["id"]: one for one in events if one["ph"] == "s"}
    ends = {one["id"]: one for one in events if one["ph"] == "f"}
    assert len(begins) == 4 and begins.keys() == ends.keys()
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)
    assert {(one["name"], named[one["pid"]]) for one in ends.values()} == {
        ("activation", "worker/1"),
        ("gradient", "worker/0"),
    }
    assert [one["args"]["microbatches"] for one in events if one["ph"] == "C"][-1] == 0
    assert found["otherData"] == {"job": "digits", "pipeline": "flush"}


def test_clocks_are_aligned_by_the_quickest_message() -> None:
    clocks = ClockOffsets()
    # Its clock is 100 s behind; messages take 1 ms at best.
    assert clocks.heard("worker/0", 0.0, 100.050) == pytest.approx(100.050)
    assert clocks.heard("worker/0", 1.0, 101.001) == pytest.approx(100.001)
    # A slow one is no better measurement, but the clocks may have run apart by 1e-4.
    assert clocks.heard("worker/0", 2.0, 102.4) == pytest.approx(100.0012, abs=1e-4)
    assert clocks.heard("worker/1", 2.0, 102.4) == pytest.approx(100.4)


def test_passes_of_machines_with_other_clocks_are_drawn_on_one() -> None:
    board = PassBoard()
    board.told("worker/0", 1, [report()], sent_s=5.0, now_s=6.0)
    assert json.loads(board.recent()) == {"rows": [], "passes": []}
    assert board.trace() is None
    board.begin("digits", "flush", stages=2, replicas=1, microbatches=1)
    passes = step_of("flush", 3, 2, 1, 0.0)
    for stage, clock_s in ((0, 1000.0), (1, 77.0)):
        own = [
            replace(one, start_s=one.start_s + clock_s, end_s=one.end_s + clock_s)
            for one in passes
            if one.stage == stage
        ]
        board.told(f"worker/{stage}", 1, own, sent_s=clock_s + 4.0, now_s=504.0)
    drawn = json.loads(board.recent())
    assert drawn["rows"] == [
        {"stage": 0, "replica": 0, "task": "worker/0"},
        {"stage": 1, "replica": 0, "task": "worker/1"},
    ]
    assert [one[:6] for one in drawn["passes"]] == [
        [0, 3, 0, 0, 0.0, 1000.0],
        [1, 3, 0, 0, 1000.0, 2000.0],
        [1, 3, 0, 1, 2000.0, 3000.0],
        [0, 3, 0, 1, 3000.0, 4000.0],
    ]
    assert [one.bubble for one in board.figures()] == [0.5, 0.5]
    found = board.trace()
    assert found is not None and len([one for one in found["traceEvents"] if one["ph"] == "X"]) == 4


def test_a_quicker_message_moves_the_passes_that_were_told_before_it() -> None:
    board = PassBoard()
    board.begin("digits", "flush", stages=1, replicas=1, microbatches=1)
    first, second = step_of("flush", 0, 1, 1, 0.0), step_of("flush", 1, 1, 1, 2.0)
    # The clocks are alike. The first message takes 5 s: its passes seem to be later than those of the next one.
    board.told("worker/0", 1, first, sent_s=2.0, now_s=7.0)
    board.told("worker/0", 1, second, sent_s=4.0, now_s=4.0)
    found = board.trace()
    assert found is not None
    slices = sorted((one for one in found["traceEvents"] if one["ph"] == "X"), key=lambda one: one["ts"])
    assert [(one["args"]["step"], one["cat"]) for one in slices] == [
        (0, "forward"),
        (0, "backward"),
        (1, "forward"),
        (1, "backward"),
    ]
    assert [one[1] for one in json.loads(board.recent())["passes"]] == [0, 0, 1, 1]
