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
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch
from torch import nn

from shardline.client.api.joining import begin, link_of
from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.optimizer_state import TrainingPosition, check_unused
from shardline.client.api.script_job import ScriptSettings, check_named, script_spec
from shardline.client.api.step_loop import Hyper, StepLoop
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.trainer import Trainer
from shardline.config import RoleConfig
from shardline.core.orders import Phase
from shardline.core.spec import JobSpec
from shardline.data import Watch, where_raised
from shardline.errors import (
    FencedError,
    JobError,
    JobExitError,
    ShardlineError,
    TensorError,
    UnreachableError,
    UsageError,
)
from shardline.host.process import Termination, resolve_device
from shardline.observability.line_rate import meter_line
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink
from shardline.rpc.server import RpcServer

log = logging.getLogger("shardline.client")


class Session:
    """One worker's place in a job. Used by one thread; made by shardline.connect() or the worker service."""

    def __init__(
        self,
        config: RoleConfig,
        *,
        termination: Termination | None = None,
        script: ScriptSettings | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(config.device, config.gpu_memory_fraction)
        self._termination = termination or Termination()
        self._script = script or ScriptSettings()
        self._workers = max(1, config.cluster.num("worker"))
        self._server = RpcServer(
            config.cluster.address(config.task), name=config.task, security=config.security, bind=config.bind
        )
        self.metrics = Metrics("worker", config.task)
        self._loop = StepLoop(config, self.metrics, self._termination)
        self._link: ChiefLink | None = None
        self._optimizer: ShardlineOptimizer | None = None
        self._closed = False

    # What a script asks

    @property
    def link(self) -> ChiefLink:
        """Tie to the chief; raises UsageError before attach()."""
        return self._loop.finder.link

    @property
    def trainer(self) -> Trainer:
        """State of training; raises UsageError before attach()."""
        return self._loop.trainer

    @property
    def _values(self) -> Mapping[str, torch.Tensor]:
        return self._loop.place.values

    @property
    def replica(self) -> int:
        """First logical replica of this worker; of a script its index, known before attach()."""
        return self._loop.replica

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that still have to contribute to the open step, in order."""
        return tuple(sorted(self._loop.finder.todo))

    @property
    def num_replicas(self) -> int:
        """Logical replicas of the job; of a script the workers of the cluster spec, known before attach()."""
        if self._loop.place.current is not None and self._loop.assigns_replicas:
            return self.job.replicas
        return self._workers

    @property
    def step(self) -> int:
        """Step whose parameters the model holds; in asynchronous mode, pushes of this worker."""
        self._loop.own_loop.knows_the_step()
        return self.trainer.step

    @property
    def standing(self) -> TrainingPosition:
        """Where the job is, for state dicts."""
        methods = self.trainer.methods
        one_step = methods.mode.consistent_cuts
        return TrainingPosition(step=methods.half.job_step, incarnation=self.link.incarnation, one_step=one_step)

    def resumed(self) -> None:
        """A state that was saved at this step has been loaded, and with it the weights that the servers have."""
        self._loop.own_loop.knows_the_step()
        self._loop.own_loop.pulled()

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing, since a gradient was not finite and nan_policy is "skip".

        Synchronous: of any replica, and so the same in all of them. Asynchronous: of this one.
        """
        return self._loop.skipped

    def check_scaler(self) -> None:
        """A gradient scaler is about to step. Raises JobError where not all replicas could skip an overflow."""
        policy = self.job.consistency.nan_policy
        if policy != "skip":
            raise JobError(
                'a GradScaler needs connect(nan_policy="skip"), by which all replicas skip the step in which one of '
                f'them overflows; the job\'s is "{policy}"'
            )
        if self._loop.place.overlaps:
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
        spec = job or script_spec(self._script, self._workers, model, optimizer)
        self._loop.place.furnish(model, from_file=job is not None, overlap=overlap, zero_copy=zero_copy)
        self._join(spec)
        begin(self.link, self._loop)
        check_unused(optimizer.state.values(), self.standing)
        if job is None and not zero_copy:
            self._loop.own_loop.attached(self.standing.step, self.trainer.weights.layout.trained)
        self._optimizer = ShardlineOptimizer(self, optimizer, spec.rule.name)
        lent = None
        if zero_copy:
            owned = {id(item) for group in optimizer.param_groups for item in group["params"]}
            mine = {name: value for name, value in self._values.items() if id(value) in owned}
            lent = SharedGradients(mine, self._gradient_view)
        self._loop.attached(self._optimizer.hyper, lent)
        return self._optimizer

    def _join(self, spec: JobSpec) -> None:
        """Be admitted by the chief. Raises SystemExit where this process is asked to end before that."""
        address = self._server.start()
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
        self._loop.finder.follow(link)
        self._termination.call(self._asked_to_end)
        link.client.peer.on_retry = self.metrics.counter("shardline_rpc_retries_total", peer="chief").inc
        self._termination.call(link.cancel_join)
        if not link.join():
            log.info("asked to end before the chief admitted this worker")
            self.shutdown()
            raise SystemExit(0)
        log.info("joined as %s, incarnation %#x, metrics at %s", link.task, link.incarnation, self.metrics.url)

    # Orders

    def _asked_to_end(self) -> None:
        log.info("asked to end: handing this worker's replicas back to the chief")
        if self._link is not None:
            self._link.leave()

    # Steps

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Step numbers to train, from where the job stands, until it ends (or `total` steps are done).

        The body runs again for a step that has to be repeated, so a loop over this survives whatever happens to the
        cluster. In asynchronous jobs from a file the numbers are those of batches the chief has leased to this worker.

        Raises JobError, and tells the chief, where the body leaves optimizer.step() out: docs/scripts.md says when.
        """
        return self._loop.steps(total)

    # One step

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """Around the body of a loop over steps(): leaves it quietly where it has to be run again for the same step."""
        return self._loop.pipeline.attempt()

    def begin_replica(self, replica: int) -> None:
        """Before each replica's forward pass where a worker runs several."""
        self._loop.pipeline.begin(replica)

    def watch(self, replica: int) -> Watch:
        """For replica_gradients: lets the replica's passes overlap with what is sent, where that is wanted."""
        # A GPU's loss isn't asked for before it has to be.
        return self._loop.watch(replica, ask_loss=self.device.type == "cpu")

    def gradients_cleared(self) -> None:
        """The optimizer's zero_grad() was called: outside of steps(), a step begins."""
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
        """Take the gradients in .grad (or those given, by name) as one replica's part of the open step.

        keep: nobody writes to these tensors until the step is closed, so they need not be copied.
        """
        given = self._gradients() if gradients is None else gradients
        self._loop.contribute(replica, given, loss=loss, samples=samples, hyper=hyper, keep=keep)

    def _gradients(self) -> Mapping[str, torch.Tensor]:
        """What is in .grad, by name."""
        clip_norm = self.job.consistency.clip_norm
        if clip_norm > 0.0 and self.trainer.methods.mode.clips_at_worker:
            # torch's own way: each worker its own gradient, before anybody else sees it.
            torch.nn.utils.clip_grad_norm_([v for v in self._values.values() if v.grad is not None], clip_norm)
        if self._loop.lent is not None:
            return self._loop.lent.gradients()
        return {name: value.grad for name, value in self._values.items() if value.grad is not None}

    def finish_step(self, loss: float | None = None, hyper: Hyper | None = None) -> bool:
        """Send the open step and hold the next parameters; False where the loop has to run the step again.

        Contributes .grad for this worker's own replica where nothing was contributed yet.

        Outside of steps(): True too where a standby has taken over, since what was contributed is taken along; raises
        RolledBackError where the job went back.
        """
        return self._loop.finish(self._gradients, loss, hyper)

    def wait(self) -> None:
        """Return when the model holds all parameters of `step`.

        Where the next forward pass waits per layer, tensors may be older before; else there is nothing to wait for.
        """
        self._loop.wait()

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
        return self._loop.barrier.meet(
            self.link, self.trainer.step, by_step=self._loop.assigns_replicas, timeout_s=limit_s
        )

    def log_loss(self, loss: float) -> None:
        """Loss of the open step, for logs and the dashboard of a script's job."""
        self._loop.note_loss(loss)

    # Named tensors, for those who write their own loop

    def push(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Contribute named gradients as this worker's part of the open step and hold the next parameters."""
        check_named(self._values, gradients)
        self.wait()
        self._loop.contribute_own(gradients)
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
        if self._loop.lent is None or self._closed:
            return False
        self._loop.lent.zero(set_to_none=set_to_none)
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
                self._loop.finder.finish_part()
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
        if self._loop.lent is not None:
            self._loop.lent.close()
        if self._link is not None:
            self._link.close()
        self._loop.place.close()
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
