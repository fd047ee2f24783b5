"""A session's steps: compute, hand over, wait. What comes between two of them is step_runner.py's."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping

import torch

from shardline.client.api.barrier import Barrier
from shardline.client.api.step_runner import StepRunner
from shardline.client.exchange.outcomes import Interrupted, Restart, StepFigures, Stopped
from shardline.client.overlap.watching import StepAgain, StepWatch
from shardline.client.step.open_step import Expected
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.trainer import RetainedContribution, Trainer
from shardline.config import RoleConfig
from shardline.core.orders import Phase, StepReport
from shardline.data import UNWATCHED, Watch
from shardline.errors import JobError, JobStopped
from shardline.host.process import Termination
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")

Hyper = Mapping[int, Mapping[str, float]]
"""Hyper-parameters that differ from the job's, by parameter group."""


class LoopMistakes:
    """Logs, once, mistakes of a script's own loop that it would not notice. Used by the session's thread."""

    def __init__(self) -> None:
        self._goes_on = 0
        """The job's step when this process joined, until the loop is known to have taken it into account; then 0."""
        self._refused = 0

    @property
    def lost(self) -> int:
        """Steps that the loop has taken although the job had ended: those after the first JobStopped."""
        return max(0, self._refused - 1)

    def stopped(self, link: ChiefLink, step: int) -> None:
        """Raise JobStopped: nothing but this tells the loop that its step was not made, because the job has ended.

        step: that of the parameters in the model.
        """
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


class StepLoop:
    """One worker's steps, in a job file's or the user's loop. Used by the session's thread."""

    def __init__(self, config: RoleConfig, metrics: Metrics, termination: Termination) -> None:
        self._index = config.index
        self.runner = StepRunner(config, metrics, leaving=termination.event.is_set)
        self.place = self.runner.place
        self._now = self.runner.now
        self.barrier = Barrier()
        self.mistakes = LoopMistakes()
        self._stepper = self.runner.now.stepper
        self._reports = self.runner.reports
        self._hyper: Callable[[], Hyper] | None = None
        self._loss: float | None = None

    def attached(self, hyper: Callable[[], Hyper], lent: SharedGradients | None) -> None:
        """Set up after attaching. hyper: the optimizer's changed numbers. lent: memory for .grad, None if private."""
        self._hyper = hyper
        self.runner.lent = lent

    @property
    def trainer(self) -> Trainer:
        """State of training. Raises UsageError before attach()."""
        return self.place.trainer

    @property
    def replica(self) -> int:
        """First logical replica of this worker; in a script the worker's index, known before attach()."""
        begun = self._stepper.begun.replicas
        return begun[0] if begun and self._now.assigned else self._index

    @property
    def _own_replica(self) -> int:
        return self.replica if self._now.assigned else 0

    # A step: begin(replica), the passes, contribute(replica), then finish()

    def steps(self, total: int | None) -> Iterator[int]:
        self._stepper.iterating = True
        self.place.wake()
        self.mistakes.knows_the_step()
        try:
            while True:
                found = self.runner.next()
                self.barrier.begin(self.trainer.step, begun=True)
                if not found:
                    return
                methods = self.trainer.methods
                number = methods.ticks.number(self._now.number)
                if total is not None and number >= total:
                    if self.runner.settle():
                        self.place.rest()
                        return
                    continue
                if methods.ticks.tick == 0:
                    self._reports.clear()
                else:
                    self._reports.next_tick()
                self.place.waits.seconds = 0.0
                # A script's worker has one replica, whose own parameters go into the model. A body that runs again
                # without step() in between adds to its pass.
                if methods.cadence.keeps_copies and self.trainer.job.script and self.runner.missing_steps.passes == 1:
                    methods.local.enter(self._own_replica, methods.ticks.tick)
                self._expect_by_itself()
                yield number
        except JobError as error:
            # Workers waiting for this one's step learn why it does not come, even if the script catches the error.
            self._now.link.fail(str(error), error.exit_code)
            raise
        finally:
            self._stepper.iterating = False
            if self.place.current is not None:
                self.place.current.disarm()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Context manager for the loop's body: swallows StepAgain, so that the body runs again."""
        try:
            yield
        except StepAgain as again:
            log.info("restarting the step: %s", again.cause or "orders changed")
            for error in (again, again.cause):
                if error is not None:
                    # Frames of the body would hold tensors that only the model's modules are to hold, see Reach.
                    traceback.clear_frames(error.__traceback__)
            self.runner.unwound = again

    def begin(self, replica: int) -> None:
        with self.place.waits():
            self.trainer.begin(replica)

    def watch(self, replica: int, *, ask_loss: bool) -> Watch:
        """Watch for replica_gradients. ask_loss: the loss costs nothing."""
        if not self.place.overlaps:
            return UNWATCHED
        owned = sorted(self._stepper.todo) if self._now.assigned else [0]

        def expect(loss: Callable[[], float], samples: int) -> None:
            self._settle_in_body()
            asked = ask_loss or self.trainer.job.consistency.nan_policy == "skip"
            found = loss() if asked else None
            self.trainer.expect(Expected(replica=replica, owned=owned, samples=samples, loss=found))

        return StepWatch(self.place.gate, lambda: self.trainer.open.uses, expect)

    def _settle_in_body(self) -> None:
        """Wait for the whole previous step and check that the orders have not changed. Raises StepAgain otherwise."""
        if self.runner.sent is not None:
            with self.place.waits():
                figures = self.trainer.settle()
            self.runner.close(figures)
            self.runner.check_ordered()

    def gradients_cleared(self) -> None:
        """zero_grad() of the optimizer was called: outside of steps(), this begins a step."""
        if not self._stepper.iterating:
            self._expect_by_itself()

    def _expect_by_itself(self) -> None:
        """In the user's own loop: the next backward() belongs to the open step."""
        view = self.place.view
        if self.place.overlaps and view is not None and view.job.script and self._hyper is not None:
            replica = self._own_replica
            self.trainer.expect(Expected(replica=replica, owned=[replica], hyper=self._hyper))

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
        if not self._stepper.iterating and added:
            self._now.retained = RetainedContribution(mark, added)
        report = StepReport(
            # Where workers push for themselves, curves are drawn over their own numbers, else over the job's steps.
            step=trainer.half.job_step if self._now.assigned else self._now.number,
            replica=replica,
            loss=float("nan") if loss is None else loss,
            samples=samples,
            drift=added[replica].drift if added else 0.0,
        )
        self._reports.add(report, waited_s=self.place.waits.seconds)

    def contribute_own(
        self, gradients: Mapping[str, torch.Tensor], *, loss: float | None = None, hyper: Hyper | None = None
    ) -> None:
        """Contribute as a script's one replica. The tensors must not change until the step is closed."""
        self.contribute(self._own_replica, gradients, loss=loss, samples=0, hyper=hyper, keep=True)

    def note_loss(self, loss: float) -> None:
        self._loss = loss

    def finish(
        self, gradients: Callable[[], Mapping[str, torch.Tensor]], loss: float | None, hyper: Hyper | None
    ) -> bool:
        """See Session.finish_step. gradients: called if nothing was contributed yet."""
        runner, ticks = self.runner, self.trainer.methods.ticks
        self._reports.skipped = False
        self._check_loop()
        runner.missing_steps.reset()
        self.mistakes.about_to_step()
        if not self._reports.contributed:
            # Not copied: this returns when they are acknowledged.
            self.contribute_own(gradients(), loss=loss or self._loss, hyper=hyper)
        self._loss = None
        if not ticks.last:
            ticks.advance()
            self._reports.next_tick()
            return True
        gate = self.place.gate
        reason = gate.why_not() if gate is not None else ""
        goes_on = self.trainer.methods.goes_on or (gate is not None and not reason)
        wait = not goes_on or self.trainer.open.first or self.trainer.watch.waits
        while True:
            figures: StepFigures | None = None
            try:
                if self._now.link.orders.phase is Phase.ENDED:
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
                if not runner.go_on(error):
                    runner.forget()
                    if self._stepper.stale and not self._stepper.iterating:
                        self.mistakes.stopped(self._now.link, self.trainer.half.job_step)
                    return False
                figures = runner.closed_by
                if figures is None:
                    continue
            runner.advance(figures)
            return True

    def _check_loop(self) -> None:
        """Raise JobError for a loop in which nothing tells when a pass begins, if the cadence has to know it."""
        methods = self.trainer.methods
        if methods.cadence.keeps_copies and self.trainer.job.script and not self._stepper.iterating:
            error = JobError(
                f"cadence {methods.cadence} keeps parameters of each replica's own, which only a loop over "
                "session.steps() gets; write the loop so, or choose another cadence, such as diloco"
            )
            self._now.link.fail(str(error), error.exit_code)
            raise error

    # Between steps

    def meet_others(self, timeout_s: float) -> bool:
        """See Session.barrier. Nobody needs to wait for this worker's pushes meanwhile."""
        self.place.rest()
        passed = self.barrier.meet(self._now.link, self.trainer.step, by_step=self._now.assigned, timeout_s=timeout_s)
        if passed and not self.place.wake() and not self._stepper.iterating:
            # Within steps() the next step does this.
            return self.runner.find_again()
        return passed
