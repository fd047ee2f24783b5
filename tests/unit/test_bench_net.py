"""shardline bench net: a link and a lane measured between two tasks, and every sentence of what can be wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.main import main
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, ProtocolError, ShardlineError, UnreachableError, UsageError
from shardline.host.ports import on_this_host
from shardline_lab.bench import link as bench_link
from shardline_lab.bench.command import BenchFigures, headline, table
from shardline_lab.bench.lane import LaneFigures, pull_wait_s
from shardline_lab.bench.link import LINE_BYTES, MAGIC, LinkClient, LinkFigures, LinkServer, check_request


@contextmanager
def serving(token: bytes = b"") -> Iterator[tuple[str, list[Any]]]:
    """A server on a thread; yields its address and where the request for a lane arrives."""
    server = LinkServer("127.0.0.1:0", token)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(server.serve(wait_s=10.0))
        except UnreachableError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server.address, found
    finally:
        if thread.is_alive():
            # It may be ending by itself at this moment, and hang up.
            with contextlib.suppress(ShardlineError):
                LinkClient(server.address, where="it", token=token).ask("lane", budget_s=1.0)
        thread.join(timeout=15.0)
        assert not thread.is_alive()


def cluster(ps: str, worker: str = "127.0.0.1:0") -> str:
    return json.dumps({"chief": ["127.0.0.1:1"], "ps": [ps], "worker": [worker]})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_link_is_measured_both_ways_and_there_and_back() -> None:
    with serving() as (address, _):
        found = LinkClient(address, where="ps/0").measure(0.1)
    assert found.up_bytes_per_s > 1e6
    assert found.down_bytes_per_s > 1e6
    assert 0.0 < found.round_trip_s < 1.0


def test_request_for_a_lane_ends_the_first_part_and_frees_the_port() -> None:
    with serving() as (address, found):
        LinkClient(address, where="ps/0").ask("lane", budget_s=5.0)
    assert found[0]["budget_s"] == 5.0
    again = LinkServer(address)
    assert again.address == address


def test_stranger_on_the_port_changes_nothing() -> None:
    with serving() as (address, _):
        host, _, port = address.rpartition(":")
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"x" * (LINE_BYTES + 10), b"{}\n", b"[1]\n", b""):
            with socket.create_connection((host, int(port)), timeout=5.0) as sock:
                sock.sendall(words)
        assert LinkClient(address, where="ps/0").measure(0.05).up_bytes_per_s > 0.0


def test_with_a_token_both_sides_prove_it_before_anything_else_and_never_send_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = b"the token of this cluster"
    with serving(token) as (address, _):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
            # As long as a nonce and a proof.
            stranger.sendall(b'{"is": "shardline-bench-1", "do": "send", "seconds": 60}\n'.ljust(64, b" "))
            with contextlib.suppress(ConnectionError):
                assert len(stranger.recv(4096)) == 64
                assert stranger.recv(4096) == b""
        with pytest.raises(ProtocolError, match=r"bench net --serve` of this cluster .* or give both the same token"):
            LinkClient(address, where="ps/0", token=b"another token than that").ask("echo", count=1)
        assert LinkClient(address, where="ps/0", token=token).measure(0.05).up_bytes_per_s > 0.0
    # Where one side has none, each waits for the other one to begin.
    monkeypatch.setattr(bench_link, "STALL_S", 0.5)
    for theirs, ours in ((token, b""), (b"", token)):
        server = LinkServer("127.0.0.1:0", theirs)
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(server.serve, wait_s=2.0)
            with pytest.raises(ProtocolError, match="or give both the same token"):
                LinkClient(server.address, where="ps/0", token=ours).ask("lane", budget_s=5.0)
            assert isinstance(served.exception(timeout=20.0), UnreachableError)


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "send", "seconds": 1.0},
        {"is": MAGIC, "do": "send", "seconds": 1e9},
        {"is": MAGIC, "do": "receive", "seconds": float("nan")},
        {"is": MAGIC, "do": "echo", "count": -1},
        {"is": MAGIC, "do": "echo", "count": True},
        {"is": MAGIC, "do": "lane"},
        {"is": MAGIC, "do": "shell"},
    ],
)
def test_requests_out_of_range_are_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        check_request(request_)


def test_missing_side_is_told_what_to_start() -> None:
    client = LinkClient(f"127.0.0.1:{free_port()}", where="ps/0 at its address", hint="start it")
    with pytest.raises(UnreachableError, match="nothing is listening at ps/0 at its address; start it"):
        client.measure(0.1)


def test_unknown_host_is_a_sentence() -> None:
    with pytest.raises(UnreachableError, match=r"host of ps/0 can't be resolved.*no-such-host.invalid"):
        LinkClient("no-such-host.invalid:1", where="ps/0").measure(0.1)


def test_blocked_port_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(bench_link.socket, "create_connection", connect)
    with pytest.raises(UnreachableError, match=r"did not answer within 10 s.*port 2222 blocked"):
        LinkClient("127.0.0.1:2222", where="ps/0").measure(0.1)


def test_another_program_on_the_port_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\n"))
        thread.start()
        with pytest.raises(ProtocolError, match=r"is not `shardline bench net --serve`.*--port"):
            LinkClient(f"127.0.0.1:{other.getsockname()[1]}", where="ps/0").measure(0.1)
        thread.join(timeout=5.0)


def test_server_that_nobody_asks_ends_with_a_sentence() -> None:
    with pytest.raises(UnreachableError, match="no measurement against"):
        LinkServer("127.0.0.1:0").serve(wait_s=0.05)


def test_port_in_use_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"can't listen on .*another process"):
            LinkServer(address)


def test_local_addresses_are_those_one_can_bind() -> None:
    assert on_this_host("127.0.0.1")
    assert not on_this_host("192.0.2.1")
    assert not on_this_host("no-such-host.invalid")


def test_both_ends_on_one_machine_start_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "net.json"
    command = ["bench", "net", "--cluster", cluster("127.0.0.1:0"), "--megabytes", "0.5", "--seconds", "0.2"]
    assert main([*command, "--lane", "grpc", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["from"] == "worker/0"
    assert found["to"] == "ps/0"
    assert found["lane"]["lane"] == "grpc"
    assert found["lane"]["nbytes"] > 400_000
    assert found["push_ratio"] == found["lane"]["push_bytes_per_s"] / found["link"]["up_bytes_per_s"]
    text = capsys.readouterr().out
    assert "push worker/0 -> ps/0" in text
    assert "pull ps/0 -> worker/0" in text


def test_task_with_itself_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "net", "--cluster", cluster("127.0.0.1:0"), "--from", "ps/0", "--to", "ps/0"]
    assert main(command) == UsageError.exit_code
    assert "name two tasks" in capsys.readouterr().err


def test_task_that_is_not_in_the_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "net", "--cluster", cluster("127.0.0.1:0"), "--from", "worker/7"]) == (
        ClusterSpecError.exit_code
    )
    assert "worker/7 is not in the cluster spec" in capsys.readouterr().err


def test_port_0_elsewhere_needs_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "net", "--cluster", cluster("192.0.2.1:0")]) == ClusterSpecError.exit_code
    assert "--port" in capsys.readouterr().err


def test_figures_for_people_name_what_was_not_used() -> None:
    found = BenchFigures(
        sender="worker/0",
        server="ps/0",
        address="10.0.0.1:2222",
        link=LinkFigures(up_bytes_per_s=125e6, down_bytes_per_s=125e6, round_trip_s=0.001),
        lane=LaneFigures(
            lane="grpc",
            fallbacks=("tcp: the port is blocked",),
            nbytes=64_000_000,
            push_bytes_per_s=120e6,
            pull_bytes_per_s=100e6,
            both_s=0.6,
            rounds=5,
        ),
    )
    assert found.push_ratio == pytest.approx(0.96)
    assert headline(found)[1] == "  lane skipped: tcp: the port is blocked"
    assert table(found).row_count == 3


@pytest.mark.parametrize(
    ("megabytes", "least_s", "most_s"), [(0.01, 5.0, 5.1), (64.0, 64.0, 70.0), (4e3, 600.0, 600.0)]
)
def test_a_pull_waits_for_a_push_that_a_slow_link_takes_long_for(
    megabytes: float, least_s: float, most_s: float
) -> None:
    assert least_s <= pull_wait_s(Timeouts(total_s=60.0), int(megabytes * 1e6)) <= most_s
