"""A session's steps as the loop's body sees them (StepLoop), and what comes between two (StepRunner)."""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shardline.cadence.base import Hyper
from shardline.client.api.barrier import Barrier
from shardline.client.api.profile import StepProfile
from shardline.client.api.stateful import Stateful
from shardline.client.api.step_reports import SentStep, StepReports, figures_of
from shardline.client.api.stepper import OPEN, Do, LoopMistakes, MissingSteps, TrainingPosition
from shardline.client.api.workplace import WorkerState
from shardline.client.exchange.shard_exchange import Interrupted, Overtaken, Rerouted, Restart, StepFigures, Stopped
from shardline.client.overlap.gate import StepAgain, StepWatch
from shardline.client.step.early_push import Expected
from shardline.client.step.shared_gradients import SharedGradients
from shardline.client.step.trainer import RetainedContribution, Trainer
from shardline.config import RoleConfig
from shardline.core.orders import LOST, REPEATED, Orders, Phase, StepReport
from shardline.data import UNWATCHED, Watch
from shardline.errors import JobError, RolledBackError, UnreachableError
from shardline.host.awake import awake_s
from shardline.host.process import OwnProcess
from shardline.observability.metrics import Metrics
from shardline.rpc.client import Lease
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")


NORM_EVERY = 10
"""Steps from one measurement of the gradients' norm to the next."""


class StepRunner:
    """One worker's steps, between the passes of its loop. Used by the session's thread, except ordered().

    leaving: whether this worker was asked to leave.
    """

    def __init__(self, config: RoleConfig, metrics: Metrics, *, leaving: Callable[[], bool]) -> None:
        self.now = WorkerState(config, metrics, leaving=leaving, settle=self.settle_stages)
        self.place = self.now.place
        self.stepper = self.now.stepper
        self.profile = StepProfile.of(config)
        self.reports = StepReports(metrics, self.profile)
        self.missing_steps = MissingSteps(config.timeouts.total_s)
        self.sent: SentStep | None = None
        """The step in flight."""
        self.closed_by: StepFigures | None = None
        """Set by go_on() if the open step needs no further exchange: all shards have its contribution."""
        self.unwound: StepAgain | None = None
        """Set if the loop's body was left in the middle."""
        self.lent: SharedGradients | None = None
        """Gradients in memory shared with the servers."""
        self._repeated = 0
        """Asynchronous mode: batches that were sent but had to be computed again."""

    @property
    def link(self) -> ChiefLink:
        return self.now.link

    @property
    def trainer(self) -> Trainer:
        return self.place.trainer

    # Before a pass

    def next(self) -> bool:
        """Find the next pass, and begin it; False if there is none. Waits while there may be one later.

        Raises JobError if the previous step was begun and not ended, see Trainer.check_stepped, or if other workers
        wait for it, see MissingSteps.
        """
        while True:
            unwound, self.unwound = self.unwound, None
            if unwound is not None:
                # The body was left in the middle: give up what it sent, and settle the step in flight.
                if self.sent is None:
                    self.trainer.give_up()
                elif unwound.cause is None or self.go_on(unwound.cause):
                    self.settle()
                self.stepper.stale = True
                self.missing_steps.reset()
            trainer = self.trainer
            trainer.check_stepped()
            flies = self.sent is not None and not (trainer.methods.needs_pull or trainer.open.failed)
            runs_on = flies and not self.missing_steps.passes and self.now.still_ordered()
            if runs_on and self.stepper.runs_on(self.now.see()):
                self._begin()
                return True
            if not self.settle():
                continue
            # Before reading the orders: an interruption by newer ones must not be lost.
            self.place.arm()
            seen = self.now.see()
            match self.stepper.next(seen):
                case Do.BEGIN:
                    self._begin()
                    return True
                case Do.END:
                    return False
                case Do.LOCATE:
                    self.locate(seen.orders)
                case Do.LEASE:
                    self._lease()
                case Do.RESUME:
                    self.link.resume()
                case Do.FINISH | Do.REST | Do.WAIT as what:
                    if what is Do.FINISH:
                        self.finish_part()
                    elif what is Do.REST:
                        self.place.rest()
                    self.now.wait_for_change(seen.orders)

    def _begin(self) -> None:
        trainer, owned = self.trainer, self.stepper.begun.replicas
        if self.place.partners is not None:
            self.place.partners.begin(trainer.job, self.stepper.begun, trainer.step, self.link.identity)
        self.link.set_step(self.now.number)
        now_s = awake_s()
        if self.missing_steps.begin(self.now.number, now_s):
            self.missing_steps.waited_for(self.now.number, waiting_replicas(trainer, owned), now_s)

    def locate(self, orders: Orders) -> bool:
        """Ask for Progress and pull the parameters of that step; False if this has to be tried again."""
        stepper = self.stepper
        stepper.begun, stepper.stale = orders, True
        try:
            self.place.renew(self.link)
            if self.link.orders != orders:
                # The new trainer did not exist when these orders came, so they could not interrupt it.
                return False
            stepper.todo = self.trainer.locate(orders.units(self.link.task), orders.timeline, orders.posts)
        except (Restart, Interrupted, Stopped, UnreachableError) as error:
            # Stopped: these replicas are counted in the last step, or the job ends at its current step. A ps that can't
            # be reached: the chief decides whether it is dead; it ends the job or announces where its shards are now.
            level = logging.WARNING if isinstance(error, UnreachableError) else logging.INFO
            log.log(level, "looking for the current step again: %s", error or "interrupted")
            if not isinstance(error, (Overtaken, Rerouted)):
                self.now.wait_for_change(orders)
            return False
        stepper.stale = False
        self.missing_steps.reset()
        self.link.figures = {LOST: float(self.place.lost_updates), REPEATED: float(self._repeated)}
        self.link.set_step(self.trainer.step)
        return True

    def find_again(self, limit_s: float | None = None) -> bool:
        """Wait until the parameters of the job's current step are in the model; False if the job ends.

        Raises UnreachableError after limit_s.
        """
        self.stepper.stale = True
        began_s = awake_s()
        while self.stepper.stale:
            # Before reading the orders, see next().
            self.trainer.exchange.arm()
            seen = self.now.see()
            if seen.over:
                return False
            if seen.orders.phase not in OPEN or (seen.assigned and not seen.orders.replicas):
                self.now.wait_for_change(seen.orders)
            elif not self.locate(seen.orders) and limit_s is not None and awake_s() - began_s > limit_s:
                raise UnreachableError(
                    f"{self.link.task}: could not determine the current step of the job within {limit_s:.0f} s"
                )
        return True

    def _lease(self) -> None:
        """Report the current lease as done, all its pushes being acknowledged, and ask for the next: ChiefLink.ask."""
        link, done = self.link, self.stepper.leases.number
        try:
            lease = link.ask(lambda: link.client.lease(link.identity, done))
        except UnreachableError:
            if link.orders.phase is not Phase.ENDED:
                raise
            # The chief announced the end and exited.
            lease = Lease(number=0, first=0, count=0, ended=True)
        self.stepper.leases.take(lease)
        if lease.count == 0:
            self.place.rest()
            if lease.ended:
                self.finish_part()
            link.wait(lambda o: o.phase is Phase.ENDED, timeout_s=lease.retry_after_s or 0.05)

    def finish_part(self) -> None:
        """Report to the chief, once, that this worker has done its part."""
        again, self.stepper.finished = self.stepper.finished, True
        self.place.finish(self.link, again=again)

    # The step in flight

    def advance(self, figures: StepFigures | None) -> None:
        """The open step was sent. figures: set if it is also closed. Raises StepAgain."""
        sent = self.reports.take(self.stepper.leases.batch)
        self.now.retained = None
        self.stepper.advance(assigned=self.now.assigned)
        self.link.set_step(self.trainer.step)
        self.place.waits.seconds = 0.0
        if figures is not None:
            self.reports.account(sent, figures, self.place, self.link)
            return
        self.sent = sent
        if self.place.gate is not None:
            # From now on nobody reads what has not arrived.
            with self.place.waits():
                self.place.gate.shut()

    def settle(self) -> bool:
        """Wait for the step in flight; False if the step, or the end of the job, has to be found again."""
        while self.sent is not None:
            try:
                self.close(self.trainer.settle())
            except (Restart, Interrupted, Stopped) as error:
                if not self.go_on(error):
                    return False
        return True

    def settle_stages(self) -> None:
        """Wait for the whole previous step, sent again if need be. Raises StepAgain if it has to be found again."""
        if not self.settle():
            raise StepAgain
        self.check_ordered()

    def check_ordered(self) -> None:
        """Raise StepAgain if the orders have changed."""
        self.trainer.exchange.arm()
        # Check orders that came before arm(); later ones interrupt again.
        if not self.now.still_ordered():
            raise StepAgain

    def close(self, figures: StepFigures | None) -> None:
        """The step in flight, if there is one, has ended with these figures."""
        sent, self.sent = self.sent, None
        if self.place.gate is not None:
            self.place.gate.open()
        if sent is not None and figures is not None:
            self.reports.account(sent, figures, self.place, self.link)

    # After a failed exchange

    def go_on(self, error: Exception) -> bool:
        """Do what has to follow a failed exchange: True = send the same again, False = the loop starts over.

        Raises RolledBackError if the job rolled back and the loop can't start over.
        """
        trainer, again = self.trainer, False
        try:
            again = self._go_on(error)
        except RolledBackError:
            self.forget()
            raise
        finally:
            if self.lent is not None and not (again and self.trainer is trainer):
                # A server may still read the contribution of a step that was given up, and segments are freed with
                # their lanes.
                self.lent.take_back()
        return again

    def _go_on(self, error: Exception) -> bool:
        self.closed_by = None
        seen = self.now.see()
        what = self.stepper.failed(error, seen)
        if what is Do.RESEND:
            if not isinstance(error, Interrupted):
                self.link.wait(lambda o: o != seen.orders, timeout_s=0.1)
            self.trainer.exchange.arm()
            if self.now.still_ordered():
                return True
            what = self.stepper.failed(error, seen, resend=False)
        if what is Do.CARRY_OVER:
            return self._carry_over()
        if what is not Do.END:
            log.info("restarting the step: %s", error or "orders changed")
        self._give_up(again=what not in (Do.END, Do.FINISH))
        if what is Do.CATCH_UP:
            # Its step is closed without it. Nothing has to be sent again.
            self.find_again()
        elif what in (Do.FINISH, Do.WAIT):
            if what is Do.FINISH:
                self.finish_part()
            self.now.wait_for_change(seen.orders)
        return False

    def _carry_over(self) -> bool:
        """Move the contribution of a loop that can't repeat its step into another timeline.

        True = send it again, or closed_by shows that it is already counted; False = the job has ended. When a standby
        replaces a server, the new timeline continues without going back. Otherwise raises RolledBackError, with the
        parameters of the job's current step in the model.
        """
        link, retained = self.link, self.now.retained
        if retained is None:
            # attach(job=...) without a loop over steps(): it runs ahead of what it has sent and retains nothing.
            unbegun = (Phase.WAITING, Phase.INIT)
            link.wait(lambda o: o.fenced or o.phase not in unbegun, timeout_s=link.timeouts.lost_s)
            if link.orders.phase is not Phase.ENDED:
                link.check()
                raise rolled_back(link.task, link.orders.first_step)
            self.stepper.stale = True
            self._give_up()
            return False
        retained.keep(self.trainer, shared=self.place.wishes.zero_copy)
        self._give_up()
        if not self.find_again():
            return False
        trainer, half = self.trainer, self.trainer.half
        if half.went_back(retained.mark):
            raise rolled_back(link.task, trainer.step if half.shares_steps else link.orders.first_step)
        if half.counted(retained.mark):
            self.closed_by = retained.accept(half)
        else:
            retained.contribute(trainer)
        return True

    def forget(self) -> None:
        """Drop the contribution to the open step, which is of no use any more."""
        self.reports.clear()
        self.now.retained = None

    def _give_up(self, *, again: bool = False) -> None:
        """Give up the step in flight, which has to be computed again. again: so has the open one, if it was sent."""
        trainer = self.place.current
        if self.sent is not None or (again and trainer is not None and trainer.open.pushes):
            # Some shards may already have applied it.
            self._repeated += not self.now.assigned
        if self.sent is not None:
            self.stepper.leases.batch = self.sent.batch
        self.close(None)
        if trainer is not None:
            trainer.give_up()


def waiting_replicas(trainer: Trainer, owned: Sequence[int]) -> list[int]:
    """Replicas of other workers that every shard has counted in the open step; none if a server can't answer now.

    No exchange may be running.
    """
    others = [replica for replica in range(trainer.job.replicas) if replica not in owned]
    if not others or not trainer.half.shares_steps:
        return []
    try:
        standings = trainer.standings(others).values()
    except (Restart, Interrupted, UnreachableError) as error:
        log.debug("step %d: asking which replicas are waiting: %s", trainer.step, error)
        return []
    return [replica for replica in others if all(found.replicas[replica] > trainer.step for found in standings)]


def rolled_back(task: str, step: int) -> RolledBackError:
    """The error for a loop that can't repeat a step. step: the job's current step."""
    return RolledBackError(
        f"{task}: a parameter server was lost, and the job was rolled back to step {step}; loop over session.steps() "
        "to follow it, or train with --standbys 1",
        step=step,
    )


class StepLoop:
    """One worker's steps, in a job file's or the user's loop. Used by the session's thread."""

    def __init__(self, config: RoleConfig, metrics: Metrics, leaving: Callable[[], bool]) -> None:
        self._index = config.index
        self.runner = StepRunner(config, metrics, leaving=leaving)
        self.runner.now.on_stop = self._hand_over
        self.place = self.runner.place
        self._now = self.runner.now
        self.barrier = Barrier()
        self.mistakes = LoopMistakes()
        self._stepper, self._reports = self.runner.now.stepper, self.runner.reports
        self.profile, self.owner = self.runner.profile, OwnProcess(config.task)
        self.closed = False  # no step may be made any more
        self.hyper: Callable[[], Hyper] = dict
        """The optimizer's numbers that differ from the job's, once it is attached."""
        self.loss: float | None = None  # the open step's, for logs
        self.stateful: list[Stateful] = []
        """Loaders of a script whose states are kept by step."""
        self.attempting = False  # in the body of attempt()
        self.place.tables.waits = functools.partial(waits_for_rows, self)
        self.logged: dict[str, float] = {}
        """The open step's other figures, for curves."""

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
                    self._hand_over(self._now.number)
                    return
                methods = self.trainer.methods
                number = methods.ticks.number(self._now.number)
                if total is not None and number >= total:
                    if self.runner.settle():
                        self._hand_over(self._now.number)
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
                if self.profile is not None:
                    self.profile.at(number)
                for loader in self.stateful:
                    loader.enter(number)
                yield number
        except JobError as error:
            # Workers waiting for this one's step learn why it does not come, even if the script catches the error.
            self._now.link.fail(str(error), error.exit_code)
            raise
        finally:
            self._stepper.iterating = False
            if self.place.current is not None:
                self.place.current.disarm()

    def _hand_over(self, step: int) -> None:
        """The loop or the job ends at this step, of which the last checkpoint may be."""
        orders = self._now.link.orders
        if orders.phase is not Phase.ENDED and not orders.fenced:
            for loader in self.stateful:
                loader.hand_over(step)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Context manager for the loop's body: swallows StepAgain, so that the body runs again."""
        self.attempting = True
        try:
            yield
        except StepAgain as again:
            log.info("restarting the step: %s", again.cause or "orders changed")
            for error in (again, again.cause):
                if error is not None:
                    # Frames of the body would hold tensors that only the model's modules are to hold, see Reach.
                    traceback.clear_frames(error.__traceback__)
            self.place.tables.forget()
            self.runner.unwound = again
        finally:
            self.attempting = False

    def begin(self, replica: int) -> None:
        self.place.tables.forget()
        with self.place.waits():
            self.trainer.begin(replica)

    def watch(self, replica: int, *, ask_loss: bool) -> Watch:
        """Watch for replica_gradients. ask_loss: the loss costs nothing."""
        if not self.place.wishes.overlap:
            return UNWATCHED
        owned = sorted(self._stepper.todo) if self._now.assigned else [0]

        def expect(loss: Callable[[], float], samples: int) -> None:
            if self.runner.sent is not None:
                # The whole previous step, and orders that have not changed since: else StepAgain.
                with self.place.waits():
                    figures = self.trainer.settle()
                self.runner.close(figures)
                self.runner.check_ordered()
            asked = ask_loss or self.trainer.job.consistency.nan_policy == "skip"
            found = loss() if asked else None
            expected = Expected(replica=replica, owned=owned, samples=samples, loss=found, hyper=self.hyper)
            self.trainer.expect(expected)

        return StepWatch(self.place.gate, lambda: self.trainer.open.uses, expect)

    # The optimizer that a script has

    @property
    def standing(self) -> TrainingPosition:
        """The job's position, for state dicts."""
        half = self.trainer.half
        return TrainingPosition(
            step=half.job_step,
            ahead=self.mistakes.lost + (self.trainer.methods.ticks.tick if half.shares_steps else 0),
            incarnation=self._now.link.incarnation,
            one_step=half.shares_steps,
        )

    def resumed(self) -> None:
        """Note that an optimizer state saved at this step was loaded, with the weights that the servers have."""
        self.mistakes.knows_the_step()
        self.place.watch.resumed(one_step=self.standing.one_step)

    @property
    def skipped(self) -> bool:
        return self._reports.skipped

    def check_scaler(self) -> None:
        """Check that a gradient scaler may step. Raises JobError if an overflow can't be skipped in all replicas."""
        policy = self.trainer.job.consistency.nan_policy
        if policy != "skip":
            raise JobError(
                'a GradScaler needs connect(nan_policy="skip"), so that all replicas skip a step in which one of them '
                f'overflows; the policy of this job is "{policy}"'
            )
        if self.place.wishes.overlap:
            raise JobError(
                "a GradScaler can't be combined with overlap, which would send scaled gradients during backward(); "
                "use attach(..., overlap=False) or SHARDLINE_OVERLAP=0"
            )

    def share_gradients(self, *, set_to_none: bool = True) -> bool:
        """zero_grad() for gradients in shared memory; returns False if they are private."""
        lent = None if self.closed else self.runner.lent
        if lent is not None:
            lent.zero(set_to_none=set_to_none)
        return lent is not None

    def gradients_cleared(self) -> None:
        """zero_grad() of the optimizer was called: outside of steps(), this begins a step."""
        self.place.tables.clear_gradients()
        if not (self.closed or self._stepper.iterating):
            self._expect_by_itself()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradients in .grad, by name."""
        clip_norm, lent = self.trainer.job.consistency.clip_norm, self.runner.lent
        values = self.place.values
        if clip_norm > 0.0 and not self._now.assigned:
            # As in torch: each worker clips its own gradient before it is sent.
            torch.nn.utils.clip_grad_norm_([v for v in values.values() if v.grad is not None], clip_norm)
        private = {name: value.grad for name, value in values.items() if value.grad is not None}
        return {**(private if lent is None else lent.gradients()), **self.place.tables.gradients()}

    def _expect_by_itself(self) -> None:
        """In the user's own loop: the next backward() belongs to the open step."""
        view = self.place.view
        if self.place.wishes.overlap and view is not None and view.job.script:
            replica = self._own_replica
            self.trainer.expect(Expected(replica=replica, owned=[replica], hyper=self.hyper))

    def contribute(
        self,
        replica: int,
        gradients: Mapping[str, torch.Tensor],
        *,
        loss: float | None,
        samples: int,
        keep: bool,
    ) -> None:
        trainer = self.trainer
        mark = trainer.half.mark()
        hyper = self.hyper()
        added = trainer.contribute(replica, gradients, samples=samples, loss=loss, hyper=hyper, keep=keep)
        if not self._stepper.iterating and added:
            self._now.retained = RetainedContribution(mark, added)
        # Where workers push for themselves, curves are drawn over their own numbers, else over the job's steps.
        step = trainer.half.job_step if self._now.assigned else self._now.number
        # Of a model that is cut into parts no worker has all gradients.
        measured = gradients if step % NORM_EVERY == 0 and self.place.partners is None else {}
        report = StepReport(
            step=step,
            replica=replica,
            loss=float("nan") if loss is None else loss,
            samples=samples,
            drift=added[replica].drift if added else 0.0,
            logged={**figures_of(trainer.job, step, measured, hyper), **self.logged},
        )
        self._reports.add(report, waited_s=self.place.waits.seconds)

    def contribute_own(self, gradients: Mapping[str, torch.Tensor], *, loss: float | None = None) -> None:
        """Contribute as a script's one replica. The tensors must not change until the step is closed."""
        self.contribute(self._own_replica, gradients, loss=loss, samples=0, keep=True)

    def finish(self, loss: float | None) -> bool:
        self.owner.check()
        runner, ticks = self.runner, self.trainer.methods.ticks
        self._reports.skipped = False
        cadence = self.trainer.methods.cadence
        if cadence.keeps_copies and self.trainer.job.script and not self._stepper.iterating:
            # In another loop nothing tells when a pass begins.
            error = JobError(
                f"cadence {cadence} keeps parameters of each replica's own, which only a loop over session.steps() "
                "gets; write the loop so, or choose another cadence, such as diloco"
            )
            self._now.link.fail(str(error), error.exit_code)
            raise error
        runner.missing_steps.reset()
        self.mistakes.about_to_step()
        for loader in self.stateful:
            loader.leave(self._now.number, self.trainer.job.checkpoint_every)
        if not self._reports.contributed:
            # Not copied: this returns when they are acknowledged.
            self.contribute_own(self.gradients(), loss=loss or self.loss)
        self.loss = None
        self.logged = {}
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
            except (Restart, Interrupted, Stopped) as failure:
                if not runner.go_on(failure):
                    runner.forget()
                    if self._stepper.stale and not self._stepper.iterating:
                        self.mistakes.stopped(self._now.link, self.trainer.half.job_step)
                    return False
                figures = runner.closed_by
                if figures is None:
                    continue
            runner.advance(figures)
            if self.profile is not None and not self._stepper.iterating:
                self.profile.at(ticks.number(self._now.number))
            return True

    # Between steps

    def meet_others(self, timeout_s: float, value: str = "") -> str | None:
        """Worker/0's value at a barrier, None if the job ends. Nobody needs to wait for this worker's pushes there."""
        self.place.rest()
        found = self.barrier.meet(
            self._now.link, self.trainer.step, by_step=self._now.assigned, timeout_s=timeout_s, value=value
        )
        # Within steps() the next step finds the step again.
        again = found is not None and not self.place.wake() and not self._stepper.iterating
        return None if again and not self.runner.find_again() else found


@contextlib.contextmanager
def waits_for_rows(loop: StepLoop) -> Iterator[None]:
    """Turn a failed pull of rows, in the middle of a pass, into StepAgain, or outside of attempt() into an error.

    Raises JobStopped, RolledBackError.
    """
    try:
        with loop.place.waits():
            yield
    except StepAgain as again:
        if loop.attempting:
            raise
        link, step = loop.runner.link, loop.trainer.half.job_step
        if link.orders.phase is Phase.ENDED:
            loop.mistakes.stopped(link, step)
        raise RolledBackError(
            f"{link.task}: a parameter server was lost while rows of a table were pulled, in the middle of step "
            f"{step}; put the loop's body into `with session.attempt():`, which repeats it then",
            step=step,
        ) from again.cause
