"""A worker's session with its cluster: the one path by which a job file and a person's own script train.

session = shardline.connect()
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(600):
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()
session.close()
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import nn

from shardline.client.attachment import ScriptSettings, check_named, meter_step, script_spec
from shardline.client.exchange import Interrupted, Restart, Stopped
from shardline.client.gate import Gate, why_not
from shardline.client.leases import Leases
from shardline.client.optimizer import ShardlineOptimizer
from shardline.client.overlap import Expected
from shardline.client.trainer import StepFigures, Trainer
from shardline.client.watching import StepAgain, StepWatch
from shardline.config import RoleConfig, environment
from shardline.data import UNWATCHED, Watch
from shardline.errors import (
    FencedError,
    JobError,
    RolledBackError,
    ShardlineError,
    TaskLostError,
    TensorError,
    UnreachableError,
    UsageError,
)
from shardline.lanes.base import Lane
from shardline.lanes.open import open_lane
from shardline.metrics import Metrics
from shardline.model import named_values
from shardline.process import Termination, resolve_device
from shardline.rpc.channel import Peers
from shardline.rpc.client import JobView
from shardline.rpc.link import ChiefLink, Orders, Phase, StepReport, machine_fingerprint
from shardline.rpc.server import RpcServer
from shardline.spec import ConsistencySpec, JobSpec

log = logging.getLogger("shardline.client")


@dataclass(frozen=True)
class _Sent:
    """A step that is on its way while the next one is computed."""

    reports: tuple[StepReport, ...]
    began_s: float
    batch: int


class Session:
    """One worker's place in a job. Used by one thread; made by shardline.connect() or the worker service."""

    def __init__(
        self,
        config: RoleConfig,
        *,
        termination: Termination | None = None,
        name: str = "script",
        consistency: ConsistencySpec | None = None,
        seed: int = 0,
        checkpoint_every: int = 0,
        checkpoint_keep: int = 3,
    ) -> None:
        self.config = config
        self.device = resolve_device(config.device, config.gpu_memory_fraction)
        self._termination = termination or Termination()
        self._script = ScriptSettings(
            name=name,
            consistency=consistency or ConsistencySpec(),
            seed=seed,
            checkpoint_every=checkpoint_every,
            checkpoint_keep=checkpoint_keep,
            workers=max(1, config.cluster.num("worker")),
        )
        self._server = RpcServer(config.cluster.address(config.task), name=config.task, security=config.security)
        self.metrics = Metrics("worker", config.task)
        self._peers = Peers(config.timeouts, config.security)
        self._link: ChiefLink | None = None
        self._trainer: Trainer | None = None
        self._values: Mapping[str, torch.Tensor] = {}
        self._optimizer: ShardlineOptimizer | None = None
        self._view: JobView | None = None
        self._replicas: tuple[int, ...] = ()
        self._todo: set[int] = set()
        """Replicas that still have to contribute to the open step."""
        self._contributed: list[StepReport] = []
        self._stale = True
        """The next step begins with Progress."""
        self._iterating = False
        self._leases = Leases()
        self._sent: _Sent | None = None
        self._unwound: StepAgain | None = None
        """The body of the loop was left in its middle."""
        self._hooked = False
        """Gradients leave during the backward pass."""
        self._gate: Gate | None = None
        """Where there is one, the next forward pass waits per layer."""
        self._model: nn.Module | None = None
        self._step_began_s = self._accounted_s = time.monotonic()
        self._loss: float | None = None
        self._finished = False
        self._closed = False

    # What a script asks

    @property
    def link(self) -> ChiefLink:
        """Tie to the chief; raises UsageError before attach()."""
        if self._link is None:
            raise UsageError("the session is not attached yet: call session.attach(model, optimizer) first")
        return self._link

    @property
    def trainer(self) -> Trainer:
        """State of training; raises UsageError before attach()."""
        if self._trainer is None:
            raise UsageError("the session is not attached yet: call session.attach(model, optimizer) first")
        return self._trainer

    @property
    def replica(self) -> int:
        """First logical replica of this worker; in asynchronous mode its index."""
        return self._replicas[0] if self._replicas and self.trainer.is_sync else self.config.index

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that still have to contribute to the open step, in order."""
        return tuple(sorted(self._todo))

    @property
    def num_replicas(self) -> int:
        """Logical replicas of the job; in asynchronous mode the workers of the cluster spec."""
        if self.trainer.is_sync:
            return self.trainer.job.replicas
        return max(1, self.config.cluster.num("worker"))

    @property
    def step(self) -> int:
        """Step whose parameters the model holds; in asynchronous mode, pushes of this worker."""
        return self.trainer.step

    @property
    def job(self) -> JobSpec:
        """The job as the chief has it."""
        return self.trainer.job

    # Attaching

    def attach(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        job: JobSpec | None = None,
        overlap: bool = False,
    ) -> ShardlineOptimizer:
        """Join the cluster with this model; returns when it holds the job's parameters.

        model: a module, or named tensors for those who write their own loop. Its tensors are updated in place.
        optimizer: a torch.optim object over the model's parameters; the servers apply its rule.
        job: the whole specification where there is a job file.
        overlap: gradients leave during backward(), so nothing may change them between backward() and step(): no
        clip_grad_norm_, no second backward(), no unscale_. Jobs from a file overlap by themselves, and their next
        forward pass waits per layer.

        Raises MismatchError where model or settings differ from the job's, UnreachableError, JobError.
        """
        if self._optimizer is not None:
            raise UsageError("this session is attached already; one session trains one model")
        spec = job or script_spec(self._script, model, optimizer)
        self._hooked = self.config.overlap and (overlap or job is not None)
        self._model = model if isinstance(model, nn.Module) and job is not None and self._hooked else None
        self._values = named_values(model) if isinstance(model, nn.Module) else dict(model)
        address = self._server.start()
        metrics_address = self.metrics.serve(self.config.host, self.config.metrics_port)
        self._link = ChiefLink(
            self.config.cluster.chief,
            self.config.timeouts,
            role=self.config.role,
            index=self.config.index,
            address=address,
            metrics_address=metrics_address,
            job=spec,
            machine=machine_fingerprint(spec.threads, str(self.device)),
            on_orders=self._ordered,
            traffic=self._traffic,
            cancelled=self._termination.event,
            security=self.config.security,
        )
        self._termination.call(self._asked_to_end)
        self._link.client.peer.on_retry = self.metrics.counter("shardline_rpc_retries_total", peer="chief").inc
        self._termination.call(self._link.cancel_join)
        if not self._link.join():
            log.info("asked to end before the chief admitted this worker")
            self.shutdown()
            raise SystemExit(0)
        log.info(
            "joined as %s, incarnation %#x, metrics at http://%s/metrics",
            self._link.task,
            self._link.incarnation,
            metrics_address,
        )
        self._begin()
        self._optimizer = ShardlineOptimizer(self, optimizer, spec.rule.name)
        self._expect_by_itself()
        return self._optimizer

    def _begin(self) -> None:
        """From admitted to holding parameters: send first values if asked to, wait for the start, find the step."""
        link = self.link
        initialized: set[int] = set()

        def ready(orders: Orders) -> bool:
            begun = orders.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDED)
            return begun or (orders.phase is Phase.INIT and orders.init and orders.timeline not in initialized)

        while True:
            link.wait(ready)
            orders = link.orders
            if orders.phase is Phase.ENDED:
                if orders.exit_code:
                    raise TaskLostError(f"{link.task}: the job ended before it began: {orders.reason}")
                self._make_trainer()
                return
            self._make_trainer()
            if orders.phase is not Phase.INIT:
                break
            try:
                self.trainer.initialize()
            except (Restart, Interrupted) as error:
                log.info("first values: %s; asking again", error)
            else:
                initialized.add(orders.timeline)
        if self._view is not None and self._view.job.script:
            self._relocate_until_there()

    def _make_trainer(self) -> None:
        link = self.link
        view = link.client.get_job(link.task, link.incarnation)
        if (
            self._view is not None
            and view.plan.plan_id == self._view.plan.plan_id
            and (view.timeline == self._view.timeline)
        ):
            return
        self._close_trainer()
        self._view = view
        lanes: dict[int, Lane] = {}
        for place in view.placement:
            peer = self._peers.get(place.task, place.address)
            peer.on_retry = self.metrics.counter("shardline_rpc_retries_total", peer=place.task).inc
            lanes[place.shard] = open_lane(
                self.config,
                peer,
                place.shard,
                view.plan.shards[place.shard],
                on_fallback=lambda lane, reason: self.metrics.counter(
                    "shardline_lane_fallbacks_total", lane=lane
                ).inc(),
            )
        self._trainer = Trainer(
            view,
            self._values,
            lanes,
            self.config.timeouts,
            task=link.task,
            incarnation=link.incarnation,
            index=self.config.index,
            on_retry=lambda shard: self._count_retry(view, shard),
            overlap=self._hooked,
            credit_bytes=int(float(environment("credit_mb") or 0.0) * 2**20),
        )
        self._open_gate(self._trainer)
        self._trainer.exchange.still_ordered = self._still_ordered
        self._trainer.on_nonfinite = lambda name: self.metrics.counter("shardline_nonfinite_total", what=name).inc()

    def _open_gate(self, trainer: Trainer) -> None:
        if self._model is None:
            return
        reason = why_not(self._model)
        if reason:
            log.info("the next forward pass waits for the whole model: %s", reason)
            return
        numbers = {id(tensor): number for number, tensor in enumerate(trainer.layout.tensors)}
        self._gate = Gate(
            self._model, numbers, wait_for=self._wait_for, waiting=lambda: trainer.pending and trainer.arrivals.waiting
        )

    def _close_trainer(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._trainer is not None:
            self._trainer.close()

    def _count_retry(self, view: JobView, shard: int) -> None:
        peer = next((place.task for place in view.placement if place.shard == shard), "ps")
        self.metrics.counter("shardline_rpc_retries_total", peer=peer).inc()

    # Orders

    def _ordered(self, orders: Orders) -> None:
        """Called on the heartbeat thread."""
        trainer, link = self._trainer, self._link
        if trainer is None or link is None or self._view is None:
            return
        moved = trainer.is_sync and self._replicas and orders.replicas != self._replicas
        if orders.fenced or link.lost or moved or orders.timeline != self._view.timeline or orders.phase is Phase.ENDED:
            trainer.exchange.interrupt()

    def _still_ordered(self) -> bool:
        """Whether the orders are still those that the open step began with."""
        orders = self.link.orders
        if orders.fenced or self.link.lost is not None or orders.phase is Phase.ENDED or self._view is None:
            return False
        moves = self.trainer.is_sync and self._iterating
        return orders.timeline == self._view.timeline and not (moves and orders.replicas != self._replicas)

    def _asked_to_end(self) -> None:
        log.info("asked to end: handing this worker's replicas back to the chief")
        if self._link is not None:
            self._link.leave()

    @property
    def _leaving(self) -> bool:
        return self._termination.event.is_set()

    def _traffic(self) -> tuple[int, int, int, int]:
        return self._trainer.traffic if self._trainer is not None else (0, 0, 0, 0)

    # Steps

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Step numbers to train, from where the job stands, until it ends (or `total` steps are done).

        The body runs again for a step that has to be repeated, so a loop over this survives whatever happens to the
        cluster. In asynchronous jobs from a file the numbers are those of batches the chief has leased to this worker.
        """
        self._iterating = True
        try:
            while True:
                number = self._next()
                if number is None:
                    return
                if total is not None and number >= total:
                    if self._settle():
                        return
                    continue
                self._step_began_s = time.monotonic()
                self._contributed.clear()
                self._expect_by_itself()
                yield number
        finally:
            self._iterating = False

    def _next(self) -> int | None:
        """Number of the next step or batch, None when there is none; waits while there may be one later."""
        while True:
            link = self.link
            if self._unwound is not None:
                self._rewind()
            number = self._next_while_sending()
            if number is not None:
                link.set_step(number)
                return number
            if not self._settle():
                continue
            # Before the orders are read: an interruption by newer ones must not be forgotten.
            self.trainer.exchange.arm()
            orders = self._orders_or_none()
            if orders is None or orders.phase is Phase.ENDED:
                return None
            if orders.phase not in (Phase.RUNNING, Phase.STOPPING):
                self._wait_for_change(orders)
                continue
            if self.trainer.is_sync:
                number = self._next_sync(orders)
            elif self.job.script:
                self._todo = {0}
                number = self.trainer.step
            else:
                number = self._next_lease(orders)
            if number is not None:
                link.set_step(number)
                return number

    def _orders_or_none(self) -> Orders | None:
        """Orders in force; None where this worker is leaving and has been let go."""
        link = self.link
        if self._leaving and (link.orders.fenced or not link.orders.replicas):
            return None
        link.check()
        return link.orders

    def _wait_for_change(self, seen: Orders) -> None:
        self.link.wait(lambda o: o != seen or o.fenced, timeout_s=self.config.timeouts.heartbeat_s * 4)

    def _next_sync(self, orders: Orders) -> int | None:
        if not orders.replicas:
            # A spare: nothing to do until somebody's replicas come here.
            self._replicas, self._stale = (), True
            self._wait_for_change(orders)
            return None
        if self._stale or orders.replicas != self._replicas:
            if not self._relocate(orders):
                return None
        elif not self._todo:
            self._todo = set(self._replicas)
        if orders.stop_step and self.trainer.step >= orders.stop_step:
            self._finish_part()
            self._wait_for_change(orders)
            return None
        return self.trainer.step

    def _relocate(self, orders: Orders) -> bool:
        """Ask Progress and pull that step; False where it has to be tried again."""
        self._replicas = orders.replicas
        try:
            self._make_trainer()
            self._todo = self.trainer.locate(orders.replicas, orders.timeline)
        except (Restart, Interrupted) as error:
            log.info("finding the step again: %s", error or "interrupted")
            self._wait_for_change(orders)
            return False
        except Stopped as error:
            # These replicas are counted in the last step that there is, or the job ends where it stands.
            log.info("%s", error)
            self._wait_for_change(orders)
            return False
        except UnreachableError as error:
            # The chief knows better whether that ps is dead; it ends the job or tells where its shards are now.
            log.warning("%s", error)
            self._wait_for_change(orders)
            return False
        self._stale = False
        self.link.set_step(self.trainer.step)
        return True

    def _relocate_until_there(self) -> None:
        """A script's start: return with parameters in the model, or raise when the deadline ends."""
        deadline_s = time.monotonic() + self.config.timeouts.total_s
        while True:
            self.trainer.exchange.arm()
            self.link.check()
            orders = self.link.orders
            if orders.phase is Phase.ENDED:
                return
            if self._relocate(orders):
                if not self.trainer.is_sync:
                    self._todo = {0}
                return
            if time.monotonic() > deadline_s:
                raise UnreachableError(
                    f"{self.link.task}: could not find the job's step within {self.config.timeouts.total_s:.0f} s"
                )

    def _next_lease(self, orders: Orders) -> int | None:
        if self._finished:
            self._wait_for_change(orders)
            return None
        if self._stale and not self._relocate(orders):
            return None
        if not self._leases.has_next:
            if self._leaving:
                self._wait_for_change(orders)
                return None
            lease = self._leases.renew(self.link)
            if lease.count == 0:
                if lease.ended:
                    self._finish_part()
                self.link.wait(lambda o: o.phase is Phase.ENDED, timeout_s=lease.retry_after_s or 0.05)
                return None
        self._todo = {0}
        return self._leases.batch

    def _finish_part(self) -> None:
        if not self._finished:
            self._finished = True
            self.link.finish()

    # One step

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the body of a loop over steps(): leaves it quietly where it has to be run again for the same step."""
        try:
            yield
        except StepAgain as again:
            log.info("starting the step again: %s", again.cause or "orders changed")
            self._unwound = again

    def begin_replica(self) -> None:
        """Before each replica's forward pass where a worker runs several."""
        with _unwinding():
            self.trainer.begin()

    def watch(self, replica: int) -> Watch:
        """For replica_gradients: lets the replica's passes overlap with what is sent, where that is wanted."""
        if not self._hooked:
            return UNWATCHED

        def expect(loss: Callable[[], float], samples: int) -> None:
            self._settle_in_body()
            # A GPU's loss isn't asked for before it has to be.
            early = self.job.consistency.nan_policy == "skip" or self.device.type == "cpu"
            owned = sorted(self._todo) if self.trainer.is_sync else [0]
            self.trainer.expect(Expected(replica=replica, owned=owned, samples=samples, loss=loss() if early else None))

        return StepWatch(self._gate, lambda: self.trainer.uses if self.trainer.starting else None, expect)

    def _wait_for(self, tensors: Iterable[int]) -> None:
        with _unwinding():
            self.trainer.wait_for(tensors)

    def _settle_in_body(self) -> None:
        """Everything of the step before has come, and the orders are still those of this one; else StepAgain."""
        if self._sent is None:
            return
        with _unwinding():
            figures = self.trainer.settle()
        if figures is not None:
            self._account(figures)
        self.trainer.exchange.arm()
        if not self._still_ordered():
            raise StepAgain

    def _expect_by_itself(self) -> None:
        """A person's own loop: whatever backward() comes next is the open step's."""
        if not self._hooked or self._view is None or not self._view.job.script or self._optimizer is None:
            return
        replica = self.replica if self.trainer.is_sync else 0
        self.trainer.expect(Expected(replica=replica, owned=[replica], hyper=self._optimizer.hyper))

    def contribute(
        self,
        replica: int,
        *,
        loss: float | None = None,
        samples: int = 0,
        hyper: Mapping[int, Mapping[str, float]] | None = None,
        gradients: Mapping[str, torch.Tensor] | None = None,
        keep: bool = False,
    ) -> None:
        """Take the gradients in .grad (or those given, by name) as one replica's part of the open step.

        keep: nobody writes to these tensors until the step is closed, so they need not be copied.
        """
        clip_norm = self.job.consistency.clip_norm
        if gradients is None:
            if clip_norm > 0.0 and not self.trainer.is_sync:
                # torch's own way: each worker its own gradient, before anybody else sees it.
                torch.nn.utils.clip_grad_norm_([v for v in self._values.values() if v.grad is not None], clip_norm)
            gradients = {name: v.grad for name, v in self._values.items() if v.grad is not None}
        self.trainer.contribute(replica, gradients, samples=samples, loss=loss, hyper=hyper, keep=keep)
        compute_s = time.monotonic() - self._step_began_s - sum(item.compute_s for item in self._contributed)
        number = self._leases.batch if self._leases.held else self.trainer.step
        self._contributed.append(
            StepReport(
                step=number,
                replica=replica,
                loss=float("nan") if loss is None else loss,
                samples=samples,
                compute_s=compute_s,
            )
        )

    def finish_step(self, loss: float | None = None, hyper: Mapping[int, Mapping[str, float]] | None = None) -> bool:
        """Send the open step and hold the next parameters; False where the loop has to run the step again.

        Contributes .grad for this worker's own replica where nothing was contributed yet.
        """
        if not self._contributed:
            replica = self.replica if self.trainer.is_sync else 0
            # Kept as they are: this returns when they are acknowledged.
            self.contribute(replica, loss=loss or self._loss, hyper=hyper, keep=True)
        self._loss = None
        wait = self._gate is None or self.trainer.starting
        while True:
            try:
                figures = self.trainer.finish(wait=wait)
            except (Restart, Interrupted, Stopped) as error:
                if not self._go_on(error):
                    return False
                continue
            self._sent = _Sent(tuple(self._contributed), self._step_began_s, self._leases.batch)
            self._advance()
            if figures is not None:
                self._account(figures)
                if not self._iterating:
                    self._expect_by_itself()
            return True

    def wait(self) -> None:
        """Return when the model holds all parameters of `step`.

        Where the next forward pass waits per layer, tensors may be older before; else there is nothing to wait for.
        """
        self._settle()

    # A step that is on its way while the next one is computed

    def _next_while_sending(self) -> int | None:
        """Number of the step to begin although the one before is not closed; None where nothing or all has to wait."""
        if self._sent is None or self.trainer.pending_failed or not self._still_ordered():
            return None
        orders = self._orders_or_none()
        if orders is None or orders.phase not in (Phase.RUNNING, Phase.STOPPING):
            return None
        if not self.trainer.is_sync:
            return self._leases.batch if self._leases.has_next else None
        if orders.stop_step and self.trainer.step >= orders.stop_step:
            return None
        return self.trainer.step

    def _settle(self) -> bool:
        """Wait for the step that is on its way; False where it, or the end of the job, has to be looked for again."""
        while self._sent is not None:
            try:
                figures = self.trainer.settle()
            except (Restart, Interrupted, Stopped) as error:
                if not self._go_on(error):
                    return False
            else:
                if figures is not None:
                    self._account(figures)
        return True

    def _rewind(self) -> None:
        """After a body that was left in its middle: what it sent is given up, what was on its way is looked after."""
        unwound, self._unwound = self._unwound, None
        assert unwound is not None
        self._contributed.clear()
        if self._sent is None:
            self.trainer.give_up()
        elif unwound.cause is None or self._go_on(unwound.cause):
            self._settle()
        self._stale = True

    def _go_on(self, error: Exception) -> bool:
        """After an exchange that didn't end: True = send the same again, False = the loop starts over."""
        link = self.link
        orders = self._orders_or_none()
        if orders is None or orders.phase is Phase.ENDED:
            self._stale = True
            self._lose_sent()
            return False
        if isinstance(error, Stopped):
            log.info("%s", error)
            self._stale = True
            self._contributed.clear()
            self._lose_sent()
            if not self.trainer.is_sync:
                self._finish_part()
            self._wait_for_change(orders)
            return False
        assert self._view is not None
        if orders.timeline == self._view.timeline and (not self.trainer.is_sync or not self._iterating):
            # Sending again is harmless: what counted is a duplicate.
            if not isinstance(error, Interrupted):
                link.wait(lambda o: o != orders, timeout_s=0.1)
            self.trainer.exchange.arm()
            # Orders that came before arm() are looked at here, later ones interrupt again.
            return self._still_ordered()
        if not self._iterating:
            raise RolledBackError(
                f"{link.task}: the job went back to an earlier step ({error or 'its timeline changed'}); loop over "
                f"session.steps() to follow it",
                step=orders.first_step,
            )
        log.info("starting the step again: %s", error or "orders changed")
        self._stale = True
        self._contributed.clear()
        self._lose_sent()
        return False

    def _lose_sent(self) -> None:
        """What is on its way has to be computed again."""
        if self._sent is not None:
            self._leases.batch = self._sent.batch
            self._sent = None
        self.trainer.give_up()

    def _advance(self) -> None:
        """A step has been sent: what comes is the next one's."""
        self._contributed.clear()
        self._todo = set(self._replicas) if self.trainer.is_sync else {0}
        if self._leases.held:
            self._leases.batch += 1
        self.link.set_step(self.trainer.step)
        self._step_began_s = time.monotonic()

    def _account(self, figures: StepFigures) -> None:
        """Tell metrics and chief about a step that is closed."""
        sent, self._sent = self._sent, None
        assert sent is not None
        peers = {place.shard: place.task for place in self._view.placement} if self._view else {}
        step_s = time.monotonic() - max(sent.began_s, self._accounted_s)
        self._accounted_s = time.monotonic()
        meter_step(self.metrics, self.trainer, figures, sent.reports, step_s, peers)
        for item in sent.reports:
            self.link.report(replace(item, exchange_s=figures.seconds, staleness=figures.staleness))

    def log_loss(self, loss: float) -> None:
        """Loss of the open step, for logs and the dashboard of a script's job."""
        self._loss = loss

    # Named tensors, for those who write their own loop

    def push(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Contribute named gradients as this worker's part of the open step and hold the next parameters."""
        check_named(self._values, gradients)
        self.wait()
        self.contribute(self.replica if self.trainer.is_sync else 0, gradients=gradients, keep=True)
        self.finish_step()

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of the named tensors (all by default) as of the step this session holds."""
        self.wait()
        wanted = list(self._values) if names is None else list(names)
        for name in wanted:
            if name not in self._values:
                raise TensorError(f"there is no tensor {name!r} in the job; it has {', '.join(list(self._values)[:8])}")
        return {name: self._values[name].detach().clone() for name in wanted}

    def push_pull(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """push() and pull() in one exchange."""
        self.push(gradients)
        return self.pull(list(gradients))

    # Ending

    def fail(self, error: ShardlineError) -> None:
        """Tell the chief why this worker can't go on."""
        if self._link is not None and not isinstance(error, FencedError):
            self._link.fail(str(error), error.exit_code)

    def close(self) -> None:
        """Tell the chief that this worker has done its part, wait for the job's end, free everything."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._link is not None and self._optimizer is not None and not self._link.orders.fenced:
                self._finish_part()
                # A script's job ends when all its workers have finished; nobody needs this process after that.
                self._link.wait(lambda o: o.phase is Phase.ENDED or o.fenced, timeout_s=self.config.timeouts.total_s)
        except (UnreachableError, FencedError) as error:
            log.warning("%s", error)
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Free sockets and threads without telling anybody."""
        self._closed = True
        self._close_trainer()
        if self._link is not None:
            self._link.close()
        self._peers.close()
        self._server.close(grace_s=0.2)
        self.metrics.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, ShardlineError):
            self.fail(error)
        elif isinstance(error, Exception):
            self.fail(JobError(f"the script raised {kind.__name__ if kind else 'error'}: {error}"))
        self.shutdown()


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """What ended the exchange of the step before ends the body of this one."""
    try:
        yield
    except (Restart, Interrupted, Stopped) as error:
        raise StepAgain(error) from error
