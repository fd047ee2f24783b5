"""shardline top: frames of fixed views, plain lines where there is no terminal, and a real terminal (a pty)."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, TextIO

import pytest

from shardline.cli import progress
from shardline.cli.main import main
from shardline.cli.terminal import PlainConsole
from shardline.cli.top import Keys, Poller, Screen
from shardline.cli.top_frame import ASCII, FANCY, ChiefSilence, Curves, bar, frame, plain_line, seconds, size, sparkline
from shardline.core.status import (
    Awaited,
    CheckpointStatus,
    ChiefStatus,
    EventStatus,
    ShardStatus,
    Standstill,
    TaskStatus,
)
from shardline.errors import UnreachableError, UsageError
from shardline.observability.view import ClusterView, cluster_view

PATIENCE_S = 60.0
NOON = 1_700_000_000.0
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

STATUS = ChiefStatus(
    job="digits",
    consistency="sync",
    phase="running",
    step=120,
    steps=400,
    loss=0.31,
    steps_per_s=50.0,
    push_bytes_per_s=8.2e6,
    pull_bytes_per_s=8.3e6,
    seconds=2.4,
    time=NOON,
    rule="SGD",
    replicas=2,
    last_metrics={"accuracy": 0.97, "loss": 0.2},
    last_metrics_step=100,
    best_metrics={"accuracy": 0.97},
    best_step=100,
    shard_bytes=(80_000, 40_000),
    missing=("evaluator/0",),
    checkpoints=(CheckpointStatus(step=100, path="/out/checkpoints/step-00000100", bytes=300_000, age_s=0.8),),
    said=(
        EventStatus(time=NOON - 9, level="info", sentence="training from step 0 until step 400"),
        EventStatus(time=NOON - 2, level="error", sentence="worker/1 is dead: nothing heard for 20 s; " + 9 * "more "),
    ),
    tasks=(
        TaskStatus(task="chief/0", state="alive", incarnation=(1 << 32) | 1, step=120, address="10.0.0.1:2222"),
        TaskStatus(
            task="ps/0",
            state="alive",
            incarnation=(1 << 32) | 2,
            last_heard_s=0.4,
            push_bytes_per_s=4.1e6,
            pull_bytes_per_s=4.2e6,
            shards=(
                ShardStatus(shard=0, version=120, step_min=120, step_max=121, bytes=400_000, waiting_for=(1,)),
                ShardStatus(shard=1, version=119, step_min=119, step_max=119, bytes=200_000),
            ),
        ),
        TaskStatus(
            task="worker/0",
            state="alive",
            incarnation=(1 << 32) | 5,
            step=120,
            last_heard_s=0.2,
            steps_per_s=50.0,
            data_s=0.0031,
            compute_s=0.0123,
            exchange_s=0.0071,
            blocked_s=0.0042,
            device="cuda:1",
        ),
        TaskStatus(task="worker/1", state="dead", step=90, last_heard_s=21.0),
    ),
)
VIEW = cluster_view(STATUS)
ENDED = dataclasses.replace(STATUS, phase="ended", step=400, reason="done")


def drawn(
    view: ClusterView,
    width: int,
    *,
    height: int | None = None,
    curves: Curves | None = None,
    silence: ChiefSilence | None = None,
) -> list[str]:
    """Lines of a frame as a terminal without colours shows them."""
    console = PlainConsole(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(view, curves or Curves(), width=width, height=height, silence=silence, address="10.0.0.1:2222"))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def row(lines: list[str], first: str) -> list[str]:
    """Words of the line that begins with a word."""
    return next(line.split() for line in lines if line.split()[:1] == [first])


# Frames


@pytest.mark.parametrize("width", [60, 80, 120])
def test_frame_fits_the_terminal_and_shows_the_job(width: int) -> None:
    lines = drawn(VIEW, width)
    assert max(len(line) for line in lines) <= width
    assert lines[0] == "digits · sync · SGD · 2 replicas · training"
    assert re.fullmatch(r"━+╌+  step 120/400  30%  5\.6 s left", lines[1]), lines[1]
    assert lines[2] == "50.0 steps/s  push 8.2 MB/s  pull 8.3 MB/s"
    assert lines[3:6] == [
        "loss 0.3100",
        "evaluated accuracy 0.97 at step 100, best step 100",
        "evaluated loss 0.2 at step 100",
    ]
    assert lines[6].startswith("checkpoint of step 100, 0.8 s ago, 300.0 kB, /out/check")
    assert lines[-2].endswith(" training from step 0 until step 400")
    assert " worker/1 is dead: nothing heard for 20 s; more" in lines[-1]
    assert (len(lines[-1]) == width and lines[-1].endswith("…")) == (width < 110)


def test_table_of_tasks_shows_more_the_wider_it_may_be() -> None:
    narrow, middle, wide = (drawn(VIEW, width) for width in (60, 80, 120))
    assert row(narrow, "task") == ["task", "state", "life", "heard", "step", "push", "pull"]
    assert row(narrow, "ps/0") == ["ps/0", "alive", "1.2", "0.4", "s", "119", "4.1", "MB/s", "4.2", "MB/s"]
    assert row(narrow, "worker/1") == ["worker/1", "dead", "–", "21", "s", "90", "–", "–"]
    assert row(narrow, "evaluator/0") == ["evaluator/0", "missing", "–", "–", "–", "–", "–"]
    assert row(middle, "task")[-2:] == ["steps/s", "stale"]
    assert row(middle, "worker/0")[-2:] == ["50.0", "0.0"]
    assert row(wide, "task")[-4:] == ["exchange", "blocked", "device", "address"]
    assert row(wide, "worker/0")[-11:] == ["50.0", "0.0", "3", "ms", "12", "ms", "7", "ms", "4", "ms", "cuda:1"]
    assert row(wide, "chief/0")[-1] == "10.0.0.1:2222"


def test_map_of_shards_shows_who_holds_what_and_who_is_waited_for() -> None:
    lines = drawn(VIEW, 80)
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == ["shard"])
    assert lines[at].split() == ["shard", "on", "size", "version", "steps", "memory", "awaits"]
    assert lines[at + 1].split() == [
        *("0", "ps/0", "80.0", "kB", "━" * 12, "120", "120-121", "400.0", "kB", "replica", "1"),
    ]
    assert lines[at + 2].split() == ["1", "ps/0", "40.0", "kB", "━" * 6 + "╌" * 6, "119", "119", "200.0", "kB"]
    assert "memory" not in row(drawn(VIEW, 60), "shard")


def test_map_of_shards_shows_standbys_where_the_job_has_them_and_the_terminal_is_wide_enough() -> None:
    ps = STATUS.tasks[1]
    shards = (
        dataclasses.replace(ps.shards[0], standby="synced", standby_task="ps/1"),
        dataclasses.replace(ps.shards[1], standby="copying", standby_task="ps/2"),
    )
    tasks = (STATUS.tasks[0], dataclasses.replace(ps, shards=shards))
    view = cluster_view(dataclasses.replace(STATUS, tasks=tasks))
    for width in (80, 120):
        lines = drawn(view, width)
        at = next(number for number, line in enumerate(lines) if line.split()[:1] == ["shard"])
        assert max(len(line) for line in lines) <= width
        assert " standby " in lines[at]
        assert " ps/1 in step " in lines[at + 1] and "replica 1" in lines[at + 1]
        assert " ps/2 copying " in lines[at + 2]
    assert not any("standby" in line for line in (*drawn(view, 60), *drawn(VIEW, 120)))


def test_job_that_has_not_begun_shows_what_it_waits_for_and_no_figures_it_does_not_have() -> None:
    waiting = ChiefStatus(job="digits", phase="waiting", missing=("ps/0",), steps=400, time=NOON)
    lines = drawn(cluster_view(waiting), 80)
    assert lines[0].endswith(" · waiting for ps/0")
    assert lines[1].endswith("step 0/400  0%")
    assert not any(line.startswith(("loss", "evaluated", "checkpoint", "shard")) for line in lines)


def test_job_that_stands_still_says_since_when_and_for_whom_and_has_no_rates() -> None:
    awaited = (Awaited(task="worker/1", why="replica 1, last heard 11 s ago"),)
    still = Standstill(seconds=12.3, awaited=awaited)
    view = cluster_view(dataclasses.replace(STATUS, steps_per_s=0.0, push_bytes_per_s=0.0, standstill=still))
    lines = drawn(view, 120)
    assert lines[0].endswith(" · standing still for 12 s, waiting for worker/1")
    since = time.strftime("%H:%M:%S", time.localtime(NOON - 12.3))
    assert lines[1] == f"no step since {since} (12 s): waiting for worker/1 (replica 1, last heard 11 s ago)"
    assert " left" not in lines[2] and lines[3].startswith("– steps/s")
    assert "standing still for 12 s, waiting for worker/1" in plain_line(view)
    assert "steps/s" not in plain_line(view)


def test_script_without_an_end_has_no_bar() -> None:
    lines = drawn(cluster_view(dataclasses.replace(STATUS, steps=0)), 80)
    assert lines[1] == "step 120  2.4 s"


@pytest.mark.parametrize("height", [12, 20, 24, 40])
def test_frame_of_a_large_cluster_is_no_higher_than_the_terminal(height: int) -> None:
    workers = tuple(TaskStatus(task=f"worker/{index}", state="alive") for index in range(40))
    dead = TaskStatus(task="worker/40", state="dead")
    large = cluster_view(dataclasses.replace(STATUS, tasks=(*STATUS.tasks[:2], *workers, dead), said=()))
    lines = drawn(large, 80, height=height)
    assert len(lines) <= max(height, 20)
    assert row(lines, "worker/40")[:2] == ["worker/40", "dead"]
    hidden = next(int(line.split()[1]) for line in lines if line.startswith("…"))
    assert hidden == len(large.tasks) - sum(1 for line in lines if re.match(r"(chief|ps|worker|evaluator)/\d", line))
    everything = drawn(large, 80)
    assert sum(1 for line in everything if line.startswith("worker/")) == 41


def test_silent_chief_is_named_with_since_when_and_until_when() -> None:
    silence = ChiefSilence(since=NOON, now=NOON + 7, until=NOON + 15, reason="no route to host")
    text = " ".join(drawn(VIEW, 60, silence=silence)[:2])
    clocks = [time.strftime("%H:%M:%S", time.localtime(NOON + after)) for after in (0, 15)]
    assert text == f"no answer from the chief at 10.0.0.1:2222 since {clocks[0]} (7.0 s); retrying until {clocks[1]}"


def test_ended_job_shows_why() -> None:
    failed = dataclasses.replace(ENDED, reason="ps/0 died", exit_code=4)
    lines = drawn(cluster_view(failed), 80)
    assert lines[0].endswith("ended") and "ps/0 died" in lines


def test_names_and_sentences_of_others_can_not_steer_the_terminal() -> None:
    event = EventStatus(time=NOON, level="info", sentence="a\x1b[2Jb\nc\u202ed [red]e[/red]")
    lines = drawn(cluster_view(dataclasses.replace(STATUS, job="x\x1b]0;y\x07", said=(event,))), 80)
    assert "\x1b" not in "".join(lines) and "\x07" not in "".join(lines)
    assert lines[-1].endswith("a [2Jb | c d [red]e[/red]")
    assert lines[0].startswith("x ]0;y  · ")


# Figures


def test_sparkline_goes_from_the_lowest_to_the_highest_and_means_what_shares_a_block() -> None:
    assert sparkline([0.0, 7.0, 3.5], 10) == "▁█▅"
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([0.0, 2.0, 10.0, 12.0], 2) == "▁█"
    assert sparkline([float(value) for value in range(8)], 8, ASCII) == ASCII.steps
    assert len(sparkline([float(value) for value in range(241)], 60)) <= 60
    assert sparkline([], 10) == sparkline([1.0], 0) == ""


def test_curves_keep_new_steps_only_and_forget_the_oldest() -> None:
    curves = Curves(points=3)
    for step, loss in ((1, 3.0), (2, 2.0), (2, 9.0), (3, float("nan")), (4, 1.0), (5, 0.5)):
        curves.add(cluster_view(dataclasses.replace(STATUS, step=step, loss=loss)))
    assert curves.values("loss") == [2.0, 1.0, 0.5]
    assert curves.values("evaluated accuracy") == [0.97]
    assert curves.values("nothing") == []
    assert drawn(VIEW, 80, curves=curves)[3] == "loss 0.3100  █▃▁"


def test_bar_and_units() -> None:
    assert bar(0.5, 4) == "━━╌╌" and bar(2.0, 3, ASCII) == "###" and bar(-1.0, 3, ASCII) == "..."
    assert [size(value) for value in (0, 999, 1000, 3.4e6, 2e9, 5e12)] == [
        *("0 B", "999 B", "1.0 kB", "3.4 MB", "2.0 GB", "5.0 TB"),
    ]
    assert [seconds(value) for value in (0.44, 12, 119, 180, 7500)] == ["0.4 s", "12 s", "119 s", "3 min", "2 h 05 min"]


def test_ascii_terminal_gets_ascii() -> None:
    console = PlainConsole(file=io.StringIO(), width=80, color_system=None)
    short = dataclasses.replace(STATUS, said=STATUS.said[:1])
    console.print(frame(cluster_view(short), Curves(), width=80, glyphs=ASCII))
    assert console.file.getvalue().isascii()  # type: ignore[attr-defined]
    assert FANCY.none not in plain_line(VIEW)


def test_plain_line_has_the_job_in_one_line() -> None:
    assert plain_line(VIEW).split("  ")[1:] == [
        *("digits", "training", "step 120/400", "loss 0.3100", "50.0 steps/s", "push 8.2 MB/s", "pull 8.3 MB/s"),
        *("evaluated at step 100: accuracy 0.97, loss 0.2", "5.6 s left", "worker/1 dead", "evaluator/0 missing"),
    ]


# Without a terminal


class Told:
    """A chief that gives these answers in turn, and the last one again and again."""

    def __init__(self, *answers: ChiefStatus | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    def status(self, timeout_s: float | None = None) -> ChiefStatus:
        assert timeout_s is not None
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


GONE = UnreachableError("chief at 10.0.0.1:2222 did not answer Status within 3.0 s")


class Shown(threading.Event):
    """Set by an answer, cleared by who shows it; tells who asks when that was."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = threading.Event()
        self.taken.set()

    def set(self) -> None:
        self.taken.clear()
        super().set()

    def clear(self) -> None:
        super().clear()
        self.taken.set()


@contextlib.contextmanager
def watching(chief: Told, console: PlainConsole, *, deadline_s: float = 60.0) -> Iterator[Screen]:
    shown = Shown()

    class InTurn:
        """Asks only after the answer before was shown, so that none is passed over."""

        def status(self, timeout_s: float | None = None) -> ChiefStatus:
            shown.taken.wait(PATIENCE_S)
            return chief.status(timeout_s)

    poller = Poller(InTurn(), 0.01, deadline_s, changed=shown)
    poller.start()
    try:
        yield Screen(poller, console, "10.0.0.1:2222")
    finally:
        poller.stop()


def pipe() -> tuple[PlainConsole, io.StringIO]:
    stream = io.StringIO()
    return PlainConsole(file=stream, width=120), stream


def test_pipe_gets_a_line_per_answer_each_event_once_and_no_escape_codes() -> None:
    console, stream = pipe()
    later = EventStatus(time=NOON + 1, level="warning", sentence="worker/1 is suspected")
    second = dataclasses.replace(STATUS, step=130, said=(*STATUS.said, later))
    with watching(Told(STATUS, second, ENDED), console) as screen:
        assert screen.lines() == 0
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert [re.sub(r"^\S+ ", "", line)[:40] for line in lines] == [
        "training from step 0 until step 400",
        "ERROR worker/1 is dead: nothing heard fo",
        " digits  training  step 120/400  loss 0.",
        "WARNING worker/1 is suspected",
        " digits  training  step 130/400  loss 0.",
        " digits  ended  step 400/400  loss 0.310",
    ]


def test_long_interval_leaves_out_lines_but_neither_events_nor_the_last_line() -> None:
    console, stream = pipe()
    later = EventStatus(time=NOON + 1, level="warning", sentence="worker/1 is suspected")
    second = dataclasses.replace(STATUS, step=130, said=(*STATUS.said, later))
    with watching(Told(STATUS, second, ENDED), console) as screen:
        assert screen.lines(every_s=600.0) == 0
    assert re.findall(r"step \d+/400|is suspected", stream.getvalue()) == [
        "step 120/400",
        "is suspected",
        "step 400/400",
    ]


def test_pipe_is_told_once_that_the_chief_is_silent_and_once_that_it_is_back() -> None:
    console, stream = pipe()
    with watching(Told(STATUS, GONE, GONE, GONE, STATUS, ENDED), console) as screen:
        assert screen.lines() == 0
    text = stream.getvalue()
    assert text.count("no answer from the chief at 10.0.0.1:2222 since ") == 1
    assert text.count(str(GONE)) == 1
    assert text.count("the chief answers again") == 1


def test_chief_that_stays_away_is_given_up_with_code_three_and_what_was_last_known() -> None:
    console, _ = pipe()
    with (
        watching(Told(STATUS, GONE), console, deadline_s=0.05) as screen,
        pytest.raises(UnreachableError) as caught,
    ):
        screen.lines()
    assert caught.value.exit_code == 3
    since = r"the chief at 10\.0\.0\.1:2222 has not answered since \d\d:\d\d:\d\d, for 0 s; "
    assert re.fullmatch(f"{since}the job was training at step 120: {re.escape(str(GONE))}", str(caught.value))


def test_wrong_token_ends_at_once() -> None:
    console, _ = pipe()
    refused = UsageError("chief at 10.0.0.1:2222 refused Status: the call does not carry the token of this job")
    with (
        watching(Told(refused), console) as screen,
        pytest.raises(UsageError, match="does not carry the token of this job"),
    ):
        screen.lines()


def test_once_prints_one_frame_and_ends() -> None:
    console, stream = pipe()
    with watching(Told(GONE, STATUS), console) as screen:
        assert screen.once() == 0
    assert stream.getvalue().startswith("digits · sync")
    assert stream.getvalue().count("step 120/400") == 1


def test_command_without_a_chief_ends_with_code_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    spec = '{"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:0"]}'
    assert main(["top", "--cluster", spec, "--timeout", "4", "--interval", "0.1"]) == 3
    printed = capsys.readouterr()
    assert "no answer from the chief at 127.0.0.1:1 since" in printed.out
    assert "\x1b" not in printed.out + printed.err
    assert "shardline: the chief at 127.0.0.1:1 has not answered since" in printed.err


def test_command_without_a_cluster_says_how_to_name_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHARDLINE_CLUSTER", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert main(["top"]) == 2
    assert "use --cluster FILE" in capsys.readouterr().err


# On a terminal


class Terminal:
    """A pseudo-terminal of 100 columns and 40 lines; what is written to it is read on a thread."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (40, 100))
        self.text = ""
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            with self._more:
                self.text += data.decode(errors="replace")
                self._more.notify_all()

    def open(self, mode: Literal["r", "w"]) -> TextIO:
        return open(os.dup(self.slave), mode, encoding="utf-8")

    def wait_for(self, holds: Callable[[str], bool]) -> None:
        with self._more:
            assert self._more.wait_for(lambda: holds(self.text), PATIENCE_S), self.text[-2000:]

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        os.close(self.slave)
        self._thread.join(PATIENCE_S)
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal()
    try:
        yield found
    finally:
        found.close()


def watch(terminal: Terminal, chief: Told) -> int:
    """`shardline top` on a terminal, against this chief."""
    with terminal.open("w") as out, terminal.open("r") as keys:
        console = PlainConsole(file=out, width=100, height=40, force_terminal=True)
        assert progress.on_terminal(console)
        with watching(chief, console) as screen, Keys(keys).raw() as raw:
            return screen.live(raw)


def test_terminal_is_redrawn_until_q_and_left_as_it_was(terminal: Terminal) -> None:
    before = termios.tcgetattr(terminal.slave)
    codes: list[int] = []
    chief = Told(STATUS, GONE, dataclasses.replace(STATUS, step=130))
    thread = threading.Thread(target=lambda: codes.append(watch(terminal, chief)), daemon=True)
    thread.start()
    terminal.wait_for(lambda text: "step 120/400" in text)
    assert not termios.tcgetattr(terminal.slave)[3] & termios.ICANON
    terminal.wait_for(lambda text: "no answer from the chief" in text)
    terminal.wait_for(lambda text: "step 130/400" in text)
    terminal.press("xq")
    thread.join(PATIENCE_S)
    assert codes == [0]
    assert termios.tcgetattr(terminal.slave) == before
    # Into the alternate screen and out of it.
    terminal.wait_for(lambda text: text.count("\x1b[?1049h") == 1 and text.count("\x1b[?1049l") == 1)


def test_last_frame_of_a_job_that_ends_stays_on_the_terminal(terminal: Terminal) -> None:
    assert watch(terminal, Told(STATUS, ENDED)) == 0
    terminal.wait_for(lambda text: "400/400" in text.rpartition("\x1b[?1049l")[2])
    left = ESCAPE.sub("", terminal.text.rpartition("\x1b[?1049l")[2])
    assert "digits · sync · SGD · 2 replicas · ended" in left and "worker/0" in left


def test_chief_that_stays_away_leaves_the_last_frame_and_the_reason(terminal: Terminal) -> None:
    chief = Told(STATUS, GONE)
    with (
        terminal.open("w") as out,
        watching(chief, PlainConsole(file=out, width=100), deadline_s=0.2) as screen,
        pytest.raises(UnreachableError, match="the job was training at step 120"),
    ):
        screen.live(Keys(None))
    terminal.wait_for(lambda text: "step 120/400" in text.rpartition("\x1b[?1049l")[2])


# Progress of `shardline train`


@pytest.mark.parametrize(
    ("to_terminal", "term", "kind"),
    [(True, "xterm", "BarDisplay"), (True, "dumb", "LineDisplay"), (False, "xterm", "LineDisplay")],
    ids=["terminal", "dumb terminal", "pipe"],
)
def test_progress_is_a_bar_on_a_terminal_only_whatever_the_colours(
    to_terminal: bool, term: str, kind: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", term)
    with terminal.open("w") if to_terminal else io.StringIO() as stream:
        assert type(progress.make_display(PlainConsole(file=stream, width=80))).__name__ == kind


def test_progress_in_a_pipe_has_no_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    stream = io.StringIO()
    with progress.make_display(PlainConsole(file=stream, width=80)) as display:
        display.update(STATUS)
        display.say("worker/1 was killed")
    assert stream.getvalue().splitlines() == [progress.line(STATUS), "worker/1 was killed"]


def test_help_needs_neither_torch_nor_grpc() -> None:
    program = (
        "import sys\nfrom shardline.cli.main import main\nmain(['top', '--help'])\n"
        "assert not {'torch', 'grpc', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "press q or Ctrl-C" in " ".join(result.stdout.split())
