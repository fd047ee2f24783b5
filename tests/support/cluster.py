"""A whole cluster in one process: real parameter servers over loopback gRPC, workers as threads, no chief.

with Cluster(job, ps=2) as cluster:
    cluster.train([[0, 1], [2]])
    assert_same_end(cluster.state(), reference(job))
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardline import division, topology
from shardline.client.api.workplace import Ties, Wishes, make_trainer, own_layout
from shardline.client.exchange.shard_exchange import Observer, StepFigures
from shardline.client.step.table_rows import ServedRows
from shardline.client.step.trainer import WorkerMethods
from shardline.client.watch.model_watch import ModelWatch
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.image import VALUE, BucketImage
from shardline.core.orders import JobView
from shardline.core.placement import Placement
from shardline.core.plan import Plan, Slice, make_plan
from shardline.core.spec import TensorKind
from shardline.core.timeouts import Timeouts
from shardline.data import BatchSource, replica_gradients
from shardline.job import Job
from shardline.lanes.attachments import Attachments
from shardline.lanes.base import Lane
from shardline.lanes.negotiated import open_lane
from shardline.model import named_values
from shardline.nn import tables_of
from shardline.rpc.channel import Peer
from shardline.rpc.client import PsControl
from shardline.rpc.messages.configuration import Configuration
from shardline.rpc.server import RpcServer
from shardline.storage.table import IDS
from shardline.testing import ReferenceResult
from shardline.topology import Hop, Surroundings
from shardline.waist import Sender
from shardline_ps.control.votes import Voters
from shardline_ps.service import offers
from shardline_ps.servicer import ParameterServer, register
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.sender import StandbySender
from shardline_ps.store import ParameterStore

COMPUTE = threading.Lock()
"""replica_gradients seeds the process's generators, so replicas compute one at a time; exchanges overlap."""
TIMELINE = 1 << 32 | 1
PLAIN = Wishes()
PATIENCE_S = 60.0
SERVICES = ("shardline.rpc.v1.ParameterServer", "shardline.rpc.v1.Coordinator", "shardline.rpc.v1.Replication")


class Ps:
    """A parameter server without a process of its own."""

    def __init__(self, index: int, timeouts: Timeouts, *, address: str = "127.0.0.1:0", lane: str = "grpc") -> None:
        self.task = f"ps/{index}"
        self.store = ParameterStore(device=torch.device("cpu"), pool_threads=2)
        self.voters = Voters(self.store, timeouts)
        self.attachments = Attachments()
        self.stopped: list[str] = []
        self.standbys = StandbySender(self.task, self.store, timeouts)
        self.servicer = ParameterServer(
            self.task, self.store, self.voters, self.attachments, self.standbys, on_stop=self.stopped.append
        )
        self.server = RpcServer(address, register=[register(self.servicer)], service_names=SERVICES, name=self.task)
        self.voters.bind(self.server.loop)
        if lane != "grpc":
            spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",)})
            config = RoleConfig(role="ps", index=0, cluster=spec, timeouts=timeouts, lane=lane)
            for offer in offers(config, self.store, lambda method, error: None):
                self.attachments.offer(offer)
        self.address = self.server.start()

    async def end(self) -> None:
        self.attachments.close()
        await self.voters.close()
        await self.standbys.close()

    def close(self, *, grace_s: float = 0.2) -> None:
        if self.server.loop.is_closed():
            return
        self.server.run(self.end(), timeout_s=5.0)
        self.server.close(grace_s=grace_s)
        self.store.close()


class Orders(Observer):
    """Replaces the chief's orders for a worker, as set by the test; also records what its exchanges reported."""

    def __init__(self) -> None:
        self.nonfinite: list[str] = []
        super().__init__(not_finite=self.nonfinite.append)


class Worker:
    """One life of a worker, with its own model and trainer. Used by one thread."""

    def __init__(
        self,
        cluster: Cluster,
        index: int,
        *,
        incarnation: int = 1,
        lane: str = "grpc",
        wrap: Callable[[Lane], Lane] = lambda lane: lane,
        wishes: Wishes = PLAIN,
    ) -> None:
        self.cluster = cluster
        self.index = index
        self.job = cluster.job
        with COMPUTE:
            self.model = self.job.build_model()
            self.source = BatchSource(self.job)
        self.values = named_values(self.model)
        self.tables = ServedRows(lambda: self.trainer, contextlib.nullcontext)
        self.tables.serve(tables_of(self.model))
        servers = {place.shard: Hop(place.task, place.address) for place in cluster.placement}
        around = Surroundings(
            task=f"worker/{index}",
            workers=cluster.num_workers or self.job.replicas,
            servers=servers,
            aggregators=cluster.aggregators,
            places=len(cluster.aggregators),
        )
        hops = topology.of(cluster.spec).hops(around)
        peers = {hop: Peer(hop.task, hop.address, cluster.timeouts) for hop in hops.values()}
        self.peers = list(peers.values())
        lanes: dict[int, Lane] = {}
        for shard, spec in enumerate(cluster.plan.shards):
            opened = open_lane(
                cluster.lane_config(lane), peers[hops[shard]], shard, spec, on_fallback=cluster.note_fallback
            )
            lanes[shard] = wrap(opened)
        self.orders = Orders()
        ties = Ties(
            who=Identity(f"worker/{index}", incarnation),
            index=index,
            lanes=lanes,
            timeouts=cluster.timeouts,
            observer=self.orders,
        )
        self.trainer = make_trainer(cluster.view, WorkerMethods(self.cluster.spec, self.values), ties, wishes)
        groups = self.job.build_optimizer(self.model).param_groups
        self.trainer.watch = ModelWatch(
            self.model, self.values, groups, script=False, divided=division.of(cluster.spec).partial
        )
        self.trainer.watch.meet(own_layout(self.trainer))
        self.clips = not self.trainer.half.shares_steps and self.job.clip_norm > 0.0
        self.figures: list[StepFigures] = []

    def run(self, replicas: Sequence[int], steps: int) -> Worker:
        """Train these replicas from the shards' current step up to `steps`."""
        self.trainer.exchange.arm()
        todo = self.trainer.locate(replicas, self.cluster.timeline)
        while self.trainer.step < steps:
            self.step(sorted(todo))
            todo = set(replicas)
        self.settle()
        return self

    def step(self, replicas: Sequence[int]) -> None:
        """One synchronous step: all its remaining ticks. With an overlap its exchange is left running."""
        while not self.tick(replicas):
            self.trainer.methods.ticks.advance()
        if self.trainer.methods.cadence.rounds.overlap and not self.trainer.open.first:
            self.trainer.send()
        else:
            self.figures.append(self.trainer.finish())

    def settle(self) -> None:
        """Wait for the exchange that was left running, if any."""
        figures = self.trainer.settle()
        if figures is not None:
            self.figures.append(figures)

    def tick(self, replicas: Sequence[int]) -> bool:
        """One pass of each replica; returns whether it ends the step."""
        ticks = self.trainer.methods.ticks
        if self.trainer.methods.needs_pull:
            self.settle()
        with COMPUTE:
            for replica in replicas:
                self.compute(ticks.number(self.trainer.step), replica)
        return ticks.last

    def compute(self, step: int, replica: int) -> None:
        """Compute one replica's gradients and stage them. COMPUTE must be held."""
        self.trainer.begin(replica)
        self.tables.forget()
        loss, samples = replica_gradients(self.model, self.job, self.source, step, replica)
        if self.clips:
            parameters = [value for value in self.values.values() if value.grad is not None]
            torch.nn.utils.clip_grad_norm_(parameters, self.job.clip_norm)
        gradients = {name: value.grad for name, value in self.values.items() if value.grad is not None}
        gradients.update(self.tables.gradients())
        self.trainer.contribute(replica, gradients, samples=samples, loss=loss)

    def run_async(self, batches: Sequence[int]) -> Worker:
        """Push the gradient of each batch as an update of its own."""
        self.trainer.exchange.arm()
        self.trainer.locate([0], self.cluster.timeline)
        for batch in batches:
            with COMPUTE:
                self.compute(batch, 0)
            self.figures.append(self.trainer.finish())
        return self

    def close(self) -> None:
        self.trainer.close()
        for peer in self.peers:
            peer.close()


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """Content of the shards, by tensor name; see ReferenceResult."""

    step: int
    version: int
    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]


class Cluster:
    """S parameter servers with a job, active and with first values set."""

    def __init__(
        self,
        job: Job,
        *,
        ps: int = 1,
        timeouts: Timeouts | None = None,
        term: int = 0,
        cut_every: int = 0,
        members: Mapping[str, int] | None = None,
        bucket_bytes: int | None = None,
        lane: str = "grpc",
        spare: int = 0,
    ) -> None:
        """spare: number of servers beyond the number of shards."""
        self.job = job
        self.lane = lane
        self.timeouts = timeouts or Timeouts(total_s=20.0)
        self.timeline = TIMELINE
        with COMPUTE:
            self.spec = job.spec(job.build_model())
        self.plan = make_plan(self.spec.tensors, ps, bucket_bytes=bucket_bytes)
        # A model with few pieces has fewer shards than there are ps.
        self.hosts = [Ps(index, self.timeouts, lane=lane) for index in range(len(self.plan.shards) + spare)]
        self.workers: list[Worker] = []
        self.aggregators: dict[int, Hop] = {}
        """Those that workers made from now on may go through."""
        self.num_workers = 0
        """Of the cluster spec; 0 = one per replica."""
        self.fallbacks: list[tuple[str, str]] = []
        """Lanes that workers asked for and could not use, each with the reason."""
        self.placement = self.make_placement()
        self.controls = [
            PsControl(host.task, host.address, self.timeouts, term=term, chief_uuid="chief" if term else "")
            for host in self.hosts
        ]
        self.cut_every = cut_every
        for shard, control in enumerate(self.controls):
            if term:
                control.lead()
            control.configure(self.configuration(shard))
            if members is not None:
                control.set_membership(self.timeline, members)
        first = self.worker(0, incarnation=(members or {}).get("worker/0", 1))
        first.trainer.initialize()
        for control in self.controls:
            control.activate(self.timeline)

    @property
    def view(self) -> JobView:
        """The job view that a chief would send to a worker."""
        return JobView(job=self.spec, plan=self.plan, placement=self.placement, timeline=self.timeline)

    def host_of(self, shard: int) -> int:
        """Index of the ps that hosts a shard."""
        return shard

    def make_placement(self) -> tuple[Placement, ...]:
        """The placement of the shards."""
        hosts = [self.hosts[self.host_of(shard)] for shard in range(len(self.plan.shards))]
        return tuple(Placement(shard=shard, task=host.task, address=host.address) for shard, host in enumerate(hosts))

    def configuration(self, host: int) -> Configuration:
        """The configuration of one ps."""
        return Configuration(
            job=self.spec.name,
            timeline=self.timeline,
            plan=self.plan,
            shards=tuple(shard for shard in range(len(self.plan.shards)) if self.host_of(shard) == host),
            rule=self.spec.rule,
            schedule=self.spec.schedule,
            consistency=self.spec.consistency,
            **self.spec.settings(),
            cut_every=self.cut_every,
            placement=self.placement,
        )

    def configure_anew(self, timeline: int, keep: Sequence[int] = ()) -> None:
        """A new timeline: every ps holds its shards without values, but for those to keep."""
        self.timeline = timeline
        for host, control in enumerate(self.controls):
            mine = self.configuration(host)
            control.configure(replace(mine, keep=tuple(shard for shard in mine.shards if shard in keep)))

    def sender(self, task: str) -> Sender:
        """What the first life of a worker is known by."""
        return Sender(
            job=self.spec.name, timeline=self.timeline, plan_id=self.plan.plan_id, who=Identity(task, incarnation=1)
        )

    def note_fallback(self, lane: str, reason: str) -> None:
        self.fallbacks.append((lane, reason))

    def lane_config(self, lane: str) -> RoleConfig:
        """Settings of a task of this cluster, as far as lanes and offers need them."""
        spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",), "worker": ("127.0.0.1:0",)})
        return RoleConfig(role="worker", index=0, cluster=spec, timeouts=self.timeouts, lane=lane)

    def worker(
        self,
        index: int,
        *,
        incarnation: int = 1,
        lane: str | None = None,
        wrap: Callable[[Lane], Lane] = lambda lane: lane,
        zero_copy: bool = False,
    ) -> Worker:
        """A new life of a worker, closed with the cluster."""
        wishes = Wishes(zero_copy=zero_copy)
        worker = Worker(self, index, incarnation=incarnation, lane=lane or self.lane, wrap=wrap, wishes=wishes)
        self.workers.append(worker)
        return worker

    def train(self, ownership: Sequence[Sequence[int]], *, steps: int | None = None) -> list[Worker]:
        """Train with one worker per entry, each with these replicas; returns the workers at the end."""
        workers = [self.worker(index) for index in range(len(ownership))]
        target = self.job.steps if steps is None else steps
        jobs = [functools.partial(w.run, owned, target) for w, owned in zip(workers, ownership, strict=True)]
        return self.together(jobs)

    def together(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run functions in separate threads and return their results; raises the first error of any of them."""
        futures: list[Future[Any]] = [Future() for _ in functions]

        def run(future: Future[Any], function: Callable[[], Any]) -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        for pair in zip(futures, functions, strict=True):
            # Daemon threads: a hanging one fails its test without blocking the process.
            threading.Thread(target=run, args=pair, daemon=True).start()
        done, late = wait(futures, PATIENCE_S, FIRST_EXCEPTION)
        for future in done:
            future.result()
        assert not late, f"{len(late)} of {len(futures)} did not end within {PATIENCE_S} s"
        return [future.result() for future in futures]

    @property
    def shards(self) -> list[Shard]:
        """The shards themselves, in order."""
        return [self.hosts[self.host_of(number)].store.shards[number] for number in range(len(self.plan.shards))]

    def images(self) -> list[list[BucketImage]]:
        """Copies of all buckets, by shard. Where workers run the optimizer, one of them brings its state first."""
        for worker in self.workers:
            if worker.trainer.methods.applied is not None:
                worker.trainer.methods.applied.bring_all()
        found = []
        for shard in self.shards:
            images = []
            for bucket in shard.buckets:
                with bucket.lock:
                    brought = shard.cuts.offered(bucket.number, bucket.step)
                    images.append(bucket.image() if bucket.has_state else brought or bucket.image())
            found.append(images)
        return found

    def state(self, images: Sequence[Sequence[BucketImage]] | None = None) -> ClusterState:
        """The whole content of the shards, or of a cut's images; all buckets must be at one step."""
        images = images or self.images()
        steps = {image.step for shard in images for image in shard}
        versions = {image.version for shard in images for image in shard}
        assert len(steps) == 1 and len(versions) == 1, (steps, versions)
        params: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        params.update(gather_rows(self.plan, images))
        for spec, flat in zip(self.plan.tensors, gather(self.plan, images), strict=True):
            if spec.kind is TensorKind.TABLE:
                continue
            values = flat.pop(VALUE).reshape(spec.shape)
            (buffers if spec.kind is TensorKind.BUFFER else params)[spec.name] = values
            if flat:
                optimizer[spec.name] = {
                    key: item if item.dim() == 0 else item.reshape(spec.shape) for key, item in flat.items()
                }
        return ClusterState(
            step=steps.pop(), version=versions.pop(), params=params, buffers=buffers, optimizer=optimizer
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for control in self.controls:
            control.close()
        for host in self.hosts:
            host.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def gather(plan: Plan, images: Sequence[Sequence[BucketImage]]) -> list[dict[str, torch.Tensor]]:
    """Per tensor: its value and states, assembled from the slices; states that are one number stay 0-d."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in plan.tensors]
    for shard, held in zip(plan.shards, images, strict=True):
        for bucket, image in zip(shard.buckets, held, strict=True):
            if bucket.kind is TensorKind.TABLE:
                continue
            for number, piece in enumerate(bucket.slices):
                _gather_slice(plan, found[piece.tensor], piece, number, image)
    return found


def gather_rows(plan: Plan, images: Sequence[Sequence[BucketImage]]) -> dict[str, torch.Tensor]:
    """The ids and rows of tables, as ReferenceResult has them, and the states of their rows."""
    found: dict[str, list[torch.Tensor]] = {}
    for shard, held in zip(plan.shards, images, strict=True):
        for bucket, image in zip(shard.buckets, held, strict=True):
            if bucket.kind is TensorKind.TABLE:
                table = plan.tensors[bucket.slices[0].tensor].name
                ids = image.tensors[IDS]
                found.setdefault(f"{table}.ids", []).append(ids)
                found.setdefault(f"{table}.rows", []).append(image.tensors[VALUE].view(len(ids), -1))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _gather_slice(plan: Plan, target: dict[str, torch.Tensor], piece: Slice, number: int, image: BucketImage) -> None:
    spec = plan.tensors[piece.tensor]
    start = piece.first_row * spec.row_elements
    for name, flat in image.tensors.items():
        if name != VALUE and not image.initialized[number]:
            continue
        whole = target.setdefault(name, torch.zeros(spec.elements, dtype=flat.dtype))
        whole[start : start + piece.elements] = flat[piece.offset : piece.end]
    for name, values in image.scalars.items():
        if image.initialized[number]:
            before = target.setdefault(name, torch.tensor(values[number], dtype=torch.float64))
            assert float(before) == values[number], f"{spec.name}: {name} differs between its slices"


def assert_same_end(ours: ClusterState, expected: ReferenceResult) -> None:
    """Parameters, buffers and optimizer state equal the reference's, bit for bit."""
    assert (ours.step, ours.version) == (expected.step, expected.version)
    for kind, mine, theirs in (
        ("parameter", ours.params, expected.params),
        ("buffer", ours.buffers, expected.buffers),
    ):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert same_bits(mine[name], value), f"{kind} {name} differs by {_gap(mine[name], value)}"
    for name, state in expected.optimizer.items():
        held = ours.optimizer.get(name, {})
        if not held and float(state.get("step", 1.0)) == 0.0:
            continue  # Adagrad creates its state before the first gradient, a bucket with it
        for key, item in state.items():
            if not isinstance(item, torch.Tensor):
                continue
            assert key in held, f"{name} has no {key}"
            if item.dim() == 0 and held[key].dim() == 0:
                assert float(item) == float(held[key]), f"{name}: {key} is {held[key]}, expected {item}"
            else:
                assert same_bits(held[key].reshape(item.shape), item), f"{name}: {key} differs"
    assert set(ours.optimizer) <= set(expected.optimizer), "state for a parameter that never had a gradient"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values, dtype and shape."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b.detach()))


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.detach().double()).abs().max()) if a.shape == b.shape else float("nan")


def split_evenly(replicas: int, workers: int) -> list[list[int]]:
    """Replicas of each worker, round robin: blocks that don't line up with the tree."""
    return [list(range(index, replicas, workers)) for index in range(workers)]
