"""The gRPC service of a ps: parse, call, answer. Decisions are made elsewhere."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from shardline.codecs import CODECS
from shardline.consistency import choices as choices_of
from shardline.consistency.server import numbers
from shardline.core.choices import choice_from_bytes, choice_to_bytes
from shardline.core.image import BucketImage, WorkerSequence
from shardline.core.outcome import FEATURES, PROTOCOL_MINOR, Outcome
from shardline.core.placement import Placement
from shardline.errors import FencedError, ProtocolError, UnreachableError
from shardline.lanes.attachments import Attachments
from shardline.rpc import errors as rpc_errors
from shardline.rpc.limits import MAX_MEMBERS, MAX_SENTENCE, at_most, short
from shardline.rpc.messages.configuration import configuration_from_proto, placement_from_proto
from shardline.rpc.messages.convert import ImageAssembler, image_parts, sequences_from_proto, sequences_to_proto
from shardline.rpc.messages.data import ON_STREAM, lane_number
from shardline.rpc.messages.fields import to_message
from shardline.rpc.messages.records import verdict_from_proto
from shardline.rpc.messages.status import choices_to_proto
from shardline.rpc.v1 import common_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from shardline.server.incoming_push import PushResult
from shardline.storage.table import TableBucket
from shardline_ps.control.authority import Term
from shardline_ps.control.votes import Voters
from shardline_ps.control.voting import Ballot, Verdict
from shardline_ps.shard.retired_shards import Reconfiguration, RetiredShards
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.sender import StandbySender
from shardline_ps.standby.servicer import StandbyServicer
from shardline_ps.state_calls import StateCalls
from shardline_ps.store import ParameterStore, PsConfiguration, planned_bytes


def ps_status(task: str, store: ParameterStore, standbys: StandbySender) -> parameter_server_pb2.PsStatusReply:
    authority = store.authority
    reply = parameter_server_pb2.PsStatusReply(
        task=task,
        term=parameter_server_pb2.Term(number=authority.term.number, chief_uuid=authority.term.chief_uuid),
        timeline=authority.timeline,
        active=authority.active,
        failure=store.failure,
        shards=[_shard(shard, standbys) for _, shard in sorted(store.shards.items())],
        standbys=[
            parameter_server_pb2.StandbyStatus(
                shard=number,
                synced=held.synced,
                record=held.record,
                copy=held.copy,
                bytes=held.nbytes,
                appointment=held.appointment,
            )
            for number, held in sorted(store.standbys.items())
        ],
    )
    pulls = store.configuration.coding.pull if store.configuration is not None else None
    error = (pulls.relative_error if pulls is not None else None) or 0.0
    with store.traffic_lock:
        reply.traffic.CopyFrom(to_message(parameter_server_pb2.Traffic, store.traffic, codec_error=error))
    return reply


def _shard(shard: Shard, standbys: StandbySender) -> parameter_server_pb2.ShardStatus:
    step_min, choices = shard.step_min, choices_of(shard.mode)
    made = choices.made() if choices is not None and choices.leads else None
    return to_message(
        parameter_server_pb2.ShardStatus,
        shard.tally,
        shard=shard.number,
        # A step is reported together with its choice, so that the chief never ends a run that lacks one.
        step_min=step_min if made is None else min(step_min, made.end),
        step_max=shard.step_max,
        version=shard.version,
        initialized=shard.initialized,
        cuts=[
            parameter_server_pb2.HeldCut(step=step, complete=complete, skipped=skipped)
            for step, complete, skipped in shard.cuts.status()
        ],
        waiting_for=shard.mode.waiting_for(),
        bytes=shard.held_bytes,
        choices=choices_to_proto(made) if made is not None else None,
        tables=[
            parameter_server_pb2.TableStatus(**bucket.counts())
            for bucket in shard.buckets
            if isinstance(bucket, TableBucket)
        ],
        **standbys.view(shard.number),
    )


log = logging.getLogger("shardline.ps")
GetCutFrame = parameter_server_pb2.GetCutFrame
GRACE_S = 0.25
"""Seconds that woken calls have to finish by themselves when their shard is retired."""
KEY_BYTES = 32
T = TypeVar("T")


class ParameterServer(StateCalls, parameter_server_pb2_grpc.CoordinatorServicer):
    """Serves ParameterServer (the data plane and the chief's commands) and Coordinator for one ParameterStore."""

    def __init__(
        self,
        task: str,
        store: ParameterStore,
        voters: Voters,
        attachments: Attachments,
        standbys: StandbySender,
        *,
        on_stop: Callable[[str], None],
        on_push: Callable[[PushResult], None] = lambda result: None,
        on_refused: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        super().__init__(store, attachments, on_push=on_push)
        self._task = task
        self._voters = voters
        self._standbys = standbys
        self.standby_servicer = StandbyServicer(task, store)
        self._changing = asyncio.Lock()
        """Held by commands that change the timeline or the placement, so that they run one at a time."""
        self._commands: set[asyncio.Task[Any]] = set()
        self._on_stop = on_stop
        self.on_refused = self.standby_servicer.on_refused = on_refused

    # Commands of the chief

    def _obey(self, term: parameter_server_pb2.Term) -> None:
        authority = self._store.authority
        decision = authority.obeys(Term(term.number, term.chief_uuid))
        if term.number and not authority.term.number:
            # The chief means the process that was here before: for it, this one is no answer.
            raise UnreachableError(f"{self._task}: no chief leads this process yet")
        if decision.outcome is not Outcome.SERVED:
            raise FencedError(f"{self._task}: {decision.reason}")

    @rpc_errors.unary
    async def Lead(self, request: parameter_server_pb2.LeadRequest, context: Any) -> parameter_server_pb2.LeadReply:
        authority = self._store.authority
        held = authority.lead(Term(request.term.number, request.term.chief_uuid))
        current = parameter_server_pb2.Term(number=authority.term.number, chief_uuid=authority.term.chief_uuid)
        return parameter_server_pb2.LeadReply(held=held, current=current, timeline=authority.timeline)

    @rpc_errors.unary
    async def Configure(
        self, request: parameter_server_pb2.ConfigureRequest, context: Any
    ) -> parameter_server_pb2.ConfigureReply:
        """Hold these shards. Repeating the same configuration changes nothing."""
        self._obey(request.term)
        configuration, placement = configuration_from_proto(request), placement_from_proto(request.placement)
        changed = await self._whole(self._configure(request, configuration, placement))
        return parameter_server_pb2.ConfigureReply(
            hello=common_pb2.Hello(
                protocol_minor=PROTOCOL_MINOR,
                features=sorted(FEATURES),
                codecs=CODECS.names,
                lanes=sorted(lane_number(name) for name in (ON_STREAM.lane, *self._attachments.lanes)),
            ),
            changed=changed,
            memory_bytes=planned_bytes(configuration),
        )

    async def _whole(self, command: Coroutine[Any, Any, T]) -> T:
        """Run a command to its end, even if its caller gives up meanwhile."""
        task = asyncio.get_running_loop().create_task(command)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        return await asyncio.shield(task)

    async def _configure(
        self,
        request: parameter_server_pb2.ConfigureRequest,
        configuration: PsConfiguration,
        placement: tuple[Placement, ...],
    ) -> bool:
        """Configure, after earlier commands; False if nothing changed."""
        async with self._changing:
            # Another chief may have taken command meanwhile.
            self._obey(request.term)
            store, loop = self._store, asyncio.get_running_loop()
            change = store.check(configuration, keep=request.keep_shards, keep_standbys=request.keep_standbys)
            if change is not None:
                await self._let_go(store.let_go(change, loop), change)
                # Even if another chief leads by now: a half-configured server could neither be activated nor have its
                # standbys promoted, and the next chief's commands wait for this one to end.
                store.make(change, loop)
                self._obey(request.term)
            if placement:
                self._place(placement)
            if request.activate:
                self._begin()
            return change is not None

    async def _let_go(self, retired: RetiredShards, change: Reconfiguration) -> None:
        """Return once no one uses the retired shards, or after the store's deadline, which is logged."""
        reason = "this ps was reconfigured"
        self._standbys.configured()
        self._voters.configured()
        self.standby_servicer.keep_only(change.standbys, reason)
        self._attachments.drop_all(reason)
        if await retired.gone(GRACE_S):
            return
        # Calls that wait for their peers would keep the shards alive as long as the peers like.
        self.calls.end_all(reason)
        if await retired.gone(GRACE_S):
            return
        # Failed calls may have left reference cycles of frames behind.
        gc.collect()
        if not await retired.gone(self._store.let_go_s):
            log.warning(
                "%s: shards %s are still in use %.1f s after they were released; until then, this ps uses more memory "
                "than planned",
                self._task,
                numbers(retired.numbers),
                self._store.let_go_s,
            )

    def _place(self, placement: tuple[Placement, ...]) -> None:
        """Take over a placement; standbys that belong elsewhere, or are out of date, are dropped."""
        self._store.placement = placement
        mine = {place.shard: place.appointment for place in placement if place.standby_task == self._task}
        held = list(self._store.standbys.items())
        keep = [number for number, standby in held if mine.get(number) == standby.appointment]
        self._store.drop_standbys("it was moved or is no longer needed, or its primary copies it again", keep=keep)

    def _wake_everybody(self) -> None:
        for signal in self._store.signals.values():
            signal.notify()

    @rpc_errors.unary
    async def SetMembership(
        self, request: parameter_server_pb2.SetMembershipRequest, context: Any
    ) -> parameter_server_pb2.SetMembershipReply:
        self._obey(request.term)
        at_most(len(request.members), MAX_MEMBERS, "SetMembership: members")
        for member in request.members:
            short(member.task, "SetMembership: name of a task")
            if len(member.key) not in (0, KEY_BYTES):
                raise ProtocolError(
                    f"SetMembership: the key of {member.task} has {len(member.key)} bytes; a SHA-256 has {KEY_BYTES}"
                )
        placement = placement_from_proto(request.placement)
        authority = self._store.authority
        before = dict(authority.members or {})
        authority.keys = {member.task: member.key for member in request.members}
        authority.members = {member.task: member.incarnation for member in request.members}
        self._attachments.keep_only(authority.members)
        self.calls.keep_only(authority.members)
        self._store.members_changed()
        if placement:
            # The fence above does not wait for other commands.
            async with self._changing:
                self._obey(request.term)
                self._place(placement)
                if authority.active:
                    self._standbys.follow()
        fenced = [task for task, number in before.items() if authority.members.get(task) != number]
        return parameter_server_pb2.SetMembershipReply(fenced=len(fenced))

    @rpc_errors.unary
    async def Restore(self, request: AsyncIterator[Any], context: Any) -> parameter_server_pb2.RestoreReply:
        """Replace one shard by the images of the stream, all or nothing."""
        with self.calls.enter():
            return await self._restore(request)

    async def _restore(self, request: AsyncIterator[Any]) -> parameter_server_pb2.RestoreReply:
        shard: Shard | None = None
        assembler: ImageAssembler | None = None
        images: list[BucketImage] = []
        sequences: dict[str, WorkerSequence] = {}
        ended = False
        async for frame in request:
            if frame.HasField("head"):
                self._obey(frame.head.term)
                if frame.head.timeline != self._store.authority.timeline:
                    raise ProtocolError(
                        f"Restore is for timeline {frame.head.timeline:#x}; this ps is at "
                        f"{self._store.authority.timeline:#x}"
                    )
                shard = self._store.shard(frame.head.shard)
                assembler = ImageAssembler(max_bytes=shard.settings.plan.shards[shard.number].image_bytes)
            if shard is None or assembler is None:
                raise ProtocolError("Restore must start with its head")
            if (image := assembler.read(frame)) is not None:
                at_most(len(images) + 1, len(shard.buckets), f"Restore of shard {shard.number}: buckets")
                images.append(image)
            if frame.HasField("end"):
                ended = True
                sequences = sequences_from_proto(frame.end.sequences)
        if shard is None or assembler is None or not ended or not assembler.idle:
            raise ProtocolError("Restore ended early; the shard is unchanged")
        await self._store.work(shard.restore, images, sequences)
        return parameter_server_pb2.RestoreReply(step=shard.step_min, buckets=len(images))

    @rpc_errors.unary
    async def Activate(
        self, request: parameter_server_pb2.ActivateRequest, context: Any
    ) -> parameter_server_pb2.ActivateReply:
        """Admit the timeline's messages; refused while a shard has no values."""
        async with self._changing:
            self._obey(request.term)
            authority = self._store.authority
            self._check_timeline(request.timeline, "Activate")
            if not authority.configured:
                raise ProtocolError(f"{self._task} is not fully configured; call Configure first")
            empty = [number for number, shard in sorted(self._store.shards.items()) if not shard.initialized]
            if not empty:
                self._begin()
                self._wake_everybody()
            return parameter_server_pb2.ActivateReply(empty_shards=empty)

    @rpc_errors.unary
    async def Promote(
        self, request: parameter_server_pb2.PromoteRequest, context: Any
    ) -> parameter_server_pb2.PromoteReply:
        """Make the standby held here the primary of its shard."""
        async with self._changing:
            self._obey(request.term)
            store, number = self._store, request.shard
            if not store.authority.configured:
                raise ProtocolError(f"{self._task} is not configured; it can't become the primary of shard {number}")
            now = store.authority
            if request.timeline < now.timeline or (request.timeline == now.timeline and now.active):
                raise ProtocolError(
                    f"Promote is for timeline {request.timeline:#x}; this ps is already at {now.timeline:#x}"
                )
            if number not in store.shards:
                standby = store.standbys.get(number)
                reason = f"{self._task} has no standby of shard {number}"
                # In the pool, since it waits for a record that is being applied.
                if standby is None or (reason := await store.work(standby.promote, request.appointment)):
                    return parameter_server_pb2.PromoteReply(reason=reason)
                store.adopt(number, asyncio.get_running_loop())
                log.warning("%s: promoted to the primary of shard %d at record %d", self._task, number, standby.record)
            store.authority.active = False
            store.authority.timeline = request.timeline
            self._wake_everybody()
            return parameter_server_pb2.PromoteReply()

    def _begin(self) -> None:
        """Admit the timeline's messages; standbys and votes continue from the current state."""
        self._store.authority.active = True
        self._standbys.follow()
        self._voters.tell_verdicts()

    @rpc_errors.unary
    async def Cut(self, request: parameter_server_pb2.CutRequest, context: Any) -> parameter_server_pb2.CutReply:
        """Cut all shards at a step, or at once if shards are cut one by one."""
        self._obey(request.term)
        self._check_timeline(request.timeline, "Cut")
        passed, highest = False, 0
        for shard in self._store.shards.values():
            late, top = await self._store.work(lambda s=shard: s.request_cut(request.step, stop=request.stop))
            passed, highest = passed or late, max(highest, top)
        if request.stop:
            self._wake_everybody()
        return parameter_server_pb2.CutReply(passed=passed, step_max=highest)

    def _check_timeline(self, timeline: int, what: str) -> None:
        current = self._store.authority.timeline
        if timeline != current:
            raise ProtocolError(f"{what} is for timeline {timeline:#x}; this ps is at {current:#x}")

    @rpc_errors.writer
    async def GetCut(self, request: parameter_server_pb2.GetCutRequest, context: Any) -> None:
        self._obey(request.term)
        self._check_timeline(request.timeline, "GetCut")
        shard = self._store.shard(request.shard)
        cut = shard.cuts.whole(request.step)
        if cut is None:
            held = [step for step, complete, _ in shard.cuts.status() if complete]
            raise ProtocolError(f"shard {shard.number} has no complete cut of step {request.step}; it has {held}")
        # It may contain pushes that a failover would lose.
        await shard.answerable()
        await context.send_initial_metadata(())
        # All of --timeout: the chief reads at a small share of a link's rate, and as fast as its disk takes it.
        reader_s = 3 * self.calls.reader_s
        for image in cut.in_order():
            for header, chunk in image_parts(image):
                await rpc_errors.write(context, GetCutFrame(header=header, chunk=chunk), reader_s)
        end = parameter_server_pb2.ImageEnd(buckets=len(cut.images), sequences=sequences_to_proto(cut.sequences))
        await rpc_errors.write(context, GetCutFrame(end=end), reader_s)

    @rpc_errors.unary
    async def Release(
        self, request: parameter_server_pb2.ReleaseRequest, context: Any
    ) -> parameter_server_pb2.ReleaseReply:
        """Drop the cuts up to a step, and the choices that the chief has noted."""
        self._obey(request.term)
        released = sum(shard.cuts.release(request.step) for shard in self._store.shards.values())
        for shard in self._store.shards.values():
            if (choices := choices_of(shard.mode)) is not None:
                choices.noted(request.noted)
        return parameter_server_pb2.ReleaseReply(released=released)

    @rpc_errors.unary
    async def Stop(self, request: parameter_server_pb2.StopRequest, context: Any) -> parameter_server_pb2.StopReply:
        self._obey(request.term)
        self._on_stop(short(request.reason, "Stop: reason", MAX_SENTENCE))
        return parameter_server_pb2.StopReply(task=self._task)

    @rpc_errors.unary
    async def Status(
        self, request: parameter_server_pb2.PsStatusRequest, context: Any
    ) -> parameter_server_pb2.PsStatusReply:
        """Steps, versions, cuts, standbys, traffic; not for a chief whose dead server had this port."""
        if request.HasField("term"):
            self._obey(request.term)
        return await self._store.work(self.status)

    def status(self) -> parameter_server_pb2.PsStatusReply:
        """The status message; also sent with every heartbeat."""
        return ps_status(self._task, self._store, self._standbys)

    # Coordinator

    @rpc_errors.unary
    async def Vote(self, request: parameter_server_pb2.VoteRequest, context: Any) -> parameter_server_pb2.VerdictReply:
        """A shard's vote; answered with the verdict once all shards have voted."""
        authority = self._store.authority
        if not authority.configured or request.job != authority.job or request.timeline != authority.timeline:
            return parameter_server_pb2.VerdictReply(
                outcome=common_pb2.OUTCOME_WRONG_TIMELINE,
                reason=f"the lead is at timeline {authority.timeline:#x}; the vote is for {request.timeline:#x}",
            )
        if 0 not in self._store.shards or len(request.quantum) != len(request.square_sum):
            raise ProtocolError("this ps is not the lead, or the vote has different numbers of quanta and sums")
        if request.asks:
            choice = await self._voters.choice_here(request.timeline, request.step)
            return parameter_server_pb2.VerdictReply(
                outcome=common_pb2.OUTCOME_WAITING if choice is None else common_pb2.OUTCOME_APPLIED,
                step=request.step,
                choice=choice_to_bytes(choice or 0),
            )
        if request.HasField("told"):
            self._voters.hear(request.timeline, request.shard, request.step, choice_from_bytes(request.told))
            return parameter_server_pb2.VerdictReply(outcome=common_pb2.OUTCOME_APPLIED, step=request.step)
        if request.HasField("decided"):
            verdict: Verdict | None = self._voters.adopt(request.timeline, verdict_from_proto(request.decided))
            return _verdict_reply(request.step, verdict)
        ballot = Ballot(
            sums=tuple(zip(request.quantum, request.square_sum, strict=True)),
            nonfinite=tuple(request.nonfinite_tensors),
        )
        verdict = await self._voters.vote_here(request.timeline, request.step, request.shard, ballot)
        return _verdict_reply(request.step, verdict)


def _verdict_reply(step: int, verdict: Verdict | None) -> parameter_server_pb2.VerdictReply:
    if verdict is None:
        return parameter_server_pb2.VerdictReply(outcome=common_pb2.OUTCOME_WAITING, step=step)
    outcome = common_pb2.OUTCOME_SKIPPED if verdict.skip else common_pb2.OUTCOME_APPLIED
    differing = {"outcome": outcome, "nonfinite_tensors": verdict.nonfinite}
    return to_message(parameter_server_pb2.VerdictReply, verdict, without={"nonfinite"}, **differing)


def register(servicer: ParameterServer) -> Callable[[grpc.aio.Server], None]:

    def add(server: grpc.aio.Server) -> None:
        parameter_server_pb2_grpc.add_ParameterServerServicer_to_server(servicer, server)
        parameter_server_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
        parameter_server_pb2_grpc.add_ReplicationServicer_to_server(servicer.standby_servicer, server)

    return add
