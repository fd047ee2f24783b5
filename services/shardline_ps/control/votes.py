"""Takes voted steps from "all contributions have arrived" to "applied": vote, get the lead's verdict, apply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Coroutine
from typing import Any

import grpc

from shardline.consistency.server import ShardVote, Staged
from shardline.core.records import Applied
from shardline.core.timeouts import Timeouts
from shardline.errors import InternalError, NonFiniteError, ProtocolError
from shardline.rpc.channel import AioPeer
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

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run voted steps on this loop."""
        self._loop = loop
        self._store.on_complete = self.on_complete

    def on_complete(self, shard: int, step: int) -> None:
        """All contributions of a step have arrived at a shard."""
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
            self._store.on_failure(InternalError(f"a voted step failed: {error}"))

    async def _decide(self, number: int, step: int) -> None:
        store = self._store
        shard = store.shards.get(number)
        if shard is None:
            # The shard was retired after the step was complete.
            return
        found = await store.work(shard.mode.vote, step)
        if found is None:
            return
        vote, staged = found
        verdict = await self._ask(shard, vote, staged)
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
            await store.work(lambda: shard.mode.apply_verdict(staged, scale=verdict.scale, skip=verdict.skip))

    async def _ask(self, shard: Shard, vote: ShardVote, staged: Staged) -> Verdict | None:
        """The lead's verdict, requested until it comes; None if the shard or its contributions are gone.

        The timeline may change meanwhile: a shard that keeps its values still needs the verdict.
        """
        ballot = Ballot(sums=vote.sums, nonfinite=vote.nonfinite)
        started_s = time.monotonic()
        told = False
        while self._store.shards.get(shard.number) is shard and shard.mode.waits_for(staged):
            timeline = self._store.authority.timeline
            verdict = await self._ask_once(vote.step, shard.number, ballot)
            if verdict is not None:
                decided = Applied(step=verdict.step, scale=verdict.scale, skip=verdict.skip)
                # From here on a new lead is informed of the verdict, even before it is applied: see tell_verdicts().
                shard.mode.decided(staged, decided)
                if timeline != self._store.authority.timeline:
                    self._spawn(self._tell(shard.number, decided))
                return verdict
            silent_s = time.monotonic() - started_s
            if silent_s > self._timeouts.suspect_s and not told:
                told = True
                log.warning(
                    "shard %d: no verdict on step %d for %.0f s; still asking", shard.number, vote.step, silent_s
                )
        return None

    def tell_verdicts(self) -> None:
        """Report each shard's last verdict to the lead, which may be a new one: see VoteLead.adopt()."""
        self._lead.renew(self._store.authority.timeline)
        for number, shard in self._store.shards.items():
            if shard.mode.last_verdict is not None:
                self._spawn(self._tell(number, shard.mode.last_verdict))

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
        address = next((item.address for item in self._store.placement if item.shard == 0), None)
        if address is None:
            await asyncio.sleep(self._timeouts.heartbeat_s)
            return None
        if address not in self._peers:
            self._peers[address] = AioPeer(address, self._timeouts, self._security)
        peer = self._peers[address]
        stub = parameter_server_pb2_grpc.CoordinatorStub(peer.channel)
        assert self._store.configuration is not None
        request = parameter_server_pb2.VoteRequest(
            job=self._store.configuration.job,
            timeline=timeline,
            step=step,
            shard=shard,
        )
        if isinstance(ballot, Applied):
            request.decided.CopyFrom(verdict_to_proto(ballot))
        else:
            request.quantum.extend(quantum for quantum, _ in ballot.sums)
            request.square_sum.extend(value for _, value in ballot.sums)
            request.nonfinite_tensors.extend(ballot.nonfinite)
        try:
            metadata = await peer.metadata(VOTE)
            reply = await stub.Vote(request, timeout=self._timeouts.rpc_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            peer.failed()
            log.debug("vote on step %d at %s: %s", step, address, error.code().name)
            await asyncio.sleep(0.05 + 0.2 * random.random())
            return None
        if reply.outcome not in (common_pb2.OUTCOME_APPLIED, common_pb2.OUTCOME_SKIPPED):
            await asyncio.sleep(0.05)
            return None
        return Verdict(
            step=reply.step,
            scale=reply.scale,
            skip=reply.skip,
            norm=reply.norm,
            nonfinite=tuple(reply.nonfinite_tensors),
        )

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
        """Cancel running votes and close the channels."""
        for task in list(self._tasks):
            task.cancel()
        for peer in self._peers.values():
            await peer.close()
