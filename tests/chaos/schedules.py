"""What happens to a cluster, drawn from a seed. Pure: the same seed gives the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

TIMEOUT_S = 18.0
"""--timeout of the clusters: a silent task is dead after a third of it."""
DEAD_S = TIMEOUT_S / 3


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happens when the job has come a certain way.

    kind: "kill" (and started again), "away" (killed and kept away for `seconds`), "pause" (SIGSTOP, then SIGCONT),
    "cut" (no packet between task and peer, in both directions), "deaf" (nothing from peer reaches task), "slow" (what
    task sends goes at 1 Mbit/s).
    """

    at: float
    """Share of the job's steps that have been logged."""
    kind: str
    task: str
    seconds: float = 0.0
    peer: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} {self.task}" + (f" from {self.peer}" if self.peer else "")
        return f"at {self.at:.0%}: {what}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A job and what happens to it."""

    seed: int
    mode: str
    ps: int
    workers: int
    replicas: int
    steps: int
    every: int
    """Steps between two checkpoints."""
    clip_norm: float
    standbys: int
    networks: bool
    """Each task has a network of its own, whose links can be cut."""
    events: tuple[Event, ...]

    def __str__(self) -> str:
        about = f"seed {self.seed}: {self.mode}, {self.ps} ps, {self.workers} workers, {self.replicas} replicas"
        about += f", {self.steps} steps, a checkpoint every {self.every}"
        about += f", clip {self.clip_norm}" if self.clip_norm else ""
        about += f", {self.standbys} standby" if self.standbys else ""
        return "\n  ".join([about, *map(str, self.events)])


def draw(seed: int, *, networks: bool = True, standbys: bool = False) -> Schedule:
    """The schedule of a seed. networks: links may be cut, where the machine can do that."""
    dice = random.Random(seed)
    mode = "async" if seed % 5 in (3, 4) else "sync"
    ps, workers = dice.choice([2, 2, 3]), dice.choice([2, 2, 3])
    networks = networks and seed % 4 == 1
    tasks = [f"{role}/{index}" for role, count in (("ps", ps), ("worker", workers)) for index in range(count)]
    events, at = [], 0.0
    for _ in range(dice.choice([1, 2, 2, 3])):
        at += dice.uniform(0.08, 0.3)
        events.append(_event(dice, at, tasks, networks=networks))
    return Schedule(
        seed=seed,
        mode=mode,
        ps=ps,
        workers=workers,
        replicas=dice.choice([workers, workers + 1]) if mode == "sync" else 1,
        steps=80 if mode == "sync" else 240,
        every=dice.choice([7, 10, 15]) * (1 if mode == "sync" else 4),
        clip_norm=0.5 if mode == "sync" and dice.random() < 0.25 else 0.0,
        standbys=int(standbys and seed % 3 == 0),
        networks=networks,
        events=tuple(events),
    )


def _event(dice: random.Random, at: float, tasks: list[str], *, networks: bool) -> Event:
    victims = [*tasks, *tasks, "chief/0", "chief/0", "evaluator/0"]
    if networks and dice.random() < 0.7:
        kind = dice.choice(["cut", "cut", "deaf", "slow"])
        task = dice.choice([*tasks, "chief/0"])
        servers = [name for name in tasks if name.startswith("ps/")]
        peer = dice.choice(servers if task.startswith("worker/") and dice.random() < 0.5 else ["chief/0"])
        if task == "chief/0":
            peer = dice.choice(tasks)
        seconds = dice.choice([DEAD_S / 4, DEAD_S * 1.5])
        return Event(at=at, kind=kind, task=task, seconds=seconds, peer="" if kind == "slow" else peer)
    kind = dice.choice(["kill", "kill", "kill", "pause", "pause", "away"])
    if kind == "kill":
        return Event(at=at, kind=kind, task=dice.choice(victims))
    if kind == "pause":
        return Event(at=at, kind=kind, task=dice.choice(victims), seconds=dice.choice([DEAD_S / 4, DEAD_S * 1.4]))
    # Of two servers one can hold all shards, of two workers one can do all the work; a chief has no other.
    return Event(at=at, kind=kind, task=dice.choice(tasks), seconds=dice.choice([2.0, DEAD_S * 2.5]))
