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

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch
from torch import nn

from shardline.client.attachment import ScriptSettings, check_named, meter_step, script_spec
from shardline.client.exchange import Interrupted, Restart, Stopped
from shardline.client.optimizer import ShardlineOptimizer
from shardline.client.trainer import StepFigures, Trainer
from shardline.config import RoleConfig
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
from shardline.rpc.client import JobView, Lease
from shardline.rpc.link import ChiefLink, Orders, Phase, StepReport, machine_fingerprint
from shardline.rpc.server import RpcServer
from shardline.spec import ConsistencySpec, JobSpec

log = logging.getLogger("shardline.client")


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
        self._lease: Lease | None = None
        self._next_batch = 0
        self._step_began_s = time.monotonic()
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
    ) -> ShardlineOptimizer:
        """Join the cluster with this model; returns when it holds the job's parameters.

        model: a module, or named tensors for those who write their own loop. Its tensors are updated in place.
        optimizer: a torch.optim object over the model's parameters; the servers apply its rule.
        job: the whole specification where there is a job file.

        Raises MismatchError where model or settings differ from the job's, UnreachableError, JobError.
        """
        if self._optimizer is not None:
            raise UsageError("this session is attached already; one session trains one model")
        spec = job or script_spec(self._script, model, optimizer)
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
        if self._trainer is not None:
            self._trainer.close()
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
                on_fallback=lambda lane, reason: self.metrics.counter("shardline_lane_fallbacks_total", lane=lane).inc(),
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
        )
        self._trainer.exchange.still_ordered = self._still_ordered
        self._trainer.on_nonfinite = lambda name: self.metrics.counter("shardline_nonfinite_total", what=name).inc()

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
                if number is None or (total is not None and number >= total):
                    return
                self._step_began_s = time.monotonic()
                self._contributed.clear()
                yield number
        finally:
            self._iterating = False

    def _next(self) -> int | None:
        """Number of the next step or batch, None when there is none; waits while there may be one later."""
        while True:
            link = self.link
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
        lease = self._lease
        if lease is None or self._next_batch >= lease.first + lease.count:
            if self._leaving:
                self._wait_for_change(orders)
                return None
            done = [lease.number] if lease is not None else []
            lease = self._lease = self.link.client.lease(self.link.task, self.link.incarnation, done)
            self._next_batch = lease.first
            if lease.count == 0:
                self._lease = None
                if lease.ended:
                    self._finish_part()
                self.link.wait(lambda o: o.phase is Phase.ENDED, timeout_s=lease.retry_after_s or 0.05)
                return None
        self._todo = {0}
        return self._next_batch

    def _finish_part(self) -> None:
        if not self._finished:
            self._finished = True
            self.link.finish()

    # One step

    def begin_replica(self) -> None:
        """Before each replica's forward pass where a worker runs several."""
        self.trainer.begin()

    def contribute(
        self,
        replica: int,
        *,
        loss: float | None = None,
        samples: int = 0,
        hyper: Mapping[int, Mapping[str, float]] | None = None,
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Take the gradients in .grad (or those given, by name) as one replica's part of the open step."""
        clip_norm = self.job.consistency.clip_norm
        if gradients is None:
            if clip_norm > 0.0 and not self.trainer.is_sync:
                # torch's own way: each worker its own gradient, before anybody else sees it.
                torch.nn.utils.clip_grad_norm_([v for v in self._values.values() if v.grad is not None], clip_norm)
            gradients = {name: v.grad for name, v in self._values.items() if v.grad is not None}
        self.trainer.contribute(replica, gradients, samples=samples, loss=loss, hyper=hyper)
        compute_s = time.monotonic() - self._step_began_s - sum(item.compute_s for item in self._contributed)
        number = self._next_batch if self._lease is not None else self.trainer.step
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
            self.contribute(self.replica if self.trainer.is_sync else 0, loss=loss or self._loss, hyper=hyper)
        self._loss = None
        while True:
            try:
                figures = self.trainer.finish()
                assert figures is not None
            except (Restart, Interrupted, Stopped) as error:
                if not self._go_on(error):
                    return False
            else:
                self._account(figures)
                return True

    def _go_on(self, error: Exception) -> bool:
        """After an exchange that didn't end: True = send the same again, False = the loop starts over."""
        link = self.link
        orders = self._orders_or_none()
        if orders is None or orders.phase is Phase.ENDED:
            self._stale = True
            return False
        if isinstance(error, Stopped):
            log.info("%s", error)
            self._stale = True
            self._contributed.clear()
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
        return False

    def _account(self, figures: StepFigures) -> None:
        """Tell metrics and chief about a finished step."""
        now_s = time.monotonic()
        peers = {place.shard: place.task for place in self._view.placement} if self._view else {}
        meter_step(self.metrics, self.trainer, figures, self._contributed, now_s - self._step_began_s, peers)
        for item in self._contributed:
            self.link.report(
                StepReport(
                    step=item.step,
                    replica=item.replica,
                    loss=item.loss,
                    samples=item.samples,
                    compute_s=item.compute_s,
                    exchange_s=figures.seconds,
                    staleness=figures.staleness,
                )
            )
        self._contributed.clear()
        self._todo = set(self._replicas) if self.trainer.is_sync else {0}
        if self._lease is not None:
            self._next_batch += 1
        self.link.set_step(self.trainer.step)
        self._step_began_s = now_s

    def log_loss(self, loss: float) -> None:
        """Loss of the open step, for logs and the dashboard of a script's job."""
        self._loss = loss

    # Named tensors, for those who write their own loop

    def push(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Contribute named gradients as this worker's part of the open step and hold the next parameters."""
        check_named(self._values, gradients)
        self.contribute(self.replica if self.trainer.is_sync else 0, gradients=gradients)
        self.finish_step()

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of the named tensors (all by default) as of the step this session holds."""
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
        if self._trainer is not None:
            self._trainer.close()
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
