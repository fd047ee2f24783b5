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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

import torch
from torch import nn

from shardline.client.attachment import ScriptSettings, check_named, meter_step, script_spec
from shardline.client.barrier import Barrier
from shardline.client.carried import Carried
from shardline.client.exchange import Interrupted, Restart, StepFigures, Stopped
from shardline.client.optimizer import ShardlineOptimizer
from shardline.client.optimizer_state import Standing, check_unused
from shardline.client.overlap import Expected
from shardline.client.own_loop import OwnLoop
from shardline.client.pipeline import Pipeline, Sent
from shardline.client.shared_gradients import SharedGradients
from shardline.client.steps import StepFinder
from shardline.client.trainer import Trainer
from shardline.client.workplace import Workplace
from shardline.config import RoleConfig
from shardline.data import Watch, where_raised
from shardline.errors import (
    FencedError,
    JobError,
    JobExitError,
    RolledBackError,
    ShardlineError,
    TaskLostError,
    TensorError,
    UnreachableError,
    UsageError,
)
from shardline.line_rate import meter_line
from shardline.metrics import Metrics
from shardline.process import Termination, resolve_device
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
        self._server = RpcServer(
            config.cluster.address(config.task), name=config.task, security=config.security, bind=config.bind
        )
        self.metrics = Metrics("worker", config.task)
        self._pipeline = Pipeline(go_on=self._go_on, still_ordered=self._still_ordered, closed=self._account)
        self._place = Workplace(
            config, self.metrics, wait_for=self._pipeline.wait_for, still_ordered=self._still_ordered
        )
        self._pipeline.place = self._place
        self._steps = StepFinder(config.timeouts, self._place, self._pipeline, leaving=self._termination.event.is_set)
        self._link: ChiefLink | None = None
        self._optimizer: ShardlineOptimizer | None = None
        self._contributed: list[StepReport] = []
        self._step_began_s = self._accounted_s = time.monotonic()
        self._loss: float | None = None
        self._skipped = False
        self._barrier = Barrier()
        self._own_loop = OwnLoop()
        self._lent: SharedGradients | None = None
        self._closed = False

    # What a script asks

    @property
    def link(self) -> ChiefLink:
        """Tie to the chief; raises UsageError before attach()."""
        return self._steps.link

    @property
    def trainer(self) -> Trainer:
        """State of training; raises UsageError before attach()."""
        return self._place.trainer

    @property
    def _values(self) -> Mapping[str, torch.Tensor]:
        return self._place.values

    @property
    def replica(self) -> int:
        """First logical replica of this worker; of a script its index, known before attach()."""
        return self._steps.assigned[0] if self._steps.assigned and self.trainer.is_sync else self.config.index

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that still have to contribute to the open step, in order."""
        return tuple(sorted(self._steps.todo))

    @property
    def num_replicas(self) -> int:
        """Logical replicas of the job; of a script the workers of the cluster spec, known before attach()."""
        trainer = self._place.current
        if trainer is not None and trainer.is_sync:
            return trainer.job.replicas
        return self._script.workers

    @property
    def step(self) -> int:
        """Step whose parameters the model holds; in asynchronous mode, pushes of this worker."""
        self._own_loop.knows_the_step()
        return self.trainer.step

    @property
    def standing(self) -> Standing:
        """Where the job is, for state dicts."""
        trainer = self.trainer
        step = trainer.step if trainer.is_sync else min(trainer.base.values(), default=0)
        return Standing(step=step, incarnation=self.link.incarnation, is_sync=trainer.is_sync)

    def resumed(self) -> None:
        """A state that was saved at this step has been loaded, and with it the weights that the servers have."""
        self._own_loop.knows_the_step()
        self._own_loop.pulled()

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, since a gradient was not finite and nan_policy is "skip".

        Synchronous: of any replica, and so the same in all of them. Asynchronous: of this one.
        """
        return self._skipped

    def check_scaler(self) -> None:
        """A gradient scaler is about to step. Raises JobError where not all replicas could skip an overflow."""
        policy = self.job.consistency.nan_policy
        if policy != "skip":
            raise JobError(
                'a GradScaler needs connect(nan_policy="skip"), by which all replicas skip the step in which one of '
                f'them overflows; the job\'s is "{policy}"'
            )
        if self._place.overlaps:
            raise JobError(
                "a GradScaler and overlap exclude each other: scaled gradients would leave during backward(); use "
                "attach(..., overlap=False) or SHARDLINE_OVERLAP=0"
            )

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
        zero_copy: bool = False,
    ) -> ShardlineOptimizer:
        """Join the cluster with this model; returns when it holds the job's parameters.

        model: a module, or named tensors for those who write their own loop. Its tensors are updated in place.
        optimizer: a torch.optim object over the model's parameters; the servers apply its rule.
        job: the whole specification where there is a job file. Its loop has to be over steps(): with overlap any other
        is told of a standby that takes over as of a rollback, since it computes while a step is on its way.
        overlap: gradients leave during backward(), so nothing may change them between backward() and step(): no
        clip_grad_norm_, no second backward(), no unscale_. Jobs from a file overlap by themselves, and their next
        forward pass waits per layer.
        zero_copy: on lane shm, parameters become read-only views of what the servers publish, and gradients views of
        what they read: a step copies nothing. WRITING TO SUCH A PARAMETER ENDS THE PROCESS WITH A SEGMENTATION FAULT.
        Tensors that can't lie there (cut over several shards, other lanes) stay private. See docs/lanes.md.

        Raises MismatchError where model or settings differ from the job's, UnreachableError, JobError.
        """
        if self._optimizer is not None:
            raise UsageError("this session is attached already; one session trains one model")
        spec = job or script_spec(self._script, model, optimizer)
        self._place.furnish(model, from_file=job is not None, overlap=overlap, zero_copy=zero_copy)
        address = self._server.start()
        metrics_address = self.metrics.serve(self.config.host, self.config.metrics_port, self.config.security)
        meter_line(self.metrics, address)
        self._link = ChiefLink(
            self.config.cluster.chief,
            self.config.timeouts,
            role=self.config.role,
            index=self.config.index,
            address=address,
            metrics_address=metrics_address,
            job=spec,
            machine=machine_fingerprint(spec.threads, str(self.device)),
            on_orders=self._steps.ordered,
            traffic=self._traffic,
            cancelled=self._termination.event,
            security=self.config.security,
        )
        self._steps.follow(self._link)
        self._termination.call(self._asked_to_end)
        self._link.client.peer.on_retry = self.metrics.counter("shardline_rpc_retries_total", peer="chief").inc
        self._termination.call(self._link.cancel_join)
        if not self._link.join():
            log.info("asked to end before the chief admitted this worker")
            self.shutdown()
            raise SystemExit(0)
        log.info(
            "joined as %s, incarnation %#x, metrics at %s",
            self._link.task,
            self._link.incarnation,
            self.metrics.url,
        )
        self._begin()
        check_unused(optimizer.state.values(), self.standing)
        if job is None and not zero_copy:
            self._own_loop.attached(self.standing.step, self.trainer.layout.trained)
        self._optimizer = ShardlineOptimizer(self, optimizer, spec.rule.name)
        if zero_copy:
            owned = {id(item) for group in optimizer.param_groups for item in group["params"]}
            lent = {name: value for name, value in self._values.items() if id(value) in owned}
            self._lent = SharedGradients(lent, self._gradient_view)
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
                self._place.renew(link)
                return
            self._place.renew(link)
            if orders.phase is not Phase.INIT:
                break
            try:
                self.trainer.initialize()
            except (Restart, Interrupted) as error:
                log.info("first values: %s; asking again", error)
            else:
                initialized.add(orders.timeline)
        if self._place.view is not None and self._place.view.job.script:
            self._steps.locate_until_there()
            self._barrier.begin(self.trainer.step, begun=False)

    # Orders

    def _asked_to_end(self) -> None:
        log.info("asked to end: handing this worker's replicas back to the chief")
        if self._link is not None:
            self._link.leave()

    def _traffic(self) -> tuple[int, int, int, int]:
        return self._place.current.traffic if self._place.current is not None else (0, 0, 0, 0)

    # Steps

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Step numbers to train, from where the job stands, until it ends (or `total` steps are done).

        The body runs again for a step that has to be repeated, so a loop over this survives whatever happens to the
        cluster. In asynchronous jobs from a file the numbers are those of batches the chief has leased to this worker.

        Raises JobError, of which the chief is told, where the body has overlap, called backward() and left step() out,
        or leaves it out for so long that other replicas have waited --timeout for it.
        """
        self._steps.iterating = True
        self._own_loop.knows_the_step()
        try:
            while True:
                number = self._steps.next()
                self._barrier.begin(self.trainer.step, begun=True)
                self._own_loop.pulled()
                if number is None:
                    return
                if total is not None and number >= total:
                    if self._pipeline.settle():
                        return
                    continue
                self._step_began_s = time.monotonic()
                self._pipeline.waited_s = 0.0
                self._contributed.clear()
                self._expect_by_itself()
                yield number
        except JobError as error:
            self.fail(error)
            raise
        finally:
            self._steps.iterating = False
            if self._place.current is not None:
                self._place.current.disarm()

    # One step

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """Around the body of a loop over steps(): leaves it quietly where it has to be run again for the same step."""
        return self._pipeline.attempt()

    def begin_replica(self) -> None:
        """Before each replica's forward pass where a worker runs several."""
        self._pipeline.begin()

    def watch(self, replica: int) -> Watch:
        """For replica_gradients: lets the replica's passes overlap with what is sent, where that is wanted."""
        owned = sorted(self._steps.todo) if self.trainer.is_sync else [0]
        # A GPU's loss isn't asked for before it has to be.
        return self._pipeline.watch(replica, owned, ask_loss=self.device.type == "cpu")

    def gradients_cleared(self) -> None:
        """The optimizer's zero_grad() was called: outside of steps(), a step begins."""
        if not self._steps.iterating and not self._closed:
            self._expect_by_itself()

    def _expect_by_itself(self) -> None:
        """A person's own loop: whatever backward() comes next is the open step's."""
        view, optimizer = self._place.view, self._optimizer
        if not self._place.overlaps or view is None or not view.job.script or optimizer is None:
            return
        replica = self.replica if self.trainer.is_sync else 0
        self.trainer.expect(Expected(replica=replica, owned=[replica], hyper=optimizer.hyper))

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
            given = {name: v.grad for name, v in self._values.items() if v.grad is not None}
            gradients = given if self._lent is None else self._lent.gradients()
        self.trainer.contribute(replica, gradients, samples=samples, loss=loss, hyper=hyper, keep=keep)
        if not self._steps.iterating:
            kept = gradients if keep else {name: gradient.clone() for name, gradient in gradients.items()}
            self._steps.carried = Carried(self.trainer, replica, kept, loss=loss, samples=samples, hyper=hyper)
        compute_s = time.monotonic() - self._step_began_s - self._pipeline.waited_s
        compute_s -= sum(item.compute_s for item in self._contributed)
        number = self._steps.leases.batch if self._steps.leases.held else self.trainer.step
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

        Outside of steps(): True too where a standby has taken over, since what was contributed is taken along; raises
        RolledBackError where the job went back.
        """
        self._skipped = False
        self._own_loop.about_to_step()
        if not self._contributed:
            replica = self.replica if self.trainer.is_sync else 0
            # Kept as they are: this returns when they are acknowledged.
            self.contribute(replica, loss=loss or self._loss, hyper=hyper, keep=True)
        self._loss = None
        wait = self._place.gate is None or self.trainer.starting
        figures: StepFigures | None = None
        while True:
            try:
                if wait:
                    figures = self.trainer.finish()
                else:
                    self.trainer.send()
            except (Restart, Interrupted, Stopped) as error:
                if not self._go_on(error):
                    self._contributed.clear()
                    self._steps.carried = None
                    return False
                figures = self._steps.closed_by
                if figures is None:
                    continue
            sent = Sent(tuple(self._contributed), self._step_began_s, self._steps.leases.batch)
            self._contributed.clear()
            self._steps.carried = None
            self._steps.advance()
            self._step_began_s = time.monotonic()
            self._pipeline.waited_s = 0.0
            if figures is None:
                self._pipeline.sent = sent
            else:
                self._account(sent, figures)
            self._own_loop.pulled()
            return True

    def wait(self) -> None:
        """Return when the model holds all parameters of `step`.

        Where the next forward pass waits per layer, tensors may be older before; else there is nothing to wait for.
        """
        self._pipeline.settle()

    def _still_ordered(self) -> bool:
        return self._steps.still_ordered()

    def _go_on(self, error: Exception) -> bool:
        again, trainer = False, self.trainer
        try:
            again = self._steps.go_on(error)
        except RolledBackError:
            self._contributed.clear()
            self._steps.carried = None
            raise
        finally:
            if self._lent is not None and not (again and self.trainer is trainer):
                # What was counted of a step that is given up may be read for longer, and segments go with their lanes.
                self._lent.take_back()
        return again

    def _account(self, sent: Sent, figures: StepFigures) -> None:
        """Tell metrics and chief about a step that is closed."""
        self._skipped = figures.skipped
        step_s = time.monotonic() - max(sent.began_s, self._accounted_s)
        self._accounted_s = time.monotonic()
        meter_step(self.metrics, self.trainer, figures, sent.reports, step_s, self._place.peers)
        for item in sent.reports:
            self.link.report(replace(item, exchange_s=figures.seconds, staleness=figures.staleness))

    def barrier(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all workers of the cluster spec have called this; False where the job is stopped meanwhile.

        timeout_s: default ten times --timeout. A worker that dies is waited for as in any step; started again it passes
        by itself the barriers that it had before its loop. Raises JobError naming a worker that has ended instead of
        coming here, UnreachableError after timeout_s naming those that are missing, TaskLostError where the job fails.
        """
        if self._closed:
            raise UsageError("this session is closed, so no barrier can be met")
        if not self.job.script:
            raise UsageError("barrier() is for scripts: the replicas of a job file may be anywhere")
        self.wait()
        limit_s = 10.0 * self.config.timeouts.total_s if timeout_s is None else timeout_s
        return self._barrier.meet(self.link, self.trainer.step, is_sync=self.trainer.is_sync, timeout_s=limit_s)

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

    def gradient(self, name: str) -> torch.Tensor:
        """The tensor to compute this one's gradient in: with zero_copy, memory that the server reads; else new zeros.

        Ask for it in every step, after the one before has ended. Raises TensorError.
        """
        if name not in self._values:
            raise TensorError(f"there is no tensor {name!r} in the job; it has {', '.join(list(self._values)[:8])}")
        view = self._gradient_view(name)
        return view if view is not None else torch.zeros_like(self._values[name])

    def _gradient_view(self, name: str) -> torch.Tensor | None:
        return self.trainer.gradient_view(name)

    def share_gradients(self, *, set_to_none: bool = True) -> bool:
        """The optimizer's zero_grad() where gradients lie in shared memory; False where they are private."""
        if self._lent is None or self._closed:
            return False
        self._lent.zero(set_to_none=set_to_none)
        return True

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
        """Tell the chief that this worker has done its part, wait for the job's end, free everything.

        Raises JobError where a backward pass has sent gradients and no step() followed: the job ends with that.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._link is not None and self._optimizer is not None and not self._link.orders.fenced:
                self.trainer.check_stepped()
                self._steps.finish_part()
                # A script's job ends when all its workers have finished; nobody needs this process after that.
                self._link.wait(lambda o: o.phase is Phase.ENDED or o.fenced, timeout_s=self.config.timeouts.total_s)
                if code := self._link.orders.exit_code:
                    log.error("the job has ended with exit code %d: %s", code, self._link.orders.reason)
        except JobError as error:
            self.fail(error)
            raise
        except (UnreachableError, FencedError) as error:
            log.warning("%s", error)
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Free sockets and threads without telling anybody."""
        self._closed = True
        if self._lent is not None:
            self._lent.close()
        if self._link is not None:
            self._link.close()
        self._place.close()
        self._server.close(grace_s=0.2)
        self.metrics.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        if isinstance(error, SystemExit):
            self.fail(JobExitError(f"the script called sys.exit({error.code!r}){where_raised(error)}"))
        elif isinstance(error, ShardlineError):
            self.fail(error)
        elif isinstance(error, Exception):
            self.fail(JobError(f"the script raised {kind.__name__ if kind else 'error'}: {error}"))
        self.shutdown()
