"""What a restarted chief knows: the journal's entries, reduced to one value. Pure.

    remembered = replay(journal.read())
    if remembered.unfinished: ...           # takeover.py continues the job

An entry is on disk before its action, so the last one may describe an action that was never done: ask the servers
what they hold before relying on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardline.core.choices import Choices
from shardline.core.image import WorkerSequence
from shardline.core.placement import Placement
from shardline.core.spec import JobSpec, differences
from shardline.core.spec_json import job_from_json
from shardline.errors import JobError, ShardlineError, UsageError
from shardline_chief.rules.actions import Promotion
from shardline_chief.rules.state.leases import Lease, Leases
from shardline_chief.rules.state.losses import Recovered, WentBack
from shardline_chief.rules.state.membership import Life, Member
from shardline_chief.rules.state.settings import ChiefSettings, as_chosen, as_in_cluster


@dataclass(kw_only=True)
class Remembered:
    """A job according to its journal, from the start of its run to the last entry."""

    term: int = 0
    """Term of the chief that wrote last; 0 = the journal is empty."""
    job: JobSpec | None = None
    earlier: tuple[JobSpec, ...] = ()
    """The jobs of earlier runs, from which this one was resumed."""
    plan_id: str = ""
    shards: int = 0
    """Number of shards in the plan."""
    shares: tuple[float, ...] = ()
    """The part of the model of each server, 0 = none; empty = equal parts."""
    shard_bytes: tuple[int, ...] = ()
    """Bytes of each shard's values; empty where an earlier version wrote the journal."""
    timeline: int = 0
    """The newest timeline begun; 0 = none."""
    active: bool = False
    """Every shard has its values, so it may accept pushes; False: still being prepared."""
    placement: tuple[Placement, ...] = ()
    stays: bool = False
    """The newest timeline keeps all values of the previous one: standbys were being promoted."""
    since: int = 0
    """Oldest timeline with the same values as the newest."""
    promoted: dict[int, Promotion] = field(default_factory=dict)
    """Standbys that were being promoted, by shard, if `placement` does not name them as primaries yet."""
    kept: frozenset[int] = frozenset()
    """Shards that keep their values from the previous timeline; the others were created again."""
    first_step: int = 0
    """Step at which the run began."""
    base_step: int = 0
    """Step at which the newest timeline began."""
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    stop_step: int = 0
    """Last stop step chosen in this timeline; 0 = none."""
    machine: Mapping[str, str] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    """Tasks that have neither died nor left, according to the journal: suspect until they are heard."""
    gone: dict[str, Member] = field(default_factory=dict)
    """Tasks that have died or left, and did not come back."""
    finished: set[str] = field(default_factory=set)
    drained: set[tuple[str, int]] = field(default_factory=set)
    """Servers that are to hold nothing, with their incarnation."""
    leases: Leases | None = None
    """Asynchronous mode: a copy of the leases, including the open ones."""
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """The evaluator's scores, by step; empty if it could not score that one."""
    followed: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """The first score of each step of this history, also of the runs from which this one was resumed."""
    best: tuple[int, Mapping[str, float]] | None = None
    began_s: float | None = None
    """Unix time at which training began."""
    recoveries: list[Recovered] = field(default_factory=list)
    lives: dict[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    """Figures of lives of workers, by (task, incarnation), as last noted."""
    back: list[WentBack] = field(default_factory=list)
    """Where shards go back one by one: each time."""
    page: str = ""
    """Address of the last chief's web page; "" = none."""
    failovers: int = 0
    """How many chiefs have taken over in this run."""
    dropped_memories: int = 0
    """How many times error memory was dropped."""
    stopping: tuple[str, int] | None = None
    """(reason, exit code) of an end that has begun."""
    ended: tuple[int, str] | None = None
    """(exit code, reason) of an end that has been decided."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of the chief that decided it."""
    closed: bool = False
    """The chief has notified every task of the end, or none was left."""
    first_chosen: int = 0
    chosen: list[int] = field(default_factory=list)
    """With spares: the choices from step `first_chosen` on. It grows in place: a long run has thousands of entries."""

    @property
    def unfinished(self) -> bool:
        """Whether there is something to take over: a job, or tasks that wait for one."""
        return self.term > 0 and not self.closed and (self.job is not None or bool(self.members))

    @property
    def choices(self) -> Choices:
        """With spares: whose gradients made the steps of the surviving history."""
        return Choices(self.first_chosen, tuple(self.chosen))

    def scores_until(self, step: int) -> dict[int, Mapping[str, float]]:
        """The first score of each step of this history up to one."""
        return {at: metrics for at, metrics in self.followed.items() if at <= step}

    def _choose(self, choices: Choices) -> None:
        self.first_chosen, self.chosen = choices.first, list(choices.made)

    # Entries

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take in the next entry; those of other kinds are only for people."""
        match entry["kind"]:
            case "chief":
                self._begin(entry)
            case "job":
                if self.timeline:
                    # It changes: the servers have the one before until the next timeline begins.
                    self.active, self.stays, self.kept = False, False, frozenset()
                self.job = job_from_json(entry["spec"])
            case "plan":
                self.plan_id, self.shards = str(entry["plan_id"]), int(entry.get("shards", 0))
                self.shares = tuple(float(share) for share in entry.get("shares", ()))
                self.shard_bytes = tuple(int(size) for size in entry.get("sizes", ()))
            case "timeline" | "standbys" | "failover":
                self._placed(entry)
            case "running":
                self.first_step, self.began_s = int(entry["step"]), float(entry["time"])
            case "stop":
                self.stop_step = int(entry["step"])
            case "cut":
                self.checkpoint_step, self.checkpoint_path = int(entry["step"]), str(entry["path"])
            case "drained":
                life = (str(entry["task"]), int(entry["incarnation"]))
                (self.drained.discard if entry.get("off") else self.drained.add)(life)
            case "machine" | "member" | "gone" | "finished" | "figures":
                self._tasks(entry)
            case "cursor" | "lease" | "chosen":
                self._work(entry)
            case "recovered":
                names = ("task", "at_step", "from_step", "seconds", "lost")
                self.recoveries.append(Recovered(**{name: entry[name] for name in names}))
            case "went_back":
                shards = {
                    int(shard): {
                        str(task): WorkerSequence(int(life), int(last)) for task, (life, last) in table.items()
                    }
                    for shard, table in entry["shards"].items()
                }
                self.back.append(WentBack(timeline=int(entry["timeline"]), sequences=shards))
            case "memory_dropped":
                self.dropped_memories += int(entry["count"])
            case "evaluation":
                # A list, to keep the order: the first metric may decide which is best.
                step, metrics = int(entry["step"]), {str(name): float(value) for name, value in entry["metrics"]}
                self.metrics[step] = metrics
                self.followed.setdefault(step, metrics)
                if entry["best"]:
                    self.best = (step, metrics)
            case "stopping":
                self.stopping = (str(entry["reason"]), int(entry["exit_code"]))
            case "ended":
                self.ended = int(entry["exit_code"]), str(entry["reason"])
                self.summary = dict(entry.get("summary", {}))
            case "closed":
                self.closed = True
        self.term = int(entry["term"])

    def _begin(self, entry: Mapping[str, Any]) -> None:
        """A chief started. If it takes over, the run continues; otherwise a new run begins."""
        page, step, before = str(entry.get("page", "")), entry.get("resume"), replace(self)
        if entry.get("takes_over"):
            self.page, self.failovers = page, self.failovers + 1
            return
        self.__dict__.update(Remembered(page=page).__dict__)
        if step is not None:
            self._choose(before.choices.until(int(step)))
            self.earlier = (*before.earlier, before.job) if before.job is not None else before.earlier
            self.first_step = self.base_step = self.checkpoint_step = int(step)
            self.followed = before.scores_until(int(step))

    # Who holds what

    def _placed(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "standbys":
            # Recorded before a primary continues without its old standby.
            self._standbys(entry)
            return
        if entry["kind"] == "failover":
            # Standbys are about to be promoted; which servers got the order is unknown.
            for shard, task, *rest in entry["promoted"]:
                self.promoted[int(shard)] = Promotion(str(task), *map(int, rest))
            return
        number = int(entry["timeline"])
        if entry["state"] == "active":
            self.active = self.active or number == self.timeline
            return
        self.placement = tuple(Placement(shard=int(s), task=str(t), address=str(a)) for s, t, a in entry["placement"])
        self.kept, self.stays = frozenset(map(int, entry.get("keep", ()))), bool(entry.get("stays", False))
        self.since = (self.since or number) if self.stays else number
        self.timeline, self.active, self.stop_step, self.promoted = number, False, 0, {}
        self._standbys(entry)
        step = entry.get("from_cut")
        if not self.stays:
            self._choose(self.choices.until(int(step or 0)))
        if step is not None:
            self.base_step = self.checkpoint_step = int(step)
            self.checkpoint_path = str(entry.get("path", self.checkpoint_path))

    def _standbys(self, entry: Mapping[str, Any]) -> None:
        told = {int(shard): (str(task), *rest) for shard, task, *rest in entry.get("standbys", ())}
        found = []
        for place in self.placement:
            task, *rest = told.get(place.shard, ("",))
            # Earlier builds recorded no address. A member's is known; a server that is no longer a member holds
            # nothing. They recorded no appointment either; nor do servers of those builds know one.
            address = str(rest[0]) if rest else self.members[task].address if task in self.members else ""
            number = int(rest[1]) if len(rest) > 1 else 0
            standby = task if address else ""
            found.append(replace(place, standby_task=standby, standby_address=address, appointment=number))
        self.placement = tuple(found)

    # Tasks and their work

    def _tasks(self, entry: Mapping[str, Any]) -> None:
        match entry["kind"]:
            case "machine":
                self.machine = dict(entry["facts"])
            case "finished":
                # All that are; fewer than before after a rollback.
                self.finished = set(map(str, entry["tasks"]))
            case "figures":
                for task, incarnation, figures in entry["lives"]:
                    self._figures(str(task), int(incarnation), figures)
            case "member":
                member = _member(entry)
                self.members[member.task] = member
                self.gone.pop(member.task, None)
            case "gone":
                # Fenced or left: recorded before its work is given to others, so that no later chief takes that back.
                task, incarnation = str(entry["task"]), int(entry["incarnation"])
                known = self.members.get(task)
                if known is not None and known.incarnation == incarnation:
                    self.gone[task] = self.members.pop(task)
                if entry.get("figures"):
                    self._figures(task, incarnation, entry["figures"])
                if self.leases is not None:
                    self.leases.fence(incarnation)

    def _figures(self, task: str, incarnation: int, figures: Mapping[str, Any]) -> None:
        self.lives[task, incarnation] = {str(name): float(value) for name, value in figures.items()}

    def _work(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "chosen":
            # Whose gradients made the next steps; after a gap, what was before is of no use.
            news = Choices.unpacked(int(entry["first"]), int(entry["width"]), bytes.fromhex(entry["made"]))
            if self.first_chosen <= news.first <= self.first_chosen + len(self.chosen):
                self.chosen[news.first - self.first_chosen :] = news.made
            else:
                self._choose(news)
            return
        if entry["kind"] == "cursor":
            # The batches start here, at first or after all shards were rolled back.
            number = self.leases.number if self.leases is not None else 0
            self.leases = Leases.resumed(entry["cursor"], int(entry["steps"]), number=number)
            return
        assert self.leases is not None
        incarnation = int(entry["incarnation"])
        for number in entry["done"]:
            self.leases.finish(int(number), incarnation)
        if entry["issued"] is not None:
            number, first, count = map(int, entry["issued"])
            self.leases.recall(Lease(number=number, first=first, count=count, incarnation=incarnation))


def _member(entry: Mapping[str, Any]) -> Member:
    role, _, index = str(entry["task"]).partition("/")
    return Member(
        role=role,
        index=int(index),
        incarnation=int(entry["incarnation"]),
        stable_id=str(entry["stable_id"]),
        address=str(entry["address"]),
        metrics_address=str(entry["metrics_address"]),
        device=str(entry.get("device", "")),
        key=bytes.fromhex(entry.get("key", "")),
        joined=float(entry.get("time", 0.0)),
        last_heard_s=0.0,
        state=Life.SUSPECT,
        broken=True,
    )


def replay(entries: Iterable[Mapping[str, Any]]) -> Remembered:
    """The newest run in the journal. Raises UsageError, naming the entry, if this version can't read one."""
    known = Remembered()
    for entry in entries:
        try:
            known.take(entry)
        except (KeyError, TypeError, ValueError, ShardlineError) as error:
            raise UsageError(
                f"an entry of the chief's journal can't be read ({type(error).__name__}: {error}): {dict(entry)}; if "
                "another version wrote it, continue with that one; otherwise choose another --out"
            ) from error
    return known


def obstacle(remembered: Remembered, job: JobSpec | None, settings: ChiefSettings) -> str:
    """Why the unfinished job in the folder is not the one being started; empty if it is, or may be."""
    known = remembered.job
    if known is None:
        return ""
    if job is not None:
        phrases = differences(as_chosen(as_in_cluster(job, settings), known), known)
        if phrases:
            return "; ".join(phrases)
    if remembered.plan_id:
        try:
            plan = settings.cut_as(remembered.shares).plan(known)
        except JobError as error:
            return str(error)
        if plan.plan_id != remembered.plan_id:
            servers = f"a number of parameter servers other than {len(settings.ps)}"
            flags = "--bucket-mb, --shards or --with-ps"
            return f"its parameters were cut for {servers}, with another {flags}, or by another version"
    return ""
