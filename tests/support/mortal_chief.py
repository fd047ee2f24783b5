"""A cluster without a network whose chief can be killed and replaced by the next one."""

from __future__ import annotations

import json
from typing import Any

from shardline.core.orders import Phase
from shardline.core.spec import JobSpec
from shardline_chief.rules.actions import (
    Action,
    Command,
    Cut,
    JournalLine,
)
from shardline_chief.rules.program import Program
from shardline_chief.rules.replay import Remembered, obstacle, replay
from shardline_chief.rules.state.settings import ChiefSettings
from tests.support.chief_cluster import Cluster, make_job, phase


class Killed(Exception):
    """The chief's process has been killed."""


class Mortal(Cluster):
    """A cluster whose chief can be killed. Each chief has the next term and reads what earlier ones recorded."""

    def __init__(self, **fields: Any) -> None:
        self.entries: list[dict[str, Any]] = []
        self.kill_in = -1
        """Number of actions carried out before the chief is killed; negative: it stays alive."""
        self.changes: list[str] = []
        """Names of the newest chief's commands."""
        self.job: JobSpec | None = fields.get("job")
        super().__init__(**fields)

    @property
    def settings(self) -> ChiefSettings:
        return self.program.state.settings

    def act(self, action: Action) -> None:
        if self.kill_in == 0:
            raise Killed
        self.kill_in -= 1
        super().act(action)
        if isinstance(action, Command) and not self.held:
            self.changes.append(type(action.order).__name__)
        if isinstance(action, JournalLine):
            self.note(action.kind, **action.fields)

    def note(self, kind: str, **fields: Any) -> None:
        entry = {"kind": kind, "term": self.settings.term, "time": self.now_s, **fields}
        self.entries.append(json.loads(json.dumps(entry)))

    def next_chief(self, seconds: float = 1.0) -> Remembered:
        """The chief is dead for some seconds, then the next one starts."""
        self.kill_in = -1
        self.held.clear()
        self.held_saves.clear()
        self.led.clear()
        self.changes.clear()
        self.commands.clear()
        self.now_s += seconds
        old = self.settings
        remembered = replay(self.entries)
        fields = {
            name: getattr(old, name)
            for name in ("ps", "workers", "evaluators", "min_workers", "timeouts", "standbys", "shards")
        }
        settings = ChiefSettings(term=old.term + 1, chief_uuid="v", chief_address="chief:1", **fields)
        trained_s = self.now_s - remembered.began_s if remembered.began_s is not None else 0.0
        known = remembered if remembered.unfinished else None
        # As its user starts it again: the job may have changed meanwhile.
        job = self.job if self.job is not None else self.program.state.job
        assert job is None or not obstacle(remembered, job, settings)
        self.program: Program = Program(settings, self.now_s, job=job, remembered=known, trained_s=trained_s)
        self.note("chief", uuid="v", resume=None, takes_over=known is not None)
        self.settle()
        return remembered

    def hear(self) -> None:
        """All tasks send a heartbeat, and the chief handles them."""
        for task in list(self.lives):
            if not any(ps.dead for ps in self.ps if ps.task == task):
                self.beat(task)
        self.now_s += 0.1
        self.program.tick(self.now_s)
        self.settle()


def hear_twice(cluster: Mortal) -> None:
    cluster.hear()
    cluster.hear()


def mortal(**fields: Any) -> Mortal:
    cluster = Mortal(job=make_job(**fields))
    cluster.start()
    assert phase(cluster) is Phase.RUNNING
    return cluster


def cut(cluster: Mortal, step: int) -> None:
    for ps in cluster.ps:
        if ps.led:
            ps.obey(Cut(timeline=ps.timeline, step=step))
    cluster.advance(step)
