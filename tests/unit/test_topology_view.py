"""Who exchanges with whom: told in heartbeats, turned into rates, and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardline.cli.status_frame import Frame
from shardline.cli.terminal import PlainConsole
from shardline.core.status import ChiefStatus, PeerBytes, TaskLinks, TaskStatus
from shardline.errors import ProtocolError
from shardline.observability.line_rate import links
from shardline.observability.metrics import Metrics
from shardline.observability.topology_view import MOST_EDGES, MachineView, NodeView, TopologyView, topology_view
from shardline.observability.view import cluster_view
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.messages.status import chief_status_from_proto, chief_status_to_proto
from shardline.rpc.v1 import chief_pb2
from shardline_chief.io.reporter import LinkRates
from tests.support.chief_cluster import running

LINE = 125e6


def task(name: str, host: str, peers: Mapping[str, tuple[float, float]] | None = None, line: float = 0.0) -> TaskStatus:
    told = tuple(PeerBytes(task=peer, out_bytes=out, in_bytes=back) for peer, (out, back) in (peers or {}).items())
    return TaskStatus(
        task=name, state="alive", address=f"{host}:2222", links=TaskLinks(line_bytes_per_s=line, peers=told)
    )


def view(*tasks: TaskStatus) -> TopologyView:
    found = topology_view(tasks)
    assert found is not None
    return found


def edges(found: TopologyView) -> dict[tuple[str, str], tuple[float, float, bool]]:
    return {(one.start, one.end): (one.out_bytes_per_s, one.in_bytes_per_s, one.marked) for one in found.edges}


RACK = (
    task("chief/0", "10.0.0.1"),
    task("ps/0", "10.0.0.1", line=LINE),
    task("aggregator/0", "10.0.0.2", {"ps/0": (9e7, 4e7)}, line=10 * LINE),
    task("worker/0", "[fe80::1]", {"aggregator/0": (8e7, 4e7)}),
    task("worker/1", "[fe80::1]", {"aggregator/0": (8e7, 4e7), "ps/0": (0.0, 0.0)}),
)


def test_tasks_stand_in_their_machines_and_the_link_with_the_largest_share_is_marked() -> None:
    found = view(*RACK)
    assert found.machines == (
        MachineView(
            name="fe80::1",
            nodes=(NodeView(name="worker/0", column=0), NodeView(name="worker/1", column=0)),
            others="",
            marked=False,
        ),
        MachineView(name="10.0.0.2", nodes=(NodeView(name="aggregator/0", column=1),), others="", marked=False),
        MachineView(name="10.0.0.1", nodes=(NodeView(name="ps/0", column=2),), others="chief/0", marked=True),
    )
    # The aggregator's machine moves more, over a link that carries ten times as much.
    assert found.marked == "fullest link: 10.0.0.1 in, 90.0 MB/s, 72% of 125.0 MB/s"
    assert edges(found) == {
        ("aggregator/0", "ps/0"): (9e7, 4e7, True),
        ("worker/0", "aggregator/0"): (8e7, 4e7, False),
        ("worker/1", "aggregator/0"): (8e7, 4e7, False),
        ("worker/1", "ps/0"): (0.0, 0.0, False),
    }


def test_where_no_rate_of_a_link_is_known_the_busiest_is_marked_and_said_to_be_that() -> None:
    found = view(*(replace(one, links=replace(one.links, line_bytes_per_s=0.0)) for one in RACK))
    # What it takes from workers, and from the server.
    assert found.marked == "busiest link: 10.0.0.2 in, 200.0 MB/s, what it carries is not known"
    assert [(one.start, one.marked) for one in found.edges] == [
        ("aggregator/0", True),
        ("worker/0", True),
        ("worker/1", True),
        ("worker/1", False),
    ]


def test_on_one_machine_the_busiest_pair_is_marked_and_both_sides_of_it_are_one_edge() -> None:
    # Each of two stages tells what it sends.
    stages = task("worker/0", "h", {"worker/1": (4e6, 0.0)}), task("worker/1", "h", {"worker/0": (3e6, 0.0)})
    found = view(task("ps/0", "h"), *stages, task("worker/2", "h", {"ps/0": (2e6, 1e6)}))
    assert found.marked == "busiest: worker/0 and worker/1, 7.0 MB/s, within one machine"
    assert edges(found) == {("worker/0", "worker/1"): (4e6, 3e6, True), ("worker/2", "ps/0"): (2e6, 1e6, False)}
    assert [one.marked for one in found.machines] == [False]
    # While nothing moves, nothing is marked.
    still = view(task("ps/0", "h"), task("worker/0", "h", {"ps/0": (0.0, 0.0)}))
    assert (still.marked, edges(still)) == ("", {("worker/0", "ps/0"): (0.0, 0.0, False)})


@pytest.mark.parametrize(
    ("workers", "servers", "each", "machines", "merged"),
    [
        # Tasks of one role on a machine, then machines of one kind.
        (16, 4, 8, ["h0", "h1", "s0", "s1", "s2", "s3"], 8),
        (64, 8, 1, ["64 machines", "8 machines"], 1),
    ],
)
def test_a_large_cluster_is_drawn_with_few_edges_that_have_all_the_bytes(
    workers: int, servers: int, each: int, machines: list[str], merged: int
) -> None:
    shards = {f"ps/{index}": (1e6, 2e6) for index in range(servers)}
    found = view(
        *(task(f"ps/{index}", f"s{index}", line=LINE) for index in range(servers)),
        *(task(f"worker/{index}", f"h{index // each}", shards) for index in range(workers)),
    )
    assert [one.name for one in found.machines] == machines
    assert len(found.edges) == merged <= MOST_EDGES
    assert sum(one.out_bytes_per_s for one in found.edges) == workers * servers * 1e6
    assert found.marked == f"fullest link: s0 out, {2 * workers}.0 MB/s, {2 * workers / 125:.0%} of 125.0 MB/s"
    assert [one.name for one in found.machines if one.marked] == ["8 machines" if merged == 1 else "s0"]


def test_machines_that_have_workers_and_servers_keep_both_when_they_are_merged() -> None:
    shards = {f"ps/{index}": (1e6, 1e6) for index in range(5)}
    found = view(
        *(task(f"ps/{index}", f"h{index}") for index in range(5)),
        *(task(f"worker/{index}", f"h{index}", shards) for index in range(5)),
    )
    (machine,) = found.machines
    assert (machine.name, [node.name for node in machine.nodes]) == ("5 machines", ["worker/0-4", "ps/0-4"])
    assert edges(found) == {("worker/0-4", "ps/0-4"): (25e6, 25e6, True)}


def test_only_who_lives_is_drawn_and_nobody_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    status = ChiefStatus(phase="running", tasks=(*RACK[:4], replace(RACK[4], state="dead")))
    found = cluster_view(chief_status_from_proto(chief_status_to_proto(status))).topology
    assert found is not None
    assert [(one.start, one.end) for one in found.edges] == [("aggregator/0", "ps/0"), ("worker/0", "aggregator/0")]
    PlainConsole(width=100).print(Frame(view=cluster_view(status)))
    assert "fullest link: 10.0.0.1 in, 90.0 MB/s, 72% of 125.0 MB/s" in capsys.readouterr().out
    assert cluster_view(replace(status, phase="ended")).topology is None
    assert cluster_view(ChiefStatus(phase="running", tasks=RACK[:2])).topology is None


def test_who_pushes_and_pulls_tells_its_bytes_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("worker", "worker/0")
    for kind, what, peer, count in (
        ("push", "raw", "ps/0", 400),
        ("push", "wire", "ps/0", 100),
        ("pull", "raw", "ps/0", 300),
        # Within one host nothing is sent.
        ("push", "raw", "ps/1", 50),
        ("push", "wire", "ps/1", 0),
        ("parcel", "wire", "worker/1", 7),
        # It speaks for its host.
        ("push", "raw", "worker/0", 9),
    ):
        metrics.counter(f"shardline_{kind}_{what}_bytes_total", peer=peer, codec="raw", lane="tcp").inc(count)
    metrics.counter("shardline_push_wire_bytes_total", peer="ps/0", codec="raw", lane="sum").inc(20)
    told = links(metrics)
    assert told == TaskLinks(
        peers=(
            PeerBytes(task="ps/0", out_bytes=120, in_bytes=300),
            PeerBytes(task="ps/1", out_bytes=50),
            PeerBytes(task="worker/1", out_bytes=7),
        )
    )
    assert from_message(TaskLinks, to_message(chief_pb2.TaskLinks, told)) == told
    server = Metrics("ps", "ps/0")
    server.counter("shardline_push_wire_bytes_total", peer="worker/0", codec="raw", lane="tcp").inc(5)
    server.gauge("shardline_link_bytes_per_second").set(LINE)
    assert links(server) == TaskLinks(line_bytes_per_s=LINE)


def test_the_chief_makes_rates_of_what_heartbeats_tell() -> None:
    cluster, rates = running(), LinkRates()

    def tell(count: float) -> TaskLinks:
        peers = (PeerBytes(task="ps/0", out_bytes=count, in_bytes=2 * count), PeerBytes(task="nobody/0", out_bytes=1))
        assert cluster.beat("worker/0", links=TaskLinks(line_bytes_per_s=LINE, peers=peers))
        rows = {row.task: row.links for row in cluster.program.rows(cluster.now_s)}
        rates.add({**rows, "ps/0": TaskLinks()}, count / 1e6)
        return rates.of("worker/0", rows["worker/0"])

    tell(0.0)
    assert tell(2e6) == TaskLinks(line_bytes_per_s=LINE, peers=(PeerBytes(task="ps/0", out_bytes=1e6, in_bytes=2e6),))
    with pytest.raises(ProtocolError, match="links: bytes are nan; they must be a number from 0 to"):
        tell(float("nan"))
