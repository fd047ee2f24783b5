"""shardline status: frames of fixed views, plain lines where there is no terminal, and a real terminal (a pty)."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardline.cli import progress
from shardline.cli.main import main
from shardline.cli.status import Answers, answers, lines
from shardline.cli.status_frame import Frame, seconds
from shardline.cli.terminal import PlainConsole
from shardline.core.status import (
    Awaited,
    CheckpointStatus,
    ChiefStatus,
    EventStatus,
    ShardStatus,
    StageStatus,
    Standstill,
    TaskStatus,
)
from shardline.errors import UnreachableError, UsageError
from shardline.observability.view import ClusterView, cluster_view
from shardline.rpc import watch
from tests.support.chief_process import Chief

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
    last_metrics={"loss": 0.2, "accuracy": 0.97},
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
        TaskStatus(
            task="chief/0",
            state="alive",
            incarnation=(1 << 32) | 1,
            step=120,
            address="10.0.0.1:2222",
            metrics_address="10.0.0.1:8080",
        ),
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


def drawn(view: ClusterView, width: int, *, height: int | None = None, silence: str = "") -> list[str]:
    """Lines of a frame as a terminal without colours shows them."""
    console = PlainConsole(file=io.StringIO(), width=width, color_system=None)
    console.print(Frame(view=view, height=height, silence=silence))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def row(lines: list[str], first: str) -> list[str]:
    """Words of the line that begins with a word."""
    return next(line.split() for line in lines if line.split()[:1] == [first])


# Frames


@pytest.mark.parametrize("width", [60, 80, 120])
def test_frame_fits_the_terminal_and_shows_the_job(width: int) -> None:
    lines = drawn(VIEW, width)
    assert max(len(line) for line in lines) <= width
    assert lines[0] == "digits  sync  SGD  2 replicas  training"
    assert re.fullmatch(r"step 120/400  30%  5\.6 s left  ━+╸?", lines[1]), lines[1]
    assert lines[2:5] == [
        "loss 0.3100  50.0 steps/s  push 8.2 MB/s  pull 8.3 MB/s",
        "evaluated at step 100: accuracy 0.97, loss 0.2",
        "best at step 100: accuracy 0.97",
    ]
    assert lines[5].startswith("checkpoint of step 100, 0.8 s ago, 300.0 kB, /out/check")
    assert lines[-2].endswith(" training from step 0 until step 400")
    assert " ERROR worker/1 is dead: nothing heard for 20 s; mo" in lines[-1]
    assert (len(lines[-1]) == width and lines[-1].endswith("…")) == (width < 110)


def test_table_of_tasks_shows_more_the_wider_it_may_be_and_the_ill_first() -> None:
    narrow, middle, wide, pipe = (drawn(VIEW, width) for width in (60, 80, 120, 1000))
    assert row(narrow, "task") == ["task", "state", "life", "heard", "step", "push", "pull"]
    assert row(narrow, "ps/0") == ["ps/0", "alive", "1.2", "0.4", "s", "119", "4.1", "MB/s", "4.2", "MB/s"]
    assert row(narrow, "worker/1") == ["worker/1", "dead", "-", "21", "s", "90", "-", "-"]
    assert row(narrow, "evaluator/0") == ["evaluator/0", "missing", "-", "-", "-", "-", "-"]
    at = next(number for number, line in enumerate(narrow) if line.startswith("task "))
    names = [line.split()[0] for line in narrow[at + 1 : at + 6]]
    assert names == ["worker/1", "evaluator/0", "chief/0", "ps/0", "worker/0"]
    assert row(middle, "task")[-2:] == ["steps/s", "stale"]
    assert row(middle, "worker/0")[-2:] == ["50.0", "0.0"]
    assert row(wide, "task")[-4:] == ["exchange", "blocked", "device", "address"]
    assert row(wide, "worker/0")[-12:] == ["50.0", "0.0", "3", "ms", "12", "ms", "7", "ms", "4", "ms", "cuda:1", "-"]
    assert row(wide, "chief/0")[-1] == "10.0.0.1:2222"
    assert row(pipe, "chief/0")[-2:] == ["10.0.0.1:2222", "10.0.0.1:8080"]
    # No task has a gap.
    assert "gap" not in row(pipe, "task")


def test_map_of_shards_shows_who_holds_what_and_who_is_waited_for() -> None:
    lines = drawn(VIEW, 100)
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == ["shard"])
    assert lines[at].split() == ["shard", "on", "size", "version", "steps", "memory", "awaits"]
    assert lines[at + 1].split() == [
        *("0", "ps/0", "80.0", "kB", "━" * 12, "120", "120-121", "400.0", "kB", "replica", "1"),
    ]
    assert lines[at + 2].split() == ["1", "ps/0", "40.0", "kB", "━" * 6, "119", "119", "200.0", "kB", "-"]
    assert "memory" not in row(drawn(VIEW, 60), "shard") and "━" not in "".join(drawn(VIEW, 80)[at:])


def test_map_of_shards_shows_standbys_where_the_job_has_them_and_the_terminal_is_wide_enough() -> None:
    ps = STATUS.tasks[1]
    shards = (
        dataclasses.replace(ps.shards[0], standby="synced", standby_task="ps/1"),
        dataclasses.replace(ps.shards[1], standby="unprotected", standby_task="ps/2"),
    )
    tasks = (STATUS.tasks[0], dataclasses.replace(ps, shards=shards))
    view = cluster_view(dataclasses.replace(STATUS, tasks=tasks))
    for width in (80, 120):
        lines = drawn(view, width)
        at = next(number for number, line in enumerate(lines) if line.split()[:1] == ["shard"])
        assert max(len(line) for line in lines) <= width
        assert " standby " in lines[at]
        assert " ps/1 in step " in lines[at + 1] and "replica 1" in lines[at + 1]
        assert " ps/2 unreachable " in lines[at + 2]
    assert not any("standby" in line for line in (*drawn(view, 60), *drawn(VIEW, 120)))


def test_job_that_has_not_begun_shows_what_it_waits_for_and_no_figures_it_does_not_have() -> None:
    waiting = ChiefStatus(job="digits", phase="waiting", missing=("ps/0",), steps=400, time=NOON)
    lines = drawn(cluster_view(waiting), 80)
    assert lines[0].endswith("  waiting for ps/0")
    assert lines[1] == "step 0/400  0%  0.0 s"
    assert not any(line.startswith(("loss", "evaluated", "checkpoint", "shard")) for line in lines)


def test_job_that_stands_still_says_since_when_and_for_whom_and_has_no_rates() -> None:
    awaited = (Awaited(task="worker/1", why="replica 1, last heard 11 s ago"),)
    still = Standstill(seconds=12.3, awaited=awaited)
    view = cluster_view(dataclasses.replace(STATUS, steps_per_s=0.0, push_bytes_per_s=0.0, standstill=still))
    lines = drawn(view, 120)
    assert lines[0].endswith("  standing still for 12 s, waiting for worker/1")
    since = time.strftime("%H:%M:%S", time.localtime(NOON - 12.3))
    assert lines[1] == f"no step since {since} (12 s): waiting for worker/1 (replica 1, last heard 11 s ago)"
    assert " left" not in lines[2] and lines[3] == "loss 0.3100"


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
    hidden = next(int(line.split()[1]) for line in lines if line.startswith("... "))
    assert hidden == len(large.tasks) - sum(1 for line in lines if re.match(r"(chief|ps|worker|evaluator)/\d", line))
    everything = drawn(large, 80)
    assert sum(1 for line in everything if line.startswith("worker/")) == 41


def test_silence_stands_over_the_last_frame() -> None:
    lines = drawn(VIEW, 60, silence="no answer from the chief at 10.0.0.1:2222 since 12:00:00; retrying until 12:00:15")
    assert " ".join(lines[:2]).endswith("retrying until 12:00:15") and lines[2].startswith("digits  sync")


def test_stages_of_a_pipeline_have_a_line_each() -> None:
    stage = StageStatus(stage=1, tasks=("worker/1",), bubble=0.25, forward_s=0.002, backward_s=0.004, held=3, behind=2)
    lines = drawn(cluster_view(dataclasses.replace(STATUS, stages=(dataclasses.replace(stage, stage=0), stage))), 120)
    text = "25% idle within steps, holds 3, 2 updates behind, on worker/1, forward 2.0 ms, backward 4.0 ms"
    assert lines[6:8] == [f"stage 0: {text}", f"stage 1: {text}"]


def test_ended_job_shows_why() -> None:
    failed = dataclasses.replace(ENDED, reason="ps/0 died", exit_code=4)
    lines = drawn(cluster_view(failed), 80)
    assert lines[0].endswith("ended") and "ps/0 died" in lines


def test_names_and_sentences_of_others_can_not_steer_the_terminal() -> None:
    event = EventStatus(time=NOON, level="info", sentence="a\x1b[2Jb\nc\u202ed [red]e[/red]")
    lines = drawn(cluster_view(dataclasses.replace(STATUS, job="x\x1b]0;y\x07", said=(event,))), 80)
    assert "\x1b" not in "".join(lines) and "\x07" not in "".join(lines)
    assert lines[-1].endswith("a [2Jb | c d [red]e[/red]")
    assert lines[0].startswith("x ]0;y   sync")


def test_units() -> None:
    assert [seconds(value) for value in (None, 0.44, 12, 180, 7500)] == ["", "0.4 s", "12 s", "3 min", "2.1 h"]


# Without a terminal


class Told:
    """A chief that gives these answers in turn, and the last one again and again."""

    def __init__(self, *answers: ChiefStatus | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    def status(self, timeout_s: float) -> ChiefStatus:
        assert 0.5 <= timeout_s <= 3.0
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


GONE = UnreachableError("chief at 10.0.0.1:2222 did not answer Status within 3.0 s")


def asked(chief: Told, deadline_s: float = 60.0) -> Answers:
    return answers(chief.status, "10.0.0.1:2222", 0.01, deadline_s)


def pipe() -> tuple[PlainConsole, io.StringIO]:
    stream = io.StringIO()
    return PlainConsole(file=stream, width=120), stream


def test_pipe_gets_a_line_per_answer_each_event_once_and_no_escape_codes() -> None:
    console, stream = pipe()
    later = EventStatus(time=NOON + 1, level="warning", sentence="worker/1 is suspected")
    second = dataclasses.replace(STATUS, step=130, said=(*STATUS.said, later))
    lines(console, asked(Told(STATUS, second, ENDED)), 0.0)
    assert "\x1b" not in stream.getvalue()
    assert [re.sub(r"^\S+ ", "", line)[:40] for line in stream.getvalue().splitlines()] == [
        "training from step 0 until step 400",
        "ERROR worker/1 is dead: nothing heard fo",
        " digits  step 120/400  loss 0.3100  50.0",
        "WARNING worker/1 is suspected",
        " digits  step 130/400  loss 0.3100  50.0",
        " digits  step 400/400  loss 0.3100  50.0",
    ]
    assert stream.getvalue().endswith("  ended\n")


def test_long_interval_leaves_out_lines_but_neither_events_nor_the_last_line() -> None:
    console, stream = pipe()
    later = EventStatus(time=NOON + 1, level="warning", sentence="worker/1 is suspected")
    second = dataclasses.replace(STATUS, step=130, said=(*STATUS.said, later))
    lines(console, asked(Told(STATUS, second, ENDED)), 600.0)
    assert re.findall(r"step \d+/400|is suspected", stream.getvalue()) == [
        "step 120/400",
        "is suspected",
        "step 400/400",
    ]


def test_pipe_is_told_once_that_the_chief_is_silent_and_once_that_it_is_back() -> None:
    console, stream = pipe()
    lines(console, asked(Told(STATUS, GONE, GONE, GONE, STATUS, ENDED)), 0.0)
    text = stream.getvalue()
    clocks = r"since \d\d:\d\d:\d\d; retrying until \d\d:\d\d:\d\d: "
    assert len(re.findall(f"no answer from the chief at 10.0.0.1:2222 {clocks}{GONE}\n", text)) == 1
    assert text.count("no answer") == text.count("the chief answers again") == 1


def test_chief_that_stays_away_is_given_up_with_code_three_and_what_was_last_known() -> None:
    with pytest.raises(UnreachableError) as caught:
        lines(pipe()[0], asked(Told(STATUS, GONE), deadline_s=0.05), 0.0)
    assert caught.value.exit_code == 3
    since = r"the chief at 10\.0\.0\.1:2222 has not answered since \d\d:\d\d:\d\d, for 0 s; "
    assert re.fullmatch(f"{since}the job was training at step 120: {re.escape(str(GONE))}", str(caught.value))


def test_wrong_token_ends_at_once() -> None:
    refused = UsageError("chief at 10.0.0.1:2222 refused Status: the call does not carry the token of this job")
    with pytest.raises(UsageError, match="does not carry the token of this job"):
        lines(pipe()[0], asked(Told(refused)), 0.0)


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


@pytest.mark.parametrize("command", ["top", "status", "stop"])
def test_command_without_a_cluster_says_how_to_name_one(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHARDLINE_CLUSTER", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert main([command]) == 2
    assert "use --cluster FILE" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["top", "--once"], ["status"]], ids=" ".join)
def test_status_prints_one_frame_with_whole_addresses_where_the_output_has_no_width(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a-host-with-a-long-name.example.org:50051"
    tasks = (TaskStatus(task="worker/12", state="alive", address=long, metrics_address=long),)
    chief = Told(dataclasses.replace(STATUS, tasks=tasks))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(watch.ChiefWatch, "status", lambda _, timeout_s: chief.status(timeout_s / 5))
    assert main([*command, "--cluster", '{"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:0"]}']) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("digits  sync") and printed.count("step 120/400") == 1
    assert "/out/checkpoints/step-00000100\n" in printed and printed.count(long) == 2


def test_ascii_output_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(watch.ChiefWatch, "status", lambda _, timeout_s: dataclasses.replace(STATUS, job="größe"))
    assert main(["status", "--cluster", '{"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:0"]}']) == 0
    stream.seek(0)
    text = stream.read()
    assert text.startswith("gr??e  sync") and "5.6 s left  -----" in text


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

    def wait_for(self, holds: Callable[[str], bool]) -> None:
        with self._more:
            assert self._more.wait_for(lambda: holds(self.text), PATIENCE_S), self.text[-2000:]

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


@pytest.fixture
def chief(tmp_path: Path) -> Iterator[Chief]:
    chief = Chief(tmp_path)
    yield chief
    chief.close()


@pytest.fixture
def watching(terminal: Terminal, chief: Chief) -> Iterator[subprocess.Popen[bytes]]:
    """`shardline status --watch` on the terminal, with the first frame drawn."""
    spec = json.dumps({"chief": [chief.address], "ps": 1, "worker": 1})
    command = [sys.executable, "-m", "shardline", "status", "--watch", "--cluster", spec, "--timeout", "2"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    process = subprocess.Popen(command, env=environment, **streams)  # type: ignore[call-overload]
    try:
        terminal.wait_for(lambda text: "waiting for ps/0, worker/0" in text)
        assert ALTERNATE[0] in terminal.text and ALTERNATE[1] not in terminal.text
        yield process
    finally:
        process.kill()
        process.wait()


ALTERNATE = "\x1b[?1049h", "\x1b[?1049l"
"""Into the alternate screen, and out of it."""


def left_on(terminal: Terminal, says: str) -> str:
    """The text after the alternate screen, once it contains `says`."""
    terminal.wait_for(lambda text: says in text.rpartition(ALTERNATE[1])[2])
    assert [terminal.text.count(code) for code in (*ALTERNATE, "\x1b[?25l", "\x1b[?25h")] == [1, 1, 1, 1]
    return ESCAPE.sub("", terminal.text.rpartition(ALTERNATE[1])[2])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_terminal_is_as_it_was_with_the_last_frame_on_it_after_a_signal(
    number: signal.Signals, code: int, terminal: Terminal, watching: subprocess.Popen[bytes]
) -> None:
    watching.send_signal(number)
    assert watching.wait(PATIENCE_S) == code
    assert "Traceback" not in left_on(terminal, "waiting for ps/0, worker/0")


def test_last_frame_of_a_job_that_ends_stays_on_the_terminal(
    terminal: Terminal, watching: subprocess.Popen[bytes], chief: Chief
) -> None:
    chief.client.stop("enough")
    assert watching.wait(PATIENCE_S) == 0
    assert "stopped: enough" in left_on(terminal, "  ended")


def test_chief_that_stays_away_leaves_the_last_frame_and_the_reason(
    terminal: Terminal, watching: subprocess.Popen[bytes], chief: Chief
) -> None:
    chief.process.server.close()
    terminal.wait_for(lambda text: f"no answer from the chief at {chief.address} since" in text)
    assert watching.wait(PATIENCE_S) == 3
    left = " ".join(left_on(terminal, "has not answered since").split())
    assert "waiting for ps/0, worker/0" in left
    assert re.search(r"for 2 s; the job was waiting for ps/0, worker/0 at step 0: ", left), left


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
    with open(os.dup(terminal.slave), "w", encoding="utf-8") if to_terminal else io.StringIO() as stream:
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
    assert "until its job has ended or Ctrl-C" in " ".join(result.stdout.split())
