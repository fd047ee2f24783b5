"""shardline bench mesh: every link measured once each way, and nobody made to send to others."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.errors import ClusterSpecError, ForbiddenError, ProtocolError, UnreachableError, UsageError
from shardline.host.ports import held_port
from shardline.security import Security
from shardline_lab.bench.link import LinkClient, LinkServer
from shardline_lab.bench.mesh import Mesh, measured, meetings

TOKEN = b"the token of this cluster"


def free_port() -> int:
    with held_port() as held:
        return int(held.getsockname()[1])


@contextmanager
def serving(peers: tuple[str, ...], token: bytes = TOKEN) -> Iterator[LinkServer]:
    server = LinkServer("127.0.0.1:0", token, peers)
    thread = threading.Thread(target=lambda: server.serve(wait_s=30.0))
    thread.start()
    try:
        yield server
    finally:
        LinkClient(server.address, where="it", token=token).ask("end")
        thread.join(timeout=20.0)
        assert not thread.is_alive()


def test_all_links_of_a_cluster_are_measured_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, out, port = tmp_path / "cluster.json", tmp_path / "mesh.json", free_port()
    tasks = {"chief": ["127.0.0.1:0"], "ps": ["127.0.0.1:0", "127.0.0.2:0"], "worker": ["127.0.0.3:0", "*:0"]}
    spec.write_text(json.dumps(tasks))
    command = ["bench", "mesh", "--cluster", str(spec), "--seconds", "0.05", "--megabytes", "5"]
    assert main(command) == ClusterSpecError.exit_code
    assert "chief/0 is 127.0.0.1:0" in capsys.readouterr().err
    assert main([*command, "--port", str(port), "--out", str(out)]) == 0
    found = Mesh.read(out)
    hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
    assert found.machines == dict(zip(hosts, [["chief/0", "ps/0"], ["ps/1"], ["worker/0"]], strict=True))
    assert set(found.bytes_per_s) == set(itertools.permutations(hosts, 2))
    assert all(rate > 1e6 for rate in found.bytes_per_s.values())
    assert len(capsys.readouterr().out.splitlines()) == 1 + 6


@pytest.mark.parametrize("count", range(2, 9))
def test_every_two_machines_meet_once_and_nobody_meets_two_at_a_time(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = list(meetings(names))
    assert all(len(set(sum(pairs, ()))) == 2 * len(pairs) for pairs in rounds)  # type: ignore[arg-type]
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == [sorted(pair) for pair in itertools.combinations(names, 2)]


def test_a_machine_measures_to_those_of_its_cluster_alone_and_for_who_has_the_token() -> None:
    with serving(()) as far, serving((far.address,)) as near:
        client = LinkClient(near.address, where="near", token=TOKEN)
        assert client.towards(far.address, 0.05, 1 << 20).up_bytes_per_s > 0.0
        with pytest.raises(UnreachableError, match=r"from near: 127.0.0.1:1 is no machine of its cluster.json"):
            client.towards("127.0.0.1:1", 0.05, 1)
        with pytest.raises(ProtocolError, match="give both the same token") as refused:
            LinkClient(near.address, where="near", token=b"another token than that").towards(far.address, 0.05, 1)
        assert isinstance(refused.value.__cause__, ForbiddenError)


def test_a_machine_that_is_not_there_is_one_sentence_and_ends_the_others() -> None:
    absent = f"127.0.0.1:{free_port()}"
    server = LinkServer("127.0.0.1:0")
    thread = threading.Thread(target=lambda: server.serve(wait_s=30.0))
    thread.start()
    with pytest.raises(UnreachableError, match=rf"^nothing is listening at {absent}; start there first: [^;]*$"):
        measured({"a": server.address, "b": absent}, Security(), seconds=0.05, most=1)
    thread.join(timeout=20.0)
    assert not thread.is_alive()


def test_one_machine_has_no_links_and_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    assert main(["bench", "mesh", "--cluster", json.dumps(tasks)]) == UsageError.exit_code
    assert "all tasks of the cluster spec are on 127.0.0.1" in capsys.readouterr().err
    links = [{"from": "a", "to": "b", "bytes_per_s": 1.0, "round_trip_s": 0.1}]
    for text, why in (
        ("[]", "is not a file of shardline bench mesh"),
        (json.dumps({"machines": {"a": [], "b": []}, "links": links}), "lacks a link, such as b to a"),
    ):
        (tmp_path / "mesh.json").write_text(text)
        with pytest.raises(UsageError, match=why):
            Mesh.read(tmp_path / "mesh.json")
