"""Where a model is cut: the search equals looking at everything, and what it chooses in cases whose answer is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from shardline.errors import UsageError
from shardline_pipeline import PipelineSchedule, schedule_named
from shardline_pipeline.balance import balanced
from shardline_pipeline.base import StageLayout
from shardline_pipeline.partition.choose import choose, joined, mixed, pack, rated, refined, stages_of
from shardline_pipeline.partition.costs import ALL_REDUCE, SERVERS, Cluster, Costs, LinkLevel, PlannedStage, Stages
from shardline_pipeline.partition.dynamic import candidates
from shardline_pipeline.partition.forecast import asynchronous_times, forecast_of
from shardline_pipeline.partition.profile import Handed, Layer, Profile

STASH, FLUSH, GPIPE = (schedule_named(name) for name in ("stash", "flush", "gpipe"))
LATER = [schedule_named(name) for name in ("vertical-sync", "double-buffer", "ftpipe")]
SCHEDULES = [schedule_named(name) for name in ("gpipe", "flush", "stash", "vertical-sync", "double-buffer")]


def layers(*sizes: tuple[float, int, int, int]) -> tuple[Layer, ...]:
    """Of (seconds, bytes of weights, of the output, of what is kept); each keeps storages of its own."""
    return tuple(
        Layer(
            name=str(number), forward_s=seconds / 3, backward_s=seconds * 2 / 3, trained_bytes=weights,
            handed=(Handed(dtype="uint8", shape=(output,), needs_grad=True),), output=((2 * number, output),),
            saved=((2 * number + 1, held),),
        )
        for number, (seconds, weights, output, held) in enumerate(sizes)
    )  # fmt: skip


def cases(*, deep: bool = False, count: int = 400) -> Iterator[Costs]:
    """Small models on small clusters. deep: with groups of workers."""
    for seed in range(count):
        rng = random.Random(seed)
        sizes = [(rng.randint(0, 9), rng.choice([0, 1, 5, 30]), rng.randint(0, 9), rng.randint(0, 9)) for _ in range(4)]
        sizes = sizes[: rng.randint(1, 4)] if deep else [*sizes, (1, 3, 0, 2)][rng.randint(0, 3) :]
        counts = rng.choice([(1, 2), (2, 1), (2, 2), (3, 2)] if deep else [(1,), (2,), (3,), (4,)])
        levels = tuple(LinkLevel(count=one, bytes_per_s=rng.choice([1.0, 2.0, 8.0, math.inf])) for one in counts)
        memory = math.inf if deep else rng.choice([60.0, 150.0, math.inf, math.inf])
        sync = rng.choice([SERVERS, ALL_REDUCE])
        cluster = Cluster(levels=levels, servers=rng.randint(1, 2), sync=sync, memory_bytes=memory)
        tied = (rng.randint(1, len(sizes) - 1),) if len(sizes) > 1 and rng.random() < 0.3 else ()
        yield Costs(
            profile=Profile(layers=layers(*sizes), samples=1, joined=tied), cluster=cluster,
            schedule=rng.choice([FLUSH, GPIPE, STASH, *LATER]), microbatches=rng.randint(1, 6),
            bucket_bytes=rng.choice([0.0, 2.0, 10.0]),
        )  # fmt: skip


def splits(total: int) -> Iterator[tuple[int, ...]]:
    """Ordered sums of positive numbers."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in splits(total - first):
            yield (first, *rest)


def every_flat_plan(count: int, workers: int) -> Iterator[Stages]:
    for lengths in splits(count):
        for used in range(len(lengths), workers + 1):
            for copies in splits(used):
                if len(copies) == len(lengths):
                    ends, homes = list(itertools.accumulate(lengths)), list(itertools.accumulate(copies))
                    yield tuple(
                        PlannedStage(first=end - length, end=end, workers=tuple(range(home - number, home)))
                        for length, end, number, home in zip(lengths, ends, copies, homes, strict=True)
                    )


def layer_seconds(costs: Costs, first: int, end: int) -> float:
    """Of one microbatch, both ways."""
    again = 1 if costs.schedule.recompute else 0
    return sum((1 + again) * one.forward_s + one.backward_s for one in costs.profile.layers[first:end])


def stage_seconds(costs: Costs, stage: PlannedStage) -> float:
    """A worker of a stage, from the definitions: what it computes, and what its link carries."""
    own, copies, all_layers = costs.profile.layers[stage.first : stage.end], len(stage.workers), costs.profile.layers
    weights = sum(one.trained_bytes for one in own)
    sent = weights if costs.cluster.sync == SERVERS else 2 * (copies - 1) / copies * weights
    # The same both ways: activations and gradients are equally large here.
    ends = sum(all_layers[number].output_bytes for number in (stage.first - 1, stage.end - 1) if number >= 0)
    ends -= all_layers[-1].output_bytes if stage.end == len(all_layers) else 0
    computing = math.ceil(costs.microbatches / copies) * layer_seconds(costs, stage.first, stage.end)
    return max(computing, (sent + costs.microbatches / copies * ends) / costs.cluster.levels[0].bytes_per_s)


def best(costs: Costs, *, copies: int | None = None) -> Stages | None:
    """The fastest candidate; of equals, the one whose busiest worker has least to do, then the fewest bytes."""

    def rank(plan: Stages) -> tuple[float, float, float]:
        found = forecast_of(costs, plan)
        return found.seconds, max(*found.compute_s, *found.link_s), found.bytes

    return min(candidates(costs, copies=copies), key=rank, default=None)


def subsets(count: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in range(1, count + 1))


def flushed_seconds(costs: Costs, plan: Stages) -> float:
    """A step with a flush, from the definitions: any stages' exchanges take as long as a link needs for them."""
    rate, all_layers = costs.cluster.levels[0].bytes_per_s, costs.profile.layers
    servers = costs.cluster.servers * costs.cluster.levels[-1].bytes_per_s
    spans = [(stage.first, stage.end, len(stage.workers)) for stage in plan]
    both = [
        sum(one.seconds for one in all_layers[first:end])
        + (2 * all_layers[end - 1].output_bytes / rate if end < costs.count else 0.0)
        for first, end, _ in spans
    ]
    rests = []
    for first, end, copies in spans:
        ends = [all_layers[number].output_bytes for number in (first - 1, end - 1) if 0 <= number < costs.count - 1]
        others = math.ceil(costs.microbatches / copies) - 1
        rests += [others * sum(one.seconds for one in all_layers[first:end]), others * sum(ends) / rate]
    passes = sum(both) + max(rests)
    if len(plan) == 1:
        # Gradients leave, and parameters come, layer by layer.
        spans = [(layer, layer + 1, spans[0][2]) for layer in range(costs.count)]
        both = [one.seconds for one in all_layers]
    weights = [sum(one.trained_bytes for one in all_layers[first:end]) for first, end, _ in spans]
    late = [sum(both[:number]) for number in range(len(spans))]
    waits = [0.0]
    for chosen in subsets(len(spans)):
        # The last of them is done first, and has to be there last.
        room = late[max(chosen)]
        own = [
            weights[n] if costs.cluster.sync == SERVERS else 2 * (spans[n][2] - 1) / spans[n][2] * weights[n]
            for n in chosen
        ]
        room -= last_seconds(costs, weights[max(chosen)])
        if len(plan) == 1 or len(chosen) == 1:
            waits.append(sum(own) / rate - room)
        if costs.cluster.sync == SERVERS:
            waits.append(sum(weights[n] * spans[n][2] for n in chosen) / servers - room)
    return passes + max(waits)


def last_seconds(costs: Costs, weights: float) -> float:
    """The last buckets of parameters, one of each server, over a worker's link."""
    if costs.cluster.sync != SERVERS:
        return 0.0
    return min(weights, costs.bucket_bytes * costs.cluster.servers) / costs.cluster.levels[0].bytes_per_s


def overlapped_seconds(costs: Costs, plan: Stages) -> float:
    """A step, if nothing had to wait for anything else."""
    load = sum(len(s.workers) * sum(o.trained_bytes for o in costs.profile.layers[s.first : s.end]) for s in plan)
    links = costs.cluster.servers * costs.cluster.levels[-1].bytes_per_s
    shared = load / links if costs.cluster.sync == SERVERS else 0.0
    return max([shared, *(stage_seconds(costs, stage) for stage in plan)])


def unbroken_seconds(costs: Costs, plan: Stages) -> float:
    """A step without a flush, from the definitions: that, and how long what follows each other takes."""
    rate, servers = costs.cluster.levels[0].bytes_per_s, costs.cluster.servers * costs.cluster.levels[-1].bytes_per_s
    found, name = [overlapped_seconds(costs, plan)], costs.schedule.name
    for number, stage in enumerate(plan):
        copies, later = len(stage.workers), plan[number:]
        count = math.ceil(costs.microbatches / copies)
        ahead, most = (
            math.floor((copies + behind - 1) / copies)
            for behind in (sum(len(s.workers) for s in later[1:]), sum(len(s.workers) for s in plan) - copies)
        )
        way = sum(layer_seconds(costs, s.first, s.end) for s in later)
        way += sum(2 * costs.profile.layers[s.end - 1].output_bytes / rate for s in later[:-1])
        longest = max(layer_seconds(costs, s.first, s.end) / len(s.workers) for s in later) * copies
        weights = sum(one.trained_bytes for one in costs.profile.layers[stage.first : stage.end])
        if costs.cluster.sync == SERVERS:
            exchange = max(weights / rate, copies * weights / servers) + last_seconds(costs, weights)
        else:
            exchange = 2 * (copies - 1) / copies * weights / rate
        own = count * layer_seconds(costs, stage.first, stage.end)
        found += [way * count / (ahead + 1), exchange + (own if name == "ftpipe" else 0.0)]
        # Which microbatch of which later step needs the update first, and how many of its step come after it.
        needs = {"double-buffer": count, "vertical-sync": most}.get(name, ahead)
        found.append((exchange + way + (count - 1 - needs % count) * longest) / (1 + needs // count))
    return max(found)


def plan_seconds(costs: Costs, plan: Stages) -> float:
    """What a plan takes."""
    return (flushed_seconds if costs.schedule.flushes else unbroken_seconds)(costs, plan)


def allowed(costs: Costs, plan: Stages) -> bool:
    behind, slots = 0, sum(len(stage.workers) for stage in plan)
    for stage in reversed(plan):
        copies = len(stage.workers)
        if not any(one.trained_bytes for one in costs.profile.layers[stage.first : stage.end]):
            return False
        if stage.first in costs.profile.joined:
            return False
        needed = costs.memory_bytes(stage.first, stage.end, copies=copies, behind=behind, slots=slots)
        if needed > costs.cluster.memory_bytes:
            return False
        behind += copies
    return True


def test_the_flat_search_equals_looking_at_every_plan() -> None:
    chosen = 0
    for costs in cases():
        every = [plan for plan in every_flat_plan(costs.count, costs.cluster.workers) if allowed(costs, plan)]
        found = best(costs)
        assert (found is None) == (not every), costs
        if found is not None:
            assert allowed(costs, found), costs
            seconds = {round(plan_seconds(costs, plan), 9) for plan in every}
            assert plan_seconds(costs, found) == pytest.approx(min(seconds)), costs
            chosen += len(seconds) > 1
    assert chosen > 200


def every_nested(costs: Costs, level: int, i: int, j: int, count: int, copies: int) -> Iterator[tuple[float, float]]:
    """(seconds, bytes for the servers) of every way to run layers on exactly `count` components: no table, no bound."""
    for end, taken in itertools.product(range(i + 1, j + 1), range(1, count + 1)):
        if (end < j) != (taken < count):
            continue
        rest = every_nested(costs, level, end, j, count - taken, copies) if end < j else iter([(0.0, 0.0)])
        others = list(rest)
        for seconds, load in every_part(costs, level, i, end, taken, copies * taken):
            for slower, more in others:
                yield max(seconds, slower), load + more


def every_part(costs: Costs, level: int, i: int, j: int, taken: int, copies: int) -> Iterator[tuple[float, float]]:
    weights = sum(one.trained_bytes for one in costs.profile.layers[i:j])
    ends = (costs.profile.layers[i - 1].output_bytes if i else 0) + (
        costs.profile.layers[j - 1].output_bytes if j < costs.count else 0
    )
    servers, link = costs.cluster.sync == SERVERS, costs.cluster.levels[level].bytes_per_s
    ring = 2 * (taken - 1) / taken * weights
    if level == 0:
        if costs.stage_allowed(i, j):
            computing = math.ceil(costs.microbatches / copies) * sum(o.seconds for o in costs.profile.layers[i:j])
            sent = (weights if servers else ring) + costs.microbatches / copies * ends
            yield max(computing, sent / link), taken * (weights if servers else 0)
        return
    for used in range(1, costs.cluster.levels[level - 1].count + 1):
        for seconds, load in every_nested(costs, level - 1, i, j, used, copies):
            sent = (load if servers else ring) + costs.microbatches / copies * ends
            yield max(seconds, sent / link), taken * load


def test_the_hierarchical_search_equals_looking_at_every_plan() -> None:
    for costs in cases(deep=True, count=60):
        costs = replace(costs, schedule=STASH)
        top = costs.cluster.levels[-1]
        every = [
            max(seconds, load / (costs.cluster.servers * top.bytes_per_s))
            for used in range(1, top.count + 1)
            for seconds, load in every_nested(costs, len(costs.cluster.levels) - 1, 0, costs.count, used, 1)
        ]
        plans = list(candidates(costs))
        assert (not plans) == (not every), costs
        for plan in plans:
            homes = [worker for stage in plan for worker in stage.workers]
            assert len(homes) == len(set(homes)) and set(homes) <= set(range(costs.cluster.workers))
            assert [stage.first for stage in plan] == [0, *(stage.end for stage in plan[:-1])]
            assert plan[-1].end == costs.count
        if plans and costs.cluster.sync == SERVERS:
            # What the forecast adds up link by link is what the search has added up level by level.
            found = [asynchronous_times(costs, plan) for plan in plans]
            seconds = [max(times[name] for name in ("computing", "links", "servers")) for times in found]
            assert min(seconds) == pytest.approx(min(every)), costs


def test_the_forecast_of_a_plan_is_what_the_search_compares() -> None:
    for costs in cases():
        for plan in itertools.islice(every_flat_plan(costs.count, costs.cluster.workers), 20):
            assert forecast_of(costs, plan).seconds == pytest.approx(plan_seconds(costs, plan)), (costs, plan)


def several_are_balanced(seed: int) -> bool:
    """Compare the cuts of one model with all others; whether one worker has several stages, and cuts matter."""
    rng = random.Random(seed)
    count = rng.randint(2, 7)
    seconds, closed = [float(rng.randint(0, 9)) for _ in range(count)], {rng.randint(1, 8) for _ in range(2)}
    stages, people = rng.randint(1, min(5, count)), rng.randint(1, 4)
    homes = [tuple(rng.sample(range(people), rng.randint(1, min(2, people)))) for _ in range(stages)]

    def size(stage: int, first: int, end: int) -> tuple[float, float]:
        return (math.inf if first in closed else sum(seconds[first:end]) / len(homes[stage])), 0.0

    def largest(cuts: Sequence[int]) -> float:
        has = dict.fromkeys(range(people), 0.0)
        for stage, (first, end) in enumerate(itertools.pairwise([0, *cuts, count])):
            for worker in homes[stage]:
                has[worker] += size(stage, first, end)[0]
        return max(has.values())

    every = [largest(cuts) for cuts in itertools.combinations(range(1, count), stages - 1)]
    found = balanced(range(count + 1), stages, size, homes)
    assert (found is None) == (min(every) == math.inf), seed
    assert found is None or largest(found) == pytest.approx(min(every)), seed
    return len(set(itertools.chain(*homes))) < sum(map(len, homes)) and len(set(every)) > 1


def test_cuts_for_given_workers_equal_looking_at_all_of_them() -> None:
    assert sum(map(several_are_balanced, range(400))) > 100


def test_workers_with_many_stages_are_balanced_before_the_test_s_time_is_up() -> None:
    """All splits of these layers would take hours."""
    rng, layers, homes = random.Random(3), 48, [(0,), (1,)] * 4
    ends = [0.0, *itertools.accumulate(rng.uniform(0.1, 1.0) for _ in range(layers))]
    cuts = balanced(range(layers + 1), len(homes), lambda stage, first, end: (ends[end] - ends[first], 0.0), homes)
    assert cuts is not None
    runs = list(itertools.pairwise([0, *cuts, layers]))
    has = [sum(ends[end] - ends[first] for first, end in runs[worker::2]) for worker in range(2)]
    assert max(has) < 1.01 * ends[-1] / 2


def costs_of(
    *sizes: tuple[float, int, int, int], workers: int = 4, link: float = math.inf, schedule: PipelineSchedule = STASH,
    sync: str = SERVERS, memory: float = math.inf, microbatches: int = 12,
) -> Costs:  # fmt: skip
    cluster = Cluster(
        levels=(LinkLevel(count=workers, bytes_per_s=link),), sync=sync, servers=workers, memory_bytes=memory
    )
    profile = Profile(layers=layers(*sizes), samples=1)
    return Costs(profile=profile, cluster=cluster, schedule=schedule, microbatches=microbatches)


def test_with_endless_bandwidth_and_one_worker_per_stage_the_slowest_stage_is_as_fast_as_can_be() -> None:
    costs = costs_of(*((float(s), 1, 10**9, 0) for s in (3, 1, 4, 1, 5, 9, 2, 6)))
    plan = best(costs, copies=1)
    assert plan is not None
    sums = [sum((3, 1, 4, 1, 5, 9, 2, 6)[s.first : s.end]) for s in plan]
    # 3 1 4 1 | 5 | 9 | 2 6
    assert max(sums) == 9


@pytest.mark.parametrize("sync", [SERVERS, ALL_REDUCE])
def test_large_weights_in_the_last_layers_are_not_replicated(sync: str) -> None:
    """PipeDream's VGG: convolutions on all workers but one, the linear layers on that one."""
    # With stash the last one's 30 seconds of exchange would follow its passes.
    large = (3.3, 30_000, 10, 0)
    costs = costs_of(*[(1.0, 1, 10, 0)] * 10, large, link=1000.0, sync=sync, schedule=LATER[1])
    plan = best(replace(costs, cluster=replace(costs.cluster, servers=1)))
    assert plan is not None
    assert [len(stage.workers) for stage in plan] == [3, 1]
    assert (plan[0].end, plan[1].end) == (10, 11)


@pytest.mark.parametrize("sync", [SERVERS, ALL_REDUCE])
def test_small_weights_and_large_activations_are_data_parallel(sync: str) -> None:
    """PipeDream's ResNet-50."""
    costs = costs_of(*[(1.0, 10, 10**4, 0)] * 8, link=100.0, sync=sync)
    plan = best(costs)
    assert plan == (PlannedStage(first=0, end=8, workers=(0, 1, 2, 3)),)
    assert not choose(costs).pipeline_is_better


def test_a_worker_with_several_replicas_of_a_stage_pushes_each_of_them() -> None:
    costs = costs_of((1.0, 10, 0, 0), (1.0, 1000, 0, 0), schedule=FLUSH)
    plan = (PlannedStage(first=0, end=1, workers=(0, 1, 2)), PlannedStage(first=1, end=2, workers=(3,)))
    # Three replicas of either stage push; a worker pulls its stage once.
    assert rated(costs, plan).forecast.parameter_bytes == 3 * (10 + 1000) + 3 * 10 + 1000


def test_a_choice_names_the_pipeline_where_it_is_faster_or_the_only_one_that_fits() -> None:
    large = [(1.0, 10**3, 10, 10)] * 4
    assert choose(costs_of(*large, link=100.0)).pipeline_is_better
    roomy, tight = (choose(costs_of(*large, schedule=FLUSH, memory=memory)) for memory in (math.inf, 3000.0))
    assert not roomy.pipeline_is_better and roomy.whole.fits
    assert tight.pipeline_is_better and not tight.whole.fits
    assert tight.staged is not None and max(tight.staged.forecast.memory_bytes) <= 3000.0
    none = choose(costs_of(*large, schedule=FLUSH, memory=1000.0))
    assert none.staged is None and not none.pipeline_is_better


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_only_pipelines_that_the_schedule_takes_are_chosen(schedule: PipelineSchedule) -> None:
    costs = costs_of(*[(1.0, 10**3, 10, 10)] * 4, link=100.0, schedule=schedule, microbatches=2)
    found = choose(costs).staged
    assert found is not None
    workers = tuple(len(stage.workers) for stage in found.plan)
    accumulate = costs.microbatches // found.replicas
    schedule.check(StageLayout(workers=workers, microbatches=accumulate, replicas=found.replicas))


# Memory


def test_what_neighbours_both_keep_counts_once() -> None:
    first, second = layers((1.0, 1, 8, 5), (1.0, 1, 8, 5))
    second = replace(second, saved=(*first.output, *second.saved))
    costs = costs_of((1.0, 1, 1, 1))
    costs = replace(costs, profile=Profile(layers=(first, second), samples=1))
    # Layer 0 keeps 5 and hands on 8, which layer 1 keeps too; that has 5 and an output of 8.
    assert costs.activations.held_bytes(0, 2) == 5 + 8 + 5 + 8
    assert (costs.activations.held_bytes(0, 1), costs.activations.held_bytes(1, 2)) == (5 + 8, 8 + 5 + 8)


@pytest.mark.parametrize(
    ("schedule", "versions", "held"),
    [
        ("gpipe", [1, 1, 1], [8, 8, 8]),
        ("flush", [1, 1, 1], [3, 2, 1]),
        # One that pulls fill, and those that passes need: n - s, n and 2.
        ("stash", [2, 2, 2], [3, 2, 1]),
        ("vertical-sync", [3, 3, 3], [3, 2, 1]),
        ("double-buffer", [3, 3, 3], [3, 2, 1]),
    ],
)
def test_a_stage_needs_its_versions_and_what_its_microbatches_keep(
    schedule: str, versions: list[int], held: list[int]
) -> None:
    costs = costs_of(*[(1.0, 1000, 0, 7)] * 3, workers=3, schedule=schedule_named(schedule), microbatches=8)
    plan = tuple(PlannedStage(first=number, end=number + 1, workers=(number,)) for number in range(3))
    expected = [1000 * (copies + 1) + 7 * count for copies, count in zip(versions, held, strict=True)]
    if schedule == "stash":
        # With 8 microbatches a step only passes that begin before the step's end are in the step before.
        expected = [1000 * (copies + 1) + 7 * count for copies, count in zip([3, 3, 2], held, strict=True)]
    assert list(forecast_of(costs, plan).memory_bytes) == expected


# Mixed pipelines


TIMES = st.lists(st.integers(1, 20), min_size=2, max_size=7)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TIMES, st.integers(2, 3))
def test_no_worker_has_more_than_four_thirds_of_the_best_packing(times: list[int], workers: int) -> None:
    costs = costs_of(*((float(s), 1, 1, 0) for s in times), workers=workers)
    blocks = [range(number, number + 1) for number in range(len(times))]
    home = pack(costs, blocks, workers)
    assert home is not None

    def longest(homes: Sequence[int]) -> int:
        return max(
            sum(s for s, where in zip(times, homes, strict=True) if where == worker) for worker in range(workers)
        )

    optimal = min(longest(homes) for homes in itertools.product(range(workers), repeat=len(times)))
    assert longest(home) <= (4 / 3 - 1 / (3 * workers)) * optimal + 1e-9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TIMES, st.integers(2, 3))
def test_a_mixed_pipeline_is_never_slower_than_a_sequential_one_and_uses_each_layer_once(
    times: list[int], workers: int
) -> None:
    costs = costs_of(*((float(s), 1, 1, 0) for s in times), workers=workers)
    sequential = best(costs, copies=1)
    assert sequential is not None
    plan = mixed(costs, workers, also=[sequential])
    assert plan is not None
    assert [number for stage in plan for number in range(stage.first, stage.end)] == list(range(len(times)))
    assert forecast_of(costs, plan).seconds <= forecast_of(costs, sequential).seconds
    assert {worker for stage in plan for worker in stage.workers} <= set(range(workers))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TIMES, st.integers(2, 3))
def test_as_many_blocks_as_workers_are_a_sequential_pipeline(times: list[int], workers: int) -> None:
    costs = costs_of(*((float(s), 1, 1, 0) for s in times), workers=workers)
    plan = mixed(costs, workers, multiples=[1])
    assert plan is not None
    homes = [stage.workers for stage in plan]
    assert homes == [(number,) for number in range(min(workers, len(times)))]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=6))
def test_a_mixed_plan_of_two_workers_is_within_a_sixth_of_the_best_one(times: list[int]) -> None:
    costs = costs_of(*((float(s), 1, 0, 0) for s in times), workers=2)
    every = [
        forecast_of(costs, stages_of([range(n, n + 1) for n in range(len(times))], homes)).seconds
        for homes in itertools.product(range(2), repeat=len(times))
    ]
    plan = mixed(costs, 2)
    assert plan is not None
    assert min(every) <= forecast_of(costs, plan).seconds <= 7 / 6 * min(every) + 1e-9


def test_refining_moves_a_border_while_that_helps() -> None:
    costs = costs_of(*[(1.0, 1, 1, 0)] * 8, workers=2)
    plan = refined(costs, [range(6), range(6, 8)], [0, 1])
    assert [(stage.first, stage.end) for stage in plan] == [(0, 4), (4, 8)]


def test_blocks_without_anything_to_train_join_a_neighbour() -> None:
    costs = costs_of((1.0, 1, 1, 0), (1.0, 0, 1, 0), (1.0, 1, 1, 0), (1.0, 0, 1, 0), workers=2)
    assert joined(costs, 4) == [range(2), range(2, 4)]


def test_both_ends_in_one_worker_are_faster_than_any_sequential_pipeline() -> None:
    costs = costs_of((3.0, 1, 1, 0), (4.0, 1, 1, 0), (3.0, 1, 1, 0), workers=2)
    sequential, found = best(costs, copies=1), mixed(costs, 2)
    assert sequential is not None and found is not None
    assert [stage.workers for stage in found] == [(0,), (1,), (0,)]
    assert forecast_of(costs, sequential).seconds / forecast_of(costs, found).seconds == pytest.approx(7 / 6)


# Profiles


@pytest.mark.parametrize(("schedule", "seconds"), [(FLUSH, (11, 11, 18)), (STASH, (8, 8, 16)), (None, (8, 8, 16))])
def test_workers_that_share_cores_wait_for_each_other(
    schedule: PipelineSchedule | None, seconds: tuple[float, ...]
) -> None:
    every = PlannedStage(first=0, end=4, workers=(0, 1, 2, 3))
    stages = tuple(PlannedStage(first=number, end=number + 1, workers=(number,)) for number in range(4))
    for cores, needed in zip((math.inf, 4, 2), seconds, strict=True):
        costs = Costs(
            profile=Profile(layers=layers(*[(1.0, 1, 1, 1)] * 4), samples=1), schedule=schedule or FLUSH,
            cluster=Cluster(levels=(LinkLevel(count=4),), cores=cores), microbatches=8,
        )  # fmt: skip
        assert forecast_of(costs, stages if schedule else (every,)).seconds == pytest.approx(needed)


def test_a_profile_is_written_and_read() -> None:
    profile = Profile(layers=layers((1.5, 1, 2, 3), (0.25, 4, 5, 6)), samples=4, measured="cpu, 1 thread", joined=(1,))
    assert Profile.read(profile.text(), "FILE") == profile


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"version": 3', '"version": 9', "of another version"),
        ('"samples"', '"sample"', "sample"),
        ('"trained_bytes": 1', '"trained_bytes": -1', "trained_bytes of layer"),
        ("{", "[", "is no profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(old: str, new: str, why: str) -> None:
    text = Profile(layers=layers((1.5, 1, 2, 3)), samples=4).text()
    with pytest.raises(UsageError, match=rf"FILE is no profile of a model: .*{why}|FILE {why}"):
        Profile.read(text.replace(old, new), "FILE")
