"""What a worker does next, for each kind of loop and each end of an exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardline.client.api.stepper import Do, Seen, Stepper
from shardline.client.exchange.shard_exchange import Interrupted, Overtaken, Restart, Stopped
from shardline.core.orders import Orders, Phase
from shardline.rpc.client import Lease

RUNNING = Orders(version=2, phase=Phase.RUNNING, timeline=1, replicas=(0, 1))
SEEN = Seen(
    orders=RUNNING,
    released=False,
    leaving=False,
    timeline=1,
    job_step=3,
    assigned=True,
    script=False,
    resting=False,
    resends=False,
    retained=False,
)
LEASING = replace(SEEN, assigned=False)
OWN_PUSHES = replace(LEASING, script=True)


def located(*, iterating: bool = True) -> Stepper:
    stepper = Stepper()
    stepper.begun, stepper.stale, stepper.iterating, stepper.todo = RUNNING, False, iterating, {0, 1}
    return stepper


def seen(base: Seen, **orders: object) -> Seen:
    return replace(base, orders=replace(RUNNING, **orders))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "does"),
    [
        (SEEN, Do.BEGIN),
        (replace(SEEN, released=True), Do.END),
        (seen(SEEN, phase=Phase.ENDED), Do.END),
        (seen(SEEN, phase=Phase.WAITING), Do.WAIT),
        (seen(SEEN, replicas=()), Do.WAIT),
        (seen(SEEN, replicas=(1,)), Do.LOCATE),
        (seen(SEEN, timeline=2), Do.LOCATE),
        (seen(SEEN, stop_step=3), Do.FINISH),
        (seen(SEEN, stop_step=4), Do.BEGIN),
        (OWN_PUSHES, Do.BEGIN),
        (replace(OWN_PUSHES, resting=True), Do.LOCATE),
        (LEASING, Do.LEASE),
        (replace(LEASING, leaving=True), Do.REST),
    ],
)
def test_a_worker_that_knows_its_step_goes_on_as_its_orders_say(told: Seen, does: Do) -> None:
    assert located().next(told) is does


def test_a_worker_begins_by_locating_its_step() -> None:
    assert [Stepper().next(told) for told in (SEEN, OWN_PUSHES, LEASING)] == [Do.LOCATE] * 3


def test_a_leased_batch_is_begun_and_a_rest_ends_by_locating_the_step() -> None:
    stepper = located()
    stepper.leases.take(Lease(number=1, first=7, count=1))
    assert stepper.next(LEASING) is Do.BEGIN
    assert stepper.next(replace(LEASING, resting=True)) is Do.LOCATE
    stepper.advance(assigned=False)
    assert stepper.leases.batch == 8
    assert stepper.next(LEASING) is Do.LEASE


def test_a_worker_that_had_done_its_part_resumes_once_when_the_job_goes_back() -> None:
    stepper = located()
    stepper.finished = True
    back = seen(LEASING, timeline=2)
    assert stepper.next(LEASING) is Do.REST
    assert [stepper.next(back), stepper.next(back)] == [Do.RESUME, Do.LOCATE]


@pytest.mark.parametrize(
    ("told", "runs_on"),
    [
        (SEEN, True),
        (seen(SEEN, stop_step=3), False),
        (seen(SEEN, timeline=2), False),
        (seen(SEEN, phase=Phase.WAITING), False),
        (LEASING, False),
    ],
)
def test_a_step_begins_before_the_last_is_closed_only_if_nothing_has_to_be_asked(told: Seen, runs_on: bool) -> None:
    assert located().runs_on(told) is runs_on


KEPT = replace(SEEN, retained=True)


@pytest.mark.parametrize(
    ("error", "told", "iterating", "does"),
    [
        # A loop over steps() computes again what moves with its replicas, and sends its own pushes again.
        (Restart(), SEEN, True, Do.AGAIN),
        (Overtaken(), SEEN, True, Do.AGAIN),
        (Interrupted(), replace(SEEN, resends=True), True, Do.RESEND),
        (Restart(), LEASING, True, Do.RESEND),
        (Overtaken(), LEASING, True, Do.AGAIN),
        (Restart(), seen(LEASING, timeline=2), True, Do.AGAIN),
        # A loop that can't repeat its step takes it along.
        (Restart(), KEPT, False, Do.RESEND),
        (Restart(), seen(KEPT, timeline=2), False, Do.CARRY_OVER),
        (Overtaken(), KEPT, False, Do.CARRY_OVER),
        (Overtaken(), SEEN, False, Do.CATCH_UP),
        (Stopped(), SEEN, True, Do.WAIT),
        (Stopped(), LEASING, True, Do.FINISH),
        (Restart(), seen(SEEN, phase=Phase.ENDED), True, Do.END),
    ],
)
def test_a_failed_exchange_is_followed_by(error: Exception, told: Seen, iterating: bool, does: Do) -> None:
    stepper = located(iterating=iterating)
    assert stepper.failed(error, told) is does
    # What is sent again or carried over is not computed again.
    assert stepper.stale is (does not in (Do.RESEND, Do.CARRY_OVER, Do.CATCH_UP))


def test_orders_that_change_meanwhile_forbid_to_send_the_same_again() -> None:
    assert located().failed(Restart(), LEASING, resend=False) is Do.AGAIN
    assert located(iterating=False).failed(Restart(), KEPT, resend=False) is Do.CARRY_OVER


def test_only_a_loop_over_steps_leaves_its_step_when_its_replicas_move() -> None:
    moved = replace(RUNNING, replicas=(1,))
    assert not located().still_ordered(moved, 1, assigned=True)
    assert located(iterating=False).still_ordered(moved, 1, assigned=True)
    assert not located(iterating=False).still_ordered(RUNNING, 2, assigned=True)
    assert located().interrupts(moved, 1, assigned=True)
    assert not located().interrupts(moved, 1, assigned=False)


def test_a_step_whose_learning_rate_waits_for_a_score_is_not_begun() -> None:
    waiting = replace(SEEN, rated=False)
    assert (located().next(waiting), located().next(SEEN)) == (Do.WAIT, Do.BEGIN)
    assert not located().runs_on(waiting) and located().runs_on(SEEN)
    # The job's last step is done, or it goes back: neither needs a rate.
    assert located().next(replace(seen(SEEN, stop_step=3), rated=False)) is Do.FINISH
    assert located().next(replace(seen(SEEN, timeline=2), rated=False)) is Do.LOCATE
