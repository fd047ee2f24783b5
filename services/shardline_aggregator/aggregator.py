"""An aggregator with its server: the members that it admits, and the shards of the current timeline."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardline.codecs import coding_of
from shardline.codecs.coding import JobCoding
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import JobView
from shardline.core.outcome import SERVED, Decision, Outcome
from shardline.core.placement import Post
from shardline.core.plan import Plan, ShardSpec
from shardline.errors import ProtocolError, UnreachableError
from shardline.host.awake import awake_s
from shardline.lanes import candidates, offered
from shardline.lanes.attachments import Attachments
from shardline.lanes.base import Lane
from shardline.lanes.kind import ServerSide
from shardline.lanes.negotiated import NegotiatedLane
from shardline.rpc import errors as rpc_errors
from shardline.rpc.channel import Peers
from shardline.rpc.messages.fields import to_message
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import data_pb2
from shardline.rpc.v1.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from shardline.security import holds
from shardline.server.admission import admit_data, outcome_to_proto
from shardline.server.buffers import Buffers
from shardline.server.data_plane import DataPlane
from shardline.server.pace import Pace
from shardline.server.signals import Signal
from shardline.server.staging import Staging
from shardline.storage.publication import PlainPublication, Publication
from shardline.waist import Sender, Standing
from shardline_aggregator.sums import RelayedShard, relayed_shard
from shardline_aggregator.uplink import Uplink

NOT_YET = (Outcome.FENCED, Outcome.NOT_CONFIGURED)


class Plane(DataPlane):
    """Push and pull as at the servers; the progress of replicas is known to these alone."""

    def __init__(self, relay: Aggregator, attachments: Attachments) -> None:
        super().__init__(relay, attachments)
        self._relay = relay

    @rpc_errors.unary
    async def Progress(self, request: data_pb2.ProgressRequest, context: Any) -> data_pb2.ProgressReply:
        """What the servers say of some replicas: the first call of every member."""
        relay, sent = self._relay, request.data
        await relay.ready_for(sent.timeline, lambda: admit_data(relay, sent, init=False).outcome not in NOT_YET)
        decision = admit_data(relay, sent, init=False)
        if decision.outcome is not Outcome.SERVED:
            return data_pb2.ProgressReply(
                outcome=outcome_to_proto(decision.outcome), reason=decision.reason, timeline=relay.timeline
            )
        known = relay.shard(sent.shard).replicas
        if len(request.replicas) > known or any(replica >= known for replica in request.replicas):
            raise ProtocolError(f"Progress asks for replicas {list(request.replicas)[:8]}; the job has {known}")
        found = await relay.standing(sent.shard, tuple(request.replicas))
        return to_message(
            data_pb2.ProgressReply,
            found,
            outcome=outcome_to_proto(found.outcome),
            replicas=[data_pb2.ReplicaProgress(replica=r, step=step) for r, step in found.replicas.items()],
            step_min=min(found.replicas.values(), default=found.step_max),
        )


def registered(relay: Aggregator, attachments: Attachments) -> Callable[[Any], None]:
    """What adds the service to a server."""
    # The generated base answers all other calls: they are not implemented.
    plane = Plane(relay, attachments)  # type: ignore[abstract]
    return functools.partial(add_ParameterServerServicer_to_server, plane)


log = logging.getLogger("shardline.aggregator")
T = TypeVar("T")
SERVICES = ("shardline.rpc.v1.ParameterServer",)
CLOSE_S = 10.0


class Aggregator:
    """A shardline.server.backend.Backend for the members of one aggregator, and the ways from it to the servers.

    count: called with the ps, "push" or "pull", the codec, and the bytes that went to it or came from it.
    on_refused: see ServerSide.
    """

    def __init__(
        self,
        config: RoleConfig,
        address: str,
        *,
        count: Callable[[str, str, str, int], None] = lambda peer, kind, codec, nbytes: None,
        on_refused: Callable[[str, Exception], None] = lambda label, error: None,
    ) -> None:
        self._config, self._count = config, count
        self.pool_threads, self.generation = max(2, os.cpu_count() or 1), 0
        self.staging_wait_s = config.timeouts.rpc_s / 2
        self.staging, self.pace, self.buffers = Staging(), Pace(), Buffers(self._room)
        self.timeline, self.job, self._trouble = 0, "", ""
        self.plan: Plan | None = None
        self.shards: Mapping[int, RelayedShard] = {}
        self._uplinks: Mapping[int, Uplink] = {}
        self._members: Mapping[str, Post] = {}
        self._coding: JobCoding | None = None
        self._signals: dict[tuple[int, int], Signal] = {}
        self._pool = ThreadPoolExecutor(self.pool_threads, "count")
        self._askers = ThreadPoolExecutor(8, "ask")
        self._peers = Peers(config.timeouts, config.security)
        self.attachments = Attachments()
        self.server = RpcServer(
            address,
            register=[registered(self, self.attachments)],
            service_names=SERVICES,
            name=config.task,
            security=config.security,
            bind=config.bind,
        )
        self._orders = Signal(self.server.loop)
        """Of other members, and of another timeline."""
        side = ServerSide(config, torch.device("cpu"), self.buffers.take, on_refused)
        self._offers = [offer for kind in offered(config.lane) if (offer := kind.offer(side)) is not None]
        for offer in self._offers:
            self.attachments.offer(offer)

    def _room(self) -> int:
        """Bytes of the pushes of a step and the next, which is what memory is kept for."""
        size = sum(shard.nbytes for shard in self.plan.shards) if self.plan is not None else 0
        return 2 * size * max(1, len(self._members))

    def start(self) -> str:
        """Serve; returns the address. Members are admitted after renew()."""
        return self.server.start()

    # Orders

    def renew(self, view: JobView, who: Identity, members: Sequence[Post]) -> None:
        """Begin a timeline: shards without values, and new ways to their servers."""
        self.leave()
        job, coding = view.job, coding_of(view.job, view.plan)
        sender = Sender(job=job.name, timeline=view.timeline, plan_id=view.plan.plan_id, who=who)
        loop = self.server.loop
        shards, uplinks = {}, {}
        for place in view.placement:
            spec = view.plan.shards[place.shard]
            shard = relayed_shard(
                place.shard, view.plan, job.replicas, job.consistency.nan_policy, self._publication(spec), self._notify
            )
            shards[place.shard] = shard
            connect = functools.partial(self._connect, place.task, place.address, place.shard, spec)
            uplinks[place.shard] = Uplink(
                shard,
                sender,
                coding,
                connect,
                self._config.timeouts,
                on_trouble=self._retire,
                count=functools.partial(self._count, place.task),
            )
        signals = {(s, b.number): Signal(loop) for s, shard in shards.items() for b in shard.buckets}

        async def begin() -> None:
            self.plan, self._coding = view.plan, coding
            self.job, self._trouble = job.name, ""
            self._signals, self.shards, self._uplinks = signals, shards, uplinks
            self.generation += 1
            self.timeline, self._members = view.timeline, {post.task: post for post in members}
            self._orders.notify()

        self.server.run(begin(), timeout_s=CLOSE_S)
        for uplink in uplinks.values():
            uplink.start()
        log.info("timeline %#x: sums for %d shards, pulls once for all", view.timeline, len(shards))

    def admit_members(self, members: Sequence[Post]) -> None:
        """Only these push and pull, soon. Returns at once."""

        def admit() -> None:
            self._members = {post.task: post for post in members}
            self._orders.notify()

        self.server.loop.call_soon_threadsafe(admit)

    def leave(self) -> None:
        """End the current timeline, if there is one: nobody waits for it any more."""
        if not self._uplinks:
            return

        async def leave() -> None:
            self.generation += 1
            self.timeline, self.shards = 0, {}
            self.attachments.drop_all("the timeline has ended")
            before, self._signals = self._signals, {}
            for signal in before.values():
                signal.notify()

        uplinks, self._uplinks = self._uplinks, {}
        if self.server.address:
            self.server.run(leave(), timeout_s=CLOSE_S)
        for uplink in uplinks.values():
            uplink.close()

    def _retire(self, why: str) -> None:
        """Send all members away until the next timeline: they know another way."""

        async def retire() -> None:
            if self._trouble or self._uplinks is not uplinks:
                return
            self._trouble = why
            log.warning("%s; the workers go to the servers themselves", why)
            self.generation += 1
            self.attachments.drop_all(why)
            for signal in self._signals.values():
                signal.notify()

        uplinks = self._uplinks
        asyncio.run_coroutine_threadsafe(retire(), self.server.loop)

    def _connect(self, task: str, address: str, shard: int, spec: ShardSpec) -> Lane:
        """A lane to the servers. Its bytes always move: shared segments are for pushes and pulls of one call."""
        peer = self._peers.get(task, address)
        peer.await_name()
        kinds = candidates(self._config.lane, local=False)
        lanes = [kind.connect(self._config, peer, shard, spec) for kind in kinds]
        return NegotiatedLane(lanes, peer=str(peer), expected=[], on_fallback=lambda lane, reason: None)

    def _publication(self, spec: ShardSpec) -> Publication:
        wanted = (offer.publish(spec, keeps_previous=True) for offer in self._offers)
        return next((made for made in wanted if made is not None), None) or PlainPublication(spec, torch.device("cpu"))

    def _notify(self, shard: int, bucket: int) -> None:
        signal = self._signals.get((shard, bucket))
        if signal is not None:
            signal.notify()

    # Backend

    @property
    def coding(self) -> JobCoding:
        if self._coding is None:
            raise ProtocolError("this aggregator has no job yet")
        return self._coding

    def shard(self, number: int) -> RelayedShard:
        if number not in self.shards:
            raise ProtocolError(f"shard {number} is not at this aggregator; it has {sorted(self.shards)}")
        return self.shards[number]

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        if self._trouble:
            raise UnreachableError(f"this aggregator is out of use in this timeline: {self._trouble}")
        if not self.timeline or self.plan is None:
            return Decision(Outcome.NOT_CONFIGURED, "this aggregator has no job yet")
        if timeline != self.timeline:
            why = f"the timeline is {self.timeline:#x}; the message says {timeline:#x}"
            return Decision(Outcome.WRONG_TIMELINE, why)
        if (job, plan_id) != (self.job, self.plan.plan_id):
            why = f"this aggregator has job {self.job!r} with plan {self.plan.plan_id}, not {job!r} with {plan_id}"
            return Decision(Outcome.NOT_CONFIGURED, why)
        fenced = self.fenced(who.task, who.incarnation)
        if fenced is None and not holds(who.secret, self._members[who.task].key):
            return Decision(Outcome.FENCED, f"the message is not from {who.task}: it lacks the secret of that life")
        return fenced or SERVED

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        post = self._members.get(task)
        if post is not None and post.incarnation == incarnation:
            return None
        return Decision(Outcome.FENCED, f"{task} incarnation {incarnation:#x} is not admitted at this aggregator")

    def signal(self, shard: int, bucket: int) -> Signal | None:
        return self._signals.get((shard, bucket))

    async def work(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args))

    def work_whole(self, function: Callable[[], T], after: Callable[[], None]) -> asyncio.Future[T]:
        def whole() -> T:
            try:
                return function()
            finally:
                after()

        return asyncio.shield(self.work(whole))

    def filled(self) -> None: ...

    def count(self, *, push_raw: int = 0, push_wire: int = 0, pull_raw: int = 0, pull_wire: int = 0) -> None: ...

    def pulled(self, task: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None: ...

    # What a member asks first

    async def ready_for(self, timeline: int, admits: Callable[[], bool]) -> None:
        """Wait, for a while, until this aggregator has the orders by which a sender came here. On the loop.

        Raises UnreachableError if it does not get them: the sender then goes to the servers.
        """
        deadline_s = awake_s() + self._config.timeouts.rpc_s / 4
        while True:
            changed = self._orders.arm()
            try:
                if timeline <= self.timeline and admits():
                    return
                if not await self._orders.wait(changed, max(0.0, deadline_s - awake_s())):
                    raise UnreachableError("this aggregator does not have the orders by which its member came")
            finally:
                self._orders.disarm(changed)

    async def standing(self, shard: int, replicas: Sequence[int]) -> Standing:
        """What the servers answer."""
        return await asyncio.get_running_loop().run_in_executor(self._askers, self._uplinks[shard].standing, replicas)

    def close(self) -> None:
        async def close_lanes() -> None:
            self.attachments.close()

        self.leave()
        if self.server.address:
            self.server.run(close_lanes(), timeout_s=CLOSE_S)
        self.server.close(grace_s=0.2)
        self._pool.shutdown(cancel_futures=True)
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._peers.close()
