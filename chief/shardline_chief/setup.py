"""From "tasks are missing" to "training": plan, command, configure, first values or restore, cut 0, activate.

Each step follows when every ps has done the one before. If the worker that sets the first values dies, all of it starts
again under a new timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardline.errors import JobError, ShardlineError, UnreachableError
from shardline.rpc.configuration import Placement
from shardline.rpc.link import Phase
from shardline.sharding import balance, make_plan
from shardline.spec import JobSpec
from shardline.spec_json import job_to_json
from shardline_chief.actions import Activate, CommandResult, Configure, Cut, Heir, Lead, Promote, Restore, Save, Saved
from shardline_chief.assignment import assign
from shardline_chief.cuts import CutLedger
from shardline_chief.leases import Leases
from shardline_chief.membership import Member
from shardline_chief.standbys import protected
from shardline_chief.state import State, as_in_cluster, filled_shards, ps_at


class Setup:
    """Rules of the phases WAITING and INIT."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.begun = False
        self.done_before = ""
        """Why there is nothing to do; the end then waits for those who are still to come."""
        self.table_there = False
        self.values_there = False
        self.cut_asked_s: float | None = None
        self.active = False
        self.able_s: float | None = None
        """Since when training could begin, with the tasks that are there; it waits for the others, but not for long."""
        self.on_running: Callable[[float], None] = lambda now_s: None
        """(now): training begins, or goes on."""
        self.stays = False
        """All values stay: standbys have taken over."""
        self.keep: frozenset[int] = frozenset()
        """Shards whose values stay, in a timeline that follows another."""
        self.followed: frozenset[int] = frozenset()
        """Shards whose standbys stay too."""

    # The job

    def adopt(self, job: JobSpec, source: str) -> None:
        """The job becomes known, from the job file or from the first task that trains."""
        state = self.state
        state.job = as_in_cluster(job, state.settings)
        state.record("job", spec=job_to_json(state.job))
        count = sum(tensor.elements for tensor in job.tensors)
        state.say("job", f"job {job.name!r} from {source}: {len(job.tensors)} tensors, {count:,} elements")

    def advance(self, now_s: float) -> None:
        """Go on as far as the tasks that are there allow."""
        state = self.state
        if state.ended or state.returning:
            return
        if self.done_before:
            if not self._to_come():
                state.end(0, self.done_before, now_s)
        elif not self.begun and state.job is not None and (not state.missing_ps() or self._complete(state.job)):
            # A job that is done needs nobody to be there.
            self.begun = True
            self._begin(now_s)
        elif state.phase is Phase.INIT and not self.values_there:
            self._choose_initializer()
        elif state.phase is Phase.INIT and self.active:
            self._maybe_run(now_s)

    def _begin(self, now_s: float) -> None:
        state = self.state
        job = state.job
        assert job is not None
        try:
            if state.resume is not None and (changed := state.resume.check(job)):
                others = f"with other settings than the checkpoint's: {'; '.join(changed)}"
                state.say("resume", f"going on from step {state.resume.step} {others}", "warning")
            plan = make_plan(job.tensors, len(state.settings.ps))
            if not job.script and job.steps < 1:
                raise JobError(f"job {job.name!r} has {job.steps} steps; nothing would be trained")
        except ShardlineError as error:
            state.end(error.exit_code, str(error), now_s)
            return
        state.plan = plan
        # A script chooses its batches and its end itself, so it has no leases in either mode.
        if job.consistency.mode == "async" and not job.script:
            cursor = state.resume.cursor if state.resume is not None else {}
            state.leases = Leases.resumed(cursor, job.steps)
            state.note_cursor()
        if self._complete(job):
            self._nothing_to_do(now_s)
            return
        members = state.members.living("ps")
        # A small model may have fewer shards than there are ps: the last ones then hold nothing.
        placement = tuple(
            Placement(shard=shard, task=member.task, address=member.address)
            for shard, member in zip(range(len(plan.shards)), members, strict=False)
        )
        idle = [member.task for member in members[len(plan.shards) :]]
        if idle:
            state.say("plan", f"the model is too small for {len(members)} ps: {', '.join(idle)} will hold nothing")
        state.record("plan", plan_id=plan.plan_id, shards=len(plan.shards), replicas=job.replicas, job=job.name)
        buckets = sum(len(shard.buckets) for shard in plan.shards)
        size = sum(shard.nbytes for shard in plan.shards)
        state.say(
            "plan",
            f"plan {plan.plan_id[:8]}: {size / 1e6:.1f} MB in {buckets} buckets on {len(plan.shards)} shards, "
            f"largest {balance(plan):.2f} of the mean",
        )
        self.place(placement)

    def place(self, placement: tuple[Placement, ...], keep: frozenset[int] = frozenset()) -> None:
        """Have the shards made where this says, filled, and activated. keep: those that stay as they are."""
        state = self.state
        if state.settings.standbys:
            living = {member.task: member.address for member in state.members.living("ps")}
            placement = protected(placement, living, appoint=state.new_appointment)
        state.placement = placement
        self.keep, self.stays, self.followed = keep, False, frozenset()
        self.forget()
        state.command(Lead(addresses=addresses(placement)), state.history(lambda *_: self._configure()))

    def take_over(
        self, placement: tuple[Placement, ...], promoted: Mapping[int, Heir], *, followed: frozenset[int]
    ) -> None:
        """Have standbys become primaries and everybody else follow, with all values as they are.

        promoted: by shard, its standby. followed: shards whose standbys stay as they are.
        """
        state = self.state
        assert state.plan is not None
        state.placement = placement
        self.keep, self.stays, self.followed = frozenset(range(len(state.plan.shards))), True, followed
        self.forget()
        state.record("failover", timeline=state.timeline, promoted=heirs_of(promoted))

        def promote(result: CommandResult, now_s: float) -> None:
            order = Promote(timeline=state.timeline, shards=promoted)
            state.command(order, state.history(lambda *_: self._configure()))

        state.command(Lead(addresses=addresses(placement)), state.history(promote))

    def set_standbys(
        self, placement: tuple[Placement, ...], then: Callable[[], None], *, followed: frozenset[int]
    ) -> None:
        """Have standbys elsewhere from now on, or none, while training goes on. then(): when that is done.

        followed: shards whose standbys stay as they are.
        """
        state = self.state
        assert state.plan is not None
        assert state.job is not None
        state.placement = placement
        state.record("standbys", standbys=standbys_of(placement))
        configure = Configure(
            job=state.job,
            plan=state.plan,
            timeline=state.timeline,
            placement=placement,
            keep=frozenset(range(len(state.plan.shards))),
            keep_standbys=followed,
        )
        activate = Activate(timeline=state.timeline)

        # A server that was not there before gets all of it; for the others only the placement is new.
        def led(result: CommandResult, now_s: float) -> None:
            state.command(configure, state.history(configured))

        def configured(result: CommandResult, now_s: float) -> None:
            state.publish_members(state.history(known))

        def known(result: CommandResult, now_s: float) -> None:
            state.command(activate, state.history(lambda result, now_s: then()))

        state.command(Lead(addresses=addresses(placement)), state.history(led))

    def forget(self) -> None:
        """Nothing of what was set up before counts."""
        state = self.state
        state.phase = Phase.INIT
        state.shards.clear()
        state.initializer = ""
        state.table_sent = False
        self.table_there = self.values_there = self.active = False
        self.cut_asked_s = None

    def _complete(self, job: JobSpec) -> bool:
        """Whether the checkpoint to go on from holds all the steps that there are."""
        resume = self.state.resume
        if resume is None:
            return False
        if job.consistency.mode == "async" and not job.script:
            return Leases.resumed(resume.cursor, job.steps).all_done
        return 0 < job.steps <= resume.step

    def _nothing_to_do(self, now_s: float) -> None:
        """All steps are made: end, once everybody is there to hear it.

        Who comes later would find no chief, wait for it and fail: containers are started one after another, each when
        the one before it is healthy.
        """
        state = self.state
        assert state.resume is not None
        assert state.job is not None
        state.first_step = state.base_step = state.checkpoint_step = state.resume.step
        state.checkpoint_path = state.resume.path
        self.begun = False
        self.done_before = f"done before: {state.resume.path} holds all {state.job.steps} steps; ask for more --steps"
        to_come = self._to_come()
        if to_come:
            wait = f"waiting up to {state.timeouts.join_s:g} s for {to_come}, to tell them so"
            state.say("done_before", f"all {state.job.steps} steps were made before; {wait}")
        self.advance(now_s)

    def _to_come(self) -> str:
        """Tasks of this cluster that have not joined, as a phrase; empty where all have."""
        state = self.state
        expected = {
            "ps": len(state.settings.ps),
            "worker": state.settings.workers,
            "chief": int(state.settings.chief_trains),
            "evaluator": state.settings.evaluators,
        }
        # A finished job needs nobody: who has come and gone again is not waited for.
        came = [member.role for member in state.members]
        lacking = {role: count - came.count(role) for role, count in expected.items()}
        return ", ".join(f"{count} {role}" for role, count in lacking.items() if count > 0)

    # The servers

    def _configure(self) -> None:
        """Begin a timeline on every ps."""
        state = self.state
        assert state.job is not None
        assert state.plan is not None
        state.new_timeline()
        state.ledger = CutLedger(filled_shards(state.plan))
        self.forget()
        state.record(
            "timeline",
            timeline=state.timeline,
            state="preparing",
            from_cut=state.resume.step if state.resume is not None and not self.stays else None,
            path=state.resume.path if state.resume is not None and not self.stays else None,
            placement=[[place.shard, place.task, place.address] for place in state.placement],
            standbys=standbys_of(state.placement),
            keep=sorted(self.keep),
            stays=self.stays,
        )
        state.command(
            Configure(
                job=state.job,
                plan=state.plan,
                timeline=state.timeline,
                placement=state.placement,
                keep=self.keep,
                keep_standbys=self.followed,
            ),
            state.history(self._configured),
        )

    def _configured(self, result: CommandResult, now_s: float) -> None:
        state = self.state
        held = sum(value for value in result.values.values() if isinstance(value, int))
        state.say("configured", f"{len(result.values)} parameter servers hold {held / 1e6:.1f} MB with optimizer state")
        state.publish_members(state.history(self._table_set))

    def _table_set(self, result: CommandResult, now_s: float) -> None:
        state = self.state
        self.table_there = True
        if self.stays:
            self.values_there = True
            self._activate()
            return
        if state.resume is None:
            self._choose_initializer()
            return
        assert state.plan is not None
        state.say("restore", f"restoring step {state.resume.step} from {state.resume.path}")
        restore = Restore(timeline=state.timeline, plan=state.plan, placement=state.placement, keep=self.keep)
        state.command(restore, state.history(self._restored))

    def _restored(self, result: CommandResult, now_s: float) -> None:
        state = self.state
        assert state.resume is not None
        state.base_step = state.checkpoint_step = state.resume.step
        if state.running_s is None:
            state.first_step = state.base_step
        state.checkpoint_path = state.resume.path
        self.values_there = True
        self._activate()

    # First values

    def _choose_initializer(self) -> None:
        """The worker of replica 0, or the lowest there is; waits where nobody is there yet."""
        state = self.state
        if state.initializer or state.resume is not None or not self.table_there:
            return
        trainers = state.trainers()
        if not trainers:
            return
        state.initializer = trainers[0].task
        state.say("init", f"{state.initializer} sets the first values of all parameters")

    def trainer_lost(self, member: Member) -> bool:
        """A trainer died. True: it was setting the first values, and another will, under a new timeline."""
        state = self.state
        if state.phase is not Phase.INIT or self.values_there or state.initializer != member.task:
            return False
        state.say("init", f"{member.task} was setting the first values; all of it starts again", "warning")
        self._configure()
        return True

    def shards_told(self, now_s: float) -> None:
        """A ps described its shards."""
        state = self.state
        if not self.table_there or state.phase is not Phase.INIT or state.resume is not None or not state.all_told:
            return
        if not self.values_there and all(shard.initialized for shard in state.shards.values()):
            self.values_there = True
            self.cut_asked_s = now_s
            state.command(Cut(timeline=state.timeline, step=0))
        elif self.cut_asked_s is not None and state.saving is None and 0 in state.ledger.complete():
            assert state.plan is not None
            assert state.job is not None
            state.saving = 0
            state.actions.append(
                Save(
                    step=0,
                    timeline=state.timeline,
                    plan=state.plan,
                    job=state.job,
                    placement=state.placement,
                    cursor=state.leases.cursor() if state.leases is not None else {},
                    urgent=True,
                )
            )

    def saved(self, saved: Saved) -> None:
        """Cut 0 is committed, or could not be: training starts in both cases."""
        if self.cut_asked_s is not None and not self.active:
            self.cut_asked_s = None
            self._activate()

    # Start

    def _activate(self) -> None:
        state = self.state
        state.record("timeline", timeline=state.timeline, state="active")
        state.command(Activate(timeline=state.timeline), state.history(self._activated))

    def _activated(self, result: CommandResult, now_s: float) -> None:
        state = self.state
        assert state.job is not None
        if state.sync and not state.script:
            # The last step is known from the start: the servers stop there by themselves, with a cut.
            state.stop_step = state.job.steps
            state.record("stop", step=state.stop_step)
            cut = Cut(timeline=state.timeline, step=state.stop_step, stop=True)
            state.command(cut, state.history(self._bounded))
        else:
            self._bounded(result, now_s)

    def _bounded(self, result: CommandResult, now_s: float) -> None:
        self.active = True
        self._maybe_run(now_s)

    def _maybe_run(self, now_s: float) -> None:
        state = self.state
        job = state.job
        assert job is not None
        if state.phase is not Phase.INIT:
            return
        trainers = state.trainers()
        missing = state.settings.trainers - len(trainers)
        again = state.running_s is not None
        enough = len(trainers) >= max(1, state.settings.min_workers)
        self.able_s = (now_s if self.able_s is None else self.able_s) if enough else None
        late = self.able_s is not None and now_s - self.able_s >= state.timeouts.lost_s
        # Once it has run, who is missing is a matter of what follows a death.
        if not again and (not enough or (missing > 0 and (state.script or not late))):
            return
        state.phase = Phase.RUNNING
        state.initializer = ""
        reassign(state)
        self.on_running(now_s)
        if again:
            return
        state.running_s = now_s
        state.record("running", step=state.base_step)
        if missing > 0:
            state.say(
                "late",
                f"{missing} of {state.settings.trainers} tasks that train did not join within "
                f"{state.timeouts.lost_s:g} s of all others; training starts without them, they may still come",
                "warning",
            )
        until = f"until step {job.steps}" if job.steps else "until the script ends"
        state.say(
            "running",
            f"training from step {state.base_step} {until}: {job.consistency.mode}, {len(trainers)} workers"
            + (f", {job.replicas} replicas" if state.sync else ""),
        )

    # Waiting

    def tick(self, now_s: float) -> None:
        """Deadlines of the start."""
        state = self.state
        if state.ended or state.phase not in (Phase.WAITING, Phase.INIT):
            return
        if not self.begun and not self.done_before:
            self.advance(now_s)
        if state.phase is Phase.INIT and not self.active and (state.initializer or self.cut_asked_s is not None):
            state.ask_status()
        asked_s = self.cut_asked_s
        if asked_s is not None and state.saving is None and now_s - asked_s >= state.timeouts.dead_s:
            self.cut_asked_s = None
            state.say("cut", f"no cut 0 within {state.timeouts.dead_s:g} s; training starts without it", "error")
            self._activate()
        if state.running_s is not None or state.returning:
            return
        if now_s - state.started_s >= state.timeouts.join_s:
            if self.done_before:
                state.end(0, self.done_before, now_s)
                return
            self._too_late(now_s)
        if not state.ended:
            self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        """Begin where enough tasks are there, else tell who is not."""
        state = self.state
        if self.active:
            self._maybe_run(now_s)
        deadline_s = state.started_s + state.timeouts.join_s
        if self.able_s is not None and not state.script:
            deadline_s = self.able_s + state.timeouts.lost_s
        whom = self._to_come() if self.done_before else ", ".join(state.awaited())
        if whom and state.phase is not Phase.RUNNING:
            state.tell_wait(now_s, deadline_s, whom)

    def _too_late(self, now_s: float) -> None:
        state = self.state
        settings = state.settings
        waited = f"within {state.timeouts.join_s:g} s"
        where = f"is it running, and does it reach the chief at {settings.chief_address}?"
        missing = [ps_at(index, settings.ps[index]) for index in state.missing_ps()]
        if missing and not self.begun:
            state.end(UnreachableError.exit_code, f"{', '.join(missing)} did not join {waited}; {where}", now_s)
        elif not state.trainers():
            state.end(UnreachableError.exit_code, f"no task that trains joined {waited}; {where}", now_s)
        elif self.active and len(state.trainers()) < state.settings.min_workers:
            names = ", ".join(member.task for member in state.trainers())
            state.end(
                UnreachableError.exit_code,
                f"only {names} of at least {state.settings.min_workers} tasks that train joined {waited}; {where}",
                now_s,
            )
        elif state.script and len(state.trainers()) < settings.trainers:
            there = {member.task for member in state.trainers()}
            lacking = [f"worker/{index}" for index in range(settings.workers) if f"worker/{index}" not in there]
            state.end(
                UnreachableError.exit_code,
                f"{', '.join(lacking)} did not join {waited}, and a script needs all its workers; {where}",
                now_s,
            )


def addresses(placement: tuple[Placement, ...]) -> dict[str, str]:
    """Where the servers of a placement answer, those that hold standbys only too."""
    standbys = {place.standby_task: place.standby_address for place in placement if place.standby_task}
    return {**standbys, **{place.task: place.address for place in placement}}


def standbys_of(placement: tuple[Placement, ...]) -> list[list[object]]:
    """[shard, task, address, appointment] of each standby, for the journal."""
    return [
        [place.shard, place.standby_task, place.standby_address, place.appointment]
        for place in placement
        if place.standby_task
    ]


def heirs_of(promoted: Mapping[int, Heir]) -> list[list[object]]:
    """[shard, task, appointment] of each standby that is to be a primary, for the journal."""
    return [[shard, heir.task, heir.appointment] for shard, heir in sorted(promoted.items())]


def reassign(state: State) -> list[str]:
    """Give the replicas to the living; returns a phrase for each worker whose replicas grew."""
    state.most_trainers = max(state.most_trainers, len(state.trainers()))
    if state.job is None or not state.sync or state.too_few():
        return []
    before = state.assignment
    tasks = [member.task for member in state.trainers()]
    if state.script:
        # A script computes its own replica and nobody else's.
        state.assignment = {int(task.rpartition("/")[2]): task for task in tasks}
    else:
        state.assignment = assign(before, tasks, state.job.replicas)
    lives = {member.task: member.incarnation for member in state.trainers()}
    state.given = {life: state.given.get(life, set()) for life in lives.values()}
    gained: dict[str, list[int]] = {}
    for replica, task in sorted(state.assignment.items()):
        state.given[lives[task]].add(replica)
        if before.get(replica) != task:
            gained.setdefault(task, []).append(replica)
    return [f"{_replicas(numbers)} to {task}" for task, numbers in gained.items()]


def _replicas(numbers: list[int]) -> str:
    return f"replica{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
