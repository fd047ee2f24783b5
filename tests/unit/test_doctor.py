"""shardline doctor: each check's diagnosis, and which addresses of a cluster file are problems."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.host.segments import Segment, SegmentError
from shardline_lab import doctor
from shardline_lab.doctor import OK, PROBLEM, WARNING, Diagnosis


def test_this_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.CHECKS) and all(line.startswith((OK, WARNING)) for line in lines)


def test_a_problem_is_said_with_its_remedy_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda: Diagnosis(PROBLEM, "it is full", "delete something")})
    assert main(["doctor"]) == 2
    assert capsys.readouterr().out == "problem  disk  it is full; delete something\n"


def test_few_open_files_are_a_warning_with_the_limit_that_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert doctor.check_open_files() == Diagnosis(
        WARNING, "256 open files (ulimit -n)", "ulimit -n 1024; at most 4,096 here"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert doctor.check_open_files().level == OK


def test_locked_memory_matters_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    for there, level in ((True, WARNING), (False, OK)):
        monkeypatch.setattr(doctor, "nvidia", lambda there=there: there)
        assert doctor.check_locked().level == level


def test_a_machine_without_segments_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Segment:
        raise SegmentError("no memory")

    monkeypatch.setattr(Segment, "create", refuse)
    found = doctor.check_segments()
    assert found.level == WARNING and "no memory" in found.found


def test_a_stepped_clock_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([1000.0, 1003.0])
    monkeypatch.setattr(doctor.time, "time", lambda: next(walls))
    found = doctor.check_clock()
    assert found.level == WARNING and "+2" in found.found


def test_addresses_of_a_cluster_are_dialled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in (listening, bound)]
        spec = {"chief": [f"127.0.0.1:{ports[1]}"], "ps": [f"127.0.0.1:{ports[0]}"], "worker": ["no.such.invalid:1"]}
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(spec))
        assert main(["doctor", "--cluster", str(path)]) == 2
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["ps/0"].startswith("OK") and "accepts connections" in lines["ps/0"]
    assert lines["chief/0"].startswith("OK") and "nothing listens there yet" in lines["chief/0"]
    assert lines["worker/0"].startswith("problem") and "no.such.invalid has no address" in lines["worker/0"]


def test_an_answer_of_no_chief_is_a_warning_within_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = doctor.check_chief(f"127.0.0.1:{silent.getsockname()[1]}", doctor.Security())
    assert found.level == WARNING and "can't be asked" in found.found
