"""Time in which a process ran: the clock without the gaps in which nobody read it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import NoReturn

import grpc
import pytest

from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.host.awake import LONGEST_S, TICK_S, AwakeTime, AwakeWatch, awake_s
from shardline.rpc import channel, client, link as link_module
from shardline.rpc.channel import Peer
from shardline.rpc.client import PsControl
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.rpc.v1 import parameter_server_pb2_grpc
from tests.support.sources import ROOT


def test_time_goes_on_as_the_clock_does_while_it_is_read() -> None:
    awake = AwakeTime(100.0)
    assert [awake.at(100.0 + tick * TICK_S) for tick in range(5)] == [100.0 + tick * TICK_S for tick in range(5)]
    assert awake.away_s == 0.0


def test_a_gap_in_which_nobody_read_the_clock_counts_as_a_short_one() -> None:
    awake = AwakeTime(0.0)
    assert awake.at(3600.0) == LONGEST_S
    assert awake.at(3600.0 + TICK_S) == pytest.approx(LONGEST_S + TICK_S)
    assert awake.away_s == 3600.0 - LONGEST_S


def test_this_process_reads_its_clock_while_nobody_asks() -> None:
    first = awake_s()
    threading.Event().wait(3 * LONGEST_S)
    assert awake_s() - first > LONGEST_S


STOPPED = """
import sys, threading
from shardline.host.awake import awake_s
first = awake_s()
print("ready", flush=True)
sys.stdin.readline()
print(awake_s() - first, flush=True)
"""


def test_a_process_that_is_stopped_goes_on_as_if_little_time_had_passed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            began_s = time.monotonic()
            while time.monotonic() - began_s < 3 * LONGEST_S:
                threading.Event().wait(0.1)
            child.send_signal(signal.SIGCONT)
            child.stdin.write("\n")
            child.stdin.flush()
            passed_s = float(child.stdout.readline())
            assert passed_s < time.monotonic() - began_s - LONGEST_S
        finally:
            child.kill()


def test_a_child_that_was_forked_has_a_clock_that_goes_on() -> None:
    parent_s = awake_s()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        awake_s()
        threading.Event().wait(2 * LONGEST_S)
        os.write(write, f"{awake_s()}".encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        child_s = float(told.read())
    os.waitpid(pid, 0)
    assert child_s > parent_s + LONGEST_S


def test_a_process_that_can_start_no_thread_has_the_time_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started, begin = list[threading.Thread](), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name != "awake":
            begin(thread)
            return
        started.append(thread)
        if len(started) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    watch = AwakeWatch()
    first, second, third = watch.read(), watch.read(), watch.read()
    assert first <= second <= third
    assert len(started) == 2


def test_a_signal_that_asks_for_the_time_while_its_thread_reads_it_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = AwakeWatch()

    def interrupted(now_s: float) -> float:
        monkeypatch.setattr(watch.awake, "at", read)
        found.append(watch.read())
        return read(now_s)

    watch.awake.seen = watch.awake.seen[0] - 3600.0, 0.0
    read, found = watch.awake.at, list[float]()
    monkeypatch.setattr(watch.awake, "at", interrupted)
    thread = threading.Thread(target=watch.read, daemon=True)
    thread.start()
    thread.join(10.0)
    assert found


class Failed(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # of a package without types
    """A call whose deadline has passed."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Deadline Exceeded"


def test_a_call_whose_deadline_passed_while_this_process_was_stopped_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    awake = AwakeTime(0.0)
    clock_s = 0.0
    monkeypatch.setattr(channel, "awake_s", lambda: awake.at(clock_s))
    peer = Peer("ps/0", "127.0.0.1:1", Timeouts(total_s=9.0))
    deadlines = []

    def stopped_during_the_first(request: object, *, timeout: float, wait_for_ready: bool) -> str:
        nonlocal clock_s
        deadlines.append(timeout)
        if len(deadlines) == 1:
            clock_s += 3600.0
            raise Failed
        return "answer"

    try:
        assert peer.call(stopped_during_the_first, object(), what="Status") == "answer"
    finally:
        peer.close()
    assert deadlines == [3.0, 3.0 - LONGEST_S]


def test_a_call_whose_deadline_passed_while_this_process_ran_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    awake = AwakeTime(0.0)
    clock_s = 0.0
    monkeypatch.setattr(channel, "awake_s", lambda: awake.at(clock_s))
    peer = Peer("ps/0", "127.0.0.1:1", Timeouts(total_s=9.0))

    def silent(request: object, *, timeout: float, wait_for_ready: bool) -> str:
        nonlocal clock_s
        for _ in range(40):
            clock_s += TICK_S
            awake.at(clock_s)
        raise Failed

    try:
        with pytest.raises(UnreachableError, match="did not answer Status"):
            peer.call(silent, object(), what="Status")
    finally:
        peer.close()


def test_a_restore_is_not_repeated_for_ever_though_each_was_interrupted_by_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines = list[float]()

    def stopped_half_of_the_time(frames: object, timeout: float) -> NoReturn:
        deadlines.append(timeout)
        raise Failed

    monkeypatch.setattr(client, "awake_s", lambda: sum(deadlines) / 2)
    monkeypatch.setattr(client, "away_s", lambda: sum(deadlines) / 2)
    stub = SimpleNamespace(Restore=stopped_half_of_the_time)
    monkeypatch.setattr(parameter_server_pb2_grpc, "ParameterServerStub", lambda channel: stub)
    monkeypatch.setattr(PsControl, "status", lambda self: None)
    control = PsControl("ps/0", "127.0.0.1:1", Timeouts(total_s=9.0), term=1, chief_uuid="")
    try:
        with pytest.raises(UnreachableError, match="did not answer Restore"):
            control.restore(1, 0, tuple)
    finally:
        control.close()
    assert deadlines[:3] == [90.0, 45.0, 22.5]


def test_a_checkpoint_that_took_longer_than_the_timeout_is_asked_for_again_when_the_chief_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s, calls = 0.0, 0
    monkeypatch.setattr(link_module, "awake_s", lambda: clock_s)
    link = ChiefLink("127.0.0.1:1", Timeouts(total_s=9.0), Applicant(role="evaluator", index=0))
    monkeypatch.setattr(link, "wait", lambda *args, **named: False)

    def fetch() -> str:
        nonlocal clock_s, calls
        calls, clock_s = calls + 1, clock_s + (100.0 if not calls else 1.0)
        if calls < 8 or unreachable:
            raise UnreachableError("the chief went away")
        return "parameters"

    try:
        unreachable = False
        assert link.ask(fetch) == "parameters"
        unreachable, calls, clock_s = True, 0, 0.0
        with pytest.raises(UnreachableError):
            link.ask(fetch)
        assert clock_s == 109.0
    finally:
        link.close()


FIGURES = {
    "chief/shardline_chief/io/checkpointer.py",
    "chief/shardline_chief/io/control.py",
    "chief/shardline_chief/page/viewer.py",
    "evaluator/shardline_evaluator/service.py",
    "pipeline/shardline_pipeline/activations/mailbox.py",
    "pipeline/shardline_pipeline/partition/measure.py",
    "pipeline/shardline_pipeline/stage_work.py",
    "shardline/client/api/profile.py",
    "shardline/client/api/step_reports.py",
    "shardline/client/exchange/streaming_payloads.py",
    "shardline/client/exchange/shard_exchange.py",
    "shardline/client/overlap/gate.py",
    "shardline/client/step/weights.py",
    "shardline/client/step/trainer.py",
    "shardline/rpc/link.py",
    "shardline/rpc/client.py",
}
"""Modules of tasks and of their calls that measure how long something takes; none of them judges anybody by it."""


def test_whoever_judges_a_silence_uses_the_clock_for_that() -> None:
    folders = ("chief", "services", "worker", "evaluator", "pipeline", "shardline/rpc", "shardline/client")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "time.monotonic()" in path.read_text(encoding="utf-8")
    }
    assert found == FIGURES
