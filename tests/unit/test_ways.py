"""A worker's way to the servers: who sums for its host, and when an aggregator is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardline import plugins
from shardline.client.ways import Speaker, Ways, mates
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import JobView, Orders
from shardline.core.placement import Placement, Post
from shardline.core.plan import make_plan
from shardline.observability.metrics import Metrics
from tests.support.builders import make_job_spec


class Sums:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.timeline = 0
        self.members: list[str] = []

    def renew(self, view: JobView, who: Identity, members: Any) -> None:
        self.timeline = view.timeline
        self.admit_members(members)

    def admit_members(self, members: Any) -> None:
        self.members = [f"{post.task}@{post.incarnation}" for post in members]

    def leave(self) -> None:
        self.timeline, self.members = 0, []


def posts(*lives: tuple[str, int]) -> tuple[Post, ...]:
    return tuple(Post(task=task, address="host:1", incarnation=life) for task, life in lives)


def view(timeline: int = 1, topology: str = "flat") -> JobView:
    job = make_job_spec(topology=topology)
    places = (Placement(shard=0, task="ps/0", address="host:9"),)
    return JobView(job=job, plan=make_plan(job.tensors, 1), placement=places, timeline=timeline)


def link_of(task: str, peers: tuple[Post, ...]) -> Any:
    return SimpleNamespace(task=task, identity=Identity(task, 1), orders=Orders(peers=peers))


def test_workers_are_together_whose_addresses_have_one_host_or_one_label_for_it() -> None:
    cluster = ClusterSpec.from_mapping(
        {
            "chief": ["c:1"],
            "ps": ["c:2"],
            "worker": ["a:1", "A:2", "10.0.0.7:1", "b:1"],
            "labels": {"10.0.0.7": {"host": "a"}},
        }
    )
    peers = tuple(Post(task=f"worker/{n}", address=one, incarnation=1) for n, one in enumerate(cluster.tasks["worker"]))
    assert [post.task for post in mates(cluster, peers, "worker/2")] == ["worker/0", "worker/1", "worker/2"]
    assert [post.task for post in mates(cluster, peers, "worker/3")] == ["worker/3"]


def config(task: str) -> RoleConfig:
    addresses = {"chief": ("host:1",), "ps": ("host:9",), "worker": ("host:2", "host:3"), "aggregator": ("host:4",)}
    role, _, index = task.partition("/")
    return RoleConfig(role=role, index=int(index), cluster=ClusterSpec(addresses), insecure_bind=True)


def test_the_first_worker_of_a_host_sums_for_those_of_the_newest_orders_until_it_is_not_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = Sums()
    monkeypatch.setattr(plugins, "installed", lambda *_: lambda config, address, count: sums)
    speaker = Speaker(config("worker/1"), Metrics("worker", "worker/1"))
    both = posts(("worker/1", 1), ("worker/2", 1))
    # Before it sums, nobody is admitted.
    speaker.heard(Orders(peers=both))
    assert (sums.timeline, sums.members) == (0, [])
    link = link_of("worker/1", both)
    speaker.renew(link, view())
    assert (sums.timeline, sums.members) == (1, ["worker/1@1", "worker/2@1"])
    speaker.heard(Orders(peers=posts(("worker/1", 1), ("worker/2", 2))))
    assert sums.members == ["worker/1@1", "worker/2@2"]
    # Orders that were heard while nothing was summed are made up for, also in the same timeline.
    link.orders = Orders(peers=posts(("worker/1", 1), ("worker/2", 3)))
    speaker.renew(link, view())
    assert sums.members == ["worker/1@1", "worker/2@3"]
    link.orders = Orders(peers=posts(("worker/0", 1), ("worker/1", 1)))
    speaker.renew(link, view(2))
    assert (sums.timeline, sums.members) == (0, [])


def test_an_aggregator_in_use_is_lost_when_the_chief_names_it_no_more() -> None:
    ways = Ways(config("worker/0"))
    there = posts(("aggregator/0", 1))
    ways.hops = ways.choose(link_of("worker/0", there), view(topology="aggregators"))
    assert {hop.task for hop in ways.hops.values()} == {"aggregator/0"}
    assert not ways.lost(Orders(peers=(*there, *posts(("aggregator/1", 1)))))
    assert ways.lost(Orders()) and ways.lost(Orders(peers=posts(("aggregator/0", 2))))
    ways.hops = ways.choose(link_of("worker/0", ()), view(topology="aggregators"))
    assert {hop.task for hop in ways.hops.values()} == {"ps/0"}
    assert not ways.lost(Orders())
