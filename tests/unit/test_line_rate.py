from __future__ import annotations

import functools
import socket
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from shardline.client.exchange.shard_exchange import ShardOutcome
from shardline.errors import UsageError
from shardline.observability import line_rate
from shardline.observability.line_rate import given_rate, interface_rate, meter_line
from shardline.observability.metrics import Metrics

Address = namedtuple("Address", "family address")
Stats = namedtuple("Stats", "speed")


Interfaces = Mapping[str, tuple[str, int]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Interfaces], None]:
    """Makes a machine of these interfaces: name to (address, Mbit/s as the kernel says it); "eth" is hardware."""
    monkeypatch.delenv("SHARDLINE_LINK_MBIT", raising=False)
    monkeypatch.setattr(line_rate, "INTERFACES", tmp_path)
    return functools.partial(make_machine, monkeypatch, tmp_path)


def make_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, interfaces: Interfaces) -> None:
    for name in interfaces:
        (folder / name).mkdir()
        if name.startswith("eth"):
            (folder / name / "device").mkdir()
        if name.startswith("bond"):
            (folder / name / "bonding").mkdir()
    addresses = {name: [Address(socket.AF_INET, address)] for name, (address, _) in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: Stats(speed) for name, (_, speed) in interfaces.items()})


def test_line_rate_is_that_of_the_interface_with_the_address(machine: Callable[[Interfaces], None]) -> None:
    machine({"eth0": ("10.0.0.1", 1000), "eth1": ("10.0.0.2", 25_000), "bond0": ("10.0.0.3", 20_000)})
    assert interface_rate("10.0.0.1:2222") == 125e6
    assert interface_rate("10.0.0.2:2222") == 3125e6
    assert interface_rate("10.0.0.3:2222") == 2500e6


@pytest.mark.parametrize(
    ("name", "speed"),
    [("lo", 0), ("eth0", 0), ("eth0", 65_535), ("veth12ab", 10_000), ("br-0", 10_000), ("ens3", 10_000)],
)
def test_no_line_rate_is_made_up(machine: Callable[[Interfaces], None], name: str, speed: int) -> None:
    machine({name: ("10.0.0.1", speed)})
    assert interface_rate("10.0.0.1:2222") is None
    assert interface_rate("10.9.9.9:2222") is None


def test_line_rate_of_a_name_that_nobody_knows_is_unknown() -> None:
    assert interface_rate("nowhere.invalid:2222") is None
    assert interface_rate("no address") is None


def test_given_line_rate_comes_before_the_interfaces(
    machine: Callable[[Interfaces], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({"eth0": ("10.0.0.1", 1000)})
    metrics = Metrics("ps", "ps/0")
    meter_line(metrics, "10.0.0.1:2222")
    labels = {"task": "ps/0"}
    assert metrics.registry.get_sample_value("shardline_link_bytes_per_second", labels) == 125e6
    monkeypatch.setenv("SHARDLINE_LINK_MBIT", "100")
    meter_line(metrics, "10.0.0.1:2222")
    assert metrics.registry.get_sample_value("shardline_link_bytes_per_second", labels) == 12.5e6


def test_unknown_line_rate_is_no_sample(machine: Callable[[Interfaces], None]) -> None:
    machine({"lo": ("127.0.0.1", 0)})
    metrics = Metrics("ps", "ps/0")
    meter_line(metrics, "127.0.0.1:2222")
    assert metrics.registry.get_sample_value("shardline_link_bytes_per_second", {"task": "ps/0"}) is None


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf"])
def test_line_rate_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SHARDLINE_LINK_MBIT", text)
    with pytest.raises(UsageError, match=rf"SHARDLINE_LINK_MBIT is '{text}'; give a rate in megabits"):
        given_rate()


def outcome(*, pushed_s: float, first_s: float, ended_s: float = 10.0) -> ShardOutcome:
    return ShardOutcome(acks=(), began_s=1.0, pushed_s=pushed_s, first_s=first_s, ended_s=ended_s)


@pytest.mark.parametrize(
    ("found", "computed_s", "expected"),
    [
        # Nothing left early: the exchange began when all was computed.
        (outcome(pushed_s=4.0, first_s=6.0), 1.0, (3.0, 2.0, 4.0)),
        # Gradients left during the backward pass, which ended at 3.
        (outcome(pushed_s=4.0, first_s=6.0), 3.0, (1.0, 2.0, 4.0)),
        # This shard had all of its own before.
        (outcome(pushed_s=4.0, first_s=6.0), 5.0, (0.0, 1.0, 4.0)),
        # Its first buckets came back while others were still sent.
        (outcome(pushed_s=4.0, first_s=2.0), 1.0, (3.0, 0.0, 6.0)),
        # Nothing had to come: waiting is all there was.
        (outcome(pushed_s=4.0, first_s=0.0), 1.0, (3.0, 0.0, 6.0)),
    ],
)
def test_parts_of_an_exchange_are_what_followed_the_backward_pass(
    found: ShardOutcome, computed_s: float, expected: tuple[float, float, float]
) -> None:
    assert found.parts(computed_s) == expected
    assert sum(expected) == found.ended_s - computed_s
