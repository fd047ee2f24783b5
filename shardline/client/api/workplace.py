"""What is made anew for each plan and timeline: the session's lanes, trainer and gate."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardline import codecs, division
from shardline.cadence import Sends
from shardline.client.api.stepper import Seen, Stepper
from shardline.client.applied.worker_optimizer import ServerStates
from shardline.client.exchange.shard_exchange import Exchange, Interrupted, Observer, Restart
from shardline.client.layout import ModelLayout
from shardline.client.overlap.gate import BodyWaits, Gate, Reach
from shardline.client.partners import Hooks, Partners, server_of
from shardline.client.step.early_push import AsComputed, GradientHooks
from shardline.client.step.in_place import InPlace, Places, place
from shardline.client.step.staging import GradientStaging, PushTools
from shardline.client.step.table_rows import ServedRows
from shardline.client.step.trainer import RetainedContribution, Trainer, WorkerMethods
from shardline.client.step.weights import GapMeter, Weights
from shardline.client.watch.model_watch import UNWATCHED, ModelWatch
from shardline.client.ways import Ways
from shardline.codecs import coding_of
from shardline.config import RoleConfig, environment
from shardline.consistency import Clock, Gives
from shardline.core.identity import Identity
from shardline.core.orders import JobView, Orders
from shardline.core.scores import known
from shardline.core.settings import EXACT
from shardline.core.spec import JobSpec, TensorKind
from shardline.core.status import Traffic
from shardline.core.timeouts import Timeouts
from shardline.errors import NonFiniteError, ShardlineError, UnreachableError, UsageError
from shardline.lanes.base import Lane
from shardline.lanes.negotiated import open_lane
from shardline.model import named_values
from shardline.nn import tables_of
from shardline.observability.metrics import Metrics
from shardline.rpc.channel import Peers
from shardline.rpc.link import ChiefLink
from shardline.rpc.server import RpcServer
from shardline.topology import Hop
from shardline.waist import Memory, Sender, Standing

log = logging.getLogger("shardline.client")


class Workplace:
    """One worker's trainer, replaced when plan or timeline change.

    still_ordered, still_open, settle: see Observer and Hooks.
    """

    def __init__(
        self,
        config: RoleConfig,
        metrics: Metrics,
        *,
        still_ordered: Callable[[], bool],
        still_open: Callable[[int], bool],
        settle: Callable[[], None],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self.partners: Partners | None = None
        """Other workers, where these compute parts of a replica's step."""
        self._hooks = Hooks(
            still_ordered=still_ordered,
            still_open=still_open,
            settle=settle,
            settled=lambda: self.current is None or (running := self.current.open.running) is None or not running.busy,
        )
        self._server: RpcServer | None = None
        self._still_ordered = still_ordered
        self._peers = Peers(config.timeouts, config.security)
        self.ways = Ways(config)
        self._reach: Reach | None = None
        self.values: Mapping[str, torch.Tensor] = {}
        """The user's tensors by name."""
        self.watch = UNWATCHED
        """Looks at the user's model."""
        self.wishes = Wishes()
        self._methods: WorkerMethods | None = None
        self.view: JobView | None = None
        self.current: Trainer | None = None
        self.gate: Gate | None = None
        """If set, the next forward pass waits per layer."""
        self.resting = False
        """The servers know that this worker pushes nothing until it has located its step again."""
        self.waits = BodyWaits()
        self.tables = ServedRows(lambda: self.trainer, self.waits)

    def furnish(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        job: JobSpec,
        *,
        overlap: bool,
        zero_copy: bool = False,
    ) -> None:
        """Set the model and what holds its parameters. The passes of a job file's whole model are watched, and the
        next one may wait for each tensor by itself.

        Raises UsageError for overlap together with zero_copy.
        """
        parts = division.of(job)
        self.ways.meet(job, self._metrics)
        if parts.worker is not None:
            self.partners = parts.worker.partners(self._config, self._metrics, self._hooks)
        from_file = not (job.script or parts.partial or job.has_tables)
        if zero_copy and (overlap or (from_file and self._config.overlap)):
            remedy = "pass only one of them to attach()" if overlap else "for a job file, set SHARDLINE_OVERLAP=0"
            raise UsageError(
                f"overlap and zero_copy can't be combined, since zero_copy leaves nothing to overlap; {remedy}"
            )
        overlaps = self._config.overlap and (overlap or from_file) and not job.has_tables
        self.wishes = Wishes(overlap=overlaps, zero_copy=zero_copy, credit_bytes=credit_bytes())
        if isinstance(model, nn.Module):
            self.values = named_values(model)
            self.tables.serve(tables_of(model))
            if from_file and overlaps:
                groups = [group["params"] for group in optimizer.param_groups]
                self._reach = Reach(model, self.values.values(), groups)
        else:
            self.values = dict(model)
        self.watch = ModelWatch(model, self.values, optimizer.param_groups, script=job.script, divided=parts.partial)

    def serve(self) -> str:
        """Start this worker's server, on which partners call; returns its address."""
        if self.ways.speaker is not None:
            return self.ways.speaker.start()
        self._server = server_of(self._config, self.partners)
        return self._server.start()

    @property
    def trainer(self) -> Trainer:
        """State of training. Raises UsageError before attach()."""
        if self.current is None:
            raise UsageError("the session is not attached: call session.attach(model, optimizer) first")
        return self.current

    @property
    def timeline(self) -> int | None:
        return self.view.timeline if self.view is not None else None

    @property
    def peers(self) -> dict[int, str]:
        return {shard: hop.task for shard, hop in self.ways.hops.items()}

    def renew(self, link: ChiefLink) -> None:
        """Make a new trainer if the plan or timeline has changed. The worker is about to locate its step."""
        self.resting = False
        view = link.ask(lambda: link.client.get_job(link.identity))
        known = self.view is not None and (view.plan.plan_id, view.timeline) == (
            self.view.plan.plan_id,
            self.view.timeline,
        )
        hops = self.ways.choose(link, view)
        if known and hops == self.ways.hops:
            self._bring_wanted(link)
            return
        # First, so that nothing has changed if a server's name can't be resolved yet and all of this is retried.
        ties = self._tie(link, view, hops)
        self.ways.hops = hops
        self._close_trainer()
        if self.current is not None and self._reach is not None:
            # Its references to tensors would be counted as ours, and be missed when they go.
            self.current = None
            gc.collect()
        self.view = view
        if self._methods is None:
            self._methods = WorkerMethods(view.job, self.values)
            self.wishes = replace(self.wishes, overlap=self.wishes.overlap and self._methods.streams)
        link.suspect((), view.timeline)
        trainer = make_trainer(view, self._methods, ties, self.wishes)
        if self.partners is not None:
            trainer.weights.arrivals.on_end = self.partners.look
        self.watch.meet(own_layout(trainer))
        trainer.watch = self.watch
        if self._reach is not None and self.wishes.overlap:
            self._reach.rebase()

            def wait_for(tensors: Iterable[int]) -> None:
                with self.waits():
                    trainer.wait_for(tensors)

            tensors = trainer.weights.layout.tensors
            self.gate = Gate(
                tensors,
                self._reach,
                wait_for=wait_for,
                waiting=lambda: trainer.open.sent and trainer.weights.incomplete,
            )
        self.current = trainer

    def traffic(self) -> Traffic:
        """Bytes so far, and what the codec of pushes makes of them."""
        if self.current is None:
            return Traffic()
        push_raw, push_wire, pull_raw, pull_wire = self.current.meter.total
        return Traffic(
            push_raw_bytes=push_raw,
            push_wire_bytes=push_wire,
            pull_raw_bytes=pull_raw,
            pull_wire_bytes=pull_wire,
            codec_error=self.current.weights.coding.push.relative_error or 0.0,
            codec_owed=self.current.encoders.memory_norm or 0.0,
        )

    def figures(self) -> Mapping[str, float]:
        """Figures of this worker's pushes; see WorkerHalf.figures."""
        return self._methods.half.figures if self._methods is not None else {}

    @property
    def lost_updates(self) -> int:
        """Asynchronous mode: acknowledged pushes that are gone because a shard was lost and restored."""
        return self._methods.half.lost if self._methods is not None else 0

    def _tie(self, link: ChiefLink, view: JobView, hops: Mapping[int, Hop]) -> Ties:
        """Open lanes to these tasks, by shard."""
        count = self._metrics.counter

        def fallen_back(lane: str, reason: str) -> None:
            count("shardline_lane_fallbacks_total", lane=lane).inc()

        lanes: dict[int, Lane] = {}
        for shard, hop in hops.items():
            peer = self._peers.get(hop.task, hop.address)
            # Only a resolved name shows whether the peer is on this host.
            peer.await_name()
            peer.on_retry = count("shardline_rpc_retries_total", peer=hop.task).inc
            spec, tensors = view.plan.shards[shard], self.values.values()
            lanes[shard] = open_lane(self._config, peer, shard, spec, tensors=tensors, on_fallback=fallen_back)
        return Ties(
            who=link.identity,
            index=self._config.index,
            lanes=lanes,
            timeouts=self._config.timeouts,
            observer=Observer(
                still_ordered=self._still_ordered,
                leaves=lambda shard: self.ways.leave(hops[shard]),
                retried=lambda shard: count("shardline_rpc_retries_total", peer=hops[shard].task).inc(),
                # Of this timeline's servers.
                silent=lambda shards: link.suspect({hops[shard].task for shard in shards}, view.timeline),
                not_finite=lambda name: count("shardline_nonfinite_total", what=name).inc(),
            ),
        )

    def _close_trainer(self) -> None:
        if self.gate is not None:
            self.gate.open()
            self.gate.look()
            self.gate = None
        if self.current is not None:
            self.current.close()

    def rest(self) -> None:
        """Tell the servers that this worker pushes nothing for a while, in a mode in which others would wait for it.

        If a server can't answer now, `resting` stays False. No exchange may be running.
        """
        if not self.resting:
            self.resting = self._say(()) is not None

    def wake(self) -> bool:
        """Tell the servers that this worker computes again, with the values that it has. No exchange may be running.

        False if not all were told: the worker has to find its place again before it pushes.
        """
        if self.resting:
            standings = self._say((0,))
            if standings is None:
                return False
            self.resting = False
            self.trainer.half.woken(standings)
        return True

    def _say(self, replicas: Sequence[int]) -> Mapping[int, Standing] | None:
        """Ask for the standing of these replicas, see Lane.progress; None unless all servers were told."""
        trainer = self.current
        if trainer is None or trainer.half.clock is None:
            return None
        try:
            return trainer.standings(replicas)
        except (Restart, Interrupted, UnreachableError) as error:
            log.info("telling the servers whether this worker rests: %s", error or "interrupted")
            return None

    def finish(self, link: ChiefLink, *, again: bool) -> None:
        """Report to the chief that this worker has done its part. again: it has before, and the job has not ended."""
        if again:
            self._bring_wanted(link)
            return
        if self._methods is not None and self._methods.applied is not None:
            self._methods.applied.bring_all()
        self.keep_values()
        self.rest()
        link.finish()

    def _bring_wanted(self, link: ChiefLink) -> None:
        """Bring what the last cut lacks, if the job stops: the worker that would have brought it may be lost."""
        trainer, step = self.current, link.orders.stop_step
        if step and trainer is not None and trainer.methods.applied is not None:
            try:
                wanting = [number for number, shard in trainer.standings(()).items() if shard.wants_state]
            except (Restart, Interrupted, UnreachableError) as error:
                log.info("asking what the last checkpoint lacks: %s", error or "interrupted")
                return
            trainer.methods.applied.bring_last(step, wanting)

    def fail(self, link: ChiefLink, error: ShardlineError) -> None:
        trainer = self.current
        if isinstance(error, NonFiniteError) and trainer is not None and trainer.methods.applied is not None:
            # The job stops at this step, and maybe nobody else is there to bring what its last cut lacks.
            trainer.methods.applied.bring_last(trainer.step, range(len(trainer.plan.shards)))
        link.fail(str(error), error.exit_code)

    def keep_values(self) -> None:
        """Make the model's current values this process's own, before the servers may go on without this worker.

        Any thread may call this.
        """
        if self.current is not None:
            self.current.weights.keep()

    def interrupt(self) -> None:
        """End what waits for others: the orders have changed. Called on the heartbeat thread."""
        if self.current is not None:
            self.current.exchange.interrupt()
        if self.partners is not None:
            self.partners.interrupt()

    def arm(self) -> None:
        """Forget earlier interruptions; read the orders after this."""
        self.trainer.exchange.arm()
        if self.partners is not None:
            self.partners.arm()

    def close(self) -> None:
        if self.partners is not None:
            self.partners.close()
        self._close_trainer()
        self.ways.close()
        self._peers.close()
        if self._server is not None:
            self._server.close(grace_s=0.2)


class WorkerState:
    """What a worker's loop looks at before it decides. Used by the session's thread, except ordered().

    leaving: whether this worker was asked to leave. settle: see PostOffice.
    """

    def __init__(
        self, config: RoleConfig, metrics: Metrics, *, leaving: Callable[[], bool], settle: Callable[[], None]
    ) -> None:
        self._leaving, self._timeouts = leaving, config.timeouts
        self.on_stop: Callable[[int], None] = lambda step: None
        """Called with the step at which the job stops, before waiting for its end; maybe more than once."""
        self.stepper = Stepper()
        self.place = Workplace(
            config, metrics, still_ordered=self.still_ordered, still_open=self.still_open, settle=settle
        )
        self.joined: ChiefLink | None = None
        """The link to the chief, from attach() on."""
        self.retained: RetainedContribution | None = None
        """The contribution to the open step of a loop that can't repeat a step."""

    @property
    def link(self) -> ChiefLink:
        """Link to the chief. Raises UsageError before attach()."""
        if self.joined is None:
            raise UsageError("the session is not attached: call session.attach(model, optimizer) first")
        return self.joined

    @property
    def assigned(self) -> bool:
        """Whether the chief assigns logical replicas to this worker."""
        return self.place.trainer.half.shares_steps

    @property
    def number(self) -> int:
        """Number of the open step, or of the leased batch."""
        leases = self.stepper.leases
        return self.place.trainer.step if leases.lease is None else leases.batch

    def see(self) -> Seen:
        """What to decide on. Raises the error of a worker that may not go on, see ChiefLink.check."""
        link, trainer = self.link, self.place.trainer
        leaving = self._leaving()
        if leaving and trainer.job.error_memory != EXACT:
            trainer.encoders.leaving = True
        released = leaving and (link.orders.fenced or not link.orders.replicas)
        if not released:
            link.check()
        return Seen(
            orders=link.orders,
            released=released,
            leaving=leaving,
            timeline=self.place.timeline,
            job_step=trainer.half.job_step,
            assigned=self.assigned,
            script=trainer.job.script,
            resting=self.place.resting,
            resends=trainer.methods.parts.partial,
            rated=not trainer.job.follows_scores
            or known(link.orders.scores, trainer.half.job_step, trainer.job.checkpoint_every),
            retained=self.retained is not None,
        )

    def wait_for_change(self, seen: Orders) -> None:
        """Wait for other orders, for some heartbeats at most."""
        if seen.stop_step:
            self.on_stop(seen.stop_step)
        self.link.wait(lambda o: o != seen or o.fenced, timeout_s=self._timeouts.heartbeat_s * 4)

    def ordered(self, orders: Orders) -> None:
        """Interrupt the exchange if new orders end it. Called on the heartbeat thread."""
        trainer, link, timeline = self.place.current, self.joined, self.place.timeline
        self.place.ways.heard(orders)
        if trainer is None or link is None or timeline is None:
            return
        assigned = trainer.half.shares_steps
        away = self.place.ways.lost(orders)
        if link.lost or away or self.stepper.interrupts(orders, timeline, assigned=assigned):
            self.place.interrupt()

    def still_ordered(self) -> bool:
        """Whether the orders are still those that the open step began with."""
        link, timeline = self.link, self.place.timeline
        if link.lost is not None or timeline is None:
            return False
        return self.stepper.still_ordered(link.orders, timeline, assigned=self.assigned)

    def still_open(self, number: int) -> bool:
        """Whether a step still has to be computed, by the orders that it began with."""
        if not self.still_ordered() or self.place.trainer.methods.parts.goes_back:
            # Without a flush stages are at different steps, and whatever ends one of them changes the orders.
            return self.still_ordered()
        try:
            found = self.place.trainer.standings(range(self.place.trainer.job.replicas)).values()
        except UnreachableError as error:
            # Beginning again would not help: the other stages do so only if the orders change.
            log.info("can't ask whether step %d is closed: %s", number, error)
            return self.still_ordered()
        except (Restart, Interrupted) as error:
            log.info("looking for the current step again: %s", error or "interrupted")
            return False
        return min(step for standing in found for step in standing.replicas.values()) <= number


def credit_bytes() -> int:
    """SHARDLINE_CREDIT_MB in bytes: limit of bytes in flight to a shard; 0 = derived from its buckets.

    Raises UsageError.
    """
    text = environment("credit_mb") or "0"
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < 1e6:
        raise UsageError(
            f"SHARDLINE_CREDIT_MB is {text!r}; give a number of megabytes, such as 4, or 0 for the default"
        )
    return int(found * 2**20)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How to handle a worker's tensors and gradients, if the job allows it."""

    overlap: bool = False
    """Gradients may leave during the backward pass, see Trainer.expect()."""
    zero_copy: bool = False
    """Gradients may be computed in shared memory, see in_place."""
    credit_bytes: int = 0
    """See SendQueue; 0 = derived from the buckets."""


@dataclass(frozen=True, kw_only=True)
class Ties:
    """A worker's connections to the servers of one plan and timeline."""

    who: Identity
    index: int
    """The worker's number."""
    lanes: Mapping[int, Lane]
    """By shard."""
    timeouts: Timeouts
    observer: Observer


def make_trainer(view: JobView, methods: WorkerMethods, ties: Ties, wishes: Wishes) -> Trainer:
    """Make a trainer for the plan and timeline of `view`. Raises UsageError if zero_copy is not possible."""
    plan, job = view.plan, view.job
    unshareable = why_not_shareable(job, methods)
    if wishes.zero_copy and unshareable:
        raise UsageError(unshareable)
    places = Places({}, {}) if unshareable else place(plan, methods.held.pulled, ties.lanes)
    layout = ModelLayout(plan, methods.held.pulled)
    memory = None
    if places.regions or wishes.zero_copy:
        memory = InPlace(plan, layout, ties.lanes, places, lends=wishes.zero_copy)
    coding, apart = coding_of(job, plan), methods.copies
    weights = Weights(plan, layout, coding, memory, _gap(methods, layout), apart=apart)
    exchange = Exchange(ties.lanes, weights.sinks, ties.timeouts, index=ties.index, observer=ties.observer)

    def allocate(shard: int, bucket: int, nbytes: int) -> Memory | None:
        return ties.lanes[shard].allocate(bucket, nbytes)

    encoders = methods.encoders(weights.coding.push, ties.index)
    staging = GradientStaging(plan, methods.half.tree_replicas, encoders, allocate, weights.gpu)
    tools = PushTools(
        plan=plan,
        staging=staging,
        interrupted=exchange.refusal,
        credit_bytes=wishes.credit_bytes,
        gpu=weights.gpu,
    )
    early = None
    if wishes.overlap and methods.streams:
        early = AsComputed(job, methods.half, GradientHooks(plan, layout.tensors), tools, ties.observer)
    sender = Sender(job=job.name, timeline=view.timeline, plan_id=plan.plan_id, who=ties.who)
    trainer = Trainer(view, sender, methods, weights, tools, exchange, early)
    if methods.applied is not None:
        states = ServerStates(exchange, lambda: trainer.sender)
        methods.applied.meet(plan, ModelLayout(plan, methods.held.model), layout, states)
    return trainer


def why_not_shareable(job: JobSpec, methods: WorkerMethods) -> str:
    """Why this job's tensors can't be read from and computed in shared memory; "" if they can."""
    codec = codecs.of(job)
    if not (methods.half.exact is not None and all(one.is_view for one in (*codec.ups, *codec.downs))):
        # Its replies are made for a single worker.
        return (
            f"zero_copy needs a synchronous job with codec raw; this one is {job.consistency.mode} with codec {codec}"
        )
    if methods.applied is not None:
        return "zero_copy needs servers that run the optimizer; with apply 'worker' the workers read gradients instead"
    if not methods.streams:
        return f"zero_copy needs a cadence that sends each gradient unchanged; this job has {job.cadence}"
    if methods.parts.partial:
        return (
            "zero_copy needs workers that pull the whole model; those of a pipeline or of tensor_parallel pull a part"
        )
    if Gives.LASTING_VALUES not in methods.mode.gives:
        why = Gives.LASTING_VALUES.value.format(mode=methods.mode)
        return f"zero_copy needs parameters that stay where they are while a worker uses them; {why}"
    return ""


def own_layout(trainer: Trainer) -> ModelLayout | None:
    """The layout of the tensors that passes compute with; None if these have values that are not the servers'."""
    methods = trainer.methods
    if methods.copies:
        return None
    found = trainer.weights.layout if methods.applied is None else methods.applied.buckets.model
    assert isinstance(found, ModelLayout)
    return found


def _gap(methods: WorkerMethods, layout: ModelLayout) -> GapMeter:
    """Where steps are in common, all gradients are of the parameters that they are applied to."""
    if methods.mode.clock is not Clock.VERSION or methods.cadence.sends is Sends.DELTAS:
        return GapMeter(every=0)
    specs = layout.plan.tensors
    return GapMeter([layout.tensors[number] for number, spec in enumerate(specs) if spec.kind is TensorKind.PARAM])
