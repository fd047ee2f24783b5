"""SoftSync and SSP do what their papers say, on a server's own shard."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

import pytest
import torch

import shardline
from shardline import consistency
from shardline.consistency import CONSISTENCIES
from shardline.consistency.server import NumberedPush, StepWanted
from shardline.consistency.ssp import Clocks, PacedPushes
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, TensorSpec
from shardline.errors import JobError
from shardline.storage.shard import Observers
from shardline.update import rule
from shardline.waist import Standing
from shardline_pipeline.by_stage import admit_update
from shardline_ps.shard.shard import Shard
from tests.conformance.toys.toy_dssp import TunedClocks, more_pushes
from tests.support.builders import make_job_spec, make_shard
from tests.support.jobs import make_job
from tests.support.served import noise

TENSORS = (
    TensorSpec(name="w", shape=(70,), dtype="float32"),
    TensorSpec(name="v", shape=(3,), dtype="float32"),
)
LATEST = StepWanted(step=None)


def shard_of(mode: str, workers: int, *, method: str, momentum: float) -> Shard:
    shard = make_shard(
        TENSORS,
        value=1.0,
        rule=rule("SGD", [{"lr": 0.1, "momentum": momentum}], method=method),
        consistency=ConsistencySpec(mode=mode),
        replicas=consistency.of(ConsistencySpec(mode=mode)).contributors(workers),
    )
    shard.mode.members_changed([f"worker/{worker}" for worker in range(workers)])
    return shard


class Driver:
    """Workers of one shard: each pulls, computes, pushes."""

    def __init__(self, mode: str, workers: int, *, method: str = "torch", momentum: float = 0.9) -> None:
        self.shard = shard_of(mode, workers, method=method, momentum=momentum)
        self.base = dict.fromkeys(range(workers), 0)
        self.lags: list[int] = []
        for worker in range(workers):
            self.shard.mode.standing(f"worker/{worker}", 1, (0,))

    def push(self, worker: int, gradient: torch.Tensor | None = None, *, scale: float = 1.0) -> Outcome:
        decision, lag = self.decide(worker, gradient, scale=scale)
        self.lags.append(lag)
        return decision.outcome

    def decide(
        self, worker: int, gradient: torch.Tensor | None = None, *, scale: float = 1.0, clock: int | None = None
    ) -> tuple[Decision, int]:
        task = f"worker/{worker}"
        seq = self.shard.mode.last_push(task, 1) + 1
        flat = {
            bucket.number: torch.zeros(bucket.spec.elements) if gradient is None else gradient[: bucket.spec.elements]
            for bucket in self.shard.buckets
        }
        given = {number: Gradient(values.clone(), (True,) * self.slices(number)) for number, values in flat.items()}
        clock = seq if clock is None else clock
        push = NumberedPush(task=task, incarnation=1, seq=seq, base_version=self.base[worker], clock=clock, scale=scale)
        return self.shard.push(push, given)

    def slices(self, bucket: int) -> int:
        return len(self.shard.buckets[bucket].spec.slices)

    def may_pull(self, worker: int) -> bool:
        want = StepWanted(step=None, task=f"worker/{worker}")
        found = {self.shard.mode.serve(bucket, want) for bucket in self.shard.buckets}
        assert found in ({Outcome.SERVED}, {Outcome.WAITING})
        return found == {Outcome.SERVED}

    def pulled(self, worker: int) -> None:
        self.base[worker] = self.shard.version

    def values(self) -> torch.Tensor:
        return torch.cat([bucket.values.clone() for bucket in self.shard.buckets])


def gradients(seed: int) -> Iterator[torch.Tensor]:
    for values in noise(seed, 256):
        yield values.float()


def paces(workers: int, rounds: int, *, cv: float = 0.1, seed: int = 0) -> Iterator[int]:
    """Workers in the order in which they end their computations, whose times vary by `cv`."""
    chance = random.Random(seed)
    times = [(chance.gauss(1.0, cv), worker) for worker in range(workers)]
    heapq.heapify(times)
    for _ in range(rounds * workers):
        now, worker = heapq.heappop(times)
        yield worker
        heapq.heappush(times, (now + max(0.05, chance.gauss(1.0, cv)), worker))


# SoftSync


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 10, 15, 30])
def test_the_staleness_of_softsync_is_n_on_average_and_twice_that_at_most(n: int) -> None:
    workers, rounds = 30, 100
    driver = Driver(f"softsync:n={n}", workers)
    for worker in paces(workers, rounds):
        driver.push(worker)
        driver.pulled(worker)
    assert driver.shard.version == rounds * n
    assert abs(sum(driver.lags) / len(driver.lags) - n * (1 - 1 / workers)) < 0.02 * n
    assert max(driver.lags) <= 2 * n
    assert driver.shard.tally.staleness_max == max(driver.lags)
    assert driver.shard.tally.pushes == rounds * workers


@pytest.mark.parametrize("workers", [1, 3])
def test_softsync_with_as_many_updates_as_workers_has_the_bits_of_async(workers: int) -> None:
    drivers = [Driver(mode, workers) for mode in ("async", f"softsync:n={workers}", "softsync:n=1000")]
    for driver in drivers:
        for worker, gradient in zip(paces(workers, 20), gradients(1), strict=False):
            assert driver.push(worker, gradient, scale=0.5 if worker else 1.0) is Outcome.APPLIED
            driver.pulled(worker)
        assert driver.shard.partial_bytes == 0
    assert all(torch.equal(driver.values(), drivers[0].values()) for driver in drivers)


def test_softsync_applies_the_mean_of_one_gradient_per_worker_whoever_they_are_from() -> None:
    driver = Driver("softsync:n=1", 3, momentum=0.0)
    first, second, third = (next(gradients(seed)) for seed in range(3))
    before = driver.values()
    assert driver.push(0, first) is driver.push(0, second, scale=0.5) is Outcome.COUNTED
    assert torch.equal(driver.values(), before) and driver.shard.version == 0
    held = sum(bucket.spec.nbytes for bucket in driver.shard.buckets)
    assert driver.shard.partial_bytes == held
    assert driver.push(2, third) is Outcome.APPLIED
    assert driver.shard.partial_bytes == 0 and driver.shard.version == 1
    for bucket in driver.shard.buckets:
        size = bucket.spec.elements
        mean = (first[:size] + second[:size] * 0.5 + third[:size]) / 3
        for piece in bucket.spec.slices:
            span = slice(piece.offset, piece.end)
            assert torch.equal(bucket.values[span], (torch.ones(size) - 0.1 * mean)[span])


def test_softsync_follows_the_members_and_counts_those_who_pushed_without_a_table() -> None:
    driver = Driver("softsync:n=1", 4)
    assert [driver.push(worker) for worker in range(4)] == [Outcome.COUNTED] * 3 + [Outcome.APPLIED]
    driver.push(0)
    driver.shard.mode.members_changed(["worker/0", "worker/1"])
    # Two of them are gone: what is summed is complete with the next one.
    assert driver.push(1) is Outcome.APPLIED
    alone = Driver("softsync:n=1", 3)
    alone.shard.mode.members_changed(())
    assert [alone.push(0), alone.push(1), alone.push(2)] == [Outcome.APPLIED, Outcome.COUNTED, Outcome.COUNTED]


def test_a_cut_contains_every_push_that_softsync_has_counted() -> None:
    driver = Driver("softsync:n=1", 3, momentum=0.0)
    gradient = next(gradients(1))
    driver.push(0, gradient)
    driver.push(1, gradient)
    driver.shard.request_cut(5, stop=False)
    cut = driver.shard.cuts.whole(5)
    assert cut is not None and driver.shard.partial_bytes == 0
    assert {(image.version, image.step) for image in cut.in_order()} == {(1, 1)}
    assert {task: sequence.last_seq for task, sequence in cut.sequences.items()} == {"worker/0": 1, "worker/1": 1}
    once = Driver("async", 1, momentum=0.0)
    once.push(0, gradient)
    assert torch.equal(driver.values(), once.values())


def test_a_rule_that_must_know_the_pusher_is_refused_under_softsync() -> None:
    for method in ("gap-aware", "dc-asgd", "dana"):
        job = make_job("momentum", consistency="softsync:n=2", rule=method)
        with pytest.raises(JobError, match="consistency softsync:n=2 combines the pushes of several workers"):
            job.spec(job.build_model())
        make_job("momentum", consistency="ssp", rule=method).spec(job.build_model())


def test_softsync_divides_each_push_of_a_sum_by_its_staleness_under_the_rule_staleness_aware() -> None:
    driver = Driver("softsync:n=1", 2, method="staleness-aware", momentum=0.0)
    parts = [next(gradients(seed)) for seed in range(4)]
    for worker, gradient in ((0, parts[0]), (1, parts[1]), (0, parts[2])):
        driver.push(worker, gradient)
        driver.pulled(worker)
    before = {bucket.number: bucket.values.clone() for bucket in driver.shard.buckets}
    # Its gradient is of the first values; two updates have been made by then.
    driver.base[0] = driver.base[1] = 0
    driver.push(1, parts[3])
    driver.push(0, parts[0])
    driver.push(1, parts[1])
    assert driver.lags == [0, 0, 1, 1, 2, 2] and driver.shard.version == 3
    for bucket in driver.shard.buckets:
        size = bucket.spec.elements
        second = before[bucket.number] - 0.1 * (parts[2][:size] + parts[3][:size]) / 2
        third = second - 0.1 * (parts[0][:size] / 2 + parts[1][:size] / 2) / 2
        for piece in bucket.spec.slices:
            span = slice(piece.offset, piece.end)
            assert torch.allclose(bucket.values[span], third[span], rtol=0, atol=1e-6)
    alone = [Driver(mode, 3, method="staleness-aware") for mode in ("async", "softsync:n=3")]
    for each in alone:
        for worker, gradient in zip(paces(3, 20), gradients(1), strict=False):
            each.push(worker, gradient)
            each.pulled(worker)
    assert torch.equal(alone[0].values(), alone[1].values())


def test_staleness_aware_is_refused_under_softsync_where_a_gradients_size_is_not_its_steps() -> None:
    make_job("momentum", consistency="softsync", rule="staleness-aware").spec(make_job().build_model())
    job = make_job("adam", consistency="softsync", rule="staleness-aware")
    with pytest.raises(JobError, match="update rule staleness-aware needs to know by how many updates"):
        job.spec(job.build_model())


# SSP


@pytest.mark.parametrize("slack", [1, 2, 3, 6])
@pytest.mark.parametrize("speeds", [(1, 1, 1, 1, 1, 1), (1, 1, 2, 3, 5, 8)])
def test_nobody_goes_on_more_than_slack_ahead(slack: int, speeds: tuple[int, ...]) -> None:
    driver, workers = Driver(f"ssp:slack={slack}", len(speeds)), range(len(speeds))
    chance = random.Random(slack)
    clocks = dict.fromkeys(workers, 0)
    waiting: set[int] = set()
    admitted = instant = 0
    for worker in chance.choices(workers, weights=speeds, k=1500):
        if worker not in waiting:
            assert driver.push(worker) is Outcome.APPLIED
            clocks[worker] += 1
            waiting.add(worker)
        least = min(clocks.values())
        instant = max(instant, max(clocks.values()) - least)
        for other in sorted(waiting):
            # The one that is exactly slack ahead goes on, the next push is one too many.
            assert driver.may_pull(other) is (clocks[other] - least <= slack)
            if clocks[other] - least <= slack:
                admitted = max(admitted, clocks[other] - least)
                waiting.discard(other)
    assert (admitted, instant) == (slack, slack + 1)


def test_the_slowest_is_named_and_holds_nobody_up_once_it_rests_or_leaves() -> None:
    for leaves in (True, False):
        driver = Driver("ssp:slack=2", 3)
        for _ in range(3):
            driver.push(0)
            driver.push(1)
        assert not driver.may_pull(0) and not driver.may_pull(1) and driver.may_pull(2)
        assert driver.shard.mode.late() == "pushes of worker/2"
        if leaves:
            driver.shard.mode.members_changed(["worker/0", "worker/1"])
        else:
            driver.shard.mode.standing("worker/2", 1, ())
        assert driver.may_pull(0) and driver.may_pull(1) and driver.shard.mode.late() == "pushes of other workers"


@pytest.mark.parametrize("clock", [0, 2, 3])
def test_a_clock_that_goes_back_is_refused_and_nothing_is_lost(clock: int) -> None:
    driver = Driver("ssp:slack=2", 2)
    for _ in range(3):
        driver.push(0)
    decision, _ = driver.decide(0, clock=clock)
    assert decision.outcome is Outcome.REFUSED
    assert f"worker/0 has clock {clock}, and the shard has counted up to clock 3" in decision.reason
    assert (driver.shard.version, driver.shard.mode.last_push("worker/0", 1)) == (3, 3)
    assert driver.push(0) is Outcome.APPLIED
    decision, _ = driver.decide(1, clock=0)
    assert decision.outcome is Outcome.REFUSED


def test_the_last_push_of_a_dead_worker_is_not_its_next_lifes() -> None:
    clocks = Clocks(1)
    for task in ("worker/0", "worker/1"):
        clocks.begin(task, 1)
    clocks.pushed("worker/0", 1, 1)
    clocks.begin("worker/0", 2)
    clocks.pushed("worker/0", 1, 2)
    assert clocks.of == {"worker/0": 0, "worker/1": 0}
    assert not clocks.why_not("worker/0", 2, 1)


def test_a_worker_that_has_rested_goes_on_where_the_slowest_is() -> None:
    half = PacedPushes(make_job("momentum", consistency="ssp").spec(make_job().build_model()))
    half.located({0: standing(2), 1: standing(2)}, (0,))
    half.woken({0: standing(7), 1: standing(5)})
    assert (half.clock, half.stamp(0).clock) == (7, 8)
    half.woken({0: standing(6), 1: standing(6)})
    assert half.clock == 7
    half.located({0: standing(0, timeline=2), 1: standing(1, timeline=2)}, (0,))
    assert half.clock == 1


def standing(least: int, timeline: int = 1) -> Standing:
    return Standing(
        outcome=Outcome.SERVED,
        reason="",
        timeline=timeline,
        replicas={0: least},
        step_max=least,
        version=least,
        last_seq=0,
    )


def test_who_joins_begins_where_the_slowest_is() -> None:
    driver = Driver("ssp:slack=1", 2)
    for _ in range(5):
        driver.push(0)
        driver.push(1)
    driver.push(0)
    driver.shard.mode.members_changed([f"worker/{worker}" for worker in range(3)])
    driver.shard.mode.standing("worker/2", 1, (0,))
    assert driver.shard.mode.progress(0) == 5
    assert driver.may_pull(0) and driver.may_pull(2)
    driver.push(0)
    assert not driver.may_pull(0)
    assert driver.shard.mode.late() == "pushes of worker/1, worker/2"


def test_a_restored_shard_begins_with_equal_clocks() -> None:
    driver = Driver("ssp:slack=1", 2)
    driver.shard.request_cut(0, stop=False)
    cut = driver.shard.cuts.whole(0)
    assert cut is not None
    for _ in range(3):
        driver.push(0)
    assert not driver.may_pull(0)
    driver.shard.restore(cut.in_order(), cut.sequences)
    assert driver.may_pull(0) and driver.shard.mode.progress(0) == 0


def test_a_stopped_shard_holds_nobody_back() -> None:
    driver = Driver("ssp:slack=1", 2)
    driver.push(0)
    driver.push(0)
    assert not driver.may_pull(0)
    driver.shard.request_cut(2, stop=True)
    assert driver.may_pull(0)


def test_who_waits_goes_on_only_when_the_push_that_it_waited_for_can_be_read() -> None:
    driver = Driver("ssp:slack=1", 2)
    driver.push(0)
    driver.push(0)
    allowed = []
    driver.shard.storage.observers = Observers(on_apply=lambda seconds: allowed.append(driver.may_pull(0)))
    driver.push(1)
    assert allowed == [False] * len(driver.shard.buckets) and driver.may_pull(0)


def test_a_large_slack_has_the_bits_of_async_and_none_is_sync() -> None:
    drivers = [Driver(mode, 3) for mode in ("async", "ssp:slack=100000")]
    for driver in drivers:
        for worker, gradient in zip(paces(3, 20, cv=0.8), gradients(1), strict=False):
            driver.push(worker, gradient)
            assert driver.may_pull(worker)
            driver.pulled(worker)
    assert torch.equal(drivers[0].values(), drivers[1].values())
    for spec in (ConsistencySpec(), ConsistencySpec(clip_norm=1.0), ConsistencySpec(nan_policy="skip")):
        none = ConsistencySpec(mode="ssp:slack=0", clip_norm=spec.clip_norm, nan_policy=spec.nan_policy)
        assert consistency.of(none) == consistency.of(spec)


def test_clocks() -> None:
    clocks = Clocks(1)
    clocks.admit(["a", "b"])
    clocks.begin("a", 1)
    clocks.begin("b", 1)
    clocks.pushed("a", 1, 1)
    clocks.pushed("a", 1, 2)
    assert clocks.held == {"a"}
    # A worker that computes keeps its clock, however often it says so; its next life begins at the slowest.
    clocks.begin("a", 1)
    assert clocks.of == {"a": 2, "b": 0}
    clocks.begin("a", 2)
    assert clocks.of == {"a": 0, "b": 0} and not clocks.held
    clocks.admit(["a"])
    # Its push was being applied when it was fenced.
    clocks.pushed("b", 1, 1)
    assert clocks.of == {"a": 0}


def test_the_fastest_pauses_where_the_slowest_pushes() -> None:
    # The slowest pushes at 30, 40, 50 ...; the fastest is at 24 and needs 3: with two more pushes it is at 30.
    assert more_pushes(24, 3, 20, 10, most=8) == 2
    assert more_pushes(24, 3, 20, 10, most=1) == 1
    # At 40 + 1 * 0.5 nothing is nearer than the push at 40.
    assert more_pushes(40, 0.5, 30, 10, most=5) == 0


def test_a_tuned_slack_lets_the_fastest_go_on_and_never_beyond_its_limit() -> None:
    now = [0.0]
    clocks = TunedClocks(1, 4, now=lambda: now[0])
    for task in ("fast", "slow"):
        clocks.begin(task, 1)
    done = {"fast": 0, "slow": 0}
    ahead = []
    for tick in range(1, 200):
        now[0] = float(tick)
        for task, every in (("fast", 2), ("slow", 7)):
            if tick % every == 0 and task not in clocks.held:
                done[task] += 1
                clocks.pushed(task, 1, done[task])
        ahead.append(done["fast"] - done["slow"])
        assert "slow" not in clocks.held and ahead[-1] <= 5
    assert max(ahead) > 2, "the slack was never tuned"


# Choices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softsync:n=0", "consistency softsync: n is 0; it must be at least 1"),
        ("ssp:slack=-1", "consistency ssp: slack is -1; it must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        CONSISTENCIES.parse(text)


def test_modes_have_names_and_classes() -> None:
    assert CONSISTENCIES.parse("softsync:n=2") == shardline.SoftSync(n=2)
    assert CONSISTENCIES.parse("ssp") == shardline.SSP() == shardline.SSP(slack=3)


@pytest.mark.parametrize(
    ("step", "counted", "bucket_step", "stop_step", "outcome"),
    [
        (3, 3, 7, None, Outcome.COUNTED),
        (3, 3, 7, 8, Outcome.COUNTED),
        (2, 3, 7, None, Outcome.DUPLICATE),
        (2, 3, 8, 8, Outcome.DUPLICATE),
        (4, 3, 7, None, Outcome.COUNTED),
        (3, 3, 8, 8, Outcome.LATE_DROPPED),
    ],
)
def test_a_replica_s_step_is_an_update_of_a_bucket_once_and_in_order(
    step: int, counted: int, bucket_step: int, stop_step: int | None, outcome: Outcome
) -> None:
    found = admit_update(step, Block(1, 1), counted=counted, bucket_step=bucket_step, stop_step=stop_step)
    assert found.outcome is outcome
    both = admit_update(step, Block(0, 2), counted=counted, bucket_step=bucket_step, stop_step=stop_step)
    assert both.outcome is Outcome.REFUSED


def test_a_replica_that_is_too_far_ahead_waits_until_the_slowest_of_the_stage_is_near() -> None:
    spec = ConsistencySpec(mode="ssp:slack=2,in_stages=true")
    shard = make_shard([TensorSpec(name="w", shape=(2,), dtype="float32")], consistency=spec, replicas=2)
    ones = Gradient(torch.ones(64), (True,), fingerprint=1)

    def pull(steps: int) -> Outcome:
        return shard.mode.serve(shard.buckets[0], StepWanted(step=steps, at_least=True))

    for step in range(3):
        assert shard.contribute(0, step, Block(0, 1), ones).outcome is Outcome.COUNTED
        assert pull(step + 1) is (Outcome.WAITING if step == 2 else Outcome.SERVED)
    assert shard.mode.waiting_for() == [1]
    assert shard.mode.serve(shard.buckets[0], StepWanted(step=None)) is Outcome.SERVED
    assert shard.contribute(0, 0, Block(1, 1), ones).outcome is Outcome.COUNTED
    assert pull(3) is Outcome.SERVED and pull(4) is Outcome.WAITING and shard.mode.waiting_for() == []
    # At the end the slowest may come no more.
    shard.request_cut(4, stop=True)
    assert pull(4) is Outcome.SERVED


@pytest.mark.parametrize("method", ["multi-asgd", "dana", "dana:kind=zero", "nag-asgd", "lwp:lag=2", "smega2"])
def test_replicas_of_stages_have_states_of_their_own_as_workers_of_the_whole_model_have(method: str) -> None:
    def made(mode: str) -> Shard:
        shard = make_shard(
            TENSORS[:1],
            value=1.0,
            rule=rule("SGD", [{"lr": 0.1, "momentum": 0.9}], method=method),
            consistency=ConsistencySpec(mode=mode),
            replicas=2,
        )
        shard.mode.members_changed([f"worker/{number}" for number in range(2)])
        return shard

    staged, whole = made("async:in_stages=true"), made("async")
    dice = random.Random(5)
    (ours,), (theirs,) = staged.buckets, whole.buckets
    for number, values in enumerate(itertools.islice(noise(3, ours.spec.elements), 24)):
        replica, gradient = dice.randrange(2), values.float()
        given = Gradient(gradient.clone(), (True,), fingerprint=1)
        step = ours.counted[replica]
        assert staged.contribute(0, step, Block(replica, 1), given).outcome is Outcome.COUNTED
        task = f"worker/{replica}"
        push = NumberedPush(task=task, incarnation=1, seq=whole.mode.last_push(task) + 1, base_version=whole.version)
        whole.push(push, {0: Gradient(gradient, (True,), fingerprint=1)})
        assert torch.equal(ours.values, theirs.values), number
        assert torch.equal(ours.answer(ours.step, "worker/0"), theirs.answer(theirs.step, "worker/0"))
        if number == 12:
            # Workers come and go, and a replica goes on with what is its own; so it does from a checkpoint.
            staged.mode.members_changed(["worker/7"], forget=True)
            staged.restore([ours.image()], {})


def test_after_a_cut_all_replicas_begin_where_the_furthest_was() -> None:
    spec = ConsistencySpec(mode="async:in_stages=true")
    tensors = [TensorSpec(name=name, shape=(2,), dtype="float32", fragment=stage) for stage, name in enumerate("ab")]
    shard = make_shard(tensors, consistency=spec, replicas=2, cut_every=3)
    ones = Gradient(torch.ones(64), (True,), fingerprint=1)

    def push(bucket: int, replica: int, step: int) -> Outcome:
        return shard.contribute(bucket, step, Block(replica, 1), ones).outcome

    # The stages see the replicas in different orders.
    for bucket, order in enumerate(((0, 0, 1), (1, 0, 1))):
        for replica in order:
            assert push(bucket, replica, shard.buckets[bucket].counted[replica]) is Outcome.COUNTED
    assert push(0, 0, 2) is Outcome.COUNTED
    cut = shard.cuts.whole(3)
    assert cut is not None
    assert {task: held.last_seq for task, held in cut.sequences.items()} == {"replica/0": 2, "replica/1": 2}
    shard.restore(cut.in_order(), cut.sequences)
    assert [shard.mode.progress(replica) for replica in range(2)] == [2, 2]
    assert push(0, 1, 1) is Outcome.DUPLICATE and push(0, 1, 2) is Outcome.COUNTED
    # A checkpoint of other shards does not tell: no replica has done more steps than there were updates.
    shard.restore(cut.in_order())
    assert [shard.mode.progress(replica) for replica in range(2)] == [3, 3]
    assert push(0, 1, 3) is Outcome.COUNTED and push(0, 1, 3) is Outcome.DUPLICATE
    assert shard.buckets[0].counted == [3, 4]


def test_whoever_asks_late_where_a_timeline_begins_hears_the_same_as_all_others() -> None:
    spec = ConsistencySpec(mode="async:in_stages=true")
    tensors = [TensorSpec(name=name, shape=(2,), dtype="float32", fragment=stage) for stage, name in enumerate("ab")]
    shard = make_shard(tensors, consistency=spec, replicas=2)
    ones = Gradient(torch.ones(64), (True,), fingerprint=1)
    for bucket, replica, steps in ((0, 0, 2), (1, 0, 3), (0, 1, 1), (1, 1, 1)):
        for step in range(steps):
            assert shard.contribute(bucket, step, Block(replica, 1), ones).outcome is Outcome.COUNTED
    assert [shard.mode.progress(replica) for replica in range(2)] == [0, 0]
    # A server has failed over: another timeline, with all values.
    shard.mode.members_changed(())
    shard.mode.members_changed(["worker/0"])
    for _ in range(2):
        assert ([shard.mode.progress(replica) for replica in range(2)], shard.mode.last_push("worker/0")) == ([2, 1], 3)
        shard.contribute(0, 2, Block(0, 1), ones)


def test_a_worker_begins_with_what_some_stage_lacks_and_rests_when_nobody_can_need_it_again() -> None:
    spec = ConsistencySpec(mode="async:in_stages=true")
    half = consistency.of(spec).worker_half(make_job_spec(consistency=spec, replicas=2))

    def standing(steps: list[int], timeline: int, counted: int) -> Standing:
        held = dict(enumerate(steps))
        return Standing(
            outcome=Outcome.SERVED,
            reason="",
            timeline=timeline,
            replicas=held,
            step_max=0,
            version=0,
            last_seq=counted,
        )

    half.located({0: standing([4, 5], 1, 5), 1: standing([6, 5], 1, 6)}, [0, 1])
    assert half.step == 4
    half.advance()
    half.located({0: standing([5, 5], 1, 5), 1: standing([6, 5], 1, 6)}, [0, 1])
    assert half.step == 4, "what it has not closed is open still"
    half.advance()
    half.closed(5, [0, 1], {0: 9, 1: 8}, dropped=False)
    assert (half.step, half.job_step) == (5, 5), "its stages are at update 8, but others may need step 5 again"
    half.advance()
    half.closed(6, [0, 1], {0: 9, 1: 8}, dropped=False)
    # Curves and checkpoints count updates, so that a rollback takes back what is beyond its own.
    assert (half.step, half.job_step) == (6, 8)
    # Whoever has rested at the job's end computes again when it has gone back.
    half.located({0: standing([4, 4], 2, 4), 1: standing([4, 4], 2, 4)}, [0, 1])
    assert (half.step, half.job_step) == (4, 4)
