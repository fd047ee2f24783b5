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
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardline import cadence as cadences
from shardline.client.api.barrier import to_json
from shardline.client.api.joining import JobMember
from shardline.client.api.optimizer import ShardlineOptimizer, check_unused
from shardline.client.api.script_job import ScriptSettings, check_named, script_spec
from shardline.client.partners import Partners
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.trainer import Trainer
from shardline.config import RoleConfig
from shardline.core.settings import short
from shardline.core.spec import JobSpec
from shardline.data import Watch
from shardline.errors import TaskLostError, TensorError, UsageError
from shardline.host.process import Termination
from shardline.rpc.report_queue import MAX_LOGGED, MAX_LOGGED_NAME

log = logging.getLogger("shardline.client")


class Session(JobMember):
    """One worker's session in a job. Used by one thread; made by shardline.connect() or the worker service."""

    def __init__(
        self,
        config: RoleConfig,
        *,
        termination: Termination | None = None,
        script: ScriptSettings | None = None,
    ) -> None:
        super().__init__(config, termination or Termination())
        self._script = script or ScriptSettings()
        self._workers = max(1, config.cluster.num("worker"))
        self.data_took = self._loop.runner.reports.read
        """Call with the seconds that a batch of the open step took to come."""
        self.leases = self._loop.runner.stepper.leases
        """In an asynchronous job from a file: batches that this worker is to compute."""
        self.partners: Partners | None = None
        """Other workers, where these compute parts of a replica's step; set by attach()."""

    @property
    def trainer(self) -> Trainer:
        """State of training. Raises UsageError before attach()."""
        return self._loop.trainer

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
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite and nan_policy is "skip".

        Synchronous: a gradient of any replica, so it is the same in all of them. Asynchronous: a gradient of this one.
        """
        return self._loop.skipped

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
        clip_norm: float | None = None,
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
        clip_norm: in place of connect()'s, for a library that asks for it later.

        Raises MismatchError if model or settings differ from the job's, UnreachableError, JobError, UsageError.
        """
        if self.attached:
            raise UsageError("this session is already attached; a session trains one model")
        if clip_norm is not None:
            self._script = replace(self._script, consistency=replace(self._script.consistency, clip_norm=clip_norm))
        spec = job or script_spec(self._script, self._workers, model, optimizer)
        if self._loop.profile is not None:
            self._loop.profile.check(cadences.of(spec).rounds.ticks_before(spec.steps))
        self._loop.place.furnish(model, optimizer, spec, overlap=overlap, zero_copy=zero_copy)
        self.partners = self._loop.place.partners
        self._join(spec)
        check_unused(optimizer.state.values(), self._loop.standing)
        if job is None:
            self._loop.mistakes.attached(self._loop.standing.step)
        attached = ShardlineOptimizer(self._loop, optimizer, (spec.inner or spec).rule.name)
        lent = None
        if zero_copy:
            owned = {id(item) for group in optimizer.param_groups for item in group["params"]}
            mine = {name: value for name, value in self._loop.place.values.items() if id(value) in owned}
            lent = SharedGradients(mine, lambda name: self.trainer.gradient_view(name))  # noqa: PLW0108  trainers change
        self._loop.hyper, self._loop.runner.lent = attached.hyper, lent
        self.attached = True
        return attached

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

    def contribute(
        self,
        replica: int,
        *,
        loss: float | None = None,
        samples: int = 0,
        gradients: Mapping[str, torch.Tensor] | None = None,
        keep: bool = False,
    ) -> None:
        """Contribute the gradients in .grad (or those given, by name) as one replica's part of the open step.

        keep: the tensors are not written to until the step is closed, so they need not be copied.
        """
        gradients = self._loop.gradients() if gradients is None else gradients
        self._loop.contribute(replica, gradients, loss=loss, samples=samples, keep=keep)

    def finish_step(self, loss: float | None = None) -> bool:
        """Send the open step and get the next parameters; False if the loop has to run the step again.

        Contributes .grad for this worker's own replica if nothing was contributed yet.

        Outside of steps(): True also after a standby has taken over, since the contribution is sent again. Raises
        RolledBackError if the job rolled back, JobStopped if it has ended. Raises UsageError after close().
        """
        return self._loop.finish(loss)

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
        return self._meet("barrier", timeout_s) is not None

    def broadcast(self, value: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return worker/0's value in all workers, which must all call this, as for barrier().

        value: JSON with up to 65,536 characters: None, numbers, text, lists, dicts; that of other workers is not read.
        timeout_s and errors: those of barrier(); raises JobStopped if the job ends first, UsageError for other values.
        """
        text = to_json(value) if self.config.index == 0 else ""
        found = self._meet("broadcast", timeout_s, text)
        if found is None:
            self._loop.mistakes.stopped(self.link, self._loop.trainer.half.job_step)
        if not found:
            raise TaskLostError(
                f"{self.config.task}: the chief was restarted and lost what worker/0 broadcast in step {self.step}"
            )
        return json.loads(found)

    def _meet(self, what: str, timeout_s: float | None, value: str = "") -> str | None:
        if self._loop.closed:
            raise UsageError(f"this session is closed, so {what}() can't be called")
        if not self.job.script:
            raise UsageError(f"{what}() is only for scripts: the replicas of a job file are not tied to a worker")
        self.wait()
        limit_s = 10.0 * self.config.timeouts.total_s if timeout_s is None else timeout_s
        return self._loop.meet_others(limit_s, value)

    def log_loss(self, loss: float | torch.Tensor) -> None:
        """Record the open step's loss for logs and the dashboard of a script's job. A tensor must have one element."""
        self._loop.loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def log(self, figures: Mapping[str, float | torch.Tensor]) -> None:
        """Record figures of the open step, by name, as curves of the page and of TensorBoard and in steps.jsonl.

        A tensor must have one element. A name that is logged again in the step replaces what it had; replicas' figures
        are averaged. Raises UsageError for more than 32 names, a name of more than 64 bytes, and for what is no number.
        """
        found = {**self._loop.logged, **{name: as_figure(name, value) for name, value in figures.items()}}
        if len(found) > MAX_LOGGED:
            raise UsageError(f"log() has {len(found)} figures in step {self.step}; the limit is {MAX_LOGGED}")
        self._loop.logged = found

    # Named tensors, for a hand-written loop

    def push(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Contribute gradients by name as this worker's part of the open step, and get the next parameters."""
        self.owner.check()
        check_named(self._loop.place.values, gradients)
        self.wait()
        self._loop.contribute_own(gradients)
        self.finish_step()

    def gradient(self, name: str) -> torch.Tensor:
        """Tensor to compute this parameter's gradient in: with zero_copy, memory that the server reads; else new zeros.

        Ask for it in every step, after the previous one has ended. Raises TensorError for an unknown name.
        """
        value = value_of(self._loop.place.values, name)
        view = self.trainer.gradient_view(name)
        return view if view is not None else torch.zeros_like(value)

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Copies of the named tensors (default: all) at the current step. Raises TensorError for an unknown name."""
        self.wait()
        values = self._loop.place.values
        return {name: value_of(values, name).detach().clone() for name in (values if names is None else names)}

    def push_pull(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """push() and pull() in one exchange."""
        self.push(gradients)
        return self.pull(list(gradients))


def value_of(values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor of this name. Raises TensorError if there is none."""
    if name not in values:
        raise TensorError(f"the job has no tensor {name!r}; it has {', '.join(list(values)[:8])}")
    return values[name]


def as_figure(name: str, value: float | torch.Tensor) -> float:
    """A logged figure as a number. Raises UsageError for a name that is too long, and for what is no number."""
    if not isinstance(name, str) or not 1 <= len(name.encode()) <= MAX_LOGGED_NAME:
        raise UsageError(f"log(): a figure's name is {short(name)}; give a text of 1 to {MAX_LOGGED_NAME} bytes")
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"log(): {name} is {short(value)}; give a number or a tensor of one element") from error
