"""stages="auto", and cuts="auto" of Pipeline.split: every process finds the cuts by itself.

From shapes alone, on a machine that is the same for all. Nothing is measured, since processes would measure different
times. `shardline partition` measures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardline.core.settings import WORKER
from shardline.errors import JobError, JobExitError
from shardline_pipeline import tensor_parallel
from shardline_pipeline.balance import balanced
from shardline_pipeline.partition.costs import Cluster, Costs, LayerTraffic, LinkLevel
from shardline_pipeline.partition.measure import shapes
from shardline_pipeline.partition.profile import Layer, Profile, coded
from shardline_pipeline.schedules.flushed import Flush
from shardline_pipeline.staged import StagedModel, wanted_stages

if TYPE_CHECKING:
    from shardline.job import Job

FLOPS_PER_S, MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 50e9, 10e9, 1.25e9
"""Of the machine that all models are cut for: about one core, and 10 Gbit/s."""


def cuts_for(model: StagedModel, job: Job) -> tuple[list[int], Profile] | None:
    """Those of a model's in_layers() that begin a stage, where its cuts are "auto" or "auto:N", and what layers need.

    Computes the job's first microbatch, forward, with all that this changes in the model. "auto" makes as many stages
    as the model names workers for, else as there are workers for each replica, or teams of those that share layers.
    None where neither is known: the model stays uncut, and says so when it is asked for its stages. Raises JobError
    where the microbatch can't be computed, or the model has too few layers, and what in_layers() and Job.data_order()
    raise.
    """
    count = wanted_stages(model.automatic, model.cuts_option) or len(model.hosts) or _teams(job)
    if not count:
        return None
    if job.samples:
        # Too few samples are no matter of shapes.
        job.data_order()
    # Layers that can't begin a stage, since workers that share layers have what comes in in parts. Raises what
    # shared_layers() does, such as for a model that is traced.
    shared = tensor_parallel.shared_layers(model, job.tensor_parallel, in_stages=False) if job.tensor_ranks > 1 else ()
    pairs = [[int(name.partition(".")[0]) for name in pair] for pair in tensor_parallel.handed_in_parts(shared)]
    apart = {number for left, right in pairs for number in range(left + 1, right + 1)}
    layers = model.in_layers()
    try:
        profile = shapes(layers, job)
    except JobExitError:
        raise
    except JobError as error:
        raise JobError(
            f"{model.cuts_option}={model.automatic!r} looks at the shapes of the job's first microbatch, but {error}; "
            "or give what begins a stage, as `shardline partition` finds it"
        ) from error
    parted = replace(profile, joined=tuple(sorted({*profile.joined, *apart})))
    homes = model.hosts or [(number,) for number in range(count)]
    # With the optimizer on the one worker that has a stage, nothing is exchanged.
    exchanged = job.apply != WORKER or job.replicas > 1
    codec = str(job.codec_parcels)
    return cuts(parted, homes, job.accumulate * job.contributors, exchanged=exchanged, codec=codec), profile


def _teams(job: Job) -> int:
    """Workers for each replica, or teams of those that share layers; 0 = unknown."""
    ranks = job.tensor_ranks if job.tensor_parallel else 1
    return max(1, job.workers // (job.contributors * ranks)) if job.workers else 0


def cuts(
    profile: Profile, homes: Sequence[Sequence[int]], microbatches: int, *, exchanged: bool = True, codec: str = ""
) -> list[int]:
    """The layers that begin a stage, so that the worker that takes longest takes as little time as possible.

    Time is that of computing and of the link, one after the other, by flops and bytes. Of equals: fewest bytes of
    activations. homes: workers of each stage. microbatches: of a step, of all replicas. exchanged: parameters with the
    servers. codec: the job's codec_parcels. Raises JobError for more stages than the model can have, with the names of
    those layers.
    """
    costs = Costs(
        profile=nominal(profile),
        cluster=Cluster(levels=(LinkLevel(count=sum(map(len, homes)), bytes_per_s=LINK_BYTES_PER_S),)),
        schedule=Flush(),
        microbatches=microbatches,
        exchange=() if exchanged else [LayerTraffic(push_bytes=0.0, pull_bytes=0.0)] * len(profile.layers),
        coded=coded(profile, codec),
    )

    # Stages on as many workers have the same sizes.
    @functools.cache
    def size(first: int, end: int, count: int) -> tuple[float, float]:
        if not costs.stage_allowed(first, end):
            return math.inf, 0.0
        own = first, end, count
        return costs.compute_s(*own) + costs.link_s(*own), sum(costs.activation_bytes(*own))

    # As with a number of stages: one begins with a trained layer, so that activation functions stay with theirs.
    trained = [n for n in range(1, costs.count) if costs.cut_allowed(n) and profile.layers[n].trained_bytes]
    points = [0, *trained, costs.count]
    found = balanced(points, len(homes), lambda stage, first, end: size(first, end, len(homes[stage])), homes)
    if found is None:
        raise JobError(_too_many(costs, len(homes)))
    return found


def nominal(profile: Profile) -> Profile:
    """The profile with the times of that machine: what a layer multiplies, or what it reads and writes."""
    layers: list[Layer] = []
    given = 0
    for layer in profile.layers:
        moved = given + layer.output_bytes + layer.trained_bytes + layer.fixed_bytes
        seconds = max(layer.flops / FLOPS_PER_S, moved / MEMORY_BYTES_PER_S)
        layers.append(replace(layer, forward_s=seconds, backward_s=2 * seconds))
        given = layer.output_bytes
    return replace(profile, layers=tuple(layers))


def _too_many(costs: Costs, count: int) -> str:
    starts, first = [], 0
    for end in range(1, costs.count + 1):
        if costs.stage_allowed(first, end):
            starts.append(next(n for n in range(first, end) if costs.profile.layers[n].trained_bytes))
            first = end
    names = ", ".join(costs.profile.layers[number].name for number in starts[:8])
    tied = costs.profile.joined
    why = (
        f" (no stage can begin with layer {', '.join(map(str, tied[:8]))}: weights, or outputs in parts, are shared "
        "across it)"
        if tied
        else ""
    )
    kind, name = ("Pipeline.split", "cuts") if costs.profile.split else ("Pipeline", "stages")
    return (
        f"{kind}: {count} stages of {costs.count} layers, but each needs a layer that is trained, and the model has "
        f"{len(starts)} of them: {names}{', ...' if len(starts) > 8 else ''}{why}; give at most "
        f'{name}="auto:{max(1, len(starts))}", or start fewer workers'
    )
