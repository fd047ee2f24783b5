"""A worker's session with its cluster; job files and the user's own scripts both train through it.

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
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch
from torch import nn

from shardline.client.api.joining import begin, link_of
from shardline.client.api.optimizer import ShardlineOptimizer, TrainingPosition, check_unused, position_of
from shardline.client.api.script_job import ScriptSettings, check_named, script_spec
from shardline.client.api.step_loop import Hyper, StepLoop
from shardline.client.partners import Partners
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.trainer import Trainer
from shardline.config import RoleConfig
from shardline.core.orders import Phase
from shardline.core.spec import JobSpec
from shardline.data import Watch
from shardline.errors import (
    FencedError,
    JobError,
    JobExitError,
    ShardlineError,
    TensorError,
    UnreachableError,
    UsageError,
    job_error,
    where_raised,
)
from shardline.host.process import OwnProcess, Termination, resolve_device
from shardline.observability.line_rate import meter_line
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")


class Session:
    """One worker's session in a job. Used by one thread; made by shardline.connect() or the worker service."""

    def __init__(
        self,
        config: RoleConfig,
        *,
        termination: Termination | None = None,
        script: ScriptSettings | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(config.device, config.gpu_memory_fraction, neighbours=config.neighbours)
        self._termination = termination or Termination()
        self._script = script or ScriptSettings()
        self._workers = max(1, config.cluster.num("worker"))
        self.metrics = Metrics("worker", config.task)
        self._loop = StepLoop(config, self.metrics, self._termination)
        self.data_took = self._loop.runner.reports.read
        """Call with the seconds that a batch of the open step took to come."""
        self.leases = self._loop.runner.stepper.leases
        """In an asynchronous job from a file: batches that this worker is to compute."""
        self.partners = Partners()
        """Other workers, where these compute parts of a replica's step; set by attach()."""
        self._link: ChiefLink | None = None
        self._optimizer: ShardlineOptimizer | None = None
        self._closed = False
        self.owner = OwnProcess(config.task)

    @property
    def link(self) -> ChiefLink:
        """Link to the chief. Raises UsageError before attach()."""
        return self._loop.runner.now.link

    @property
    def trainer(self) -> Trainer:
        """State of training. Raises UsageError before attach()."""
        return self._loop.trainer

    @property
    def _values(self) -> Mapping[str, torch.Tensor]:
        return self._loop.place.values

    @property
    def replica(self) -> int:
        """First logical replica of this worker; in a script the worker's index, known before attach()."""
        return self._loop.replica

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that still have to contribute to the open step, in order."""
        return tuple(sorted(self._loop.runner.stepper.todo))

    @property
    def num_replicas(self) -> int:
        """Number of logical replicas of the job; in a script the workers in the cluster spec, known before attach()."""
        if self._loop.place.current is not None and self._loop.runner.now.assigned:
            return self.job.replicas
        return self._workers

    @property
    def step(self) -> int:
        """Step of the parameters in the model; in asynchronous mode, the number of this worker's pushes."""
        self._loop.mistakes.knows_the_step()
        return self.trainer.step

    @property
    def standing(self) -> TrainingPosition:
        """The job's position, for state dicts."""
        return position_of(self.trainer.methods, self.link.incarnation, lost=self._loop.mistakes.lost)

    def resumed(self) -> None:
        """Note that an optimizer state saved at this step was loaded, with the weights that the servers have."""
        self._loop.mistakes.knows_the_step()
        self._loop.place.watch.resumed(one_step=self.standing.one_step)

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite and nan_policy is "skip".

        Synchronous: a gradient of any replica, so it is the same in all of them. Asynchronous: a gradient of this one.
        """
        return self._loop.runner.reports.skipped

    def check_scaler(self) -> None:
        """Check that a gradient scaler may step. Raises JobError if an overflow can't be skipped in all replicas."""
        policy = self.job.consistency.nan_policy
        if policy != "skip":
            raise JobError(
                'a GradScaler needs connect(nan_policy="skip"), so that all replicas skip a step in which one of them '
                f'overflows; the policy of this job is "{policy}"'
            )
        if self._loop.place.overlaps:
            raise JobError(
                "a GradScaler can't be combined with overlap, which would send scaled gradients during backward(); "
                "use attach(..., overlap=False) or SHARDLINE_OVERLAP=0"
            )

    @property
    def job(self) -> JobSpec:
        """The chief's job specification."""
        return self.trainer.job

    def attach(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        job: JobSpec | None = None,
        overlap: bool = False,
        zero_copy: bool = False,
    ) -> ShardlineOptimizer:
        """Join the cluster with this model; returns when it contains the job's parameters.

        model: a module, or tensors by name for a hand-written loop. Its tensors are updated in place.
        optimizer: a torch.optim object over the model's parameters; the servers apply its rule.
        job: the whole specification if there is a job file. Its loop must be over steps(): with overlap, any other loop
        gets RolledBackError when a standby takes over, since it computes while a step is in flight.
        overlap: gradients leave during backward(), so nothing may change them between backward() and step(): no
        clip_grad_norm_, no second backward(), no unscale_. Jobs from a file overlap by default, and their next forward
        pass waits per layer.
        zero_copy: on lane shm, compute gradients in memory that the servers read, so that a step copies nothing. Those
        that can't be shared (tensors cut over several shards, other lanes) stay private. See docs/lanes.md.

        Raises MismatchError if model or settings differ from the job's, UnreachableError, JobError, UsageError.
        """
        if self._optimizer is not None:
            raise UsageError("this session is already attached; a session trains one model")
        spec = job or script_spec(self._script, self._workers, model, optimizer)
        self._loop.place.furnish(model, optimizer, spec, overlap=overlap, zero_copy=zero_copy)
        self._join(spec)
        begin(self.link, self._loop)
        check_unused(optimizer.state.values(), self.standing)
        if job is None:
            self._loop.mistakes.attached(self.standing.step)
        self._optimizer = ShardlineOptimizer(self, optimizer, (spec.inner or spec).rule.name)
        lent = None
        if zero_copy:
            owned = {id(item) for group in optimizer.param_groups for item in group["params"]}
            mine = {name: value for name, value in self._values.items() if id(value) in owned}
            lent = SharedGradients(mine, self._gradient_view)
        self._loop.attached(self._optimizer.hyper, lent)
        return self._optimizer

    def _join(self, spec: JobSpec) -> None:
        """Get admitted by the chief. Raises SystemExit if this process is asked to end first."""
        self.partners = self._loop.place.partners
        address = self._loop.place.serve()
        metrics_address = self.metrics.serve(self.config.host, self.config.metrics_port, self.config.security)
        meter_line(self.metrics, address)
        link = self._link = link_of(
            self.config,
            spec,
            address=address,
            metrics_address=metrics_address,
            device=self.device,
            loop=self._loop,
            cancelled=self._termination.event,
        )
        self._loop.runner.now.joined = link
        link.client.peer.on_retry = self.metrics.counter("shardline_rpc_retries_total", peer="chief").inc
        for callback in (self._asked_to_end, link.cancel_join):
            self._termination.call(callback)
        if not link.join():
            log.info("asked to end before the chief admitted this worker")
            self.shutdown()
            raise SystemExit(0)
        log.info("joined as %s, incarnation %#x, metrics at %s", link.task, link.incarnation, self.metrics.url)

    def _asked_to_end(self) -> None:
        log.info("asked to end: returning the replicas of this worker to the chief")
        self._loop.place.keep_values()
        if self._link is not None:
            self._link.leave()

    # Steps

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Yield step numbers from the job's current step until the job ends (or `total` steps are done).

        The body runs again for a step that has to be repeated, so a loop over this follows every change in the cluster.
        In asynchronous jobs from a file the numbers are those of the batches leased to this worker.

        Raises JobError, and reports it to the chief, if the body omits optimizer.step(): docs/scripts.md says when.
        """
        return self._loop.steps(total)

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for the body of a loop over steps(): leaves it quietly if it has to repeat the step."""
        return self._loop.attempt()

    def begin_replica(self, replica: int) -> None:
        """Call before each replica's forward pass if a worker runs several replicas."""
        self._loop.begin(replica)

    def watch(self, replica: int) -> Watch:
        """Watch for replica_gradients: lets the replica's passes overlap with sending, if wanted."""
        # Reading a loss from a GPU would wait for the device.
        return self._loop.watch(replica, ask_loss=self.device.type == "cpu")

    def gradients_cleared(self) -> None:
        """zero_grad() of the optimizer was called: outside of steps(), this begins a step."""
        if not self._closed:
            self._loop.gradients_cleared()

    def contribute(
        self,
        replica: int,
        *,
        loss: float | None = None,
        samples: int = 0,
        hyper: Hyper | None = None,
        gradients: Mapping[str, torch.Tensor] | None = None,
        keep: bool = False,
    ) -> None:
        """Contribute the gradients in .grad (or those given, by name) as one replica's part of the open step.

        keep: the tensors are not written to until the step is closed, so they need not be copied.
        """
        gradients = self._gradients() if gradients is None else gradients
        self._loop.contribute(replica, gradients, loss=loss, samples=samples, hyper=hyper, keep=keep)

    def _gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradients in .grad, by name."""
        clip_norm = self.job.consistency.clip_norm
        if clip_norm > 0.0 and not self.trainer.half.shares_steps:
            # As in torch: each worker clips its own gradient before it is sent.
            torch.nn.utils.clip_grad_norm_([v for v in self._values.values() if v.grad is not None], clip_norm)
        if self._loop.runner.lent is not None:
            return self._loop.runner.lent.gradients()
        return {name: value.grad for name, value in self._values.items() if value.grad is not None}

    def finish_step(self, loss: float | None = None, hyper: Hyper | None = None) -> bool:
        """Send the open step and get the next parameters; False if the loop has to run the step again.

        Contributes .grad for this worker's own replica if nothing was contributed yet.

        Outside of steps(): True also after a standby has taken over, since the contribution is sent again. Raises
        RolledBackError if the job rolled back, JobStopped if it has ended. Raises UsageError after close().
        """
        self.owner.check()
        return self._loop.finish(self._gradients, loss, hyper)

    def wait(self) -> None:
        """Wait until the model contains all parameters of `step`.

        Needed only if the next forward pass waits per layer: some tensors may be older until then.
        """
        self._loop.runner.settle()

    def barrier(self, *, timeout_s: float | None = None) -> bool:
        """Wait until all workers of the cluster spec have called this; returns False if the job is stopped first.

        timeout_s: default ten times --timeout. A worker that dies is waited for as in any step; restarted, it passes
        the barriers before its loop without waiting. Raises JobError naming a worker that ended without coming here,
        UnreachableError after timeout_s naming the missing workers, TaskLostError if the job fails, UsageError.
        """
        if self._closed:
            raise UsageError("this session is closed, so barrier() can't be called")
        if not self.job.script:
            raise UsageError("barrier() is only for scripts: the replicas of a job file are not tied to a worker")
        self.wait()
        limit_s = 10.0 * self.config.timeouts.total_s if timeout_s is None else timeout_s
        return self._loop.meet_others(limit_s)

    def log_loss(self, loss: float | torch.Tensor) -> None:
        """Record the open step's loss for logs and the dashboard of a script's job. A tensor must have one element."""
        self._loop.note_loss(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    # Named tensors, for a hand-written loop

    def push(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Contribute gradients by name as this worker's part of the open step, and get the next parameters."""
        self.owner.check()
        check_named(self._values, gradients)
        self.wait()
        self._loop.contribute_own(gradients)
        self.finish_step()

    def gradient(self, name: str) -> torch.Tensor:
        """Tensor to compute this parameter's gradient in: with zero_copy, memory that the server reads; else new zeros.

        Ask for it in every step, after the previous one has ended. Raises TensorError for an unknown name.
        """
        if name not in self._values:
            raise TensorError(f"the job has no tensor {name!r}; it has {', '.join(list(self._values)[:8])}")
        view = self._gradient_view(name)
        return view if view is not None else torch.zeros_like(self._values[name])

    def _gradient_view(self, name: str) -> torch.Tensor | None:
        return self.trainer.gradient_view(name)

    def share_gradients(self, *, set_to_none: bool = True) -> bool:
        """zero_grad() for gradients in shared memory; returns False if they are private."""
        if self._loop.runner.lent is None or self._closed:
            return False
        self._loop.runner.lent.zero(set_to_none=set_to_none)
        return True

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of the named tensors (default: all) at the current step. Raises TensorError for an unknown name."""
        self.wait()
        wanted = list(self._values) if names is None else list(names)
        for name in wanted:
            if name not in self._values:
                raise TensorError(f"the job has no tensor {name!r}; it has {', '.join(list(self._values)[:8])}")
        return {name: self._values[name].detach().clone() for name in wanted}

    def push_pull(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """push() and pull() in one exchange."""
        self.push(gradients)
        return self.pull(list(gradients))

    # Ending

    def fail(self, error: ShardlineError) -> None:
        """Report to the chief why this worker can't continue."""
        if self._link is not None and not self.owner.elsewhere and not isinstance(error, FencedError):
            self._loop.place.fail(self._link, error)

    def close(self) -> None:
        """Report to the chief that this worker has done its part, wait for the job's end, free everything.

        Raises JobError if a backward pass sent gradients and no step() followed; the job ends with this error.
        """
        if self._closed or self.owner.elsewhere:
            return
        self._closed = True
        try:
            if self._link is not None and self._optimizer is not None and not self._link.orders.fenced:
                self.trainer.check_stepped()
                self.wait()
                self._loop.runner.finish_part()
                # A script's job ends when all its workers have finished; this process is not needed after that.
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
        """Free sockets and threads without reporting to the chief."""
        if self.owner.elsewhere:
            return
        self.owner.ended = self._closed = True
        if self._loop.runner.lent is not None:
            self._loop.runner.lent.close()
        if self._link is not None:
            self._link.close()
        self._loop.place.close()
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
            self.fail(job_error("the script", error))
        self.shutdown()
