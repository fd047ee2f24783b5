"""What a restarted chief knows: the journal's entries, reduced to one value. Pure.

    remembered = replay(journal.read())
    if remembered.unfinished: ...           # takeover.py continues the job

An entry is on disk before its action, so the last one may describe an action that was never done: ask the servers
what they hold before relying on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardline.core.choices import Choices
from shardline.core.image import WorkerSequence
from shardline.core.placement import Placement
from shardline.core.spec import JobSpec
from shardline.core.spec_json import job_from_json
from shardline.errors import ShardlineError, UsageError
from shardline_chief.rules.actions import Promotion
from shardline_chief.rules.state.leases import Lease, Leases
from shardline_chief.rules.state.losses import WentBack


@dataclass(frozen=True, kw_only=True)
class KnownMember:
    """A task that was admitted."""

    task: str
    incarnation: int
    stable_id: str
    address: str
    metrics_address: str = ""
    device: str = ""
    key: bytes = b""
    """Digest of the secret that the task was given."""
    joined: float = 0.0
    """Unix time."""

    @property
    def role(self) -> str:
        return self.task.partition("/")[0]

    @property
    def index(self) -> int:
        return int(self.task.partition("/")[2])


@dataclass(frozen=True, kw_only=True)
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
    timeline: int = 0
    """The newest timeline begun; 0 = none."""
    active: bool = False
    """Every shard has its values, so it may accept pushes; False: still being prepared."""
    placement: tuple[Placement, ...] = ()
    stays: bool = False
    """The newest timeline keeps all values of the previous one: standbys were being promoted."""
    since: int = 0
    """Oldest timeline with the same values as the newest."""
    promoted: Mapping[int, Promotion] = field(default_factory=dict)
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
    members: Mapping[str, KnownMember] = field(default_factory=dict)
    """Tasks that have neither died nor left, according to the journal."""
    gone: Mapping[str, KnownMember] = field(default_factory=dict)
    """Tasks that have died or left, and did not come back."""
    finished: frozenset[str] = frozenset()
    """Tasks that have finished."""
    choices: Choices = field(default_factory=Choices)
    """With spares: whose gradients made the steps of the surviving history."""
    leases: Leases | None = None
    """Asynchronous mode: a copy of the leases, including the open ones."""
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The evaluator's scores, by step; empty if it could not score that one."""
    best: tuple[int, Mapping[str, float]] | None = None
    began_s: float | None = None
    """Unix time at which training began."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """One entry for each recovery from the loss of a ps."""
    lives: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    """Figures of lives of workers, by (task, incarnation), as last noted."""
    back: tuple[WentBack, ...] = ()
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

    @property
    def unfinished(self) -> bool:
        """Whether there is something to take over: a job, or tasks that wait for one."""
        return self.term > 0 and not self.closed and (self.job is not None or bool(self.members))


def replay(entries: Iterable[Mapping[str, Any]]) -> Remembered:
    """The newest run in the journal. Raises UsageError, naming the entry, if this version can't read one."""
    book = _Book()
    for entry in entries:
        try:
            book.take(entry)
        except (KeyError, TypeError, ValueError, ShardlineError) as error:
            raise UsageError(
                f"an entry of the chief's journal can't be read ({type(error).__name__}: {error}): {dict(entry)}; if "
                "another version wrote it, continue with that one; otherwise choose another --out"
            ) from error
    return book.remembered()


class _ChoiceList:
    """Choices that grow in place: a long run has thousands of entries, and copying all for each takes minutes."""

    def __init__(self) -> None:
        self._first = 0
        self._made: list[int] = []

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self._first + len(self._made)

    def until(self, step: int) -> Choices:
        return Choices(self._first, tuple(self._made)).until(step)

    def replace(self, choices: Choices) -> None:
        self._first, self._made = choices.first, list(choices.made)

    def follow(self, news: Choices) -> None:
        """Add later choices, which replace those of the same steps."""
        if self._first <= news.first <= self.end:
            self._made[news.first - self._first :] = news.made
        else:
            self.replace(news)


class _Book:
    """The entries read so far."""

    def __init__(self) -> None:
        self._lost = _LostUpdates()
        self._begin_run()
        # Entries of other kinds are only for people.
        self._kinds: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "chief": self._chief,
            "job": self._job,
            "machine": self._machine,
            "plan": self._plan,
            "timeline": self._timeline,
            "standbys": self._standbys,
            "failover": self._failover,
            "running": self._running,
            "stop": self._stop,
            "cut": self._cut,
            "recovered": self._recovered,
            "evaluation": self._evaluation,
            "member": self._member,
            "gone": self._fenced,
            "figures": self._lost.figures,
            "went_back": self._lost.went_back,
            "finished": self._done,
            "cursor": self._cursor,
            "lease": self._lease,
            "chosen": self._chosen,
            "stopping": self._stopping,
            "memory_dropped": lambda entry: self._found.update(
                dropped_memories=self._found.get("dropped_memories", 0) + int(entry["count"])
            ),
            "ended": self._ended,
            "closed": lambda entry: self._found.update(closed=True),
        }

    def _begin_run(self) -> None:
        self._found: dict[str, Any] = {}
        self._members: dict[str, KnownMember] = {}
        self._gone: dict[str, KnownMember] = {}
        self._finished: set[str] = set()
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._recoveries: list[Mapping[str, Any]] = []
        self._lost.begin_run()
        self._leases: Leases | None = None
        self._choices = _ChoiceList()

    def remembered(self) -> Remembered:
        return Remembered(
            **self._found,
            members=dict(self._members),
            gone=dict(self._gone),
            finished=frozenset(self._finished),
            metrics=dict(self._metrics),
            recoveries=tuple(self._recoveries),
            lives=dict(self._lost.lives),
            back=tuple(self._lost.back),
            leases=self._leases,
            choices=self._choices.until(self._choices.end),
        )

    def take(self, entry: Mapping[str, Any]) -> None:
        act = self._kinds.get(entry["kind"])
        if act is not None:
            act(entry)
        self._found["term"] = int(entry["term"])

    def _chief(self, entry: Mapping[str, Any]) -> None:
        """A chief started. If it takes over, the run continues; otherwise a new run begins."""
        if entry.get("takes_over"):
            self._found["page"] = str(entry.get("page", ""))
            self._found["failovers"] = self._found.get("failovers", 0) + 1
            return
        choices, job = self._choices, self._found.get("job")
        earlier = self._found.get("earlier", ())
        self._begin_run()
        self._found["page"] = str(entry.get("page", ""))
        step = entry.get("resume")
        if step is not None:
            self._choices.replace(choices.until(int(step)))
            self._found["earlier"] = (*earlier, job) if job is not None else earlier
            self._found.update(first_step=int(step), base_step=int(step), checkpoint_step=int(step))

    # The job and its history

    def _job(self, entry: Mapping[str, Any]) -> None:
        if "timeline" in self._found:
            # It changes: the servers have the one before until the next timeline begins.
            self._found.update(active=False, stays=False, kept=frozenset())
        self._found["job"] = job_from_json(entry["spec"])

    def _machine(self, entry: Mapping[str, Any]) -> None:
        self._found["machine"] = dict(entry["facts"])

    def _plan(self, entry: Mapping[str, Any]) -> None:
        self._found.update(plan_id=str(entry["plan_id"]), shards=int(entry.get("shards", 0)))

    def _timeline(self, entry: Mapping[str, Any]) -> None:
        number, found = int(entry["timeline"]), self._found
        if entry["state"] == "active":
            if number == found.get("timeline"):
                found["active"] = True
            return
        placement = tuple(Placement(shard=int(s), task=str(t), address=str(a)) for s, t, a in entry["placement"])
        kept = frozenset(map(int, entry.get("keep", ())))
        stays = bool(entry.get("stays", False))
        since = found.get("since", number) if stays else number
        found.update(timeline=number, active=False, placement=placement, kept=kept, stays=stays, since=since)
        found.update(stop_step=0, promoted={})
        self._standbys(entry)
        step = entry.get("from_cut")
        if not stays:
            self._choices.replace(self._choices.until(int(step or 0)))
        if step is not None:
            found.update(base_step=int(step), checkpoint_step=int(step))
            if "path" in entry:
                found["checkpoint_path"] = str(entry["path"])

    def _standbys(self, entry: Mapping[str, Any]) -> None:
        """The placement of standbys: recorded before a primary continues without its old standby."""
        told = {int(shard): (str(task), *rest) for shard, task, *rest in entry.get("standbys", ())}
        found = []
        for place in self._found.get("placement", ()):
            task, *rest = told.get(place.shard, ("",))
            # Earlier builds recorded no address. A member's is known; a server that is no longer a member holds
            # nothing.
            address = str(rest[0]) if rest else self._address(task)
            # They recorded no appointment either; nor do servers of those builds know one.
            number = int(rest[1]) if len(rest) > 1 else 0
            standby = task if address else ""
            found.append(replace(place, standby_task=standby, standby_address=address, appointment=number))
        self._found["placement"] = tuple(found)

    def _address(self, task: str) -> str:
        known = self._members.get(task)
        return known.address if known is not None else ""

    def _failover(self, entry: Mapping[str, Any]) -> None:
        """Standbys are about to be promoted; which servers got the order is unknown."""
        told = {int(shard): Promotion(str(task), *map(int, rest)) for shard, task, *rest in entry["promoted"]}
        self._found["promoted"] = {**self._found.get("promoted", {}), **told}

    def _running(self, entry: Mapping[str, Any]) -> None:
        self._found.update(first_step=int(entry["step"]), began_s=float(entry["time"]))

    def _stop(self, entry: Mapping[str, Any]) -> None:
        self._found["stop_step"] = int(entry["step"])

    def _cut(self, entry: Mapping[str, Any]) -> None:
        self._found.update(checkpoint_step=int(entry["step"]), checkpoint_path=str(entry["path"]))

    def _recovered(self, entry: Mapping[str, Any]) -> None:
        self._recoveries.append({key: entry[key] for key in ("task", "at_step", "from_step", "seconds", "lost")})

    def _evaluation(self, entry: Mapping[str, Any]) -> None:
        # A list, to keep the order: the first metric may decide which is best.
        metrics = {str(name): float(value) for name, value in entry["metrics"]}
        self._metrics[int(entry["step"])] = metrics
        if entry["best"]:
            self._found["best"] = (int(entry["step"]), metrics)

    # Tasks

    def _member(self, entry: Mapping[str, Any]) -> None:
        known = KnownMember(
            task=str(entry["task"]),
            incarnation=int(entry["incarnation"]),
            stable_id=str(entry["stable_id"]),
            address=str(entry["address"]),
            metrics_address=str(entry["metrics_address"]),
            device=str(entry.get("device", "")),
            key=bytes.fromhex(entry.get("key", "")),
            joined=float(entry.get("time", 0.0)),
        )
        self._members[known.task] = known
        self._gone.pop(known.task, None)

    def _fenced(self, entry: Mapping[str, Any]) -> None:
        """Fenced or left: recorded before its work is given to others, so that no later chief takes that back."""
        task, incarnation = str(entry["task"]), int(entry["incarnation"])
        known = self._members.get(task)
        if known is not None and known.incarnation == incarnation:
            self._gone[task] = self._members.pop(task)
        if entry.get("figures"):
            self._lost.told(task, incarnation, entry["figures"])
        if self._leases is not None:
            self._leases.fence(incarnation)

    def _done(self, entry: Mapping[str, Any]) -> None:
        """All finished tasks; fewer than before after a rollback."""
        self._finished = set(map(str, entry["tasks"]))

    # Batches

    def _cursor(self, entry: Mapping[str, Any]) -> None:
        """Asynchronous mode: the batches start here, at first or after all shards were rolled back."""
        number = self._leases.number if self._leases is not None else 0
        self._leases = Leases.resumed(entry["cursor"], int(entry["steps"]), number=number)

    def _lease(self, entry: Mapping[str, Any]) -> None:
        assert self._leases is not None
        incarnation = int(entry["incarnation"])
        for number in entry["done"]:
            self._leases.finish(int(number), incarnation)
        if entry["issued"] is not None:
            number, first, count = map(int, entry["issued"])
            self._leases.recall(Lease(number=number, first=first, count=count, incarnation=incarnation))

    # Choices

    def _chosen(self, entry: Mapping[str, Any]) -> None:
        """With spares: whose gradients made the next steps; after a gap, what was before is of no use."""
        news = Choices.unpacked(int(entry["first"]), int(entry["width"]), bytes.fromhex(entry["made"]))
        self._choices.follow(news)

    # The end

    def _stopping(self, entry: Mapping[str, Any]) -> None:
        self._found["stopping"] = (str(entry["reason"]), int(entry["exit_code"]))

    def _ended(self, entry: Mapping[str, Any]) -> None:
        ended = int(entry["exit_code"]), str(entry["reason"])
        self._found.update(ended=ended, summary=dict(entry.get("summary", {})))


class _LostUpdates:
    """What Losses.updates() counts."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        self.lives: dict[tuple[str, int], Mapping[str, float]] = {}
        self.back: list[WentBack] = []

    def told(self, task: str, incarnation: int, figures: Mapping[str, Any]) -> None:
        self.lives[task, incarnation] = {str(name): float(value) for name, value in figures.items()}

    def figures(self, entry: Mapping[str, Any]) -> None:
        for task, incarnation, figures in entry["lives"]:
            self.told(str(task), int(incarnation), figures)

    def went_back(self, entry: Mapping[str, Any]) -> None:
        shards = {
            int(shard): {str(task): WorkerSequence(int(life), int(last)) for task, (life, last) in table.items()}
            for shard, table in entry["shards"].items()
        }
        self.back.append(WentBack(timeline=int(entry["timeline"]), sequences=shards))
