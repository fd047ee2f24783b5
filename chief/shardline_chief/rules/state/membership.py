"""Which tasks take part and are alive: joins, heartbeats, suspicion, death. Pure; the time is an argument.

A task is suspect when its stream broke or after T/10 of silence; it is dead after T/3 of silence, or when a new process
takes its index (PROTOCOL 1.6). Each admission creates a new incarnation; the previous one is fenced.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardline.core.identity import Identity
from shardline.core.placement import Post
from shardline.roles import ROLES, Role, trainers
from shardline.security import holds
from shardline_chief.rules.actions import Members
from shardline_chief.rules.messages import Join
from shardline_chief.rules.state.settings import ChiefSettings

LIVES, LIFE_S = 64, 60.0
"""Joins to a place at once, and the seconds for each after that: all that a life leaves in files and memory is kept."""


class Life(enum.Enum):
    """State of a task's life."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One life of a task; replaced, never changed."""

    role: str
    index: int
    incarnation: int
    stable_id: str
    address: str
    metrics_address: str
    last_heard_s: float
    device: str = ""
    """Device that it computes on, such as "cuda:1"; empty if it did not say."""
    key: bytes = field(default=b"", repr=False)
    """Digest of the secret that this life was given; see security.key_of."""
    state: Life = Life.ALIVE
    broken: bool = False
    """Its heartbeat stream broke and no new one has been opened."""
    joined: float = 0.0
    """Unix time; of members of an earlier chief."""

    @property
    def task(self) -> str:
        """Name such as "worker/3"."""
        return f"{self.role}/{self.index}"

    @property
    def row(self) -> Role:
        return ROLES[self.role]

    @property
    def living(self) -> bool:
        """Alive or merely suspect: not fenced."""
        return self.state in (Life.ALIVE, Life.SUSPECT)

    @property
    def trains(self) -> bool:
        """Whether it runs replicas."""
        return self.row.trains

    @property
    def talks(self) -> bool:
        """Servers have to know this life, since it pushes to them and pulls from them."""
        return self.row.talks

    @property
    def post(self) -> Post:
        return Post(task=self.task, address=self.address, incarnation=self.incarnation, key=self.key)


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The new member, and the living incarnation that it replaces, if any."""

    member: Member
    replaced: Member | None = None


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why a join is refused; `retry` says whether asking again may help."""

    reason: str
    retry: bool = False


@dataclass(frozen=True, kw_only=True)
class LifeChange:
    """A task changed its state; `sentence` says how and why, but not what follows."""

    member: Member
    sentence: str


class Membership:
    def __init__(self, term: int, *, suspect_s: float, dead_s: float) -> None:
        self._term = term
        self._suspect_s = suspect_s
        self._dead_s = dead_s
        self._counter = 0
        self._members: dict[str, Member] = {}
        self._kept: dict[str, tuple[str, float]] = {}
        """Indices reserved for tasks that have not joined yet: task -> (address, time of expiry)."""
        self._used_s: dict[str, float] = {}
        """Time up to which the Joins to each place have used it: LIFE_S for each."""

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda m: (m.role, m.index)))

    def get(self, task: str) -> Member | None:
        """The newest life of a task, living or not."""
        return self._members.get(task)

    def living(self, *roles: str) -> list[Member]:
        """Living members of these roles, in the order of the roles given, then by index."""
        found = [m for m in self._members.values() if m.living and m.role in roles]
        return sorted(found, key=lambda m: (roles.index(m.role), m.index))

    def current(self, task: str, incarnation: int, trait: Callable[[Role], bool] = lambda role: True) -> bool:
        """Whether this is the living incarnation of a task whose role has this trait."""
        member = self._members.get(task)
        return member is not None and member.living and member.incarnation == incarnation and trait(member.row)

    def speaks_for(self, who: Identity) -> bool:
        """Whether a message comes from the life that it names; True if that is not the newest life of the task."""
        member = self._members.get(who.task)
        return member is None or member.incarnation != who.incarnation or holds(who.secret, member.key)

    def join(self, now_s: float, join: Join, *, limit: int, key: bytes = b"") -> Admitted | Refused:
        """Admit a task, or say why not. limit: the role's indices are [0, limit). key: digest of the life's secret."""
        index = self._free_index(join.role, limit, now_s) if join.index is None else join.index
        if index is None:
            return _full(join.role, limit)
        if index >= limit:
            return Refused(reason=f"{join.role}/{index} is outside this cluster, which has room for {limit}")
        old = self._members.get(f"{join.role}/{index}")
        if old is not None and old.state is Life.ALIVE and old.stable_id != join.stable_id:
            return Refused(
                reason=f"{old.task} is already running at {old.address} (last heard {now_s - old.last_heard_s:.1f} s "
                "ago); stop that process first, or start this one with another index",
                retry=True,
            )
        used_s = max(now_s, self._used_s.get(f"{join.role}/{index}", now_s))
        if (wait_s := used_s - now_s - (LIVES - 1) * LIFE_S) > 0:
            return Refused(
                reason=f"{join.role}/{index} has joined {LIVES} times in a short time; see its log for why it starts "
                f"again and again; it may join again in {wait_s:.0f} s",
                retry=True,
            )
        self._used_s[f"{join.role}/{index}"] = used_s + LIFE_S
        self._counter += 1
        member = Member(
            role=join.role,
            index=index,
            incarnation=self._term << 32 | self._counter,
            stable_id=join.stable_id,
            address=join.address,
            metrics_address=join.metrics_address,
            device=join.device,
            last_heard_s=now_s,
            key=key,
        )
        self._members[member.task] = member
        self._kept.pop(member.task, None)
        return Admitted(member=member, replaced=old if old is not None and old.living else None)

    def recall(self, member: Member, now_s: float) -> None:
        """Restore a member of an earlier chief: suspect until its first heartbeat, dead if none comes."""
        self._members[member.task] = replace(member, last_heard_s=now_s)

    def place(self, now_s: float, role: str, address: str, *, limit: int, keep_s: float) -> int | Refused:
        """An index for a task that is about to join, reserved for its address for keep_s seconds.

        A task that was here before from the same address gets its index again: a restarted container or pod takes its
        own place, without waiting until its previous life is declared dead.
        """
        free = self._free_index(role, limit, now_s)
        # Port 0 is not an address yet: several tasks on one machine may send that.
        before = None if address.endswith(":0") else self._index_from(role, address, limit)
        index = free if before is None else before
        if index is None:
            return _full(role, limit)
        self._kept[f"{role}/{index}"] = (address, now_s + keep_s)
        return index

    def _index_from(self, role: str, address: str, limit: int) -> int | None:
        for index in range(limit):
            task = f"{role}/{index}"
            member, kept = self._members.get(task), self._kept.get(task)
            holder = kept[0] if kept is not None else member.address if member is not None else ""
            if holder == address:
                return index
        return None

    def _free_index(self, role: str, limit: int, now_s: float) -> int | None:
        self._kept = {task: kept for task, kept in self._kept.items() if now_s < kept[1]}
        taken = {m.index for m in self._members.values() if m.role == role and m.living}
        return next((i for i in range(limit) if i not in taken and f"{role}/{i}" not in self._kept), None)

    def heard(self, task: str, incarnation: int, now_s: float) -> bool:
        """Note a heartbeat. False: that incarnation is fenced or unknown."""
        if not self.current(task, incarnation):
            return False
        member = self._members[task]
        # tick sets the state back to ALIVE, so that it reports the recovery as it did the suspicion.
        self._members[task] = replace(member, last_heard_s=now_s, broken=False)
        return True

    def stream_broken(self, task: str, incarnation: int) -> None:
        """Its heartbeat stream ended without notice."""
        if self.current(task, incarnation):
            self._members[task] = replace(self._members[task], broken=True)

    def leave(self, task: str) -> None:
        """The task leaves, or has left, of its own accord."""
        if task in self._members:
            self._members[task] = replace(self._members[task], state=Life.LEFT)

    def declare_dead(self, task: str) -> None:
        """Declare a task dead for other reasons: it doesn't answer commands, or another process took its place."""
        if task in self._members:
            self._members[task] = replace(self._members[task], state=Life.DEAD)

    def tick(self, now_s: float) -> Sequence[LifeChange]:
        """Changes of state due at now_s, deaths included; each is returned once."""
        changes = []
        for member in self:
            if not member.living:
                continue
            silent = now_s - member.last_heard_s
            ago = f"last heard {silent:.1f} s ago"
            why = f"{ago}, its stream broke" if member.broken else ago
            if silent >= self._dead_s:
                state, text = Life.DEAD, f"{member.task} is dead: {why} (limit {self._dead_s:g} s)"
            elif member.broken or silent >= self._suspect_s:
                state, text = (
                    Life.SUSPECT,
                    f"{member.task} is suspect: {why}; declared dead after {self._dead_s:g} s of silence",
                )
            else:
                state, text = Life.ALIVE, f"{member.task} is alive again"
            if state is not member.state:
                changed = replace(member, state=state)
                self._members[member.task] = changed
                changes.append(LifeChange(member=changed, sentence=text))
        return changes


def _full(role: str, limit: int) -> Refused:
    return Refused(reason=f"all {limit} places for {role}s are taken by live tasks", retry=True)


class Tasks:
    def __init__(self, settings: ChiefSettings) -> None:
        self.settings = settings
        timeouts = settings.timeouts
        self.members = Membership(settings.term, suspect_s=timeouts.suspect_s, dead_s=timeouts.dead_s)
        self.machine: Mapping[str, str] = {}
        """Fingerprint of the first machine that trains; the others must equal it if results are bit-exact."""
        self.finished: set[str] = set()
        self.drained: set[tuple[str, int]] = set()
        """Servers that are to hold nothing, with the incarnation: a new process may again."""
        self.suspects: dict[str, tuple[str, ...]] = {}
        """Servers that a task can't reach, by task."""
        self.steps: dict[str, int] = {}
        """Last reported step, by task."""
        self.alone_since_s: float | None = None
        """Since when too few tasks train; None if enough do."""

    def holders(self) -> list[Member]:
        """Living servers that may be given shards."""
        return [one for one in self.members.living("ps") if (one.task, one.incarnation) not in self.drained]

    def trainers(self) -> list[Member]:
        """Living tasks that run replicas."""
        return self.members.living(*trainers())

    def working(self) -> list[Member]:
        """Living trainers that have not finished."""
        return [member for member in self.trainers() if member.task not in self.finished]

    def too_few(self) -> bool:
        """Whether fewer tasks train than the job's minimum; it then pauses."""
        return len(self.trainers()) < self.settings.min_workers

    def table(self, timeline: int) -> Members:
        """The order that sends those who may push to every server."""
        senders = [member for member in self.members if member.living and member.talks]
        return Members(
            timeline=timeline,
            members={member.task: member.incarnation for member in senders},
            keys={member.task: member.key for member in senders},
        )

    def missing_ps(self) -> list[int]:
        """Indices of parameter servers that are missing."""
        there = {member.index for member in self.members.living("ps")}
        return [index for index in range(len(self.settings.ps)) if index not in there]

    def expected(self) -> dict[str, int]:
        """Number of tasks in the cluster spec, by role."""
        settings = self.settings
        return {
            "ps": len(settings.ps),
            "worker": settings.workers,
            "chief": int(settings.chief_trains),
            "evaluator": settings.evaluators,
            **settings.others,
        }

    def to_come(self) -> str:
        """Tasks of this cluster that have never joined, as a phrase; empty if all have."""
        # Used when the job needs no tasks: one that came and left is not awaited.
        came = [member.role for member in self.members]
        lacking = {role: count - came.count(role) for role, count in self.expected().items()}
        return ", ".join(f"{count} {role}" for role, count in lacking.items() if count > 0)

    def awaited(self) -> list[str]:
        """Missing tasks of the cluster spec, except evaluators, which nothing waits for."""
        return [ps_at(index, self.settings.ps[index]) for index in self.missing_ps()] + self.missing_trainers()

    def missing_trainers(self) -> list[str]:
        settings = self.settings
        trainers = {member.task for member in self.trainers()}
        names = [*(["chief/0"] if settings.chief_trains else []), *(f"worker/{n}" for n in range(settings.workers))]
        # A worker beyond the cluster spec may have replaced one that is in it.
        lacking = max(0, settings.trainers - len(trainers))
        return [name for name in names if name not in trainers][:lacking]


def ps_at(index: int, address: str) -> str:
    """A ps that never joined, for messages. Port 0: it would have sent its address with its Join."""
    return f"ps/{index} (address not known yet)" if address.endswith(":0") else f"ps/{index} at {address}"
