"""Ports that are held for those who are told of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals

import pytest

from shardline.errors import UsageError
from shardline.host.ports import CAN_HOLD, held_port
from shardline.rpc.server import RpcServer
from tests.chaos.field import Field
from tests.chaos.nursery import Ended

pytestmark = pytest.mark.skipif(not CAN_HOLD, reason="a port can be held on Linux only")


def may_take(port: int) -> bool:
    """Whether the system would give the port to another process, as that of a connection that is opened."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_held_port_is_nobody_elses_and_one_server_after_another_listens_there() -> None:
    with held_port() as held:
        port = held.getsockname()[1]
        assert not may_take(port)
        for _ in range(2):
            server = RpcServer(f"127.0.0.1:{port}")
            assert server.start() == f"127.0.0.1:{port}"
            second = RpcServer(f"127.0.0.1:{port}")
            with pytest.raises(UsageError, match="is another process using port"):
                second.start()
            server.close(grace_s=0.0)
            assert not may_take(port)
    assert may_take(port)


def test_a_host_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(UsageError, match=r"no port of 203\.0\.113\.1 can be bound: .*is that an address of this host"):
        held_port("203.0.113.1")


class Nobody:
    """Starts no process, and says that each has ended."""

    def start(
        self, arguments: Sequence[str], *, log: Path, network: str, settings: Mapping[str, str], ended: Ended
    ) -> int:
        ended(0)
        return 1

    def signal(self, pid: int, number: Signals) -> bool:
        return False


def test_the_ports_of_a_chaos_cluster_are_its_own_until_its_end_whoever_of_it_is_away(tmp_path: Path) -> None:
    field = Field(Nobody(), tmp_path, tmp_path / "job.py", counts={"chief": 1, "ps": 2}, timeout_s=3.0)
    with field:
        spec = json.loads((tmp_path / "cluster.json").read_text())
        ports = [int(place.rpartition(":")[2]) for role in ("chief", "ps") for place in spec[role]]
        assert len(set(ports)) == 3
        assert not any(map(may_take, ports))
    assert all(map(may_take, ports))
