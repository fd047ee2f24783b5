"""Real gradients in a simulation: the job's model in this process, and a copy of the parameters for every worker."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import shardline_pipeline as pipeline
from shardline import cadence as cadences, codecs, consistency
from shardline.cadence import Held, Outgoing, Sends
from shardline.codecs.base import PLAIN_TURN, Memory, Turn
from shardline.codecs.coding import Coding, JobCoding
from shardline.core.contributions import none_present
from shardline.core.gradients import Gradient, flat_bucket, write_bucket
from shardline.core.plan import BucketSpec, Plan
from shardline.core.spec import JobSpec, TensorKind
from shardline.data import BatchSource, replica_gradients
from shardline.errors import UsageError
from shardline.job import Job
from shardline.model import named_values
from shardline.storage.shard import Hyper
from shardline.update import bucket_rule
from shardline.update.torch_optim.inner import InnerOptimizers
from shardline_lab.simulator.servers import BucketPlan, VirtualServer
from shardline_lab.simulator.simulation import Contents, Setup, coded_bytes
from shardline_lab.simulator.workers import Place

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all virtual workers of a process use, one after another."""

    job: Job
    spec: JobSpec
    plan: Plan
    coding: JobCoding
    model: nn.Module
    tensors: Tensors
    """The model's, by name."""
    source: BatchSource
    batches: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of the batches that are leased."""


def training_contents(job: Job, setup: Setup) -> Contents:
    """Servers that hold the job's parameters, and workers that compute its gradients.

    Raises JobError for a job that can't be trained on, UsageError for a codec with a memory.
    """
    if pipeline.of(setup.job).staged:
        raise UsageError(
            f"--gradients can't simulate pipeline {setup.job.pipeline}; leave it out, or have its bits in one process "
            "from shardline.testing.reference"
        )
    codec = codecs.of(setup.job)
    voting = next((one for one in codec.ups if one.at_server.votes), None)
    if voting is not None:
        raise UsageError(f"codec {voting} has the servers vote, which can't be simulated; choose another codec")
    remembering = [one for one in (*codec.ups, *codec.downs) if one.memory is not Memory.NONE]
    if remembering:
        raise UsageError(
            f"--gradients can't simulate codec {remembering[0]}, which remembers what it has sent; leave it out"
        )
    plan, model = setup.plan(), job.build_model()
    shared = Shared(
        job=job,
        spec=setup.job,
        plan=plan,
        coding=JobCoding(codec, plan),
        model=model,
        tensors=named_values(model),
        source=BatchSource(job),
    )
    servers = []
    for number, shard in enumerate(plan.shards):
        sizes = coded_bytes(setup.job, plan, number)
        servers.append([_bucket(shared, spec, *nbytes) for spec, nbytes in zip(shard.buckets, sizes, strict=True)])
    return Contents(plan=plan, buckets=servers, gradients=lambda worker: WorkerGradients(shared))


def _bucket(shared: Shared, spec: BucketSpec, push_bytes: Sequence[float], pull_bytes: Sequence[float]) -> BucketPlan:
    job, tensors = shared.spec, shared.plan.tensors
    make = functools.partial(bucket_rule, job.rule, job.schedule, spec, tensors)
    return BucketPlan(
        push_bytes=push_bytes,
        pull_bytes=pull_bytes,
        spec=spec,
        tensors=tensors,
        values=flat_bucket(shared.plan, spec, shared.tensors),
        make_rule=make,
    )


class WorkerGradients:
    """See workers.Gradients: one worker's parameters, and its half of the job's cadence."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._cadence = cadences.of(shared.spec)
        spec, tensors = shared.spec, shared.tensors
        pulled = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        inner = InnerOptimizers(spec.inner, spec.tensors, tensors) if spec.inner is not None else None
        self._held = Held(
            model=tensors,
            pulled=pulled,
            specs=spec.tensors,
            inner=inner,
            replicas=spec.replicas,
            contributors=consistency.of(spec.consistency).contributors(spec.replicas),
        )
        self._local = self._cadence.local(self._held)
        mode = consistency.of(spec.consistency)
        self._batches = mode.batches
        self._half = mode.worker_half(spec)
        self._clip_norm = 0.0 if self._half.shares_steps else spec.consistency.clip_norm
        self._outgoing: dict[int, Outgoing] = {}
        self._computed = 0
        """Step or batch of what was computed: random codecs draw by it."""

    def pulled(self, values: Mapping[Place, torch.Tensor]) -> None:
        for (server, number), found in values.items():
            spec = self._shared.plan.shards[server].buckets[number]
            write_bucket(
                self._shared.plan,
                spec,
                _coded(self._shared.coding.pull, (server, number), found, PLAIN_TURN),
                self._held.pulled,
            )

    def compute(self, step: int, replicas: Sequence[int]) -> float:
        begins = self._computed = self._batches.next(step, self._shared.batches)
        self._local.began(step)
        self._local.arrived(step)
        self._outgoing = {}
        losses = []
        for tick in range(self._cadence.rounds.ticks_in(step)):
            for replica in replicas:
                loss = self._pass(self._cadence.rounds.ticks_before(begins) + tick, tick, replica)
                losses.append(loss)
        return sum(losses) / len(losses)

    def _pass(self, number: int, tick: int, replica: int) -> float:
        shared = self._shared
        if self._cadence.sends is not Sends.DELTAS:
            with torch.no_grad():
                for name, value in self._held.pulled.items():
                    shared.tensors[name].copy_(value)
        self._local.enter(replica, tick)
        loss, samples = replica_gradients(shared.model, shared.job, shared.source, number, replica)
        trained = [spec.name for spec in shared.spec.tensors if spec.kind is TensorKind.PARAM]
        found = {name: shared.tensors[name].grad for name in trained}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        if self._clip_norm > 0.0:
            nn.utils.clip_grad_norm_([shared.tensors[name] for name in gradients], self._clip_norm)
        buffers = {
            spec.name: shared.tensors[spec.name].detach().clone()
            for spec in shared.spec.tensors
            if spec.kind is TensorKind.BUFFER and self._half.brings_buffers(replica)
        }
        outgoing = Outgoing(values=gradients, buffers=buffers, samples=samples, loss=loss)
        self._outgoing[replica] = self._local.take(replica, tick, outgoing)
        return loss

    def contribution(self, place: Place, replica: int) -> Gradient:
        plan, outgoing = self._shared.plan, self._outgoing[replica]
        spec = plan.shards[place[0]].buckets[place[1]]
        values = {**outgoing.values, **outgoing.buffers}
        present = tuple(plan.tensors[piece.tensor].name in values for piece in spec.slices)
        if not any(present):
            return Gradient(None, none_present(spec))
        turn = Turn(self._computed, replica, self._shared.job.seed, present)
        return Gradient(_coded(self._shared.coding.push, place, flat_bucket(plan, spec, values), turn), present)

    def hyper(self, replica: int) -> Hyper:
        return self._outgoing[replica].hyper


def _coded(coding: Coding, place: Place, values: torch.Tensor, turn: Turn) -> torch.Tensor:
    """The values as they arrive: written by the codec and read again."""
    found = coding.bucket(*place)
    if found.codec.is_view:
        return values
    return found.coder.decode(bytearray(found.coder.encode(values, turn)), PLAIN_TURN)


def parameters(plan: Plan, servers: Sequence[VirtualServer], model: nn.Module) -> dict[str, torch.Tensor]:
    """What the servers hold, by name. model: gives shapes and dtypes; it is not changed."""
    found = {name: tensor.detach().clone() for name, tensor in named_values(model).items()}
    for server, shard in zip(servers, plan.shards, strict=True):
        for bucket, spec in zip(server.buckets, shard.buckets, strict=True):
            write_bucket(plan, spec, bucket.values, found)
    return found
