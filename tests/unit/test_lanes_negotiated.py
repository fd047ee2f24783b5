"""When a lane is left for another: what it does itself counts against it, what this side does to it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shardline.core.identity import Identity
from shardline.errors import UnreachableError
from shardline.lanes.base import Lane, LaneUnavailable
from shardline.lanes.negotiated import BREAKS, NegotiatedLane
from shardline.waist import Exchanged, Push, Sender, Sink, Standing, Want

SENDER = Sender(job="j", timeline=1, plan_id="p", who=Identity("worker/0", 1))
DONE = Exchanged(acks=(), end=None)
NOBODY: Sink = None  # type: ignore[assignment]


class FakeLane(Lane):
    """Does what it is told in an exchange; answers Progress, which may be told something too."""

    name = ""

    def __init__(self, name: str, does: Callable[[], Exchanged] = lambda: DONE) -> None:
        self.name = name
        self.does = does
        self.asked: Callable[[], None] = lambda: None
        self.cancelled = self.closed = 0

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        return self.does()

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        self.asked()
        return Standing(outcome=None, reason="", timeline=1, replicas={}, step_max=0, version=0, last_seq=0)  # type: ignore[arg-type]

    def cancel(self) -> None:
        self.cancelled += 1

    def close(self) -> None:
        self.closed += 1


def breaks() -> Exchanged:
    raise UnreachableError("ps/0: PushPull broke")


def missing() -> Exchanged:
    raise LaneUnavailable("there is no such lane")


def negotiated(first: FakeLane) -> tuple[NegotiatedLane, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    lane = NegotiatedLane(
        [first, FakeLane("grpc")],
        peer="ps/0",
        expected=(first.name,),
        on_fallback=lambda name, reason: told.append((name, reason)),
    )
    return lane, told


def exchange(lane: NegotiatedLane) -> Exchanged:
    return lane.exchange(SENDER, [], None, NOBODY, timeout_s=1.0)


def broken(lane: NegotiatedLane) -> None:
    with pytest.raises(UnreachableError):
        exchange(lane)


def test_a_lane_that_breaks_time_and_again_while_the_shard_answers_is_left() -> None:
    first = FakeLane("shm", breaks)
    lane, told = negotiated(first)
    for _ in range(BREAKS - 1):
        broken(lane)
    assert lane.name == "shm"
    broken(lane)
    assert (lane.name, first.closed) == ("grpc", 1)
    assert [name for name, _ in told] == ["shm"] and "it failed 3 times in a row" in told[0][1]
    assert exchange(lane) is DONE


def test_a_lane_that_breaks_with_its_shard_is_kept() -> None:
    def gone() -> None:
        raise UnreachableError("ps/0 does not answer")

    first = FakeLane("shm", breaks)
    first.asked = gone
    lane, told = negotiated(first)
    for _ in range(2 * BREAKS):
        broken(lane)
    assert (lane.name, told) == ("shm", [])


def test_a_lane_that_can_not_be_used_is_left_within_the_exchange() -> None:
    lane, told = negotiated(FakeLane("shm", missing))
    assert exchange(lane) is DONE
    assert (lane.name, told) == ("grpc", [("shm", "there is no such lane")])


@pytest.mark.parametrize("when", ["before", "during"])
def test_an_exchange_that_was_given_up_says_nothing_against_its_lane(when: str) -> None:
    first = FakeLane("shm")
    lane, told = negotiated(first)

    def interrupted() -> Exchanged:
        if when == "during":
            lane.cancel()
        return breaks()

    first.does = interrupted
    for _ in range(2 * BREAKS):
        if when == "before":
            # Meant for the exchange that is about to begin.
            lane.cancel()
        broken(lane)
    assert (lane.name, told, first.cancelled) == ("shm", [], 2 * BREAKS)


def test_breaks_count_again_after_an_exchange_that_was_given_up() -> None:
    lane, _ = negotiated(FakeLane("shm", breaks))
    lane.cancel()
    for _ in range(BREAKS):
        broken(lane)
    assert lane.name == "shm"
    broken(lane)
    assert lane.name == "grpc"


def test_a_lane_is_not_left_by_an_exchange_that_is_given_up_while_the_shard_is_asked() -> None:
    first = FakeLane("shm", breaks)
    lane, told = negotiated(first)
    first.asked = lane.cancel
    for _ in range(BREAKS):
        broken(lane)
    assert (lane.name, told) == ("shm", [])
