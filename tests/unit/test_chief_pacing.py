"""Fetching at a share of the link: never more in the long run, nothing held back where nobody trains."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shardline.host.ports import on_this_host
from shardline_chief.io.pacing import (
    FREE_BYTES,
    LEAST_RATE,
    FetchPace,
    Links,
    TokenBucket,
    fetched,
)
from shardline_chief.rules.actions import Cut, Hurry, Save, Saved
from shardline_chief.rules.flows.checkpointing import StepClock, least_interval
from tests.support.chief_cluster import Cluster, make_job, running

MB = 1 << 20
GIGABIT = 118e6
"""Bytes per second."""


class Wire:
    """A link of a rate, and the clock that goes on while bytes come or somebody waits."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now_s = 100.0
        self.hurried = False
        self.waits: list[float] = []
        self.hurry_at_s = float("inf")

    def is_set(self) -> bool:
        return self.hurried

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout > 0
        self.waits.append(timeout)
        self.now_s = min(self.now_s + timeout, max(self.now_s, self.hurry_at_s))
        self.hurried = self.now_s >= self.hurry_at_s
        return self.hurried

    def fetch(self, nbytes: int, links: Links, bucket: TokenBucket, *, capped: bool = True) -> float:
        """Frames of one shard's cut; returns the seconds."""
        pace = FetchPace("ps:1", links, bucket, self, capped=capped, clock=lambda: self.now_s)
        start_s = self.now_s
        pace(0)
        for frame in frames(nbytes):
            self.now_s += frame / self.rate
            pace(frame)
        return self.now_s - start_s


def frames(nbytes: int) -> Iterator[int]:
    generator = random.Random(5)
    while nbytes > 0:
        frame = min(nbytes, generator.choice((0, 1000, MB, MB, MB)))
        yield frame
        nbytes -= frame


def test_beyond_the_free_bytes_a_cut_comes_at_4_percent_of_the_rate_measured_on_them() -> None:
    wire, links = Wire(GIGABIT), Links()
    took_s = wire.fetch(116 * MB, links, TokenBucket())
    assert links.rate("ps:1") == pytest.approx(GIGABIT, rel=1e-6)
    assert took_s == pytest.approx((116 * MB - FREE_BYTES) / (0.04 * GIGABIT), rel=0.02)
    # Bit by bit, not in one long silence and one burst.
    assert max(wire.waits) < 2 * MB / (0.04 * GIGABIT)


def test_cuts_one_after_another_come_at_4_percent_all_told() -> None:
    wire, links, bucket = Wire(GIGABIT), Links(), TokenBucket()
    start_s = wire.now_s
    for _ in range(5):
        wire.fetch(40 * MB, links, bucket)
    rate = (200 * MB - FREE_BYTES) / (wire.now_s - start_s)
    assert rate == pytest.approx(0.04 * GIGABIT, rel=0.02)


def test_a_cut_no_larger_than_the_free_bytes_never_waits_and_the_next_one_neither_when_they_are_back() -> None:
    wire, links, bucket = Wire(GIGABIT), Links(), TokenBucket()
    for _ in range(3):
        assert wire.fetch(FREE_BYTES, links, bucket) == pytest.approx(FREE_BYTES / GIGABIT)
        wire.now_s += FREE_BYTES / (0.04 * GIGABIT)
    assert wire.waits == []


def test_a_link_is_as_fast_as_it_was_at_its_best_and_a_slow_one_has_a_least_rate() -> None:
    links = Links()
    for rate, best in ((80e6, 80e6), (110e6, 110e6), (30e6, 110e6)):
        Wire(rate).fetch(12 * MB, links, TokenBucket())
        assert links.rate("ps:1") == pytest.approx(best)
    assert links.cap("ps:1") == pytest.approx(0.04 * 110e6)
    assert links.cap("ps:2") == 0
    links.note("ps:2", 2e6)
    assert links.cap("ps:2") == LEAST_RATE


def test_what_is_not_capped_measures_the_link_and_waits_for_nothing() -> None:
    wire, links = Wire(GIGABIT), Links()
    assert wire.fetch(200 * MB, links, TokenBucket(), capped=False) == pytest.approx(200 * MB / GIGABIT)
    assert links.rate("ps:1") == pytest.approx(GIGABIT)
    assert wire.waits == []


def test_a_hurry_ends_the_wait_and_all_that_would_have_followed() -> None:
    wire, links = Wire(GIGABIT), Links()
    wire.hurry_at_s = wire.now_s + 2.0
    took_s = wire.fetch(200 * MB, links, TokenBucket())
    assert took_s == pytest.approx(2.0 + 200 * MB / GIGABIT, rel=0.12)


def test_what_a_link_gave_while_it_was_held_back_is_not_taken_for_its_rate() -> None:
    wire, links = Wire(GIGABIT), Links()
    links.note("ps:1", 20e6)
    wire.fetch(FREE_BYTES - MB, links, bucket := TokenBucket())
    assert links.rate("ps:1") == pytest.approx(GIGABIT)
    slow = Links()
    slow.note("ps:1", 50e6)
    wire.fetch(40 * MB, slow, bucket)
    # The bucket was empty from the start: the few bytes before the first wait tell nothing.
    assert slow.rate("ps:1") == 50e6


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("192.0.2.7", False),
        ("no.such.host.invalid", False),
    ],
)
def test_what_is_on_this_host_is_known_without_sending_anything(
    host: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: None, **more: int) -> list[Any]:
        if host.endswith(".invalid"):
            raise OSError(f"{host} is not known")
        return list(resolve(host, port, **more))

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert on_this_host(host) is here


# The interval


def test_in_the_long_run_a_cut_takes_its_bytes_at_the_capped_rate_and_the_slowest_link_is_named() -> None:
    links = Links()
    links.note("a:1", 100e6)
    links.note("b:1", 50e6)
    took = fetched({0: 0.5, 1: 0.5, 2: 0.5}, dict.fromkeys(range(3), 40_000_000), {0: "a:1", 1: "b:1"}, links)
    assert took.seconds == 1.5
    assert took.least_s == pytest.approx(40 / 4 + 40 / 2 + 0.5)
    assert took.link_rate == 50e6
    nothing = fetched({0: 0.5}, {0: 1000}, {}, links)
    assert (nothing.least_s, nothing.link_rate) == (0.5, 0.0)


def test_the_least_interval_is_a_checkpoints_time_in_steps() -> None:
    found = least_interval(210_000_000, 12.0, 440e6, 0.0925, 200)
    assert (found.steps, found.too_small) == (130, False)
    assert found.sentence == (
        "a checkpoint of 210.0 MB takes 12.0 s at 4 % of the link's 440 MB/s, and a step 92.5 ms: with an "
        "interval below 130 steps checkpoints can't keep up"
    )
    found = least_interval(210_000_000, 12.0, 0.0, 0.0925, 129)
    assert found.too_small
    assert found.sentence.startswith("a checkpoint of 210.0 MB takes 12.0 s, and a step 92.5 ms: ")
    assert found.sentence.endswith("can't keep up, so with checkpoint_every=129 some are skipped")
    assert least_interval(1000, 0.001, 0.0, 1.0, 1).steps == 1


def test_a_step_takes_what_it_took_since_the_first_one_and_a_job_that_went_back_begins_anew() -> None:
    clock = StepClock()
    clock.observe(0, 10.0)
    clock.observe(1, 40.0)
    assert clock.seconds == 0
    clock.observe(1, 41.0)
    clock.observe(11, 45.0)
    clock.observe(11, 60.0)
    assert clock.seconds == pytest.approx(0.5)
    clock.observe(5, 70.0)
    assert clock.seconds == 0
    clock.observe(7, 71.0)
    assert clock.seconds == pytest.approx(0.5)


def checkpoint(cluster: Cluster, step: int, least_s: float) -> Save:
    """Train to a step whose checkpoint takes so long."""
    cluster.hold_saves = True
    for ps in cluster.ps:
        ps.obey(Cut(timeline=ps.timeline, step=step))
    cluster.advance(step)
    save: Save = cluster.held_saves[0]
    cluster.held_saves.clear()
    cluster.tick(10 - cluster.now_s % 10)
    done = Saved(step=step, path="/out/x", seconds=1.0, nbytes=210_000_000, least_s=least_s, link_rate=440e6)
    cluster.program.saved(done, cluster.now_s)
    cluster.settle()
    return save


def advice(cluster: Cluster) -> list[tuple[str, int]]:
    return [(say.level, say.fields["steps"]) for say in cluster.said if say.kind == "checkpoint_interval"]


def test_the_interval_is_said_once_and_a_warning_follows_where_it_comes_to_be_too_small() -> None:
    cluster = running(checkpoint_every=10, steps=1000)
    checkpoint(cluster, 1, 2.5)
    # One step seen: how long one takes is not known yet.
    assert advice(cluster) == []
    assert not checkpoint(cluster, 11, 2.5).urgent
    assert advice(cluster) == [("info", 3)]
    checkpoint(cluster, 21, 4.5)
    assert advice(cluster) == [("info", 3)]
    checkpoint(cluster, 31, 11.5)
    checkpoint(cluster, 41, 12.0)
    assert advice(cluster) == [("info", 3), ("warning", 12)]
    assert "a checkpoint of 210.0 MB takes 11.5 s at 4 % of the link's 440 MB/s" in cluster.text()
    assert cluster.program.state.saves.least_interval == 13


def test_a_job_without_an_interval_is_told_of_none() -> None:
    cluster = running(steps=1000)
    checkpoint(cluster, 1, 3.0)
    checkpoint(cluster, 11, 3.0)
    assert advice(cluster) == []


def test_cut_0_and_the_last_one_are_urgent_and_the_end_hurries_what_is_being_saved() -> None:
    cluster = Cluster(job=make_job(checkpoint_every=10))
    hurries = 0
    take = cluster.program.take

    def counted() -> list[object]:
        nonlocal hurries
        actions = take()
        hurries += sum(isinstance(action, Hurry) for action in actions)
        return list(actions)

    cluster.program.take = counted
    cluster.start()
    assert not checkpoint(cluster, 10, 1.0).urgent
    assert hurries == 0
    cluster.hold_saves = False
    cluster.advance(100)
    assert cluster.finish is not None
    assert [(save.step, save.urgent) for save in cluster.saves] == [(0, True), (100, True)]
    assert hurries == 1
