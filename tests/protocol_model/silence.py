"""Who is silent, where anybody may be stopped for any time and goes on (PROTOCOL 1.6).

    SilenceModel(SilenceSetup(seed=7)).run()

One judge, with the real Membership or as a task judges its chief, and tasks that beat, on one clock that goes on while
some or all of them are stopped. What was sent to a stopped judge waits for it; after it goes on, another of its threads
reads that only later than it looks at its clock.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shardline.core.timeouts import Timeouts
from shardline.host.awake import LONGEST_S, TICK_S, AwakeTime
from shardline_chief.rules.messages import Join
from shardline_chief.rules.state.membership import Admitted, Membership
from tests.protocol_model.numbers import require

MOMENT_S = 0.05
"""Step of the clock."""
LATENCY_S = 0.2
"""A beat takes this long, at most; so does it after the judge goes on until it has read what waits."""
RUNS_S = 2.0
"""Whoever goes on runs at least this long."""


@dataclass(frozen=True, kw_only=True)
class SilenceSetup:
    """One schedule."""

    seed: int
    tasks: int = 3
    pauses: int = 6
    kills: int = 1
    timeout_s: float = 9.0
    clock: Callable[[], Callable[[float], float]] = lambda: AwakeTime(0.0).at
    """Makes the judge's clock, from readings of the one that goes on."""


@dataclass
class _Process:
    stopped_until_s: float = 0.0
    since_s: float = 0.0
    """When it went on."""
    next_s: float = 0.0
    """When it beats or looks next."""

    def runs(self, now_s: float) -> bool:
        return now_s >= self.stopped_until_s


@dataclass
class _Task(_Process):
    incarnation: int = 0
    killed: bool = False
    dead: bool = False
    """The judge has said so."""
    unheard_s: float = 0.0
    """Since it was last heard: time in which the judge ran and the task did not."""


@dataclass
class SilenceModel:
    """The cluster. run() plays one schedule and checks the promises on the way."""

    setup: SilenceSetup
    counts: Counter[str] = field(default_factory=Counter)
    """Pauses by who was stopped, and "deaths"."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.setup.seed)
        self.timeouts = Timeouts(total_s=self.setup.timeout_s)
        self.slack_s = self.timeouts.heartbeat_s + 2 * LATENCY_S + LONGEST_S + 2 * TICK_S
        self.judge = _Process()
        self.clock = self.setup.clock()
        self.members = Membership(1, suspect_s=self.timeouts.suspect_s, dead_s=self.timeouts.dead_s)
        self.tasks = {f"worker/{index}": _Task() for index in range(self.setup.tasks)}
        for index, task in enumerate(self.tasks.values()):
            join = Join(role="worker", index=index, stable_id=str(index), address="127.0.0.1:0")
            admitted = self.members.join(self.clock(0.0), join, limit=self.setup.tasks)
            assert isinstance(admitted, Admitted)
            task.incarnation = admitted.member.incarnation
        self.sent: list[tuple[float, str]] = []
        """Beats on their way: when they come, and whose they are."""
        self.pauses, self.kills = self.setup.pauses, self.setup.kills

    def run(self) -> Counter[str]:
        now_s, quiet_s = 0.0, 0.0
        # Long enough after the last event for every silence to be noticed.
        while self.pauses or self.kills or quiet_s < self.timeouts.dead_s + self.slack_s:
            now_s += MOMENT_S
            self._happens(now_s)
            self._beats(now_s)
            if self.judge.runs(now_s):
                quiet_s = quiet_s + MOMENT_S if not (self.pauses or self.kills) else 0.0
                self._judges(now_s)
        for name, task in self.tasks.items():
            require(task.dead or not task.killed, f"{name} was killed, and the judge still waits for it")
        return self.counts

    def _happens(self, now_s: float) -> None:
        """Now and then somebody is stopped or killed."""
        everybody = [self.judge, *(task for task in self.tasks.values() if not task.killed)]
        settled = all(one.runs(now_s) and now_s - one.since_s >= RUNS_S for one in everybody)
        if not settled or self.random.random() > MOMENT_S:
            return
        if self.kills and self.random.random() < 0.2:
            self.kills -= 1
            self.random.choice(list(self.tasks.values())).killed = True
            return
        if not self.pauses:
            return
        self.pauses -= 1
        kind = self.random.choice(["all", "judge", "tasks"])
        self.counts[kind] += 1
        chosen = {"all": everybody, "judge": [self.judge], "tasks": everybody[1:]}[kind]
        seconds = self.random.choice([0.2, 0.5, 1.1, 1.5, 3.0, 40.0]) * self.timeouts.dead_s
        for one in chosen:
            # A freezer takes one after another.
            one.stopped_until_s = one.since_s = now_s + seconds + self.random.random() * LATENCY_S

    def _beats(self, now_s: float) -> None:
        for name, task in self.tasks.items():
            if task.killed or not task.runs(now_s) or now_s < task.next_s:
                continue
            task.next_s = now_s + self.timeouts.heartbeat_s
            heapq.heappush(self.sent, (now_s + self.random.random() * LATENCY_S, name))

    def _judges(self, now_s: float) -> None:
        for task in self.tasks.values():
            if task.killed or not task.runs(now_s):
                task.unheard_s += MOMENT_S
        if now_s < self.judge.next_s:
            return
        self.judge.next_s = now_s + TICK_S
        reading_s = self.clock(now_s)
        while self.sent and self.sent[0][0] <= now_s and now_s >= self.judge.since_s + LATENCY_S:
            name = heapq.heappop(self.sent)[1]
            if self.members.heard(name, self.tasks[name].incarnation, reading_s):
                self.tasks[name].unheard_s = 0.0
        for change in self.members.tick(reading_s):
            if not change.member.living:
                self._died(change.member.task, change.sentence)

    def _died(self, name: str, sentence: str) -> None:
        task = self.tasks[name]
        task.dead = True
        self.counts["deaths"] += 1
        require(
            task.unheard_s >= self.timeouts.dead_s - self.slack_s,
            f"{sentence}, but in all the time that the judge ran it was not there for {task.unheard_s:.1f} s only",
        )
