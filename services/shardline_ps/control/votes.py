"""Takes voted steps from "enough contributions have arrived" to "applied": vote, get the lead's verdict, apply.

With spares the lead first chooses whose gradients make the step, and every shard asks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine
from typing import Any

import grpc

from shardline.consistency import VotedSteps, choices as choices_of, votes
from shardline.consistency.choosing import StepChoices
from shardline.consistency.server import ShardVote, Staged
from shardline.core.choices import choice_from_bytes, choice_to_bytes
from shardline.core.records import Applied
from shardline.core.timeouts import Timeouts
from shardline.errors import InternalError, NonFiniteError, ProtocolError, as_error
from shardline.host.awake import awake_s
from shardline.rpc.channel import AioPeer
from shardline.rpc.messages.fields import from_message
from shardline.rpc.messages.records import verdict_to_proto
from shardline.rpc.v1 import common_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from shardline.security import PLAIN, Security
from shardline_ps.control.voting import Ballot, Verdict, VoteLead
from shardline_ps.shard.shard import Shard
from shardline_ps.store import ParameterStore

VOTE = "/shardline.rpc.v1.Coordinator/Vote"
log = logging.getLogger("shardline.ps")


class Voters:
    """One per ps. on_complete() is thread-safe; everything else runs on the server's loop."""

    def __init__(self, store: ParameterStore, timeouts: Timeouts, security: Security = PLAIN) -> None:
        self._store = store
        self._timeouts = timeouts
        self._security = security
        self._lead = VoteLead()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peers: dict[str, AioPeer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._deciding: dict[asyncio.Task[None], int] = {}
        """The running decisions that hold a shard, with its number."""
        self._choice_made = asyncio.Event()
        """Set, and replaced, when the lead here may know another choice."""
        self._heard: tuple[int, set[int]] = 0, set()
        """The timeline, and the shards that have told the lead here their latest choice in it."""

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._store.on_complete = self.on_complete

    def on_complete(self, shard: int, step: int) -> None:
        """Enough contributions to a step have arrived at a shard."""
        if self._loop is not None:
            # At shutdown a pool thread may finish after the loop has closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._start, shard, step)

    def configured(self) -> None:
        """The configuration has changed: stop decisions about shards that are gone, which would keep them alive."""
        for task, number in self._deciding.items():
            if number not in self._store.shards:
                task.cancel()

    def _start(self, shard: int, step: int) -> None:
        if shard == 0:
            self._wake_askers()
        if shard in self._store.shards:
            self._deciding[self._spawn(self._decide(shard, step))] = shard

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._deciding.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a voted step failed: %s", error, exc_info=error)
            self._store.on_failure(as_error(error) or InternalError(f"a voted step failed: {error}"))

    async def _decide(self, number: int, step: int) -> None:
        store = self._store
        shard = store.shards.get(number)
        if shard is None:
            # The shard was retired after the step was complete.
            return
        mode = votes(shard.mode)
        assert mode is not None, "only steps that wait for a verdict are reported"
        if mode.choices is not None and mode.choices.of(step) is None:
            # The shard reports the step again once the chosen contributions are here.
            await self._learn(shard, mode.choices, step)
            return
        found = await store.work(mode.vote, step)
        if found is None:
            return
        vote, staged = found
        verdict = await self._ask(shard, mode, vote, staged)
        if verdict is not None and verdict.nonfinite and not verdict.skip:
            # Contributions were checked one by one; it is their sum that isn't finite. Nothing is applied anywhere.
            store.on_failure(
                NonFiniteError(
                    f"step {step}: the sum of the gradients of {', '.join(verdict.nonfinite)} over the replicas has "
                    "NaN or infinity; it was not applied. Lower the learning rate, or set nan_policy='skip'"
                )
            )
            return
        if verdict is not None:
            await store.work(lambda: mode.apply_verdict(staged, scale=verdict.scale, skip=verdict.skip))

    async def _ask(self, shard: Shard, mode: VotedSteps, vote: ShardVote, staged: Staged) -> Verdict | None:
        """The lead's verdict, requested until it comes; None if the shard or its contributions are gone.

        The timeline may change meanwhile: a shard that keeps its values still needs the verdict.
        """
        ballot = Ballot(sums=vote.sums, nonfinite=vote.nonfinite)
        started_s = awake_s()
        told = False
        while self._store.shards.get(shard.number) is shard and mode.waits_for(staged):
            timeline = self._store.authority.timeline
            verdict = await self._ask_once(vote.step, shard.number, ballot)
            if verdict is not None:
                decided = Applied(step=verdict.step, scale=verdict.scale, skip=verdict.skip)
                # From here on a new lead is informed of the verdict, even before it is applied: see tell_verdicts().
                mode.decided(staged, decided)
                if timeline != self._store.authority.timeline:
                    self._spawn(self._tell(shard.number, decided))
                return verdict
            silent_s = awake_s() - started_s
            if silent_s > self._timeouts.suspect_s and not told:
                told = True
                log.warning(
                    "shard %d: no verdict on step %d for %.0f s; still asking", shard.number, vote.step, silent_s
                )
        return None

    def tell_verdicts(self) -> None:
        """Report each shard's last verdict to the lead, which may be a new one: see VoteLead.adopt()."""
        self._lead.renew(self._store.authority.timeline)
        self._wake_askers()
        for number, shard in self._store.shards.items():
            mode = votes(shard.mode)
            if mode is not None and mode.choices is not None:
                self._spawn(self._tell_choice(shard, mode.choices))
            if mode is not None and mode.last_verdict is not None:
                self._spawn(self._tell(number, mode.last_verdict))

    async def _tell(self, number: int, decided: Applied) -> None:
        timeline = self._store.authority.timeline
        while timeline == self._store.authority.timeline:
            if await self._ask_once(decided.step, number, decided) is not None:
                return

    async def _ask_once(self, step: int, shard: int, ballot: Ballot | Applied) -> Verdict | None:
        """Vote, or report a known verdict; None if there is no answer yet."""
        timeline = self._store.authority.timeline
        if 0 in self._store.shards:
            if isinstance(ballot, Applied):
                return self.adopt(timeline, ballot)
            return await self.vote_here(timeline, step, shard, ballot)
        request = parameter_server_pb2.VoteRequest(timeline=timeline, step=step, shard=shard)
        if isinstance(ballot, Applied):
            request.decided.CopyFrom(verdict_to_proto(ballot))
        else:
            request.quantum.extend(quantum for quantum, _ in ballot.sums)
            request.square_sum.extend(value for _, value in ballot.sums)
            request.nonfinite_tensors.extend(ballot.nonfinite)
        reply = await self._call(request)
        if reply is None:
            return None
        return from_message(Verdict, reply, nonfinite=tuple(reply.nonfinite_tensors))

    async def _call(self, request: parameter_server_pb2.VoteRequest) -> parameter_server_pb2.VerdictReply | None:
        """The answer of a lead that is on another ps; None, after a pause, if it has none yet."""
        address = next((item.address for item in self._store.placement if item.shard == 0), None)
        if address is None:
            await asyncio.sleep(self._timeouts.heartbeat_s)
            return None
        if address not in self._peers:
            self._peers[address] = AioPeer(address, self._timeouts, self._security)
        peer = self._peers[address]
        channel = peer.channel
        stub = parameter_server_pb2_grpc.CoordinatorStub(channel)
        assert self._store.configuration is not None
        request.job = self._store.configuration.job
        try:
            metadata = await peer.metadata(VOTE)
            reply: parameter_server_pb2.VerdictReply = await stub.Vote(
                request, timeout=self._timeouts.rpc_s, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            peer.failed()
            log.debug("vote on step %d at %s: %s", request.step, address, error.code().name)
            await asyncio.sleep(0.05 + 0.2 * random.random())
            return None
        if reply.outcome not in (common_pb2.OUTCOME_APPLIED, common_pb2.OUTCOME_SKIPPED):
            await asyncio.sleep(0.05)
            return None
        return reply

    # Choices

    async def _learn(self, shard: Shard, choices: StepChoices, step: int) -> None:
        """Ask the lead whose gradients make the open step, until it is known."""
        store = self._store
        while store.shards.get(shard.number) is shard and shard.step_min == step and choices.of(step) is None:
            timeline = store.authority.timeline
            choice = await self._ask_choice(timeline, step, shard.number)
            if choice is not None and timeline == store.authority.timeline:
                # What the lead of an earlier timeline has chosen does not hold if nobody knew it when this one began.
                choices.adopt(step, choice)

    async def _ask_choice(self, timeline: int, step: int, shard: int) -> int | None:
        if 0 in self._store.shards:
            return await self.choice_here(timeline, step)
        reply = await self._call(parameter_server_pb2.VoteRequest(timeline=timeline, step=step, shard=shard, asks=True))
        return choice_from_bytes(reply.choice) if reply is not None else None

    async def choice_here(self, timeline: int, step: int) -> int | None:
        """The lead's choice of a step; None if there is none within the time of a call, or the timeline changes."""
        store, loop = self._store, asyncio.get_running_loop()
        until_s = loop.time() + self._timeouts.server_wait_s
        while 0 in store.shards and timeline == store.authority.timeline:
            made, choices = self._choice_made, choices_of(store.shard(0).mode)
            if choices is None:
                raise ProtocolError(f"step {step}: the job's mode has no choices")
            choice = choices.of(step)
            if choice is not None:
                return choice
            try:
                await asyncio.wait_for(made.wait(), until_s - loop.time())
            except TimeoutError:
                return None
        return None

    def _wake_askers(self) -> None:
        made, self._choice_made = self._choice_made, asyncio.Event()
        made.set()

    async def _tell_choice(self, shard: Shard, choices: StepChoices) -> None:
        """Tell the lead, which may be a new one, the newest choice that a shard knows."""
        store, number = self._store, shard.number
        timeline = store.authority.timeline
        while timeline == store.authority.timeline and store.shards.get(number) is shard:
            step, choice = choices.newest()
            if 0 in store.shards:
                self.hear(timeline, number, step, choice)
                return
            request = parameter_server_pb2.VoteRequest(
                timeline=timeline, step=step, shard=number, told=choice_to_bytes(choice)
            )
            if await self._call(request) is not None:
                return

    def hear(self, timeline: int, shard: int, step: int, choice: int) -> None:
        """A shard has told the lead here the newest choice that it knows; 0 = none."""
        if self._heard[0] != timeline:
            self._heard = timeline, set()
        heard, lead = self._heard[1], self._store.shard(0)
        choices = choices_of(lead.mode)
        if choices is None or shard >= len(lead.settings.plan.shards) or choice >> lead.settings.replicas:
            raise ProtocolError(f"shard {shard}, step {step}: there is no such shard or replica, or nothing to choose")
        heard.add(shard)
        try:
            if choice:
                choices.adopt(step, choice)
            if len(heard) == len(lead.settings.plan.shards):
                choices.heard_all()
        except InternalError as error:
            self._store.on_failure(error)
        self._wake_askers()

    # The lead

    def adopt(self, timeline: int, decided: Applied) -> Verdict:
        """Record a verdict that a shard has applied; for the lead."""
        verdict = Verdict(step=decided.step, scale=decided.scale, skip=decided.skip, norm=decided.norm)
        return self._lead.adopt(timeline, verdict)

    async def vote_here(self, timeline: int, step: int, shard: int, ballot: Ballot) -> Verdict | None:
        """Vote on this ps, the lead; None on timeout. Raises ProtocolError if the vote is far from the open step."""
        configuration = self._store.configuration
        assert configuration is not None
        open_step = self._store.shard(0).step_min
        if shard >= len(configuration.plan.shards) or abs(step - open_step) > 1:
            # Rounds are kept by step: one far from the open step would never be dropped.
            raise ProtocolError(
                f"vote of shard {shard} on step {step}: there are {len(configuration.plan.shards)} shards, and the "
                f"lead is at step {open_step}"
            )
        return await self._lead.vote(
            timeline,
            step,
            shard,
            ballot,
            shards=range(len(configuration.plan.shards)),
            clip_norm=configuration.consistency.clip_norm,
            skip_nonfinite=configuration.consistency.nan_policy == "skip",
            timeout_s=self._timeouts.server_wait_s,
        )

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for peer in self._peers.values():
            await peer.close()
