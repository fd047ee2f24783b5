"""Looking for an answer instead of sleeping until it comes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shardline.lanes import call_socket
from shardline.lanes.call_socket import Lookout

PATIENCE_S = 20.0


class Line:
    """A watched socket and its other end."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.lookout = Lookout(self.here)

    def found(self) -> bool:
        """Look for an answer, which is late by a look or more."""
        began_s = time.monotonic()
        found = self.lookout.found(began_s)
        self.lookout.came(began_s)
        return found


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """On several cores that nobody else wants."""
    monkeypatch.setattr(call_socket, "usable_cores", lambda: 2)
    monkeypatch.setattr(call_socket, "LOOK_S", PATIENCE_S)
    monkeypatch.setattr(call_socket, "AWAY_S", PATIENCE_S)
    made = Line()
    yield made
    made.here.close()
    made.there.close()


def test_an_answer_is_looked_for_after_a_quick_one(line: Line) -> None:
    assert not line.found(), "nothing is known of the first"
    timer = threading.Timer(0.05, line.there.send, [b"x"])
    timer.start()
    assert line.found()
    timer.join(PATIENCE_S)


def test_no_answer_is_looked_for_after_a_slow_one(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_socket, "LOOK_S", 0.0)
    line.there.send(b"x")
    assert not line.found()
    assert not line.found()


def test_a_look_ends_in_time(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.found()
    monkeypatch.setattr(call_socket, "LOOK_S", 0.05)
    began_s = time.monotonic()
    assert not line.found()
    assert 0.05 <= time.monotonic() - began_s < PATIENCE_S
    line.there.send(b"x")
    assert not line.found(), "the last one took too long"
    assert line.found(), "and the one after it was there"


def test_who_loses_the_core_sleeps_for_some_answers(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_socket, "ASLEEP", 3)
    line.found()
    monkeypatch.setattr(call_socket, "AWAY_S", 0.0)
    assert not line.found()
    monkeypatch.setattr(call_socket, "AWAY_S", PATIENCE_S)
    line.there.send(b"x")
    assert [line.found() for _ in range(4)] == [False, False, True, True]


def test_nobody_looks_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_socket, "usable_cores", lambda: 1)
    monkeypatch.setattr(call_socket, "LOOK_S", PATIENCE_S)
    line = Line()
    with line.here, line.there:
        line.there.send(b"x")
        assert not line.found()
        assert not line.found()


def test_one_thread_of_a_process_looks(line: Line) -> None:
    other = Line()
    with other.here, other.there:
        line.found()
        other.found()
        other.there.send(b"x")
        looking = threading.Thread(target=line.found)
        looking.start()
        try:
            # Until the thread has begun to look, this one may.
            end_s = time.monotonic() + PATIENCE_S
            while other.found():
                assert time.monotonic() < end_s
        finally:
            line.there.send(b"x")
            looking.join(PATIENCE_S)
        assert other.found(), "it has found its answer"
