"""Pushes of one step keep pace: which of them may expect its next bucket."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given, strategies as st

from shardline.server.pace import AHEAD, PATIENCE_S, Pace, Race, Runner

RACE: Race = (0, 7)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def take(runner: Runner) -> bool:
    """Expect the next bucket, if it may."""
    if not runner.may_expect():
        return False
    runner.expected += 1
    return True


def bring(runner: Runner, count: int = 1) -> None:
    """Expect buckets, which it may, and receive each before the next."""
    for _ in range(count):
        assert take(runner)
        runner.took(1)


def several(pace: Pace, stack: ExitStack, count: int, race: Race = RACE) -> list[Runner]:
    return [stack.enter_context(pace.run(race)) for _ in range(count)]


def test_who_is_ahead_waits_for_the_slowest_and_the_slowest_never_waits() -> None:
    with ExitStack() as stack:
        first, second = several(Pace(Clock()), stack, 2)
        assert [take(first) for _ in range(AHEAD + 1)] == [True] * AHEAD + [False]
        first.took(AHEAD)
        # All that it may have has come: it waits for the other.
        assert not take(first)
        for number in range(1, 5):
            bring(second)
            assert take(first) and not take(first)
            first.took(1)
            assert (second.came, first.came) == (number, number + AHEAD)


def test_who_does_not_move_or_has_ended_holds_up_nobody() -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.run(RACE) as first:
        assert all(take(first) for _ in range(AHEAD))
        with pace.run(RACE):
            assert not take(first)
            clock.now_s += PATIENCE_S
            assert take(first)
        assert take(first)
        with pace.run(RACE):
            assert not take(first)
        assert take(first)


def test_who_began_first_keeps_its_lead_and_who_catches_up_is_not_held() -> None:
    with ExitStack() as stack:
        pace = Pace(Clock())
        first = stack.enter_context(pace.run(RACE))
        bring(first, 5)
        second = stack.enter_context(pace.run(RACE))
        # The first one's link is slow: while one bucket of it comes, three of the other do.
        for _ in range(2):
            assert take(first)
            bring(second, 3)
            first.took(1)
        assert (first.came, second.came) == (7, 6)
        # Side by side they keep pace: the second may be two ahead of what has come of the first.
        assert [take(second) for _ in range(4)] == [True, True, True, False]


def test_who_moves_again_is_not_waited_for_until_it_has_caught_up() -> None:
    clock = Clock()
    with ExitStack() as stack:
        first, second = several(Pace(clock), stack, 2)
        clock.now_s += PATIENCE_S
        bring(first, 6)
        bring(second)
        assert second.came == 1
        assert [take(first) for _ in range(4)] == [True, True, True, False]


def test_none_is_held_for_long_whatever_the_others_do() -> None:
    clock = Clock()
    with ExitStack() as stack:
        first, second = several(Pace(clock), stack, 2)
        second.took(1)
        assert all(take(first) for _ in range(AHEAD + 1))
        first.took(AHEAD + 1)
        for _ in range(4):
            assert not take(first)
            clock.now_s += PATIENCE_S / 2
            second.moved_s = clock.now_s
        assert not take(first)
        clock.now_s += 0.001
        assert take(first)


def test_who_stood_still_does_not_hold_up_one_that_has_paused_meanwhile() -> None:
    clock = Clock()
    with ExitStack() as stack:
        first, second = several(Pace(clock), stack, 2)
        clock.now_s += PATIENCE_S
        bring(first, 40)
        # The first one's next gradient takes its time; meanwhile the second goes on.
        clock.now_s += PATIENCE_S
        bring(second)
        assert take(first)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["take", "come", "time", "end"])), max_size=60))
def test_one_of_them_may_always_go_on(acts: list[tuple[int, str]]) -> None:
    clock = Clock()
    pace = Pace(clock)
    with ExitStack() as stack:
        held = [ExitStack() for _ in range(4)]
        runners = [one.enter_context(pace.run(RACE)) for one in held]
        for number, act in acts:
            runner = runners[number]
            if act == "take":
                take(runner)
            elif act == "come" and runner.expected > runner.came:
                runner.took(1)
            elif act == "time":
                clock.now_s += PATIENCE_S / 3
            elif act == "end":
                held[number].close()
                runners[number] = held[number].enter_context(pace.run(RACE))
            assert any(one.may_expect() or one.expected > one.came for one in runners)
        for one in held:
            stack.push(one)


@pytest.mark.parametrize("other", [(0, 8), (1, 7)])
def test_pushes_of_other_steps_and_shards_are_no_matter(other: Race) -> None:
    with ExitStack() as stack:
        pace = Pace(Clock())
        first, _ = several(pace, stack, 1) + several(pace, stack, 1, other)
        assert all(take(first) for _ in range(4))


def test_who_waits_is_woken_by_a_bucket_that_comes_by_an_end_and_by_time() -> None:
    async def main() -> None:
        pace = Pace()
        with pace.run(RACE) as first:
            for act in ("comes", "ends", "nothing"):
                with ExitStack() as stack:
                    second = stack.enter_context(pace.run(RACE))
                    waiting = asyncio.create_task(first.turn())
                    await asyncio.sleep(0)
                    assert not waiting.done()
                    if act == "comes":
                        second.took(1)
                    elif act == "ends":
                        stack.close()
                    await asyncio.wait_for(waiting, 20.0)

    asyncio.run(main())
