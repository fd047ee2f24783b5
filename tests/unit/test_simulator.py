"""Simulations of the timing: against closed forms, against sums done by hand, and over the whole table of modes."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import numpy as np
import pytest

from shardline.consistency import CONSISTENCIES
from shardline.core.spec import ConsistencySpec, JobSpec, TensorSpec
from shardline.errors import UsageError
from shardline.fit import divide
from shardline_lab.simulator.clock import VirtualClock
from shardline_lab.simulator.links import Machines, Network
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Death, Setup, Simulation
from shardline_lab.simulator.times import Gamma, Measured
from tests.support.builders import make_job_spec

MEGABYTE = TensorSpec(name="w", shape=(256, 1024), dtype="float32")
FIXED = (Gamma(1.0),)


def job(mode: str = "sync", replicas: int = 1, *tensors: TensorSpec, **terms: Any) -> JobSpec:
    """A job of one megabyte."""
    return make_job_spec(
        tensors=tensors or (MEGABYTE,), consistency=ConsistencySpec(mode=mode, **terms), replicas=replicas
    )


def simulate(of: JobSpec, workers: int, steps: int, *, cv: float = 0.0, **more: Any) -> Result:
    """With passes of one second in the mean."""
    setup: dict[str, Any] = {"times": (Gamma(1.0, cv),), **more}
    return Simulation(Setup(job=of, workers=workers, steps=steps, **setup)).run()


@pytest.mark.parametrize(
    ("workers", "cv", "expected"), [(8, 0.1, 1.147), (16, 0.1, 1.185), (8, 0.6, 1.986), (16, 0.6, 2.307)]
)
def test_a_synchronous_step_takes_as_long_as_its_slowest_worker(workers: int, cv: float, expected: float) -> None:
    found = simulate(job(replicas=workers), workers, 1500, cv=cv)
    assert found.seconds / found.steps == pytest.approx(expected, rel=0.02)
    assert found.passes == workers * 1500
    assert found.staleness == 0


@pytest.mark.parametrize("servers", [1, 2])
def test_spares_do_not_wait_for_a_slow_worker(servers: int) -> None:
    times = [Gamma(5.0, 0.1), *[Gamma(1.0, 0.1)] * 4]
    network = Network(latency_s=1e-6)
    slow = simulate(job("sync", replicas=5), 5, 500, times=times, servers=servers, network=network)
    spare = simulate(job("sync:spares=1", replicas=5), 5, 500, times=times, servers=servers, network=network)
    none_slow = simulate(job("sync", replicas=4), 4, 500, times=times[1:], servers=servers, network=network)
    assert slow.seconds / slow.steps == pytest.approx(5.0, rel=0.03)
    assert spare.seconds == pytest.approx(none_slow.seconds, rel=0.03)


@pytest.mark.parametrize(
    ("needed", "replicas", "cv", "expected"), [(8, 9, 0.1, 1.093), (7, 8, 0.1, 1.085), (8, 9, 0.6, 1.544)]
)
def test_a_step_with_spares_waits_for_the_first_ones(needed: int, replicas: int, cv: float, expected: float) -> None:
    # The order statistics of passes that all begin together. Those that were late begin later, so that they are late
    # again or miss a step: the mean lies above.
    found = simulate(job(f"sync:spares={replicas - needed}", replicas), replicas, 1500, cv=cv)
    assert expected * 0.98 <= found.seconds / found.steps <= expected * 1.1


@pytest.mark.parametrize("means", [(1.0,), (0.5, 1.0, 1.0, 4.0)])
def test_asynchronous_workers_add_up_and_lag_by_the_number_of_the_others(means: tuple[float, ...]) -> None:
    times = [Gamma(mean, 0.6) for mean in means]
    found = simulate(job("async"), 8, 8000, times=times)
    rates = [1 / means[worker % len(means)] for worker in range(8)]
    assert found.steps_per_s == pytest.approx(sum(rates), rel=0.03)
    assert found.staleness == pytest.approx(7, rel=0.01)
    assert found.computing == pytest.approx(1.0, rel=0.02)


def test_soft_synchronous_staleness_is_n_less_its_part_by_oneself() -> None:
    found = simulate(job("softsync:n=2"), 10, 2000, cv=0.1)
    assert found.staleness == pytest.approx(2 * (1 - 1 / 10), rel=0.02)
    assert found.steps_per_s == pytest.approx(2.0, rel=0.02)


def test_bounded_staleness_lets_nobody_get_further_ahead_than_its_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: dict[str, int] = {}
    ahead: list[int] = []
    simulation = Simulation(Setup(job=job("ssp:slack=2"), workers=3, times=(FIXED[0], FIXED[0], Gamma(5.0)), steps=300))
    (server,) = simulation.servers
    push = server.push

    def counting(pushed: Any, gradients: Any) -> Any:
        clocks[pushed.task] = pushed.clock
        ahead.append(max(clocks.values()) - min(clocks.get(f"worker/{index}", 0) for index in range(3)))
        return push(pushed, gradients)

    monkeypatch.setattr(server, "push", counting)
    found = simulation.run()
    # One more than the slack at the moment of a push: the slack is checked before the next pass begins.
    assert max(ahead) == 3
    assert found.steps_per_s == pytest.approx(3 / 5.0, rel=0.02)


def test_workers_that_share_a_servers_link_share_its_bandwidth() -> None:
    network = Network(bytes_per_s=1 << 20, latency_s=0.01)
    found = simulate(job("async"), 1, 50, network=network, overlap=False)
    # Pass, push, latency, pull, latency.
    assert np.diff(found.step_ends_s) == pytest.approx(1 + 1 + 0.01 + 1 + 0.01, rel=1e-3)
    assert found.push_bytes / found.steps == pytest.approx(1 << 20, rel=0.03)
    found = simulate(job("sync", 4), 4, 50, network=network, overlap=False)
    # Four pushes through the server's link at once, then four pulls: one bucket, so nothing overlaps.
    assert np.diff(found.step_ends_s) == pytest.approx(1 + 4 + 0.01 + 4 + 0.01, rel=1e-3)


def test_more_servers_and_shared_machines_divide_the_bytes() -> None:
    tensors = [TensorSpec(name=f"w{n}", shape=(256, 1024), dtype="float32") for n in range(4)]
    network = Network(bytes_per_s=1 << 20)
    of = job("async", 1, *tensors)
    times = {servers: simulate(of, 1, 20, servers=servers, network=network, overlap=False) for servers in (1, 4)}
    # One worker's own link carries all bytes, however many servers there are.
    assert np.diff(times[1].step_ends_s) == pytest.approx(9.0, rel=1e-3)
    assert np.diff(times[4].step_ends_s) == pytest.approx(9.0, rel=1e-3)
    busy = {
        servers: simulate(job("sync", 8, *tensors), 8, 20, servers=servers, network=network, overlap=False)
        for servers in (1, 4)
    }
    # One server: 32 MB in, and the last of its four buckets out to all. Four: 8 MB in and 8 MB out, all at once.
    assert np.diff(busy[1].step_ends_s) == pytest.approx(1 + 32 + 8, rel=1e-3)
    assert np.diff(busy[4].step_ends_s) == pytest.approx(1 + 8 + 8, rel=1e-3)
    here = {"worker/0": "here", "ps/0": "here"}
    alone = simulate(of, 1, 20, network=network, machines=here, overlap=False)
    assert np.diff(alone.step_ends_s) == pytest.approx(1.0)


def test_overlap_hides_transfers_behind_the_passes() -> None:
    tensors = [TensorSpec(name=f"w{n}", shape=(256, 1024), dtype="float32") for n in range(16)]
    of = job("sync", 1, *tensors)
    # 16 MB in 0.25 s each way: less than either half of the pass.
    network = Network(bytes_per_s=64 << 20)
    apart, over = (simulate(of, 1, 40, network=network, overlap=overlap) for overlap in (False, True))
    assert np.diff(apart.step_ends_s).mean() == pytest.approx(1.0 + 0.25 + 0.25 / 8, rel=0.02)
    assert 1.0 <= np.diff(over.step_ends_s).mean() < 1.1


def test_a_step_transfers_one_fragment() -> None:
    tensors = [dataclasses.replace(MEGABYTE, name=f"w{n}") for n in range(4)]
    of = divide(dataclasses.replace(job("sync", 1, *tensors), cadence="streaming-diloco:every=8,fragments=4"))
    found = simulate(of, 1, 40, network=Network(bytes_per_s=1 << 20))
    # Two passes, and a megabyte each way: one bucket, so nothing overlaps.
    assert np.diff(found.step_ends_s) == pytest.approx(2 + 1 + 1, rel=1e-3)
    assert found.push_bytes == 40 << 20


@pytest.mark.parametrize(("overlap", "step_s"), [(0, 4 + 2), (1, 4 + 1), (2, 4), (3, 4)])
def test_an_exchange_hides_behind_the_passes_that_overlap_it(overlap: int, step_s: float) -> None:
    tensors = [dataclasses.replace(MEGABYTE, name=f"w{n}") for n in range(4)]
    cadence = f"streaming-diloco:every=16,fragments=4,overlap={overlap}"
    of = divide(dataclasses.replace(job("sync", 1, *tensors), cadence=cadence))
    # Four passes of a second each, and a megabyte each way in a second.
    found = simulate(of, 1, 200, network=Network(bytes_per_s=1 << 20))
    assert np.diff(found.step_ends_s) == pytest.approx(step_s, rel=1e-3)
    assert found.computing == pytest.approx(4 / step_s, rel=0.02)
    # What the exchange takes besides the link is hidden too.
    slow = simulate(of, 1, 40, exchange_s=2.0)
    assert np.diff(slow.step_ends_s)[1:] == pytest.approx(step_s, rel=1e-3)


def test_a_link_shares_its_bandwidth_equally() -> None:
    clock = VirtualClock()
    machines = Machines(clock, Network(bytes_per_s=10.0))
    ends: dict[str, float] = {}

    def ended(name: str) -> None:
        ends[name] = clock.now_s

    machines.stream("a", "c").send(100, ended, "first")
    clock.at(5.0, lambda: machines.stream("b", "c").send(25, ended, "second"))
    clock.run()
    # Alone for 5 s (50 bytes); then both get 5 bytes/s: 25 more until the second has crossed; then alone again.
    assert ends == pytest.approx({"second": 10.0, "first": 12.5}, rel=1e-3)


MODES = [*CONSISTENCIES.names, "softsync:n=2", "ssp:slack=0", "sync:spares=1", "sync:quorum=0.5"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("terms", [{}, {"clip_norm": 1.0}, {"nan_policy": "skip"}], ids=["plain", "clipped", "skips"])
def test_every_mode_of_the_table_can_be_simulated(mode: str, terms: dict[str, Any]) -> None:
    network = Network(bytes_per_s=1 << 22, latency_s=0.01)
    spec = job(mode, CONSISTENCIES.parse(mode).contributors(4), **terms)
    found = simulate(spec, 4, 30, cv=0.3, servers=2, network=network)
    assert found.steps == 30 and found.push_bytes > 0 and found.pull_bytes > 0
    assert all(before <= after for before, after in itertools.pairwise(found.step_ends_s))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_bits(mode: str) -> None:
    spec = job(mode, CONSISTENCIES.parse(mode).contributors(4))
    network = Network(bytes_per_s=1 << 22)
    found = [simulate(spec, 4, 40, cv=0.6, network=network, seed=seed) for seed in (3, 3, 4)]
    assert dataclasses.asdict(found[0]) == dataclasses.asdict(found[1])
    assert found[0].step_ends_s != found[2].step_ends_s


@pytest.mark.parametrize("mode", MODES)
def test_a_job_survives_deaths_and_returns(mode: str) -> None:
    spec = job(mode, CONSISTENCIES.parse(mode).contributors(4))
    deaths = (
        Death(worker=1, at_s=10.5, back_s=30.0),
        Death(worker=2, at_s=20.25),
        Death(worker=3, at_s=31, back_s=1.0),
    )
    found = simulate(spec, 4, 200, cv=0.3, deaths=deaths, fence_s=5.0)
    assert found.steps == 200


def test_a_dead_worker_holds_up_others_until_it_is_fenced() -> None:
    found = simulate(job("ssp:slack=1"), 2, 60, deaths=[Death(worker=1, at_s=10.5)], fence_s=7.0)
    gaps = np.diff(found.step_ends_s)
    # The other one pushes at 11 s and 12 s, waits until 17.5 s, and from then on for nobody.
    assert gaps.max() == pytest.approx(17.5 + 1 - 12.0)
    assert gaps[-20:] == pytest.approx(1.0)


def test_the_replicas_of_a_dead_worker_move_to_others() -> None:
    found = simulate(job("sync", 2), 2, 40, deaths=[Death(worker=1, at_s=10.5)], fence_s=3.0)
    gaps = np.diff(found.step_ends_s)
    assert gaps[:8] == pytest.approx(1.0) and gaps[-20:] == pytest.approx(2.0)


def test_a_job_without_workers_says_where_it_stands() -> None:
    with pytest.raises(UsageError, match=r"stands still after step 5 of 10, at 25.5 s"):
        simulate(job("async"), 1, 10, deaths=[Death(worker=0, at_s=5.5)])


@pytest.mark.parametrize("largest_of", [1, 4])
def test_single_times_follow_from_the_largest_of_several(largest_of: int) -> None:
    generator = np.random.default_rng(1)
    single = Gamma(0.2, 0.5)
    largest = single.draw(generator, 4000 * largest_of).reshape(4000, largest_of).max(1)
    times = Measured(tuple(largest.tolist()), largest_of)
    again = times.draw(generator, 4000 * largest_of)
    assert times.mean_s == pytest.approx(0.2, rel=0.05)
    assert again.mean() == pytest.approx(0.2, rel=0.05)
    assert statistics.fmean(again.reshape(4000, largest_of).max(1)) == pytest.approx(largest.mean(), rel=0.03)


@pytest.mark.parametrize(("name", "aggregators"), [("local-sum", 0), ("aggregators", 2)])
@pytest.mark.parametrize(("workers", "pushes", "codec"), [(4, 2, "raw"), (4, 2, "bf16"), (6, 4, "raw")])
def test_one_of_a_host_pushes_whole_nodes_of_the_sum_and_pulls_once(
    name: str, aggregators: int, workers: int, pushes: int, codec: str
) -> None:
    machines = {f"worker/{index}": f"host{2 * index // workers}" for index in range(workers)}
    machines |= {f"aggregator/{index}": f"host{index}" for index in range(aggregators)}
    where: dict[str, Any] = {"machines": machines, "network": Network(bytes_per_s=1 << 20), "overlap": False}
    flat = dataclasses.replace(job("sync", workers), codec=codec)
    direct = simulate(flat, workers, 20, **where)
    found = simulate(dataclasses.replace(flat, topology=name), workers, 20, aggregators=aggregators, **where)
    # What was rounded on its way to the aggregator goes on as it is; parameters are rounded both ways.
    pull = 0.5 if codec == "bf16" else 1.0
    assert np.median(direct.step_s) == pytest.approx(1.0 + 2 * workers * pull, rel=1e-3)
    assert np.median(found.step_s) == pytest.approx(1.0 + pushes + 2 * pull, rel=1e-3)
    assert found.push_bytes / 20 == pytest.approx(pushes * 2**20, rel=1e-3)


def test_a_worker_alone_on_its_host_goes_to_the_servers_and_a_death_there_is_refused() -> None:
    of = dataclasses.replace(job("sync", 2), topology="local-sum")
    network = Network(bytes_per_s=1 << 20)
    assert simulate(of, 2, 10, network=network).seconds == simulate(job("sync", 2), 2, 10, network=network).seconds
    with pytest.raises(UsageError, match="deaths with topology local-sum can't be simulated; choose flat"):
        simulate(of, 2, 10, deaths=[Death(worker=0, at_s=1.0)])


def test_measured_links_have_their_own_rates_and_what_is_slow_between_them_too() -> None:
    rates = {("a", "b"): 10.0, ("b", "a"): 40.0, ("a", "c"): 10.0, ("c", "a"): 40.0, ("b", "c"): 5.0, ("c", "b"): 40.0}
    clock, ends = VirtualClock(), dict[str, float]()
    machines = Machines(clock, Network(pairs=rates, trips_s={**dict.fromkeys(rates, 0.0), ("b", "c"): 2.0}))
    for sender, receiver in ("ab", "cb", "bc"):
        machines.stream(sender, receiver).send(100, lambda name: ends.update({name: clock.now_s}), sender + receiver)
    clock.run()
    # Both ways into b have less than it can take; 1 s of latency from b to c, besides 20 s at 5 bytes a second.
    assert ends == pytest.approx({"ab": 10.0, "cb": 5.0, "bc": 21.0}, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workers": 0}, "0 workers"),
        ({"deaths": [Death(worker=4, at_s=1.0)]}, "worker/4 can't die"),
        ({"times": lambda: (Gamma(0.0),)}, "give a time above 0"),
        ({"times": lambda: (Measured(()),)}, "0 measured times"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    def make() -> Setup:
        made = {name: value() if callable(value) else value for name, value in wrong.items()}
        return Setup(**{"job": job(), "workers": 2, "times": FIXED, **made})

    with pytest.raises(UsageError, match=said):
        make()
