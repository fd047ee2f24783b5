"""Codecs of single tensors: who gets which, what travels, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch

import shardline
from shardline.codecs import coding_of
from shardline.core.plan import make_plan
from shardline.errors import JobError
from shardline.rpc.messages.convert import tensor_from_proto, tensor_to_proto
from tests.support.cluster import Cluster
from tests.support.jobs import Rich, Wide, make_job

CHOICES = {"*.bias": "raw", "*": shardline.Bf16()}


def test_the_first_pattern_that_matches_counts_and_each_codec_has_buckets_of_its_own() -> None:
    job = make_job("adam", model=Rich, codec_tensors=CHOICES)
    assert job.codec_tensors == {"*.bias": "raw", "*": "bf16"}
    spec = job.spec(job.build_model())
    by_name = {tensor.name: tensor.codec for tensor in spec.tensors}
    trained = {name for name, parameter in job.build_model().named_parameters() if parameter.requires_grad}
    assert {by_name[name] for name in trained if name.endswith(".bias")} == {"raw"}
    assert {by_name[name] for name in trained if not name.endswith(".bias")} == {"bf16"}
    assert {by_name[name] for name in by_name.keys() - trained} <= {""}
    assert all(tensor_from_proto(tensor_to_proto(tensor)) == tensor for tensor in spec.tensors)
    plan = make_plan(spec.tensors, 2)
    coding = coding_of(spec, plan)
    for way in (coding.push, coding.pull):
        assert not way.exact and not way.is_view
        for s, shard in enumerate(plan.shards):
            for b, bucket in enumerate(shard.buckets):
                names = {plan.tensors[piece.tensor].codec or "raw" for piece in bucket.slices}
                assert names == {way.bucket(s, b).name}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("lane", ["grpc", "tcp", "shm"])
def test_only_the_tensors_that_are_named_are_rounded(mode: str, lane: str) -> None:
    job = make_job("sgd", model=Rich, steps=3, consistency=mode, codec_tensors={"*.bias": "raw", "*": "bf16"})
    with Cluster(job, ps=2, bucket_bytes=1 << 14, lane=lane) as cluster:
        worker = cluster.worker(0)
        if mode == "sync":
            worker.run(range(job.replicas), job.steps)
        else:
            worker.run_async(range(3))
        state = cluster.state().params
    trained = {name for name, parameter in job.build_model().named_parameters() if parameter.requires_grad}
    values = {name: worker.values[name] for name in trained}
    rounded = {name for name in trained if torch.equal(values[name], values[name].bfloat16().float())}
    assert rounded >= {name for name in trained if not name.endswith(".bias")} and rounded != trained
    exact = {name for name in trained if torch.equal(values[name], state[name])}
    assert exact >= {name for name in trained if name.endswith(".bias")} and exact != trained


@pytest.mark.parametrize("codec", ["bf16", "topk", "delta:by=bf16"])
def test_a_job_begins_with_the_values_of_its_model(codec: str) -> None:
    job = make_job("adam", model=Wide, steps=4, codec_tensors={"*": codec})
    values = dict(job.build_model().named_parameters())
    with Cluster(job, ps=2, bucket_bytes=1 << 14) as cluster:
        cluster.worker(0).trainer.exchange.arm()
        state = cluster.state().params
    assert all(torch.equal(state[name], values[name]) for name in values)


def test_the_bits_do_not_depend_on_workers_and_servers() -> None:
    ends = []
    for ps, shares in ((1, [[0, 1, 2]]), (2, [[0, 2], [1]])):
        job = make_job("adam", model=Rich, steps=4, codec_tensors=CHOICES)
        with Cluster(job, ps=ps, bucket_bytes=1 << 14) as cluster:
            cluster.train(shares)
            ends.append(cluster.state().params)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_what_names_no_tensor_or_no_codec_is_refused() -> None:
    job = make_job("sgd", codec_tensors={"decoder.*": "bf16"})
    with pytest.raises(JobError, match=re.escape("the pattern 'decoder.*', which matches none of the ")):
        job.spec(job.build_model())
    with pytest.raises(JobError, match="codec 'zip' does not exist"):
        make_job("sgd", codec_tensors={"*": "zip"})
    with pytest.raises(JobError, match="codec_tensors is 'bf16'; give a dict"):
        make_job("sgd", codec_tensors="bf16")


@pytest.mark.parametrize(("codec", "what"), [("sign-vote", "signs"), ("dgc", "gradients with momentum")])
def test_a_tensor_that_would_train_by_another_kind_of_gradient_is_refused(codec: str, what: str) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 1).bfloat16())

    job = make_job("sgd", model=model, codec=codec)
    with pytest.raises(JobError, match=rf"'1.weight' has dtype bfloat16, which codec {codec} .* train by {what};"):
        job.spec(job.build_model())
    job = make_job("sgd", model=model, codec=codec, codec_tensors={"1.*": "raw"})
    job.spec(job.build_model())
