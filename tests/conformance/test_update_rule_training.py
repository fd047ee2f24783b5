"""Every update rule trains on real servers: one asynchronous worker ends where the rule alone would."""

from __future__ import annotations

import pytest
import torch

import tests.conformance.toys.toy_compensation
import tests.conformance.toys.toy_rule  # noqa: F401  # the toys are in the table from here on
from shardline.errors import JobError
from shardline.testing import reference
from shardline.update import RULES
from tests.support.cluster import Cluster
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, make_job

STEPS = 4


@pytest.mark.parametrize(("rule", "lane"), covering(RULES.names, ["grpc", "tcp", "shm"]))
def test_one_worker_ends_where_the_rule_alone_ends(rule: str, lane: str) -> None:
    # Wide needs small steps: infinities would be equal under any rule.
    arguments = {"lr": 1e-5, "momentum": 0.9, "weight_decay": 0.01}
    model = Rich if lane == "tcp" else Wide
    job = make_job("sgd", model=model, steps=STEPS, consistency="async", rule=rule, optimizer_args=arguments)
    with Cluster(job, ps=2, bucket_bytes=1 << 14, lane=lane) as cluster:
        cluster.worker(0).run_async(list(range(STEPS)))
        found = cluster.state().params
    expected = reference(job, STEPS).params
    assert all(bool(value.isfinite().all()) for value in expected.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rule_that_looks_ahead_is_not_the_optimizer() -> None:
    plain, ahead = (
        reference(make_job("sgd", steps=STEPS, consistency="async", rule=rule), STEPS).params
        for rule in ("torch", "toy-momentum")
    )
    assert any(not torch.equal(plain[name], ahead[name]) for name in plain)


def test_a_rule_that_tells_workers_apart_is_refused_in_synchronous_mode() -> None:
    job = make_job("sgd", steps=STEPS, rule="toy-momentum")
    with pytest.raises(JobError, match=r"needs .*to know which worker pushed"):
        job.spec(job.build_model())


def test_the_reference_goes_on_where_it_was() -> None:
    job = make_job("sgd", model=Wide, steps=STEPS, consistency="async", rule="toy-momentum")
    half = reference(job, 2)
    assert reference(job, STEPS, start=half).sha256 == reference(job, STEPS).sha256


@pytest.mark.parametrize("rule", ["toy-momentum", "toy-compensation"])
def test_servers_forget_a_worker_that_is_admitted_no_more(rule: str) -> None:
    job = make_job("sgd", steps=4, consistency="async", rule=rule, optimizer_args={"lr": 1e-3})
    with Cluster(job, ps=2) as cluster:
        for number in range(2):
            cluster.worker(number).run_async([number, number + 2])
        rules = [
            bucket.rule
            for host in cluster.hosts
            for shard in host.store.shards.values()
            for bucket in shard.buckets
            if bucket.rule is not None
        ]
        assert {worker for held in rules for worker in held.workers} == {"worker/0", "worker/1"}
        for host in cluster.hosts:
            host.store.authority.members = {"worker/1": 1, "evaluator/0": 1}
            host.store.members_changed()
        assert {worker for held in rules for worker in held.workers} == {"worker/1"}
