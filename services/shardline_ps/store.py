"""The state of a ps process: its authority, its shards, and the pool for all tensor work."""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from shardline import codecs, consistency
from shardline.codecs.coding import JobCoding
from shardline.core.identity import Identity
from shardline.core.outcome import Decision
from shardline.core.placement import Placement
from shardline.core.plan import ShardSpec
from shardline.core.spec import TensorKind
from shardline.errors import ProtocolError, UsageError
from shardline.host.loops import post
from shardline.rpc.messages.configuration import PsConfiguration
from shardline.server.buffers import Buffers
from shardline.server.pace import Pace
from shardline.server.signals import Signal
from shardline.server.staging import Ledger, Staging
from shardline.storage import cold
from shardline.storage.publication import PlainPublication, Publication
from shardline.storage.shard import Observers
from shardline.update import check_tensors
from shardline_ps.control.authority import Authority
from shardline_ps.control.configuration import memory_plan, memory_sentence, planned_bytes, staging_limit
from shardline_ps.memory.heap_trimmer import HeapTrimmer
from shardline_ps.shard.retired_shards import Reconfiguration, RetiredShards
from shardline_ps.shard.shard import Shard, ShardSettings
from shardline_ps.standby.standby import Standby

__all__ = ["ParameterStore", "PsConfiguration", "TrafficTally", "planned_bytes"]

log = logging.getLogger("shardline.ps")
T = TypeVar("T")


@dataclass
class TrafficTally:
    """Bytes since the process started, by direction; raw = before the codec."""

    push_raw_bytes: int = 0
    push_wire_bytes: int = 0
    pull_raw_bytes: int = 0
    pull_wire_bytes: int = 0


class PoolWork(asyncio.Future[T]):
    """The result of work in the pool. Cancelled before it has begun, it never begins, and after() is called."""

    def __init__(self, after: Callable[[], None], *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._after = after
        self.begun: Future[None] | None = None

    def cancel(self, msg: object = None) -> bool:
        """Wait no longer."""
        # False once it has begun.
        if not self.done() and self.begun is not None and self.begun.cancel():
            self._after()
        self._let_go()
        return super().cancel(msg)

    def never_began(self) -> None:
        """End without a result: the pool has ended."""
        if not self.done():
            self._after()
            self._let_go()
            super().cancel()

    def succeed(self, result: T) -> None:
        """End with a result, unless nobody waits any more."""
        self._let_go()
        if not self.done():
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless nobody waits any more."""
        self._let_go()
        if not self.done():
            self.set_exception(error)

    def _let_go(self) -> None:
        """Refer to nothing: what the work used must be freed with its last user."""
        self.begun, self._after = None, _nothing


def _nothing() -> None:
    """Do nothing."""


class ParameterStore:
    """Shards of one ps; a shardline.server.backend.Backend.

    Configuration changes on the server's loop; tensor work runs in `pool`.

    memory_limit_bytes: most bytes that Configure may allocate; None = no limit.
    staging_bytes: limit for receive slots and partial sums; None = derived from the plan, see shardline.server.staging.
    """

    cold_dir = Path(tempfile.gettempdir())
    """Folder for rows of tables beyond their memory_rows."""

    def __init__(
        self,
        *,
        device: torch.device,
        pool_threads: int,
        memory_limit_bytes: int | None = None,
        staging_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.pool_threads = pool_threads
        self.memory_limit_bytes = memory_limit_bytes
        self.free_memory: Callable[[], int] | None = None
        """Bytes of host memory still available, if that limits what can be configured; else None."""
        self.staging_bytes = staging_bytes
        self.staging = Staging()
        """Decides who may send the next contribution."""
        self.pace = Pace()
        self.buffers = Buffers(lambda: self.staging.limit, lambda: self.staging.in_use)
        """Memory for incoming contributions."""
        self.heap_trimmer = HeapTrimmer(lambda: self.staging.limit - max(self.staging.in_use, self.buffers.held_bytes))
        """Returns freed memory to the system."""
        self.staging_wait_s = 60.0
        """Most seconds in total that a stream may wait for room in staging; a sixth of --timeout in a ps process."""
        self.let_go_s = 10.0
        """Most seconds that retired shards may delay the creation of new ones; a sixth of --timeout in a ps process."""
        self.authority = Authority()
        self.shards: dict[int, Shard] = {}
        self.standbys: dict[int, Standby] = {}
        """Standbys held here, by shard; their primaries are on other servers."""
        self._settings: ShardSettings | None = None
        self._coding: JobCoding | None = None
        self.signals: dict[tuple[int, int], Signal] = {}
        self.configuration: PsConfiguration | None = None
        self.placement: tuple[Placement, ...] = ()
        self.traffic = TrafficTally()
        self.traffic_lock = threading.Lock()
        self.failure = ""
        self.generation = 0
        """Counts configurations, so that work for an older one is recognized."""
        self.pool = ThreadPoolExecutor(max_workers=pool_threads, thread_name_prefix="apply")
        self.make_publication: Callable[[ShardSpec, bool], Publication] = lambda spec, keeps_previous: PlainPublication(
            spec, self.device
        )
        """(shard's plan, whether the previous step is kept): host memory for the values that the shard publishes."""
        self.lane_bytes: Callable[[PsConfiguration], int] = lambda configuration: 0
        """Bytes that lanes will hold besides published values and staging, for the memory check at configuration."""
        self.lane_attachments: Callable[[], Mapping[str, int]] = lambda: {}
        """Number of open attachments by lane, for the metrics."""
        self.on_complete: Callable[[int, int], None] = lambda shard, step: None
        """(shard, step): all contributions to a step that needs a verdict have arrived. Called from pool threads."""
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """A step can't be applied: the job can't continue. Called on any thread with locks held: must not block."""
        self.on_pulled: Callable[[str, str, str, int, int, float], None] = (
            lambda peer, codec, lane, raw, wire, seconds: None
        )
        """(peer, codec, lane, raw bytes, wire bytes, seconds) of a finished pull."""
        self.on_barrier: Callable[[int, float], None] = lambda shard, wait_s: None
        """(shard, seconds from the first contribution to the last) of a synchronous step's first bucket."""
        self.on_applied: Callable[[int, float], None] = lambda shard, seconds: None
        """(shard, seconds) of the update rule on one bucket."""

    @property
    def coding(self) -> JobCoding:
        """See Backend. Kept as long as the shards are, since it remembers what was pulled."""
        if self._coding is None:
            raise ProtocolError("this ps has no job yet")
        return self._coding

    async def work(self, function: Callable[..., T], *args: object) -> T:
        return await self.work_whole(functools.partial(function, *args), _nothing)

    def work_whole(self, function: Callable[[], T], after: Callable[[], None]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        done: PoolWork[T] = PoolWork(after, loop=loop)

        def whole() -> None:
            try:
                try:
                    result = function()
                finally:
                    after()
                    self.heap_trimmer.look()
            except BaseException as error:
                post(loop, functools.partial(done.fail, error))
            else:
                post(loop, functools.partial(done.succeed, result))

        done.begun = self.pool.submit(whole)
        # The end of the pool cancels what it has not begun.
        done.begun.add_done_callback(lambda begun: post(loop, done.never_began) if begun.cancelled() else None)
        return done

    def check(
        self, configuration: PsConfiguration, *, keep: Collection[int] = (), keep_standbys: Collection[int] = ()
    ) -> Reconfiguration | None:
        """The changes that a configuration would make; None if it is in force already (values are then kept).

        keep: shards that keep their values in the new timeline; they must be here, under the same rule. keep_standbys:
        standbys that are kept; the others are copied again.
        Raises ProtocolError or UsageError; the current configuration then stays.
        """
        if (
            self.authority.configured
            and self.configuration is not None
            and self.configuration == replace(configuration, standbys=self.configuration.standbys)
        ):
            if configuration.standbys != self.configuration.standbys:
                # Standbys come and go while the shards stay.
                self._check_memory(configuration)
                self.configuration = configuration
            # A standby that its primary does not follow is outdated, even if it claims to be complete.
            self.drop_standbys("it is being copied again", keep=keep_standbys)
            return None
        kept = self._to_keep(configuration, keep)
        if not self._same(configuration):
            keep_standbys = ()
        plan = configuration.plan
        for number in configuration.shards:
            if number >= len(plan.shards):
                raise ProtocolError(f"Configure places shard {number} here, but the plan has {len(plan.shards)} shards")
        if configuration.replicas < 1:
            raise ProtocolError("Configure says 0 replicas; a job has at least 1")
        JobCoding(codecs.of(configuration), plan)
        check_tensors(configuration.rule, plan.tensors)
        cold.check(plan.tensors, self.cold_dir)
        self._check_memory(configuration)
        return Reconfiguration(configuration, kept, frozenset(keep_standbys))

    def let_go(self, change: Reconfiguration, loop: asyncio.AbstractEventLoop) -> RetiredShards:
        """Retire what is not kept, admit nothing, and wake everyone waiting here. make() must follow.

        Memory is freed once nothing uses it any more: see RetiredShards. If make() never comes, another configuration
        can still keep what this one keeps.
        """
        leaving = [shard for number, shard in self.shards.items() if number not in change.kept]
        leaving += [standby.shard for number, standby in self.standbys.items() if number not in change.standbys]
        retired = RetiredShards(leaving, loop)
        self.shards = dict(change.kept)
        self.drop_standbys("the timeline of its primary has ended", keep=change.standbys)
        self.authority.configured = self.authority.active = False
        self.authority.timeline = change.configuration.timeline
        self.generation += 1
        if self.configuration is not None:
            self.configuration = replace(self.configuration, shards=tuple(sorted(self.shards)))
            self._configure_staging(self.configuration)
        before, self.signals = self.signals, {}
        for signal in before.values():
            # Anyone waiting there is waiting for a timeline that has ended.
            signal.notify()
        return retired

    def make(self, change: Reconfiguration, loop: asyncio.AbstractEventLoop) -> None:
        """Create the new shards of a checked configuration, without values; let_go() has come before."""
        configuration, kept = change.configuration, change.kept
        settings = ShardSettings.of(configuration, self.device, self.cold_dir)
        shards = {
            number: kept[number] if number in kept else self._make_shard(number, settings, self._observers(number))
            for number in configuration.shards
        }
        for shard in kept.values():
            # A timeline begins without members, for these too.
            shard.mode.members_changed(())
        self._settings = settings
        self._coding = configuration.coding
        self.signals = {
            (number, bucket.number): Signal(loop) for number, shard in shards.items() for bucket in shard.buckets
        }
        self.shards = shards
        self.configuration = configuration
        self._configure_staging(configuration)
        self.generation += 1
        self.authority.configured = True
        self.authority.active = False
        self.authority.job = configuration.job
        self.authority.plan_id = configuration.plan.plan_id
        self.authority.timeline = configuration.timeline
        log.info(
            "has shards %s of %d: %d buckets, %.1f MB of parameters, %s",
            list(configuration.shards),
            len(configuration.plan.shards),
            len(self.signals),
            sum(configuration.plan.shards[number].nbytes for number in configuration.shards) / 1e6,
            configuration.rule.name,
        )
        log.info("%s", memory_sentence(self.memory_plan(configuration), configuration))

    def _configure_staging(self, configuration: PsConfiguration) -> None:
        """Size staging for the shards held now."""
        ledger = staging_ledger(configuration, self.shards, self.staging_bytes)
        self.staging.configure(ledger, partial_bytes(self.shards))

    def _check_memory(self, configuration: PsConfiguration) -> None:
        """Raise UsageError if there is no room for the memory that a configuration will need."""
        needed = planned_bytes(configuration)
        if self.device.type != "cpu":
            # Sums that wait for more replicas are on the device too.
            needed += staging_limit(configuration, 0)
        limit, remedy = self.memory_limit_bytes, "raise --gpu-memory-fraction"
        if limit is None and self.free_memory is not None:
            limit, remedy = self.free_memory() + self.held_bytes, "a machine (or container) with more memory"
        if limit is not None and needed > limit:
            raise UsageError(
                f"the shards of this ps, with optimizer state, need {needed:,} bytes on {self.device}; the limit is "
                f"{limit:,}. Use more parameter servers, or {remedy}"
            )

    def _same(self, configuration: PsConfiguration) -> bool:
        """Whether it differs from the current configuration only in placement and timeline."""
        held = self.configuration
        return held is not None and held == replace(
            configuration, timeline=held.timeline, shards=held.shards, standbys=held.standbys
        )

    def _to_keep(self, configuration: PsConfiguration, keep: Collection[int]) -> dict[int, Shard]:
        """The shards to keep. Raises ProtocolError if they are not here, or would change."""
        if not keep:
            return {}
        same = self._same(configuration)
        lacking = sorted(set(keep) - self.shards.keys() | set(keep) - set(configuration.shards))
        if not same or lacking:
            what = f"shards {lacking} are not on this ps" if lacking else "the plan, the rule or the mode differ"
            raise ProtocolError(f"Configure wants to keep shards {sorted(keep)}, but {what}; create them again")
        return {number: self.shards[number] for number in keep}

    def standby(self, number: int) -> Standby:
        """The standby of a shard, created if there is none yet. Tensor work; one call per shard at a time."""
        held = self.standbys.get(number)
        if held is None:
            if not self.authority.configured or self._settings is None or self.configuration is None:
                raise ProtocolError(
                    f"this ps is being reconfigured; its standby of shard {number} can start after that"
                )
            generation = self.generation
            if number not in self.configuration.standbys:
                # The memory check at configuration did not include it.
                self._check_memory(replace(self.configuration, standbys=(*self.configuration.standbys, number)))
            # It has no observers until adopt().
            held = Standby(self._make_shard(number, self._settings, Observers()))
            if generation != self.generation:
                raise ProtocolError(f"this ps was reconfigured while its standby of shard {number} was created")
            self.standbys[number] = held
        return held

    def drop_standbys(self, reason: str, *, keep: Collection[int] = ()) -> None:
        """Drop standbys; none of them can be promoted any more."""
        for number in self.standbys.keys() - set(keep):
            self.standbys.pop(number).close(f"the standby of shard {number} was discarded: {reason}")

    def adopt(self, number: int, loop: asyncio.AbstractEventLoop) -> Shard:
        """Become the primary of a shard whose standby here was promoted."""
        configuration = self.configuration
        assert configuration is not None
        shard = self.standbys.pop(number).shard
        shard.storage.observers = self._observers(number)
        self._forget_others(shard)
        self.shards = {**self.shards, number: shard}
        self.signals.update({(number, bucket.number): Signal(loop) for bucket in shard.buckets})
        self.configuration = configuration = replace(
            configuration,
            shards=tuple(sorted(self.shards)),
            standbys=tuple(held for held in configuration.standbys if held != number),
        )
        self._configure_staging(configuration)
        return shard

    def memory_plan(self, configuration: PsConfiguration) -> dict[str, int]:
        """Most bytes that a configuration's shards may hold, by kind; see shardline_ps.control.configuration."""
        return memory_plan(configuration, staging=self.staging_bytes, lanes=self.lane_bytes(configuration))

    def _make_shard(self, number: int, settings: ShardSettings, observers: Observers) -> Shard:
        spec = settings.plan.shards[number]
        publishing = consistency.of(settings.consistency).publishing
        shard = Shard(number, settings, publication=publishing.memory(self.make_publication, spec), observers=observers)
        shard.mode.members_changed(self.authority.members or ())
        return shard

    def _observers(self, number: int) -> Observers:
        return Observers(
            on_publish=lambda bucket: self._notify(number, bucket),
            on_counted=self.staging.changed,
            on_complete=lambda step: self.on_complete(number, step),
            on_barrier=lambda wait_s: self.on_barrier(number, wait_s),
            on_failure=self._failed,
            on_apply=lambda seconds: self.on_applied(number, seconds),
        )

    def members_changed(self) -> None:
        """Pass the newly admitted workers on to the shards; waiting pulls check whether they still have to wait."""
        for shard in (*self.shards.values(), *(standby.shard for standby in self.standbys.values())):
            shard.mode.members_changed(self.authority.members or ())
        for shard in self.shards.values():
            self._forget_others(shard)
        for signal in self.signals.values():
            signal.notify()

    def _forget_others(self, shard: Shard) -> None:
        """Have a primary's rule forget workers that are no longer admitted.

        A standby remembers them until it is promoted: records of their last pushes may still arrive.
        """
        if self.authority.members is not None:
            shard.mode.members_changed(self.authority.members, forget=True)

    def _failed(self, error: Exception) -> None:
        # Looked up at the time of the call: in tests and without a chief, it is set after the shards are created.
        self.on_failure(error)

    def _notify(self, shard: int, bucket: int) -> None:
        signal = self.signals.get((shard, bucket))
        if signal is not None:
            signal.notify()

    def shard(self, number: int) -> Shard:
        try:
            return self.shards[number]
        except KeyError:
            raise ProtocolError(f"shard {number} is not on this ps; it has {sorted(self.shards)}") from None

    @property
    def timeline(self) -> int:
        return self.authority.timeline

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        return self.authority.admit(job=job, timeline=timeline, plan_id=plan_id, who=who, init=init)

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        return self.authority.fenced(task, incarnation)

    def signal(self, shard: int, bucket: int) -> Signal | None:
        return self.signals.get((shard, bucket))

    def filled(self) -> None:
        self.heap_trimmer.give_back()

    def pulled(self, task: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        self.on_pulled(task, codec, lane, raw_bytes, wire_bytes, seconds)

    def count(self, *, push_raw: int = 0, push_wire: int = 0, pull_raw: int = 0, pull_wire: int = 0) -> None:
        with self.traffic_lock:
            self.traffic.push_raw_bytes += push_raw
            self.traffic.push_wire_bytes += push_wire
            self.traffic.pull_raw_bytes += pull_raw
            self.traffic.pull_wire_bytes += pull_wire

    @property
    def held_bytes(self) -> int:
        return sum(shard.held_bytes for shard in self.shards.values()) + self._standby_bytes()

    def _standby_bytes(self) -> int:
        return sum(standby.nbytes for standby in list(self.standbys.values()))

    def held_by_kind(self) -> dict[str, int]:
        """The same by kind: parameters with optimizer state, partial sums, cuts, standbys."""
        shards = list(self.shards.values())
        return {
            "parameters": sum(bucket.nbytes for shard in shards for bucket in shard.buckets),
            "staged": self.staging.in_use,
            "cuts": sum(shard.cuts.held_bytes for shard in shards),
            **({"standbys": self._standby_bytes()} if self.standbys else {}),
        }

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def staging_ledger(configuration: PsConfiguration, shards: Mapping[int, Shard], asked: int | None) -> Ledger:
    """The staging rule for the buckets of these shards."""

    def view(shard: int, bucket: int) -> tuple[int, int] | None:
        held = shards.get(shard)
        if held is None or bucket >= len(held.buckets):
            return None
        seen = held.buckets[bucket]
        return seen.step, seen.contributions.mask

    mode = consistency.of(configuration.consistency)
    sizes = {
        (number, bucket.number): bucket.spec.nbytes
        for number, shard in shards.items()
        for bucket in shard.buckets
        if mode.intake.place(bucket.number) is not None and bucket.spec.kind is not TensorKind.FROZEN
    }
    limit = staging_limit(configuration, asked)
    if asked is not None and limit > asked:
        log.warning(
            "the limit of staging is %.1f MB instead of the %.1f MB requested: with less, steps of %d replicas might "
            "never end",
            limit / 1e6,
            asked / 1e6,
            configuration.replicas,
        )
    replicas = mode.contributors(configuration.replicas)
    return Ledger(limit, sizes, replicas, intake=mode.intake, view=view)


def partial_bytes(shards: Mapping[int, Shard]) -> Callable[[], int]:
    """A function that returns the bytes of these shards' partial sums at the time of the call."""
    return lambda: sum(shard.partial_bytes for shard in shards.values())
