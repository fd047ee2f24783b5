from __future__ import annotations

import dataclasses
import functools
import json
import math
import threading
from pathlib import Path

import pytest

from shardline.core.orders import StepReport
from shardline.observability.metrics import Metrics
from shardline.rpc.limits import DEFAULT_BYTES
from shardline.rpc.messages.fields import to_message
from shardline.rpc.report_queue import MAX_LOGGED, MAX_LOGGED_NAME, ReportQueue
from shardline.rpc.v1 import chief_pb2
from shardline_chief.io.reporter import Rate, Reporter
from shardline_chief.page.history import History
from shardline_chief.page.past import Past, Tail
from shardline_chief.page.steps import OPEN_STEPS, StepBoard
from shardline_chief.rules.standstill import STILL_S


def report(step: int, replica: int = 0, loss: float = 1.0) -> StepReport:
    return StepReport(step=step, replica=replica, loss=loss, samples=8)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_written_when_all_its_replicas_have_told() -> None:
    board = StepBoard(2, joined=True)
    assert board.add(report(0, 0)) == []
    assert board.add(report(1, 0)) == []
    ((step, group),) = board.add(report(0, 1))
    assert (step, [r.replica for r in group]) == (0, [0, 1])


def test_steps_come_in_order_and_a_repeated_report_counts_once() -> None:
    board = StepBoard(2, joined=True)
    board.add(report(0, 0, loss=9.0))
    board.add(report(1, 0))
    board.add(report(0, 0, loss=2.0))
    # Replica 1 of step 0 was computed by a worker that died before it could tell: the new one tells step 1 first.
    assert board.add(report(1, 1)) == []
    ready = board.add(report(0, 1))
    assert [step for step, _ in ready] == [0, 1]
    assert ready[0][1][0].loss == 2.0
    # A replica that was computed twice reports a closed step again.
    assert board.add(report(0, 0)) == []


def test_a_report_that_was_lost_with_its_worker_holds_nothing_up_for_ever() -> None:
    board = StepBoard(2, joined=True)
    board.add(report(0, 0))
    ready = [step for number in range(1, OPEN_STEPS + 1) for step, _ in board.add(report(number, 0))]
    assert ready == [0]


def test_asynchronous_reports_are_lines_of_their_own() -> None:
    board = StepBoard(1, joined=False)
    assert [len(board.add(report(7))) for _ in range(3)] == [1, 1, 1]


def test_rate_is_over_the_last_seconds_and_survives_a_counter_that_starts_again() -> None:
    rate = Rate()
    assert rate.per_second == 0.0
    for second in range(20):
        rate.add(second * (1.0 if second < 10 else 3.0), float(second))
    assert rate.per_second == pytest.approx(3.0)
    rate.add(0.0, 20.0)
    rate.add(5.0, 21.0)
    assert rate.per_second == pytest.approx(5.0)


def test_rate_is_steady_where_a_counter_is_read_more_often_than_it_is_told_and_none_when_it_stands() -> None:
    rate = Rate()
    shown = []
    for half in range(20):
        rate.add(50.0 * (half // 2), half / 2)
        shown.append(rate.per_second)
    assert shown[4:] == pytest.approx([50.0] * 16)
    # Told last at 9 s.
    rate.add(450.0, 13.0)
    assert rate.per_second == pytest.approx(50.0)
    rate.add(450.0, 9.0 + STILL_S)
    assert rate.per_second == 0.0


def test_logs_hold_mean_loss_by_timeline_and_step_and_every_event(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.event("joined", "worker/0 joined", "info", {"incarnation": 7})
    reporter.begin(replicas=2, joined=True, timeline=5, first_step=10)
    reporter.report("worker/0", [report(10, 0, loss=1.0)])
    reporter.report("worker/1", [report(10, 1, loss=3.0), report(11, 1)])
    reporter.evaluation(10, {"accuracy": 0.5})
    reporter.close()
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["message"], event["incarnation"]) == ("worker/0 joined", 7)
    first, last = lines(tmp_path / "steps.jsonl")
    assert (first["timeline"], first["step"], first["loss"], first["samples"]) == (5, 10, 2.0, 16)
    assert (last["step"], last["replicas"]) == (11, 1)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_numbers_that_are_none_are_null_in_the_logs_with_what_they_were(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=1, joined=True, timeline=5, first_step=10)
    reporter.report("worker/0", [report(10, loss=math.nan), report(11, loss=-math.inf), report(12)])
    reporter.event("evaluation", "...", "info", {"step": 12, "metrics": {"a.b": math.inf, "c": 1.0}})
    reporter.close()
    strict = functools.partial(json.loads, parse_constant=pytest.fail)
    steps = [strict(text) for text in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [step["loss"] for step in steps] == [None, None, 1.0]
    assert [step.get("not_finite") for step in steps] == [{"loss": "nan"}, {"loss": "-inf"}, None]
    event = strict((tmp_path / "events.jsonl").read_text())
    assert (event["metrics"], event["not_finite"]) == ({"a.b": None, "c": 1.0}, {"metrics.a.b": "inf"})
    # The page reads them as they were.
    found = [line["loss"] for line in Tail(tmp_path / "steps.jsonl").lines()]
    assert math.isnan(found[0]) and found[1:] == [-math.inf, 1.0]
    assert [line["metrics"] for line in Tail(tmp_path / "events.jsonl").lines()] == [{"a.b": math.inf, "c": 1.0}]


def test_logs_that_can_not_be_written_are_said_once_and_cost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    reporter = Reporter(tmp_path / "file" / "logs", Metrics("chief", "chief/0"))
    for _ in range(3):
        reporter.event("joined", "worker/0 joined", "info", {})
    reporter.close()
    assert len([r for r in caplog.records if "can't be written" in r.getMessage()]) == 1
    assert [event for event in reporter.said if "joined" not in event.sentence] == [
        event
        for event in reporter.said
        if f"logs under {tmp_path / 'file' / 'logs'} can't be written" in event.sentence
    ]
    assert len(reporter.said) == 4


@pytest.mark.parametrize("sync", [True, False])
def test_steps_that_an_earlier_chief_wrote_are_not_written_again(tmp_path: Path, sync: bool) -> None:
    for last in (3, 5):
        reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
        reporter.report("worker/0", [report(step) for step in range(last)])
        reporter.begin(replicas=1, joined=sync, timeline=7, first_step=0)
        reporter.close()
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [0, 1, 2, 3, 4]


def test_logged_figures_are_averaged_over_replicas_and_drawn(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=2, joined=True, timeline=1, first_step=0)
    for replica, logged in enumerate(({"accuracy": 0.5, "own": 1.0}, {"accuracy": 1.0})):
        reporter.report(f"worker/{replica}", [dataclasses.replace(report(0, replica), logged=logged)])
    reporter.close()
    assert lines(tmp_path / "steps.jsonl")[0]["logged"] == {"accuracy": 0.75, "own": 1.0}
    curves = reporter.history.since()["curves"]
    assert curves["logged/accuracy"]["points"] == [[0, 0.0, 0.75]]
    again = History()
    Past(again, tmp_path).read()
    assert again.since()["curves"]["logged/accuracy"]["points"] == [[0, 0.0, 0.75]]


def test_a_heartbeat_takes_no_more_figures_than_its_message_may_have() -> None:
    queue, never = ReportQueue(), threading.Event()
    names = ["x" * (MAX_LOGGED_NAME - 2) + f"{number:02}" for number in range(MAX_LOGGED)]
    for step in range(1024):
        queue.add(dataclasses.replace(report(step), logged=dict.fromkeys(names, 1 / 3)))
    taken = []
    while queue:
        beat = queue.take(never)
        message = chief_pb2.Beat(steps=[to_message(chief_pb2.StepReport, one) for one in beat])
        assert 0 < message.ByteSize() < DEFAULT_BYTES * 3 // 4
        taken += [one.step for one in beat]
    assert taken == list(range(1024))
