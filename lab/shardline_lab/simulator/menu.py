"""What a job could choose on a cluster: each choice simulated, the fastest first. Only speed is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import shardline_pipeline as pipeline
from shardline import cadence as cadences, codecs, consistency
from shardline.cadence import CADENCES, Sends
from shardline.codecs import CODECS
from shardline.codecs.auto import undecided
from shardline.codecs.base import Memory
from shardline.consistency import CONSISTENCIES, Gives
from shardline.division import PIPELINES, WholeModel
from shardline.errors import JobError
from shardline.job import Job
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Setup, timing_contents
from shardline_lab.simulator.stages import simulated as simulation, stage_buckets
from shardline_pipeline import PipelineSchedule

PASSES = 1500
"""Passes of all workers that a choice is simulated for, at least."""
STEPS = 30
"""Steps that a choice is simulated for, at least."""
ALIKE = {"consistency": "sync", "cadence": "every-step"}
"""What every pipeline takes."""
FIELDS = ("pipeline", "consistency", "codec", "cadence", "replicas")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Fields of a job that decide how it uses its cluster."""

    consistency: str
    codec: str
    cadence: str
    replicas: int
    pipeline: str = str(WholeModel())

    def of(self, job: Job) -> Job:
        """The job with this choice. Raises JobError where it can't have it."""
        return dataclasses.replace(job, **dataclasses.asdict(self))

    def lines(self, job: Job) -> list[str]:
        """What has to change in the job file."""
        return [f"{name}={getattr(self, name)!r}," for name in FIELDS if getattr(self, name) != getattr(own(job), name)]


@dataclass(frozen=True, kw_only=True)
class Row:
    choice: Choice
    result: Result
    samples_per_s: float
    codec: str
    """Of both directions."""
    ticks: int | None
    """Passes that make one step; None = their number changes during the job."""


@dataclass(frozen=True, kw_only=True)
class Menu:
    rows: Sequence[Row]
    """The fastest first; of those that are equally fast, the one with the least staleness, then the fewest changes of
    the job, then the fewest bytes."""
    refused: Sequence[tuple[Choice, str]]
    """Those that the job can't have, and why."""


def own(job: Job) -> Choice:
    return Choice(
        consistency=str(job.consistency),
        codec=str(job.codec),
        cadence=str(job.cadence),
        replicas=job.replicas,
        pipeline=str(job.pipeline),
    )


def choices(job: Job, workers: int, stages: int = 1) -> Iterator[Choice]:
    """The job's own choice, and every mode and codec with their defaults; local training where every step is of all.

    A job with fewer replicas than there are workers gets as many as these; then steps that don't wait for the slowest
    one are compared too. Left out: cadences that change during a job, which have no speed of their own, and codecs with
    an error memory, whose effect on the loss can't be simulated. With stages, every pipeline that the model can have,
    those with a warning aside.
    """
    mine = own(job)
    yield mine
    replicas = max(job.replicas, workers)
    # Others than `codec` are the job's in every choice.
    fixed = job.codec_up or job.codec_down or job.codec_tensors
    plain = [codec for codec in (kind() for kind in CODECS) if codec.memory is Memory.NONE and not undecided(codec)]
    compared = [mine.codec] if fixed else [str(codec) for codec in plain if not codec.at_server.votes]
    spares = [CONSISTENCIES.parse("sync:spares=1")] if replicas > 1 else []
    for mode in (*(kind() for kind in CONSISTENCIES), *spares):
        of_all = {Gives.COMMON_STEPS, Gives.EVERY_GRADIENT} <= mode.gives
        for codec in compared:
            for cadence in (kind() for kind in CADENCES):
                if not cadence.rounds.uniform or (cadence.sends is Sends.DELTAS and not of_all):
                    continue
                count = replicas if mode.assigns_replicas else job.replicas
                choice = Choice(consistency=str(mode), codec=codec, cadence=str(cadence), replicas=count)
                if choice != mine:
                    yield choice
    schedules = [one for kind in PIPELINES if isinstance(one := kind(), PipelineSchedule) and not one.warning]
    for schedule in schedules if stages > 1 else ():
        for codec in compared:
            count = max(1, workers // stages)
            choice = Choice(**ALIKE, codec=codec, replicas=count, pipeline=str(schedule))
            if choice != mine:
                yield choice


def simulated(job: Job, setup: Setup) -> Menu:
    """Simulate every choice. setup: the cluster and the compute times; its job and steps are not used."""
    rows: list[Row] = []
    known: dict[tuple[object, ...], Result] = {}
    refused: list[tuple[Choice, str]] = []
    in_stages = len(setup.stages.times) if setup.stages is not None else 1
    for choice in choices(job, setup.workers, in_stages):
        try:
            chosen = choice.of(job)
            spec = chosen.spec(chosen.build_model())
        except JobError as error:
            refused.append((choice, str(error)))
            continue
        mode, pace = consistency.of(spec.consistency), cadences.of(spec)
        passes = spec.replicas * pace.rounds.ticks if mode.assigns_replicas else pace.rounds.ticks
        passes *= spec.accumulate * pipeline.stages(spec) if pipeline.of(spec).staged else 1
        result = _result(dataclasses.replace(setup, job=spec, steps=max(STEPS, PASSES // passes)), known)
        samples = job.batch_size * job.accumulate
        rows.append(
            Row(
                choice=choice,
                result=result,
                samples_per_s=result.passes_per_s * samples,
                codec=str(codecs.of(spec)),
                ticks=pace.rounds.ticks if pace.rounds.uniform else None,
            )
        )
    # Two digits: choices that differ by less are equally fast, as far as a simulation can tell.
    rows.sort(
        key=lambda row: (
            -float(f"{row.samples_per_s:.1e}"),
            row.result.staleness,
            len(row.choice.lines(job)),
            row.result.push_bytes,
        )
    )
    return Menu(rows=rows, refused=refused)


def _result(setup: Setup, known: dict[tuple[object, ...], Result]) -> Result:
    """The simulation's result, shared by codecs of the same size."""
    job = setup.job
    if pipeline.of(job).staged:
        plan = setup.plan()
        moved = tuple((*one.push_bytes, *one.pull_bytes) for own in stage_buckets(setup, plan) for _, one in own)
        place = (job.pipeline, job.replicas, moved)
        if place not in known:
            known[place] = simulation(setup)
        return known[place]
    contents = timing_contents(setup)
    sizes = tuple(
        (tuple(bucket.push_bytes), tuple(bucket.pull_bytes)) for server in contents.buckets for bucket in server
    )
    exact = all(codec.exact for codec in codecs.of(job).ups)
    key = (job.consistency, job.cadence, job.replicas, exact, sizes)
    if key not in known:
        known[key] = simulation(setup, contents)
    return known[key]
