"""A session's steps: compute, hand over, wait."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from shardline import pipeline
from shardline.client.api.barrier import Barrier
from shardline.client.api.in_flight import InFlight, SentStep
from shardline.client.api.script_job import meter_step
from shardline.client.api.step_finder import StepFinder
from shardline.client.api.workplace import Workplace
from shardline.client.exchange.outcomes import Interrupted, Restart, StepFigures, Stopped
from shardline.client.step.retained_contribution import RetainedContribution
from shardline.client.step.sending import Expected
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.trainer import Trainer
from shardline.config import RoleConfig
from shardline.core.orders import Phase, StepReport
from shardline.data import Watch
from shardline.errors import JobError, JobStopped, RolledBackError, UnreachableError
from shardline.host.process import Termination
from shardline.observability.metrics import Metrics
from shardline.pipeline.parcel import ParcelKey


class OwnLoop:
    """Logs, once, mistakes of a script's own loop that it would not notice. Used by the session's thread."""

    def __init__(self) -> None:
        self._goes_on = 0
        """The job's step when this process joined, until the loop is known to have taken it into account; then 0."""
        self._refused = 0

    @property
    def lost(self) -> int:
        """Steps that the loop has taken although the job had ended: those after the first JobStopped."""
        return max(0, self._refused - 1)

    def check_goes_on(self, finder: StepFinder, step: int) -> None:
        """Raise JobStopped after a step that was not made because the job has ended, if nothing else tells the loop.

        step: that of the parameters in the model.
        """
        if finder.iterating or not finder.stale:
            return
        link = finder.link
        link.wait(lambda o: o.stop_step > 0 or o.fenced or o.phase is Phase.ENDED, timeout_s=link.timeouts.rpc_s)
        orders = link.orders
        self._refused += 1
        # If it isn't known in time, this worker's own step is the best guess.
        step = orders.stop_step or step
        what = "this worker left the job" if orders.fenced else "the job ended"
        what += f" with exit code {orders.exit_code}" if orders.exit_code else ""
        why = f" ({orders.reason})" if orders.reason else ""
        error = JobStopped(
            f"{link.task}: {what} at step {step}{why}; optimizer.step() changed nothing. Leave the loop; "
            "--resume continues the job",
            step,
        )
        if not self.lost:
            # Python says nothing when a SystemExit ends the process.
            log.warning("%s", error)
        raise error

    def attached(self, step: int) -> None:
        self._goes_on = step

    def knows_the_step(self) -> None:
        """The loop knows the job's step: it is over steps(), has read session.step, or loaded a state of that step."""
        self._goes_on = 0

    def about_to_step(self) -> None:
        """Warn of steps that will be done twice."""
        if self._goes_on:
            log.warning(
                "the job continues at step %d, but this script has neither read that (session.step, session.steps()) "
                "nor loaded an optimizer state of that step: a loop that counts from 0 repeats %d steps. Loop over "
                "session.steps(), or let the Trainer resume from its own checkpoint of step %d "
                "(resume_from_checkpoint=, ckpt_path=)",
                *(self._goes_on,) * 3,
            )
            self._goes_on = 0


class StepReports:
    """The open step's reports, one per replica. Used by the session's thread."""

    def __init__(self) -> None:
        self._reports: dict[int, StepReport] = {}
        self._losses: dict[int, list[float]] = {}
        self.contributed = False
        """Some replica has contributed to the open tick."""
        self._data_s = 0.0
        """Seconds of waiting for batches since the last report."""
        self.began_s = time.monotonic()
        """When the open step began."""

    def read(self, seconds: float) -> None:
        """Note that the next report's batch took so long to come."""
        self._data_s += seconds

    def add(self, report: StepReport, *, waited_s: float) -> None:
        """Add a replica's report on the open tick. waited_s: seconds it had to wait for the previous step.

        compute_s and data_s are measured here; loss and samples are those of the tick.
        """
        before = self._reports.get(report.replica)
        losses = self._losses.setdefault(report.replica, [])
        losses.append(report.loss)
        spent_s = sum(item.compute_s + item.data_s for item in self._reports.values())
        compute_s = time.monotonic() - self.began_s - waited_s - spent_s - self._data_s
        self._reports[report.replica] = replace(
            report,
            loss=losses[0] if len(losses) == 1 else math.fsum(losses) / len(losses),
            samples=report.samples + (before.samples if before is not None else 0),
            compute_s=compute_s + (before.compute_s if before is not None else 0.0),
            data_s=self._data_s + (before.data_s if before is not None else 0.0),
        )
        self._data_s = 0.0
        self.contributed = True

    def next_tick(self) -> None:
        """Begin another tick of the same step."""
        self.contributed = False

    def take(self) -> tuple[StepReport, ...]:
        """Return the reports, one per replica, when the step is sent, and start over."""
        taken = tuple(self._reports.values())
        self.clear()
        return taken

    def clear(self) -> None:
        """Begin another step, or the same one again."""
        self._reports.clear()
        self._losses.clear()
        self.contributed = False
        self._data_s = 0.0
        self.began_s = time.monotonic()


log = logging.getLogger("shardline.client")

Hyper = Mapping[int, Mapping[str, float]]
"""Hyper-parameters that differ from the job's, by parameter group."""


class StepLoop:
    """One worker's steps, in a job file's or the user's loop. Used by the session's thread."""

    def __init__(self, config: RoleConfig, metrics: Metrics, termination: Termination) -> None:
        self._index = config.index
        self._metrics = metrics
        self.in_flight = InFlight(go_on=self.go_on, still_ordered=self._still_ordered, closed=self._account)
        self.place = Workplace(
            config,
            metrics,
            wait_for=self.in_flight.wait_for,
            still_ordered=self._still_ordered,
            still_open=self.still_open,
            settle=self.in_flight.settle_stages,
        )
        self.in_flight.place = self.place
        self.finder = StepFinder(config.timeouts, self.place, self.in_flight, leaving=termination.event.is_set)
        self.barrier = Barrier()
        self.own_loop = OwnLoop()
        self.lent: SharedGradients | None = None
        """Gradients in memory shared with the servers."""
        self._hyper: Callable[[], Hyper] | None = None
        self._reports = StepReports()
        self.data_took = self._reports.read
        """Call with the seconds that a batch of the open step took to come."""
        self._accounted_s = time.monotonic()
        self._loss: float | None = None
        self.skipped = False
        """The last step was skipped because a gradient was not finite."""

    @property
    def trainer(self) -> Trainer:
        """State of training. Raises UsageError before attach()."""
        return self.place.trainer

    @property
    def assigns_replicas(self) -> bool:
        """Whether the chief assigns logical replicas to this worker."""
        return self.trainer.methods.mode.assigns_replicas

    @property
    def replica(self) -> int:
        """First logical replica of this worker; in a script the worker's index, known before attach()."""
        return self.finder.begun.replicas[0] if self.finder.begun.replicas and self.assigns_replicas else self._index

    @property
    def _own_replica(self) -> int:
        return self.replica if self.assigns_replicas else 0

    # The loop

    def steps(self, total: int | None) -> Iterator[int]:
        self.finder.iterating = True
        self.place.wake()
        self.own_loop.knows_the_step()
        try:
            while True:
                if self.finder.next() is None:
                    self._enter_body()
                    return
                number = self.finder.number
                self._enter_body()
                if total is not None and number >= total:
                    if self.in_flight.settle():
                        self.place.rest()
                        return
                    continue
                if self.trainer.methods.ticks.tick == 0:
                    self._reports.clear()
                else:
                    self._reports.next_tick()
                self.in_flight.waited_s = 0.0
                methods = self.trainer.methods
                # A script's worker has one replica, whose own parameters go into the model. A body that runs again
                # without step() in between adds to its pass.
                if methods.cadence.keeps_copies and self.trainer.job.script and self.finder.unstepped.passes == 1:
                    methods.local.enter(self._own_replica, methods.ticks.tick)
                self._expect_by_itself()
                yield number
        except JobError as error:
            # Workers waiting for this one's step learn why it does not come, even if the script catches the error.
            self.finder.link.fail(str(error), error.exit_code)
            raise
        finally:
            self.finder.iterating = False
            if self.place.current is not None:
                self.place.current.disarm()

    def _enter_body(self) -> None:
        self.barrier.begin(self.trainer.step, begun=True)

    def _check_loop(self) -> None:
        """Raise JobError for a loop in which nothing tells when a pass begins, if the cadence has to know it."""
        methods = self.trainer.methods
        if methods.cadence.keeps_copies and self.trainer.job.script and not self.finder.iterating:
            error = JobError(
                f"cadence {methods.cadence} keeps parameters of each replica's own, which only a loop over "
                "session.steps() gets; write the loop so, or choose another cadence, such as diloco"
            )
            self.finder.link.fail(str(error), error.exit_code)
            raise error

    def watch(self, replica: int, *, ask_loss: bool) -> Watch:
        owned = sorted(self.finder.todo) if self.assigns_replicas else [0]
        return self.in_flight.watch(replica, owned, ask_loss=ask_loss)

    def gradients_cleared(self) -> None:
        """zero_grad() of the optimizer was called: outside of steps(), this begins a step."""
        if not self.finder.iterating:
            self._expect_by_itself()

    def _expect_by_itself(self) -> None:
        """In the user's own loop: the next backward() belongs to the open step."""
        view = self.place.view
        if not self.place.overlaps or view is None or not view.job.script or self._hyper is None:
            return
        replica = self._own_replica
        self.trainer.expect(Expected(replica=replica, owned=[replica], hyper=self._hyper))

    def attached(self, hyper: Callable[[], Hyper], lent: SharedGradients | None) -> None:
        """Set up after attaching. hyper: the optimizer's changed numbers. lent: memory for .grad, None if private."""
        self._hyper = hyper
        self.lent = lent

    def contribute(
        self,
        replica: int,
        gradients: Mapping[str, torch.Tensor],
        *,
        loss: float | None,
        samples: int,
        hyper: Hyper | None,
        keep: bool,
    ) -> None:
        trainer = self.trainer
        mark = trainer.half.mark()
        added = trainer.contribute(replica, gradients, samples=samples, loss=loss, hyper=hyper, keep=keep)
        if not self.finder.iterating and added:
            self.finder.retained = RetainedContribution(mark, added)
        number = self.finder.leases.batch if self.finder.leases.held else trainer.half.reported_step
        report = StepReport(
            step=number,
            replica=replica,
            loss=float("nan") if loss is None else loss,
            samples=samples,
            drift=added[replica].drift if added else 0.0,
        )
        self._reports.add(report, waited_s=self.in_flight.waited_s)

    def contribute_own(
        self, gradients: Mapping[str, torch.Tensor], *, loss: float | None = None, hyper: Hyper | None = None
    ) -> None:
        """Contribute as a script's one replica. The tensors must not change until the step is closed."""
        self.contribute(self._own_replica, gradients, loss=loss, samples=0, hyper=hyper, keep=True)

    def finish(
        self, gradients: Callable[[], Mapping[str, torch.Tensor]], loss: float | None, hyper: Hyper | None
    ) -> bool:
        """See Session.finish_step. gradients: called if nothing was contributed yet."""
        self.skipped = False
        self._check_loop()
        self.finder.unstepped.reset()
        self.own_loop.about_to_step()
        if not self._reports.contributed:
            # Not copied: this returns when they are acknowledged.
            self.contribute_own(gradients(), loss=loss or self._loss, hyper=hyper)
        self._loss = None
        if not self.trainer.methods.ticks.last:
            self.trainer.methods.ticks.advance()
            self._reports.next_tick()
            return True
        figures: StepFigures | None = None
        gate = self.place.gate
        reason = gate.why_not() if gate is not None else ""
        goes_on = self.trainer.methods.goes_on or (gate is not None and not reason)
        wait = not goes_on or self.trainer.open.first or self.trainer.watch.waits
        while True:
            try:
                if self.finder.link.orders.phase is Phase.ENDED:
                    # The servers may be gone already.
                    raise Interrupted
                if wait:
                    first = self.trainer.open.first
                    figures = self.trainer.finish()
                    if gate is not None and reason and not first:
                        gate.tell_wait(reason, figures.seconds)
                else:
                    self.trainer.send()
            except (Restart, Interrupted, Stopped) as error:
                if not self.go_on(error):
                    self._forget()
                    self.own_loop.check_goes_on(self.finder, self.trainer.half.job_step)
                    return False
                figures = self.finder.closed_by
                if figures is None:
                    continue
            # The open step was sent. figures: set if it is also closed.
            began_s = self._reports.began_s
            sent = SentStep(self._reports.take(), began_s, self.finder.leases.batch)
            self.finder.retained = None
            self.finder.advance()
            self.in_flight.waited_s = 0.0
            if figures is None:
                self.in_flight.depart(sent)
            else:
                self._account(sent, figures)
            return True

    def _forget(self) -> None:
        """Drop the contribution to the open step, which is of no use any more."""
        self._reports.clear()
        self.finder.retained = None

    def go_on(self, error: Exception) -> bool:
        """Decide after a failed exchange: True = send the same again, False = the loop starts over."""
        again, trainer = False, self.trainer
        try:
            again = self.finder.go_on(error)
        except RolledBackError:
            self._forget()
            raise
        finally:
            if self.lent is not None and not (again and self.trainer is trainer):
                # A server may still read the contribution of a step that was given up, and segments are freed with
                # their lanes.
                self.lent.take_back()
        return again

    def note_loss(self, loss: float) -> None:
        self._loss = loss

    def wait(self) -> None:
        """Wait until the model contains all parameters of the open step."""
        self.in_flight.settle()

    def meet_others(self, timeout_s: float) -> bool:
        """See Session.barrier. Nobody needs to wait for this worker's pushes meanwhile."""
        self.place.rest()
        passed = self.barrier.meet(
            self.finder.link, self.trainer.step, by_step=self.assigns_replicas, timeout_s=timeout_s
        )
        if passed and not self.place.wake() and not self.finder.iterating:
            # Within steps() the next step does this.
            return self.finder.find_again()
        return passed

    def _still_ordered(self) -> bool:
        return self.finder.still_ordered()

    def still_open(self, key: ParcelKey) -> bool:
        """Whether a step still has to be computed, by the orders that it began with."""
        if not self._still_ordered() or self.trainer.methods.unbroken:
            # Without a flush stages are at different steps, and whatever ends one of them changes the orders.
            return self._still_ordered()
        try:
            found = self.trainer.standings(range(self.trainer.job.replicas)).values()
        except UnreachableError as error:
            # Beginning again would not help: the other stages do so only if the orders change.
            log.info("can't ask whether step %d is closed: %s", key.step, error)
            return self._still_ordered()
        except (Restart, Interrupted) as error:
            log.info("looking for the current step again: %s", error or "interrupted")
            return False
        return min(step for standing in found for step in standing.replicas.values()) <= key.step

    def _account(self, sent: SentStep, figures: StepFigures) -> None:
        """Report a closed step to the metrics and the chief."""
        self.place.resting = False
        self.skipped = figures.skipped
        step_s = time.monotonic() - max(sent.began_s, self._accounted_s)
        self._accounted_s = time.monotonic()
        meter_step(self._metrics, self.trainer, figures, sent.reports, step_s, self.place.peers)
        last = pipeline.stages(self.trainer.job) - 1
        for item in sent.reports if self.place.office.rank == 0 else ():
            if last and last not in self.place.office.stages(item.replica):
                # Only the last stage knows the loss, and the chief counts one report per replica.
                continue
            self.finder.link.report(
                replace(
                    item,
                    exchange_s=figures.seconds,
                    staleness=figures.staleness,
                    blocked_s=figures.blocked_s,
                    gap=figures.gap or 0.0,
                )
            )
