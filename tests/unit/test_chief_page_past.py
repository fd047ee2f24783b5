"""Curves of the page after a restart of the chief: read back from the log files of the run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from shardline.core.orders import StepReport
from shardline.observability.metrics import Metrics
from shardline_chief.io.reporter import Reporter
from shardline_chief.page import past
from shardline_chief.page.history import History
from shardline_chief.page.past import recall


def chief(folder: Path, history: History) -> Reporter:
    return Reporter(folder, Metrics("chief", "chief/0"), history)


def train(reporter: Reporter, *, timeline: int, steps: range, loss: float) -> None:
    reporter.begin(replicas=1, joined=True, timeline=timeline, first_step=steps.start)
    for step in steps:
        told = StepReport(step=step, replica=0, loss=loss, samples=8, staleness=1)
        reporter.report("worker/0", [told])
        reporter.rates(step, {"ps/0": (step * 10, step * 20)}, float(timeline * 100 + step))
        if step % 4 == 0:
            # As the control thread does it.
            reporter.event("evaluation", "...", "info", {"step": step, "metrics": {"accuracy": loss / 10}})
            reporter.evaluation(step, {"accuracy": loss / 10})


def curves(history: History) -> dict[str, list[tuple[float, float]]]:
    found = history.since()["curves"]
    return {name: [(x, y) for _, x, y in curve["points"]] for name, curve in found.items()}


def write(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def step_line(step: int, **fields: Any) -> dict[str, Any]:
    return {"timeline": 1, "step": step, "loss": 1.0, "staleness": 0.0, "time": float(step), **fields}


def test_curves_go_on_after_a_restart_as_if_there_had_been_none(tmp_path: Path) -> None:
    before, after = History(), History()
    first = chief(tmp_path, before)
    train(first, timeline=1, steps=range(10), loss=3.0)
    first.close()
    second = chief(tmp_path, after)
    told, again = curves(before), curves(after)
    assert {name: again[name] for name in ("loss", "staleness", "evaluation/accuracy")} == {
        name: told[name] for name in ("loss", "staleness", "evaluation/accuracy")
    }
    assert again.keys() == told.keys() > {"push", "pull", "steps"}
    train(second, timeline=2, steps=range(6, 12), loss=1.0)
    second.close()
    found = curves(after)
    assert [x for x, _ in found["loss"]] == list(range(12))
    # The step it went back to was measured by both.
    assert [y for _, y in found["loss"]] == [3.0] * 6 + [2.0] + [1.0] * 5
    assert found["evaluation/accuracy"] == [(0, 0.3), (4, 0.3), (8, 0.1)]
    third = History()
    chief(tmp_path, third).close()
    assert curves(third)["loss"] == found["loss"]
    assert curves(third)["evaluation/accuracy"] == found["evaluation/accuracy"]


def test_a_chief_that_goes_on_with_the_same_timeline_keeps_all_that_it_drew(tmp_path: Path) -> None:
    first = chief(tmp_path, History())
    train(first, timeline=1, steps=range(4), loss=3.0)
    first.close()
    history = History()
    second = chief(tmp_path, history)
    # It began at step 0, long ago.
    second.begin(replicas=1, joined=True, timeline=1, first_step=0)
    second.report("worker/0", [StepReport(step=4, replica=0, loss=2.0, samples=8)])
    assert curves(history)["loss"] == [(0, 3.0), (1, 3.0), (2, 3.0), (3, 3.0), (4, 2.0)]
    second.close()


def test_lines_that_are_cut_short_or_not_ours_are_passed_over(tmp_path: Path) -> None:
    bad: list[Any] = ['{"timeline": 1, "st', "[1]", "\x00\xff", "", {"step": 1}, step_line(1, loss=None)]
    bad += [{**step_line(2), "step": 1e400}, step_line(3, loss=float("nan"), staleness=float("inf"))]
    write(tmp_path / "steps.jsonl", [step_line(0), *bad, step_line(4)])
    events = [{"kind": "joined"}, {"kind": "evaluation", "step": 1, "time": 5, "metrics": {}}]
    events += [{"kind": "evaluation", "step": 1, "time": "2026-01-01T00:00:00+00:00", "metrics": ["loss"]}]
    write(tmp_path / "events.jsonl", events)
    (tmp_path / "rates.jsonl").write_bytes(b'\xff{"time": 1.0}\n{"time": 1.0, "push_bytes_per_s": "?"}\n')
    history = History()
    recall(history, tmp_path)
    assert curves(history) == {"loss": [(0, 1.0), (4, 1.0)], "staleness": [(0, 0.0), (4, 0.0)]}


def test_a_line_that_a_death_cut_short_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(json.dumps(step_line(0)) + '\n{"timeline": 1, "st')
    reporter = chief(tmp_path, History())
    train(reporter, timeline=2, steps=range(1, 2), loss=5.0)
    reporter.close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[2])["loss"] == 5.0


def test_of_a_long_file_evenly_spread_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 20_000
    write(tmp_path / "steps.jsonl", [step_line(step, loss=2.0 * step) for step in range(steps)])
    size = (tmp_path / "steps.jsonl").stat().st_size
    monkeypatch.setattr(past, "PIECE_BYTES", 1000)
    monkeypatch.setattr(past, "READ_BYTES", 100_000)
    assert size > 10 * past.READ_BYTES
    # No other way: the history thins out what it is given.
    read = list(past.Tail(tmp_path / "steps.jsonl").lines())
    assert 900 < len(read) < 1500
    numbers = [line["step"] for line in read]
    assert (numbers[0], numbers[-1]) == (0, steps - 1)
    assert numbers == sorted(set(numbers))
    assert max(after - before for before, after in itertools.pairwise(numbers)) < 2 * steps / 100
    history = History()
    recall(history, tmp_path)
    assert [y for _, y in curves(history)["loss"]] == pytest.approx([2.0 * x for x, _ in curves(history)["loss"]])


def test_rates_are_drawn_along_their_times(tmp_path: Path) -> None:
    lines = [{"time": 1e9 + s, "push_bytes_per_s": s, "pull_bytes_per_s": 2 * s, "steps_per_s": 3 * s} for s in (0, 2)]
    write(tmp_path / "rates.jsonl", lines)
    history = History()
    recall(history, tmp_path)
    assert history.since()["curves"]["push"]["axis"] == "time"
    assert {name: found[1] for name, found in curves(history).items()} == {
        "push": (1e9 + 2, 2.0),
        "pull": (1e9 + 2, 4.0),
        "steps": (1e9 + 2, 6.0),
    }


def test_a_folder_without_logs_leaves_the_curves_empty(tmp_path: Path) -> None:
    history = History()
    recall(history, tmp_path / "nothing")
    assert curves(history) == {}


def test_a_run_without_a_page_reads_nothing_back(tmp_path: Path) -> None:
    write(tmp_path / "steps.jsonl", [step_line(0)])
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    assert curves(reporter.history) == {}
    reporter.close()
