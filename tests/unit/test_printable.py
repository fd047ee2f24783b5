"""Names and sentences of others: whatever is in them, a terminal gets characters and nothing to obey."""

from __future__ import annotations

import dataclasses
import io
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from shardline.cli import main as cli
from shardline.cli.progress import BarDisplay, LineDisplay
from shardline.cli.status_frame import Frame
from shardline.cli.terminal import PlainConsole
from shardline.cli.train import report
from shardline.core.status import ChiefStatus, EventStatus, TaskStatus
from shardline.errors import ProtocolError
from shardline.host.printable import printable, printable_lines
from shardline.observability.log import HumanFormatter
from shardline.observability.view import cluster_view
from shardline.rpc.errors import from_status

EVIL = "[bold red]a[/]\x1b]0;title\x07b\x1b[2J\x9b31mc\rd\u202ee\x00[/nothing]<script>\ud800"
SEEN = "[bold red]a[/]"
"""Of EVIL, where it may be cut."""
WHOLE = "[bold red]a[/] ]0;title b [2J 31mc | d e [/nothing]<script> "
FORGED = f"{EVIL}\nshardline: all is well"

STATUS = ChiefStatus(
    job=FORGED,
    phase="waiting",
    step=3,
    steps=9,
    consistency="sync",
    checkpoint_step=2,
    checkpoint_path=FORGED,
    reason=FORGED,
    page=FORGED,
    missing=(FORGED,),
    faults=(FORGED,),
    said=(EventStatus(time=1.0, level="error", sentence=FORGED),),
    tasks=(TaskStatus(task=FORGED, state=FORGED, address=FORGED, metrics_address=FORGED),),
    last_metrics={FORGED: 0.5},
    last_metrics_step=2,
)


def harmless(text: str, lines: int | None = None) -> None:
    """Nothing but printable characters on their lines, and no line that somebody else has made."""
    assert all(line.isprintable() for line in text.split("\n")), repr(text)
    assert not any(line.lstrip().startswith("shardline: all is well") for line in text.split("\n")), text
    assert SEEN in text
    text.encode()
    if lines is not None:
        assert text.count("\n") == lines


def console(**how: Any) -> PlainConsole:
    return PlainConsole(file=io.StringIO(), width=2000, **how)


def said(by: PlainConsole) -> str:
    assert isinstance(by.file, io.StringIO)
    return by.file.getvalue()


def test_a_text_stays_on_its_line_and_keeps_what_people_write() -> None:
    assert printable(EVIL) == WHOLE
    assert printable(FORGED) == f"{WHOLE} | shardline: all is well".replace("   |", "  |")
    assert printable("  Größe 3 µm, 日本 – ok") == "  Größe 3 µm, 日本 – ok"
    assert printable_lines("a\x1b\n  b\n") == "a \n  b\n"


def test_status_shows_names_as_they_are() -> None:
    by = console()
    task = dataclasses.replace(STATUS.tasks[0], task="worker/0")
    view = cluster_view(dataclasses.replace(STATUS, tasks=(task,), missing=()))
    by.print(Frame(view=dataclasses.replace(view, phase="ended"), silence=FORGED))
    harmless(said(by))
    assert said(by).count(SEEN) >= 9


def test_an_address_in_brackets_is_no_markup() -> None:
    by = console()
    tasks = (TaskStatus(task="ps/0", state="alive", address="[fe80::1]:2222"),)
    by.print(Frame(view=cluster_view(dataclasses.replace(STATUS, tasks=tasks, missing=()))))
    assert "[fe80::1]:2222" in said(by)


def test_train_shows_names_as_they_are() -> None:
    by = console()
    with LineDisplay(by) as display:
        display.update(STATUS)
        display.say(FORGED)
    harmless(said(by), lines=2)
    # On a terminal the bar's own codes are there, and none of the job's.
    by = console(force_terminal=True, legacy_windows=False)
    with BarDisplay(by) as bar:
        bar.update(STATUS)
        bar.say(FORGED)
    assert SEEN in said(by)
    for code in ("\x1b]0;", "\x07", "\x1b[2J\x9b", "\x9b", "\u202e", "\x00"):
        assert code not in said(by)


def test_what_a_run_prints_at_its_end_is_plain(tmp_path: Path) -> None:
    lines = report(tmp_path, None, STATUS)
    harmless("\n".join(map(printable, lines)), lines=len(lines) - 1)


def test_the_log_for_people_has_one_line_per_event_and_plain_tracebacks() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        told = error
    record = logging.LogRecord("shardline", logging.ERROR, "x.py", 1, "%s", (FORGED,), None)
    harmless(HumanFormatter("ps/0").format(record), lines=0)
    record.exc_info = (ValueError, told, told.__traceback__)
    lines = HumanFormatter("ps/0").format(record).split("\n")
    assert all(line.isprintable() for line in lines) and "Traceback" in lines[1]


class Refused(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # of a package without types
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return FORGED


Refused.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # the other methods are not asked


def test_what_a_peer_answers_becomes_a_sentence() -> None:
    harmless(str(from_status(Refused(), peer="ps/0 at h:1", what="Pull", waited_s=1.0)), lines=0)


@pytest.mark.parametrize("error", [ProtocolError(EVIL), RuntimeError(EVIL)])
def test_a_command_ends_with_a_plain_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "main", fail)
    assert cli.main([]) != 0
    harmless(capsys.readouterr().err)
