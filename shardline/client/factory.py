"""Builds a trainer from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardline.cadence import Sends
from shardline.client.applied.optimizer_buckets import ServerStates
from shardline.client.exchange.retrying import Observer
from shardline.client.exchange.shard_exchange import Exchange
from shardline.client.layout import ModelLayout
from shardline.client.overlap.early_push import AsComputed, GradientHooks
from shardline.client.step.in_place import InPlace, Places, place, why_not_shareable
from shardline.client.step.open_step import PushAtEnd, PushTools
from shardline.client.step.sink import ParameterMemory
from shardline.client.step.staging import GradientStaging
from shardline.client.step.trainer import Trainer
from shardline.client.step.weights import GapMeter, Weights
from shardline.client.step.worker_methods import WorkerMethods
from shardline.codecs import coding_of
from shardline.consistency import Clock
from shardline.core.identity import Identity
from shardline.core.orders import JobView
from shardline.core.spec import TensorKind
from shardline.core.timeouts import Timeouts
from shardline.errors import UsageError
from shardline.lanes.base import Lane
from shardline.topology import Route
from shardline.waist import Sender


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
    route: Route
    lanes: Mapping[int, Lane]
    """By shard."""
    timeouts: Timeouts
    observer: Observer


def make_trainer(view: JobView, methods: WorkerMethods, ties: Ties, wishes: Wishes) -> Trainer:
    """Make a trainer for the plan and timeline of `view`. Raises UsageError if zero_copy is not possible."""
    plan, job = view.plan, view.job
    unshareable = why_not_shareable(job, methods)
    if not unshareable and not methods.mode.lends_values:
        unshareable = (
            f"zero_copy needs parameters that stay where they are while a worker uses them; in consistency "
            f"{methods.mode} the servers go on without a slow worker"
        )
    if wishes.zero_copy and unshareable:
        raise UsageError(unshareable)
    places = Places({}, {}) if unshareable else place(plan, methods.held.pulled, ties.lanes)
    layout = ModelLayout(plan, methods.held.pulled)
    memory = ParameterMemory()
    if places.regions or wishes.zero_copy:
        memory = InPlace(plan, layout, ties.lanes, places, lends=wishes.zero_copy)
    coding, apart = coding_of(job, plan), methods.copies
    weights = Weights(plan, layout, coding, memory, _gap(methods, layout), apart=apart)
    exchange = Exchange(ties.lanes, weights.sinks, ties.timeouts, index=ties.index, observer=ties.observer)

    def allocate(shard: int, bucket: int, nbytes: int) -> memoryview | None:
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
    strategy = PushAtEnd(plan)
    if wishes.overlap and methods.streams:
        strategy = AsComputed(job, methods.half, GradientHooks(plan, layout.tensors), tools, ties.observer)
    sender = Sender(job=job.name, timeline=view.timeline, plan_id=plan.plan_id, who=ties.who)
    trainer = Trainer(view, sender, methods, ties.route, weights, tools, exchange, strategy)
    if methods.applied is not None:
        states = ServerStates(exchange, lambda: trainer.sender)
        methods.applied.meet(plan, ModelLayout(plan, methods.held.model), layout, states)
    return trainer


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
