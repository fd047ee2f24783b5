from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shardline_chief.io.targets import NAME, Targets, own_metrics, reachable, tell_left_out
from shardline_chief.rules.state.membership import Life, Member


def member(role: str, index: int, metrics: str, **changes: Any) -> Member:
    made = Member(
        role=role,
        index=index,
        incarnation=1,
        stable_id="id",
        address=f"10.0.0.{index}:2222",
        metrics_address=metrics,
        last_heard_s=0.0,
    )
    return dataclasses.replace(made, **changes)


def found(folder: Path) -> dict[str, str]:
    """Service by address."""
    groups = json.loads((folder / NAME).read_text())
    assert {group["labels"]["run"] for group in groups} <= {folder.name}
    return {group["targets"][0]: group["labels"]["service"] for group in groups}


def test_file_names_the_tasks_that_are_there_or_should_be(tmp_path: Path) -> None:
    targets = Targets(tmp_path, chief="10.0.0.9:2222", chief_metrics="127.0.0.1:9000")
    targets.show([])
    assert found(tmp_path) == {"127.0.0.1:9000": "chief"}
    ps = member("ps", 0, "10.0.0.1:9001")
    workers = [
        member("worker", 0, "10.0.0.1:9002"),
        member("worker", 1, "10.0.0.1:9003", state=Life.DEAD),
        member("worker", 2, "10.0.0.1:9004", state=Life.LEFT),
        member("worker", 3, ""),
    ]
    targets.show([ps, *workers])
    assert found(tmp_path) == {
        "127.0.0.1:9000": "chief",
        "10.0.0.1:9001": "ps",
        "10.0.0.1:9002": "worker",
        "10.0.0.1:9003": "worker",
    }
    targets.show([dataclasses.replace(ps, metrics_address="10.0.0.1:9999")])
    assert found(tmp_path) == {"127.0.0.1:9000": "chief", "10.0.0.1:9999": "ps"}
    targets.clear()
    assert found(tmp_path) == {}


def test_file_is_written_when_something_has_changed_only(tmp_path: Path) -> None:
    targets = Targets(tmp_path, chief="10.0.0.9:2222", chief_metrics="127.0.0.1:9000")
    targets.show([member("ps", 0, "10.0.0.1:9001")])
    (tmp_path / NAME).unlink()
    targets.show([member("ps", 0, "10.0.0.1:9001", last_heard_s=5.0, state=Life.SUSPECT)])
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    ("metrics", "address", "expected"),
    [
        ("127.0.0.1:9001", "10.0.0.1:2222", "127.0.0.1:9001"),
        ("0.0.0.0:9001", "10.0.0.1:2222", "10.0.0.1:9001"),
        ("[::]:9001", "ps-0.ps:2222", "ps-0.ps:9001"),
        ("0.0.0.0:9001", "[fd00::7]:2222", "[fd00::7]:9001"),
        ("nonsense", "10.0.0.1:2222", "nonsense"),
    ],
)
def test_address_that_means_every_interface_is_told_by_the_tasks_own_name(
    metrics: str, address: str, expected: str
) -> None:
    assert reachable(metrics, address) == expected


def test_folder_that_is_gone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    targets = Targets(tmp_path / "gone", chief="10.0.0.9:2222", chief_metrics="127.0.0.1:9000")
    with caplog.at_level(logging.ERROR, logger="shardline_chief"):
        targets.show([])
        targets.show([member("ps", 0, "10.0.0.1:9001")])
    (said,) = caplog.records
    assert said.getMessage().endswith("can't be written (No such file or directory); training continues without it")


def test_disk_that_works_again_gets_the_file_without_any_change(tmp_path: Path) -> None:
    out = tmp_path / "gone"
    targets = Targets(out, chief="10.0.0.9:2222", chief_metrics="127.0.0.1:9000")
    targets.show([])
    out.mkdir()
    targets.show([])
    assert found(out) == {"127.0.0.1:9000": "chief"}


HERE = "ipv4:127.0.0.1:4711"
THERE = "ipv4:10.0.0.7:4711"


@pytest.mark.parametrize(
    ("metrics", "address", "peer", "found"),
    [
        ("127.0.0.1:9464", "", HERE, "127.0.0.1:9464"),
        ("localhost:9464", "", HERE, "localhost:9464"),
        ("[::1]:9464", "", "ipv6:%5B::1%5D:4711", "[::1]:9464"),
        ("10.0.0.7:9464", "10.0.0.7:2222", THERE, "10.0.0.7:9464"),
        ("10.0.0.7:9464", "", "ipv6:%5B::ffff:10.0.0.7%5D:4711", "10.0.0.7:9464"),
        ("0.0.0.0:9464", "10.0.0.7:2222", THERE, "0.0.0.0:9464"),
        ("0.0.0.0:9464", "", THERE, "10.0.0.7:9464"),
        # A host of the cluster spec, whatever the way from there.
        ("10.0.0.1:9464", "", THERE, "10.0.0.1:9464"),
        # Another's.
        ("10.0.0.8:9464", "10.0.0.8:2222", THERE, ""),
        ("0.0.0.0:9464", "10.0.0.8:2222", THERE, ""),
        ("127.0.0.1:9464", "", THERE, ""),
        ("192.0.2.1:9464", "", HERE, ""),
        ("no-such-host.invalid:9464", "", THERE, ""),
        ("10.0.0.7:9464", "", "unix:", ""),
        # No address.
        ("10.0.0.7:0", "", THERE, ""),
        ("10.0.0.7:99999", "", THERE, ""),
        ("10.0.0.7:9464/../secret?x=", "", THERE, ""),
        ("http://10.0.0.7:9464", "", THERE, ""),
        ("10.0.0.7", "", THERE, ""),
        ("0.0.0.0:9464", "nowhere", THERE, ""),
    ],
)
def test_metrics_are_where_their_task_joins_from(metrics: str, address: str, peer: str, found: str) -> None:
    assert asyncio.run(own_metrics(metrics, address, peer, {"10.0.0.1"})) == found


@pytest.mark.parametrize(
    ("told", "level", "words"),
    [
        ("127.0.0.1:9464", logging.INFO, "for its own machine only; --host"),
        ("[::1]:9464", logging.INFO, "for its own machine only; --host"),
        ("192.0.2.1:9464", logging.WARNING, "which may be another's"),
        ("http://x", logging.WARNING, "which may be another's"),
    ],
)
def test_that_metrics_are_left_out_is_a_warning_unless_nobody_was_to_see_them(
    told: str, level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardline_chief"):
        tell_left_out("worker/0", THERE, told)
    (said,) = caplog.records
    assert said.levelno == level and words in said.getMessage()
