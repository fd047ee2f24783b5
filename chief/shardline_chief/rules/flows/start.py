"""From missing tasks to a plan, and from ready servers to training; which tasks are awaited, and how long."""

from __future__ import annotations

import itertools
from collections import Counter

from shardline import consistency, division, topology
from shardline.core.orders import Phase
from shardline.core.placement import Placement
from shardline.core.places import ALLREDUCE, PS, TOLD
from shardline.core.plan import Plan, balance
from shardline.core.spec import JobSpec
from shardline.core.spec_json import job_to_json
from shardline.errors import JobError, ShardlineError, UnreachableError
from shardline.fit import check_fit
from shardline.observability.counting import plan
from shardline_chief.rules.events import Arrived, ServersReady, Stage, Tick, TrainingBegins
from shardline_chief.rules.reconcile import Reconcile
from shardline_chief.rules.state.leases import Leases
from shardline_chief.rules.state.membership import ps_at
from shardline_chief.rules.state.settings import as_in_cluster
from shardline_chief.rules.state.state import State
from shardline_chief.rules.views import counting


class Start:
    """Rules for the stages GATHERING and NOTHING_LEFT, and for the wait for tasks that train."""

    def __init__(self, state: State, reconcile: Reconcile) -> None:
        self.state = state
        self.reconcile = reconcile
        self.done_before = ""
        """Why there is nothing to do; the end then waits for tasks that have yet to join."""
        self.able_s: float | None = None
        """Since when enough tasks are there to train; the wait for the others is then limited to --timeout."""

    # The job

    def adopt(self, job: JobSpec, source: str) -> None:
        """The job becomes known, from the job file or from the first task that trains."""
        state = self.state
        job = as_in_cluster(job, state.settings)
        state.adopt(job)
        state.record("job", spec=job_to_json(job))
        count = sum(tensor.elements for tensor in job.tensors)
        state.say("job", f"job {job.name!r} from {source}: {len(job.tensors)} tensors, {count:,} elements")

    def gather(self, event: Arrived | Tick, now_s: float) -> None:
        """Begin once the job and all servers are known."""
        state = self.state
        # A job that is complete already needs no servers.
        if state.job is not None and (not state.tasks.missing_ps() or self._complete(state.job)):
            self._begin(state.job, now_s)

    def _begin(self, job: JobSpec, now_s: float) -> None:
        state, resume = self.state, self.state.saves.resume
        try:
            if resume is not None and (changed := resume.check(job)):
                others = f"with settings that differ from the checkpoint's: {'; '.join(changed)}"
                state.say("resume", f"resuming from step {resume.step} {others}", "warning")
            if resume is not None and resume.owes and state.exact_memory:
                state.say(
                    "resume",
                    f"resuming from step {resume.step}, where replicas still owed what their codec had not sent: that "
                    "is lost, so the job ends with other bits than one that was never stopped, although error_memory "
                    "is 'exact'. Nothing is owed at a checkpoint that checkpoint_every plans",
                    "warning",
                )
            if state.settings.replayed is not None:
                state.settings.replayed.check(job)
            plan = state.settings.plan(job)
            check_fit(job, standbys=state.settings.standbys, workers=state.settings.workers)
            if job.follows_scores and not state.settings.evaluators:
                raise JobError(
                    f"the learning rate of job {job.name!r} follows the scores of an evaluator, and the cluster has "
                    "none: add one (--evaluators 1)"
                )
            if not job.script and job.steps < 1:
                raise JobError(f"job {job.name!r} has {job.steps} steps; nothing would be trained")
        except ShardlineError as error:
            state.end(error.exit_code, str(error), now_s)
            return
        state.layout.plan = plan
        if state.mode.batches.leased(job):
            state.work.leases = Leases.resumed(resume.cursor if resume is not None else {}, job.steps)
            state.note_cursor()
        if self._complete(job):
            self._nothing_left(now_s)
            return
        self._place(job, plan)

    def _place(self, job: JobSpec, plan: Plan) -> None:
        state = self.state
        # Those beyond the cluster spec may take some later.
        servers = [member for member in state.tasks.members.living("ps") if member.index < len(state.settings.ps)]
        places = state.settings.places(job)
        kinds = [plan.place(shard) if places else "" for shard in range(len(plan.shards))]
        members = [member for member in servers if places or state.settings.holds(member.index)]
        if len(members) < len(servers):
            without = [member.task for member in servers if member not in members]
            state.say("plan", f"{', '.join(without)} will not hold any shard: the workers there need their links")
        # A small model may have fewer shards than there are ps: the last ones then hold nothing.
        turns = {
            kind: itertools.cycle([member for member in members if state.settings.suits(member.index, kind)])
            for kind in {*kinds}
        }
        chosen = [next(turns[kind]) for kind in kinds]
        placement = tuple(
            Placement(shard=shard, task=member.task, address=member.address) for shard, member in enumerate(chosen)
        )
        for kind in (ALLREDUCE, PS) if places else ("",):
            some = [member for member in members if state.settings.suits(member.index, kind)]
            if idle := [member.task for member in some if member not in chosen]:
                why = f"the model is too small for {len(some)} ps" if kind in kinds else "communication leaves them out"
                state.say("plan", f"{why}: {', '.join(idle)} will not hold any shard")
        shares, shards = state.settings.shares, len(plan.shards)
        sizes = [shard.nbytes for shard in plan.shards]
        facts = {"plan_id": plan.plan_id, "shards": shards, "shares": shares, "sizes": sizes}
        state.record("plan", **facts, replicas=job.replicas, job=job.name)
        buckets = sum(len(shard.buckets) for shard in plan.shards)
        size = sum(sizes)
        where = f"largest {balance(plan):.2f} of the mean"
        if places:
            where = " and ".join(f"{count} {TOLD[kind]}" for kind, count in Counter(kinds).items())
        elif shares and not state.settings.shards and shards == len(members):
            parts = [
                f"{100 * shard.nbytes / size:.0f} % on {place.task}"
                for shard, place in zip(plan.shards, placement, strict=True)
            ]
            where = f"cut for the machines' links: {', '.join(parts)}"
        state.say(
            "plan", f"plan {plan.plan_id[:8]}: {size / 1e6:.1f} MB in {buckets} buckets on {shards} shards, {where}"
        )
        self.reconcile.place(placement)

    def _complete(self, job: JobSpec) -> bool:
        """Whether the checkpoint to resume from already has all the job's steps."""
        resume = self.state.saves.resume
        if resume is None:
            return False
        if self.state.mode.batches.leased(job):
            return Leases.resumed(resume.cursor, job.steps).all_done
        return 0 < job.steps <= resume.step

    # Nothing to do

    def _nothing_left(self, now_s: float) -> None:
        """All steps are done: end once every task has joined and can be told so.

        A task that came later would find no chief, wait for it and fail: containers are started one after another, each
        once the previous one is healthy.
        """
        state, resume = self.state, self.state.saves.resume
        assert resume is not None
        assert state.job is not None
        state.progress.first_step = state.progress.base_step = resume.step
        state.saves.committed(resume.step, resume.path)
        state.stage = Stage.NOTHING_LEFT
        self.done_before = (
            f"nothing to do: {resume.path} already has all {state.job.steps} steps; set more with --steps"
        )
        to_come = state.tasks.to_come()
        if to_come:
            wait = f"waiting up to {state.timeouts.join_s:g} s for {to_come}, to inform them"
            state.say("done_before", f"all {state.job.steps} steps are already done; {wait}")
        self.nothing_left(Arrived(), now_s)

    def nothing_left(self, event: Arrived, now_s: float) -> None:
        """End once every task has joined and can be told that nothing is left to do."""
        if not self.state.tasks.to_come():
            self.state.end(0, self.done_before, now_s)

    # Training begins

    def run(self, event: ServersReady | Arrived | Tick, now_s: float) -> None:
        """Train, if enough tasks are there."""
        state = self.state
        trainers = state.tasks.trainers()
        missing = state.settings.trainers - len(trainers)
        again = state.figures.running_s is not None
        enough = len(trainers) >= max(1, state.settings.min_workers)
        self.able_s = (now_s if self.able_s is None else self.able_s) if enough else None
        late = self.able_s is not None and now_s - self.able_s >= state.timeouts.lost_s
        # Once training has begun, missing tasks are handled like deaths.
        if not again and (not enough or (missing > 0 and (state.script or not late))):
            return
        state.stage = Stage.TRAINING
        state.work.initializer = ""
        state.reassign()
        state.emit(TrainingBegins(again))

    def began(self, event: TrainingBegins, now_s: float) -> None:
        """Workers are ordered to train, for the first time in this run."""
        if event.again:
            return
        state, job = self.state, self.state.job
        assert job is not None
        there = len(state.tasks.trainers())
        missing = state.settings.trainers - there
        if missing <= 0 and state.lacks_team:
            where = ", ".join(f"{member.task} at {member.address}" for member in state.tasks.trainers())
            state.end(
                JobError.exit_code,
                f"tensor_parallel shares layers among {division.of(job).team} workers of one host, but no host has as "
                f"many: {where}; start {division.of(job).team} on one host, or choose another tensor_ranks",
                now_s,
            )
            return
        state.figures.running_s = now_s
        state.record("running", step=state.progress.base_step)
        if missing > 0:
            state.say(
                "late",
                f"{missing} of {state.settings.trainers} tasks that train did not join within "
                f"{state.timeouts.lost_s:g} s of all others; training starts without them, but they may still join",
                "warning",
            )
        counted = counting(job)
        until = f"until {counted.asked} {job.steps}" if job.steps else "until the script ends"
        replicas = f", {job.replicas} replicas" if state.mode.assigns_replicas else ""
        parts = division.of(job)
        replicas += parts.described()
        mode = consistency.named(job.consistency)
        sentence = f"training from {counted.unit} {state.progress.base_step} {until}: {mode}, {there} workers"
        passes = f" ({planned})" if (planned := plan(counted, job.steps)) else ""
        state.say("running", sentence + replicas + passes)
        for warning in parts.warnings:
            state.say("pipeline", warning, "warning")
        if odd := topology.unused(job, state.settings.others.get("aggregator", 0)):
            state.say("topology", odd, "warning")

    # Waiting

    def wait(self, event: Tick, now_s: float) -> None:
        """Enforce the deadlines of the start; begin if enough tasks are there, else log which ones are missing."""
        state = self.state
        if state.figures.running_s is not None:
            return
        deadline_s = state.figures.started_s + state.timeouts.join_s
        if now_s >= deadline_s:
            if state.stage is Stage.NOTHING_LEFT:
                state.end(0, self.done_before, now_s)
                return
            self._too_late(now_s)
        if state.ended:
            return
        if state.stage is Stage.READY:
            self.run(event, now_s)
        if self.able_s is not None and not state.script:
            deadline_s = self.able_s + state.timeouts.lost_s
        whom = state.tasks.to_come() if state.stage is Stage.NOTHING_LEFT else ", ".join(state.tasks.awaited())
        if whom and state.phase is not Phase.RUNNING:
            state.outbox.tell_wait(now_s, deadline_s, whom)

    def _too_late(self, now_s: float) -> None:
        """The time to join is over: end the job if it can't begin without the missing tasks."""
        state, settings = self.state, self.state.settings
        trainers = [member.task for member in state.tasks.trainers()]
        missing = [ps_at(index, settings.ps[index]) for index in state.tasks.missing_ps()]
        least = settings.min_workers
        if missing and not state.begun:
            who, rest = f"{', '.join(missing)} did not join", ""
        elif not trainers:
            who, rest = "no task that trains joined", ""
        elif state.stage is Stage.READY and len(trainers) < least:
            who, rest = f"only {', '.join(trainers)} of at least {least} tasks that train joined", ""
        elif state.script and len(trainers) < settings.trainers:
            lacking = [f"worker/{index}" for index in range(settings.workers) if f"worker/{index}" not in trainers]
            who, rest = f"{', '.join(lacking)} did not join", ", and a script needs all its workers"
        else:
            return
        waited = f"within {state.timeouts.join_s:g} s"
        where = f"is it running, and can it reach the chief at {settings.chief_address}?"
        state.end(UnreachableError.exit_code, f"{who} {waited}{rest}; {where}", now_s)
