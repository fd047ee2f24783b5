"""Who takes part and who is alive: joins, heartbeats, suspicion, death. Pure; the clock is an argument.

A task is suspect when its stream broke or it was silent for T/10, dead after T/3 of silence or when a new process
takes its index (PROTOCOL 1.6). Each admission gives a new incarnation; the one before it is fenced.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardline.cluster import ROLES
from shardline.core.identity import Identity
from shardline.security import holds
from shardline_chief.rules.messages import TRAINERS, Join
from shardline_chief.rules.replay import KnownMember


class Life(enum.Enum):
    """What is known of a task's life."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One task; replaced, never changed."""

    role: str
    index: int
    incarnation: int
    stable_id: str
    address: str
    metrics_address: str
    last_heard_s: float
    key: bytes = field(default=b"", repr=False)
    """What the secret that this life was given is known by; see security.key_of."""
    state: Life = Life.ALIVE
    broken: bool = False
    """Its heartbeat stream broke and no newer one came."""

    @property
    def task(self) -> str:
        """Name such as "worker/3"."""
        return f"{self.role}/{self.index}"

    @property
    def living(self) -> bool:
        """Alive or merely suspect: not fenced."""
        return self.state in (Life.ALIVE, Life.SUSPECT)

    @property
    def trains(self) -> bool:
        """Whether it runs replicas."""
        return self.role in TRAINERS


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The new member, and the life it replaces where there was a living one."""

    member: Member
    replaced: Member | None = None


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why a join is turned down; `retry` says whether asking again may help."""

    reason: str
    retry: bool = False


@dataclass(frozen=True, kw_only=True)
class LifeChange:
    """A task changed its state; `sentence` says which, when last heard and why, not yet what happens next."""

    member: Member
    sentence: str


class Membership:
    """The table of tasks."""

    def __init__(self, term: int, *, suspect_s: float, dead_s: float) -> None:
        self._term = term
        self._suspect_s = suspect_s
        self._dead_s = dead_s
        self._counter = 0
        self._members: dict[str, Member] = {}
        self._kept: dict[str, tuple[str, float]] = {}
        """Places handed out to tasks that have not joined yet: task -> (address, until when)."""

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda m: (m.role, m.index)))

    def get(self, task: str) -> Member | None:
        """The newest life of a task, living or not."""
        return self._members.get(task)

    def living(self, *roles: str) -> list[Member]:
        """Living members of the roles, in order of role as given, then index."""
        found = [m for m in self._members.values() if m.living and m.role in roles]
        return sorted(found, key=lambda m: (roles.index(m.role), m.index))

    def current(self, task: str, incarnation: int, roles: Sequence[str] = ROLES) -> bool:
        """Whether this is the living incarnation of a task in one of these roles."""
        member = self._members.get(task)
        return member is not None and member.living and member.incarnation == incarnation and member.role in roles

    def speaks_for(self, who: Identity) -> bool:
        """Whether a message that names a life comes from it; True for one that is not the task's newest."""
        member = self._members.get(who.task)
        return member is None or member.incarnation != who.incarnation or holds(who.secret, member.key)

    def join(self, now_s: float, join: Join, *, limit: int, key: bytes = b"") -> Admitted | Refused:
        """Admit a task, or say why not. `limit`: indices of the role are [0, limit). key: of the life's secret."""
        index = self._free_index(join.role, limit, now_s) if join.index is None else join.index
        if index is None:
            return _full(join.role, limit)
        if index >= limit:
            return Refused(reason=f"{join.role}/{index} is outside this cluster, which has room for {limit}")
        old = self._members.get(f"{join.role}/{index}")
        if old is not None and old.state is Life.ALIVE and old.stable_id != join.stable_id:
            return Refused(
                reason=f"{old.task} is running already at {old.address} (last heard {now_s - old.last_heard_s:.1f} s "
                "ago); stop that process first, or start this one under another index",
                retry=True,
            )
        self._counter += 1
        member = Member(
            role=join.role,
            index=index,
            incarnation=self._term << 32 | self._counter,
            stable_id=join.stable_id,
            address=join.address,
            metrics_address=join.metrics_address,
            last_heard_s=now_s,
            key=key,
        )
        self._members[member.task] = member
        self._kept.pop(member.task, None)
        return Admitted(member=member, replaced=old if old is not None and old.living else None)

    def recall(self, known: KnownMember, now_s: float) -> None:
        """A member of an earlier chief: suspect until it beats, dead if it doesn't."""
        self._members[known.task] = Member(
            role=known.role,
            index=known.index,
            incarnation=known.incarnation,
            stable_id=known.stable_id,
            address=known.address,
            metrics_address=known.metrics_address,
            last_heard_s=now_s,
            key=known.key,
            state=Life.SUSPECT,
            broken=True,
        )

    def place(self, now_s: float, role: str, address: str, *, limit: int, keep_s: float) -> int | Refused:
        """An index for a task that is about to join, kept for its address for keep_s seconds.

        Who was here before from the same address gets its index again: a container or pod that was started again
        takes its own place, without waiting until its former life is declared dead.
        """
        free = self._free_index(role, limit, now_s)
        # Port 0 is no address yet: several tasks of one machine may say that.
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
        # The state goes back to ALIVE in tick, so that the recovery is said there like the suspicion was.
        self._members[task] = replace(member, last_heard_s=now_s, broken=False)
        return True

    def stream_broken(self, task: str, incarnation: int) -> None:
        """Its heartbeat stream ended without a farewell."""
        if self.current(task, incarnation):
            self._members[task] = replace(self._members[task], broken=True)

    def leave(self, task: str) -> None:
        """It goes on its own account, or has gone."""
        if task in self._members:
            self._members[task] = replace(self._members[task], state=Life.LEFT)

    def declare_dead(self, task: str) -> None:
        """Known from elsewhere: it doesn't answer commands, or another process took its place."""
        if task in self._members:
            self._members[task] = replace(self._members[task], state=Life.DEAD)

    def tick(self, now_s: float) -> Sequence[LifeChange]:
        """Changes of state due at now_s, deaths included; each is told once."""
        changes = []
        for member in self:
            if not member.living:
                continue
            silent = now_s - member.last_heard_s
            ago = f"last heard {silent:.1f} s ago"
            why = f"{ago}, its stream is broken" if member.broken else ago
            if silent >= self._dead_s:
                state, text = Life.DEAD, f"{member.task} is dead: {why} (limit {self._dead_s:g} s)"
            elif member.broken or silent >= self._suspect_s:
                state, text = (
                    Life.SUSPECT,
                    f"{member.task} is suspect: {why}; declared dead after {self._dead_s:g} s of silence",
                )
            else:
                state, text = Life.ALIVE, f"{member.task} is heard again"
            if state is not member.state:
                changed = replace(member, state=state)
                self._members[member.task] = changed
                changes.append(LifeChange(member=changed, sentence=text))
        return changes


def _full(role: str, limit: int) -> Refused:
    return Refused(reason=f"all {limit} places for {role}s are taken by living tasks", retry=True)
