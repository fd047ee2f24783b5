"""What happens to a cluster, drawn from a seed. Pure: the same seed gives the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

TIMEOUT_S = 9.0
"""--timeout of the clusters: a silent task is dead after a third of it."""
DEAD_S = TIMEOUT_S / 3
SHORT_S = DEAD_S / 3
LONG_S = DEAD_S * 1.5
EPOCH = 32
"""Batches in one epoch of the small job."""
LINKS = ("cut", "deaf", "mute", "island", "slow")
EVERYBODY = "everybody"
KILLS = ("kill", "away", "together", "writing")
SPARE = "sync:spares=1"
PLAIN = 50
"""Seeds from this one on have one event more, of those that came later: earlier seeds stay what they were."""
NEGATIVE = 150
"""Seeds from this one on draw NO_STASH like other pipelines."""
NO_STASH = "no-stash"
"""The pipeline that trains nothing, which has to be exact all the same."""
APART = 200
"""Seeds from this one on draw, beside other pipelines, some whose replicas don't wait for each other."""
PROTECTED = 300
"""Seeds from this one on give standbys to every other one of these."""
PAUSED = 400
"""Seeds from this one on have a pause of the chief, or of everybody, beside what else happens."""
BESIDE = 500
"""Seeds from this one on draw SoftSync, jobs whose workers share layers, and for each job another one on its host."""
TEAM = (2, 6)
"""Last digits of the seeds, from BESIDE on, whose workers share layers; so do all neighbours."""
BEHIND = 600
"""Seeds from this one on draw jobs whose workers exchange through aggregators, or through one of them."""
TABLED = 700
"""Seeds from this one on have, in turn, the jobs of the first PLAIN ones with embedding tables, never clipped."""
MIRRORED = 800
"""Seeds from this one on have the jobs of those from TABLED on, whose workers hold all but the tables."""
GATHERED = (3, 7, 8, 9)
"""Last digits of the seeds, from BEHIND on, that do."""
PACED = "ssp:slack=1"
SUMMED = "softsync:n=1"
UNBROKEN = ("stash", "double-buffer", "vertical-sync", "ftpipe")
"""Pipelines without a flush that train."""
STAGED = (UNBROKEN[0], "flush", UNBROKEN[1], "gpipe", *UNBROKEN[2:])
UPWARDS = ("onebit", "topk:ratio=0.1", "twobit", "randomk:ratio=0.2", "qsgd", "powersgd")
CUT = (0, 2, 3, 9)
"""Last digits of the seeds, from PLAIN on, that draw a pipeline."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happens.

    kind: "kill" (and started again at once), "away" (killed, and started again after `seconds`), "pause" (SIGSTOP, then
    SIGCONT), "freeze" (the same for every task at once; task is EVERYBODY), "second" (another process is started in the
    same place), "together" (task and peer are killed in one moment), "writing" (killed while the next checkpoint is
    being written), and of links: "cut" (no packet between task and peer), "deaf" (nothing from peer reaches task),
    "mute" (nothing from task reaches peer), "island" (no packet between task and anybody), "slow" (what task sends goes
    at 1 Mbit/s), "reset" (connections from peer to task are reset, so that calls which task may have served are made
    again).
    """

    at: float = 0.0
    """Share of the job's steps that have been made; 0 = right after the event before."""
    after: float = 0.0
    """Seconds later."""
    kind: str
    task: str
    seconds: float = 0.0
    peer: str = ""

    def __str__(self) -> str:
        when = f"{self.after:.2f} s after " + (f"{self.at:.0%} of the steps" if self.at else "that")
        joint = "and" if self.kind == "together" else "from"
        what = f"{self.kind} {self.task}" + (f" {joint} {self.peer}" if self.peer else "")
        return f"{when}: {what}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


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
    clip_norm: float = 0.0
    codec: str = "raw"
    """Lossy ones with error_memory="exact"."""
    codec_down: str = ""
    apply: str = "server"
    tables: bool = False
    """The model has embedding tables."""
    own: bool = False
    """Each worker is also the ps with its index; one ps, which has the tables, is a process of its own."""
    topology: str = "flat"
    aggregators: int = 0
    pipeline: str = "whole-model"
    accumulate: int = 1
    """Microbatches of each replica in a step."""
    codec_parcels: str = ""
    standbys: int = 0
    networks: bool = False
    """Each task has a network of its own, whose links can be cut."""
    team: bool = False
    """Two workers share the layers of the model."""
    beside: Schedule | None = None
    """Another job, on the same host at the same time."""
    lane: str = "auto"
    events: tuple[Event, ...]

    @property
    def unbroken(self) -> bool:
        """Whether it is a pipeline without a flush."""
        return self.pipeline.partition(":")[0] in (*UNBROKEN, NO_STASH)

    @property
    def synchronous(self) -> bool:
        """Whether every step is one of the whole job."""
        return self.mode in ("sync", SPARE)

    @property
    def apart(self) -> bool:
        """Whether it is a pipeline whose replicas don't wait for each other: steps count the updates of a stage."""
        return self.pipeline != "whole-model" and not self.synchronous

    @property
    def batches(self) -> int:
        """Microbatches that are computed in all, if nothing happens."""
        return self.steps * self.accumulate * (1 if self.apart else self.replicas) * (self.workers if self.team else 1)

    def __str__(self) -> str:
        about = f"seed {self.seed}: {self.mode}, {self.ps} ps, {self.workers} workers"
        about += f", {self.replicas} replicas" if self.synchronous or self.apart else ""
        about += f", {self.steps} steps, a checkpoint every {self.every}"
        about += f", clip {self.clip_norm}" if self.clip_norm else ""
        about += f", codec {self.codec}" if self.codec != "raw" else ""
        about += f", {self.codec_down} down" if self.codec_down else ""
        if self.pipeline != "whole-model":
            about += f", pipeline {self.pipeline}, {self.accumulate} microbatches"
        about += f", parcels in {self.codec_parcels}" if self.codec_parcels else ""
        about += ", workers apply" if self.apply == "worker" else ""
        about += ", embedding tables" if self.tables else ""
        about += ", the rest among the workers" if self.own else ""
        about += f", topology {self.topology}" if self.topology != "flat" else ""
        about += f", {self.aggregators} of them" if self.aggregators else ""
        about += f", lane {self.lane}" if self.lane != "auto" else ""
        about += ", with standbys" if self.standbys else ""
        about += ", networks" if self.networks else ""
        about += ", workers share layers" if self.team else ""
        lines = [about, *map(str, self.events)]
        if self.beside is not None:
            lines += ["beside it", *str(self.beside).splitlines()]
        return "\n  ".join(lines)


def draw(seed: int, *, networks: bool = True, standbys: bool = True) -> Schedule:
    """The schedule of a seed: two of five asynchronous, one of three with links that fail, one of four with standbys.

    From PLAIN on, four of ten are cut into stages, two of the three asynchronous ones have bounded staleness, one has a
    spare, one a lossy codec, and in one workers run the optimizer. From APART on, replicas of two of the four cut into
    stages don't wait for each other, or not much.
    From PAUSED on, somewhere among the events the chief is paused, or everybody. From BESIDE on, another job runs on
    the same host, and two of ten jobs have workers that share layers. From BEHIND on, four of ten are synchronous
    jobs behind aggregators, most of them with a codec; what these seeds draw else is as if there were no BEHIND.
    From TABLED on, models have embedding tables. From MIRRORED on, workers hold everything else.
    networks, standbys: whether there may be any; without, a seed gives another schedule.
    """
    if seed >= MIRRORED:
        return _mirrored(draw(TABLED + seed - MIRRORED, networks=False, standbys=standbys), seed)
    if seed >= TABLED:
        plain = draw((seed - TABLED) % PLAIN, networks=networks, standbys=standbys)
        return replace(plain, seed=seed, tables=True, clip_norm=0.0)
    dice = random.Random(seed)
    mode = "async" if seed % 5 in (1, 4) else "sync"
    if seed >= PLAIN and seed % 10 in (1, 4):
        mode = "ssp:slack=2"
    if seed >= PLAIN and seed % 10 == 5:
        mode = SPARE
    if seed >= BESIDE and seed % 10 == 1:
        mode = SUMMED
    if seed >= BESIDE and seed % 10 in TEAM:
        return replace(_team(seed, dice), beside=_team(-seed, dice))
    if seed >= BEHIND and seed % 10 in GATHERED:
        return _gathered(seed, dice, standbys=standbys and seed // 10 % 2 == 1)
    cut = _pipeline(seed)
    if cut:
        mode = "sync"
    ps, workers = dice.choice([2, 2, 3]), dice.choice([2, 2, 3])
    networks = networks and seed % 3 == 1
    apply = cut.apply if cut else "worker" if seed >= PLAIN and seed % 10 == 7 else "server"
    # What no standby has: versions of parameters, and the state of an optimizer that workers run.
    lone = apply == "worker" or (cut is not None and cut.unbroken)
    apart = cut is not None and cut.mode != "sync"
    standbys = standbys and (seed >= PROTECTED and seed // 10 % 2 == 1 if apart else seed % 4 == 2 and not lone)
    synchronous = mode in ("sync", SPARE)
    clip = 0.5 if synchronous and dice.random() < 0.25 else 0.0
    counts = {"chief": 1, "ps": ps, "worker": workers, "evaluator": 1}
    replicas = dice.choice([workers, workers + 1]) if synchronous else 1
    every = dice.choice([7, 10, 15]) * (1 if synchronous else 3)
    up, down = _codecs(seed, every, standbys=standbys)
    drawn = Schedule(
        seed=seed,
        mode=mode,
        ps=ps,
        workers=workers,
        replicas=replicas,
        steps=110 if synchronous else 6 * EPOCH,
        every=every,
        clip_norm=clip,
        codec=up,
        codec_down=down,
        apply=apply,
        standbys=int(standbys),
        networks=networks,
        lane="auto" if networks else dice.choice(["auto", "auto", "tcp", "grpc"]),
        events=_events(dice, counts, networks=networks, later=seed >= PLAIN, paused=seed >= PAUSED),
    )
    drawn = cut.applied(drawn) if cut else drawn
    return replace(drawn, beside=_team(-seed, dice)) if seed >= BESIDE else drawn


def _mirrored(drawn: Schedule, seed: int) -> Schedule:
    """A schedule whose servers are in its workers' processes, but for one."""
    names = {f"ps/{index}": f"worker/{index % drawn.workers}" for index in range(drawn.ps)}
    names["ps/0"] = f"ps/{drawn.workers}"
    events = [replace(e, task=names.get(e.task, e.task), peer=names.get(e.peer, e.peer)) for e in drawn.events]
    return replace(drawn, seed=seed, own=True, ps=drawn.workers + 1, events=tuple(events))


def _team(seed: int, dice: random.Random) -> Schedule:
    counts = {"chief": 1, "ps": 2, "worker": 2, "evaluator": 1}
    return Schedule(
        seed=seed,
        mode="sync",
        ps=counts["ps"],
        workers=counts["worker"],
        replicas=1,
        steps=80,
        every=10,
        team=True,
        events=_events(dice, counts, networks=False, later=True, paused=True),
    )


def _gathered(seed: int, dice: random.Random, *, standbys: bool) -> Schedule:
    """Aggregators of one process each, or workers that are some; one or two events more are theirs."""
    topology = dice.choice(["aggregators", "aggregators", "local-sum"])
    count, workers, every = dice.choice([1, 2]), dice.choice([2, 3, 4]), dice.choice([7, 10, 15])
    counts = {"chief": 1, "ps": 2, "worker": workers, "evaluator": 1}
    events = list(_events(dice, counts, networks=False, later=True, paused=True))
    for _ in range(dice.choice([1, 2])):
        task = f"aggregator/{dice.randrange(count)}" if topology == "aggregators" else "worker/0"
        kind, seconds = dice.choice(
            [("kill", 0.0), ("kill", 0.0), ("away", 1.0), ("pause", SHORT_S), ("pause", LONG_S)]
        )
        event = Event(after=dice.uniform(0.0, DEAD_S), kind=kind, task=task, seconds=seconds)
        events.insert(dice.randrange(1, len(events) + 1), event)
    up = dice.choice(["raw", *UPWARDS])
    down = dice.choice(["", "bf16", *([] if standbys else [f"delta:by=int8,refresh={every}"])]) if up != "raw" else ""
    return Schedule(
        seed=seed,
        mode="sync",
        ps=counts["ps"],
        workers=workers,
        replicas=dice.choice([workers, workers + 1]),
        steps=110,
        every=every,
        clip_norm=dice.choice([0.0, 0.0, 0.5]),
        codec=up,
        codec_down=down,
        topology=topology,
        aggregators=count if topology == "aggregators" else 0,
        standbys=int(standbys),
        lane=dice.choice(["auto", "tcp", "grpc"]),
        events=tuple(events),
    )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A pipeline."""

    name: str
    unbroken: bool
    apply: str
    replicas: int
    accumulate: int
    codec_parcels: str

    mode: str = "sync"
    workers: int = 0
    """0 = as many as are drawn."""

    def applied(self, drawn: Schedule) -> Schedule:
        """The schedule of a job that is cut so."""
        apart = self.mode != "sync"
        return replace(
            drawn,
            mode=self.mode,
            workers=self.workers or drawn.workers,
            pipeline=self.name,
            replicas=self.replicas,
            accumulate=self.accumulate,
            codec_parcels=self.codec_parcels,
            clip_norm=0.0 if self.unbroken or apart else drawn.clip_norm,
            # Passes of several microbatches take longer.
            steps=60 * (self.replicas if apart else 1),
            every=drawn.every * (self.replicas if apart else 1),
        )


def _pipeline(seed: int) -> _Cut | None:
    """Every schedule in turn, first with servers and then with workers that run the optimizer."""
    if seed < PLAIN or seed % 10 not in CUT:
        return None
    dice = random.Random(f"pipeline of {seed}")
    if seed >= APART and seed % 10 in CUT[2:]:
        return _apart(seed, dice)
    number = (seed - PLAIN) // 10 * len(CUT) + CUT.index(seed % 10)
    names = STAGED if seed < NEGATIVE else (*STAGED, NO_STASH)
    name, apply = names[number % len(names)], ("server", "worker")[number // len(names) % 2]
    predict = name in UNBROKEN and apply == "worker" and dice.random() < 0.5
    return _Cut(
        name=f"{name}:predict=true" if predict else name,
        unbroken=name in (*UNBROKEN, NO_STASH),
        apply=apply,
        replicas=dice.choice([1, 2]),
        accumulate=dice.choice([2, 3, 4]),
        codec_parcels=dice.choice(["", "", "bf16", "int8"]),
    )


def _apart(seed: int, dice: random.Random) -> _Cut:
    """Every schedule in turn, alternating whether replicas may be as far ahead as they like."""
    names = (*STAGED, NO_STASH)
    number = (seed - APART) // 10 * 2 + (seed % 10 == CUT[3])
    name, paced = names[number % len(names)], number % 2 == 1
    return _Cut(
        name=name,
        unbroken=name in (*UNBROKEN, NO_STASH),
        apply="server",
        replicas=2 if paced else dice.choice([2, 3]),
        accumulate=dice.choice([2, 3, 4]),
        codec_parcels=dice.choice(["", "", "bf16", "int8"]),
        mode=PACED if paced else "async",
        # Who has stages of several replicas binds these to each other anyway.
        workers=6 if paced else 0,
    )


def _codecs(seed: int, every: int, *, standbys: bool) -> tuple[str, str]:
    """Codec of gradients and of parameters. every: steps between two checkpoints."""
    if seed < PLAIN or seed % 10 != 8:
        return "raw", ""
    dice = random.Random(f"codecs of {seed}")
    up = dice.choice(UPWARDS)
    return up, dice.choice(["", "bf16", *([] if standbys else [f"delta:by=int8,refresh={every}"])])


def _events(
    dice: random.Random, counts: dict[str, int], *, networks: bool, later: bool, paused: bool
) -> tuple[Event, ...]:
    """One to three events; some follow the one before at once, in the middle of what comes of it."""
    events: list[Event] = []
    at = 0.0
    for _ in range(dice.choice([1, 2, 2, 3])):
        if events and dice.random() < 0.35:
            place = (0.0, dice.choice([0.0, dice.uniform(0.0, DEAD_S)]))
        else:
            at += dice.uniform(0.1, 0.28)
            place = (round(at, 2), dice.uniform(0.0, 0.1))
        events.append(_event(dice, place, counts, links=networks and dice.random() < 0.75))
    if later:
        events.append(_later(dice, counts, networks=networks))
    if paused:
        events.insert(dice.randrange(len(events)), _pause(dice))
    # Where the first chief is killed meanwhile, a second one takes over, as it should.
    dies = any(event.task == "chief/0" and event.kind in KILLS for event in events)
    return tuple(event for event in events if event.kind != "second" or not dies)


def _later(dice: random.Random, counts: dict[str, int], *, networks: bool) -> Event:
    """An event after the others, of a kind that seeds before PLAIN do not have."""
    ps, worker = f"ps/{dice.randrange(counts['ps'])}", f"worker/{dice.randrange(counts['worker'])}"
    at, after = round(dice.uniform(0.7, 0.8), 2), dice.uniform(0.0, 0.1)
    kind = "reset" if networks else dice.choice(["together", "writing"])
    if kind == "reset":
        task = dice.choice([ps, "chief/0"])
        return Event(at=at, after=after, kind=kind, task=task, peer=worker, seconds=SHORT_S / 4)
    if kind == "together":
        task, peer = dice.choice([("chief/0", ps), ("chief/0", worker), (ps, worker)])
        return Event(at=at, after=after, kind=kind, task=task, peer=peer)
    return Event(at=at, after=after, kind=kind, task=dice.choice(["chief/0", ps]))


def _pause(dice: random.Random) -> Event:
    """An event right after the one before, or at the beginning: whoever judges silences is stopped meanwhile."""
    kind, task = dice.choice([("pause", "chief/0"), ("freeze", EVERYBODY)])
    return Event(after=dice.uniform(0.0, DEAD_S), kind=kind, task=task, seconds=dice.choice([SHORT_S, LONG_S]))


def _event(dice: random.Random, place: tuple[float, float], counts: dict[str, int], *, links: bool) -> Event:
    at, after = place
    names = {role: [f"{role}/{index}" for index in range(count)] for role, count in counts.items()}
    everybody = [name for role in names for name in names[role]]
    role = dice.choices(["worker", "ps", "chief", "evaluator"], [4, 4, 3, 1])[0]
    task = dice.choice(names[role])
    if links:
        kind = dice.choice(LINKS)
        role = dice.choices(["worker", "ps", "chief"], [4, 3, 2])[0]
        task = dice.choice(names[role])
        peer = ""
        if kind in ("cut", "deaf", "mute"):
            others = {"worker": names["ps"] + names["chief"], "ps": names["worker"] + names["chief"]}
            peer = dice.choice(others.get(role, [name for name in everybody if name != task]))
        return Event(at=at, after=after, kind=kind, task=task, peer=peer, seconds=dice.choice([SHORT_S, LONG_S]))
    kind = dice.choices(["kill", "pause", "away", "second"], [5, 3, 2, 2 if role == "chief" else 0])[0]
    seconds = {"kill": 0.0, "second": 0.0, "pause": dice.choice([SHORT_S, LONG_S])}.get(kind)
    # Of two servers one can hold all shards, of two workers one can do all the work.
    away = dice.choice([1.0, DEAD_S * 2])
    return Event(at=at, after=after, kind=kind, task=task, seconds=away if seconds is None else seconds)
