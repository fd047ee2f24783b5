"""What every topology must do, whoever wrote it: those in the table, and the toy."""

from __future__ import annotations

import pytest

from shardline.errors import JobError
from shardline.seams import doc_line
from shardline.testing import reference
from shardline.topology import TOPOLOGIES, Aggregators, Flat, Hop, Surroundings, Topology
from tests.conformance.toys import toy_topology  # noqa: F401 - joins the table
from tests.support.cluster import Cluster, assert_same_end
from tests.support.jobs import Wide, make_job
from tests.support.overlap import OverlapWorker

EACH = pytest.mark.parametrize("topology", [TOPOLOGIES.parse(resident.name) for resident in TOPOLOGIES], ids=str)


@EACH
def test_it_is_written_as_it_is_read_and_says_what_it_is(topology: Topology) -> None:
    assert TOPOLOGIES.parse(str(topology)) == topology
    assert doc_line(type(topology)).endswith(".")


@EACH
def test_every_worker_has_a_way_to_every_shard(topology: Topology) -> None:
    servers = {shard: Hop(f"ps/{shard}", f"127.0.0.1:{2000 + shard}") for shard in range(3)}
    for index in range(4):
        hops = topology.hops(Surroundings(task=f"worker/{index}", workers=4, servers=servers))
        assert sorted(hops) == [0, 1, 2]


@EACH
@pytest.mark.parametrize("lane", ["grpc", "shm"])
def test_it_ends_in_the_bits_of_one_process(topology: Topology, lane: str) -> None:
    job = make_job("adam", topology=str(topology), model=Wide, replicas=3, steps=4)
    with Cluster(job, ps=2, lane=lane) as cluster:
        cluster.train([[0], [1], [2]])
        assert_same_end(cluster.state(), reference(job))


@EACH
def test_a_worker_that_is_told_to_start_its_step_over_ends_in_the_same_bits(topology: Topology) -> None:
    job = make_job("momentum", topology=str(topology), replicas=1, steps=4)
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0).run([0], 2)
        worker.tick([0])
        worker.trainer.give_up()
        worker.run([0], job.steps)
        assert_same_end(cluster.state(), reference(job))


@EACH
def test_gradients_leave_while_they_are_computed(topology: Topology) -> None:
    job = make_job("sgd", topology=str(topology), replicas=1, steps=4)
    with Cluster(job) as cluster:
        worker = OverlapWorker(cluster, 0)
        cluster.workers.append(worker)
        worker.run([0], job.steps)
        assert_same_end(cluster.state(), reference(job))
        assert worker.early_steps


def test_flat_is_straight_to_the_servers() -> None:
    servers = {0: Hop("ps/0", "127.0.0.1:2000")}
    assert Flat().hops(Surroundings(task="worker/0", workers=1, servers=servers)) == servers


@pytest.mark.parametrize(
    ("racks", "expected"),
    [
        ({}, [0, 0, 1, 1]),
        # By racks, not by neighbours; the third rack has no aggregator.
        ({"worker": "abac", "aggregator": "ab"}, [0, 1, 0, None]),
        ({"worker": "aaab", "aggregator": "aa"}, [0, 0, 1, None]),
    ],
)
def test_workers_use_an_aggregator_of_their_rack(racks: dict[str, str], expected: list[int | None]) -> None:
    servers, places = {0: Hop("ps/0", "s:1")}, {number: Hop(f"aggregator/{number}", "a:1") for number in range(2)}
    named = {f"{role}/{number}": rack for role, all_of in racks.items() for number, rack in enumerate(all_of)}
    for index, number in enumerate(expected):
        task = f"worker/{index}"
        around = Surroundings(task=task, workers=4, servers=servers, aggregators=places, places=2, racks=named)
        assert Aggregators().hops(around) == (servers if number is None else {0: places[number]})


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(JobError, match="choose from flat, aggregators, local-sum"):
        make_job(topology="star")
