"""session.barrier(): which barrier a script's worker has reached, and waiting there for the others.

Workers report barriers in their heartbeats and the chief answers in its orders, see rules.barriers of the chief. So
there is no separate call, and nothing that a restarted chief would have to remember.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from shardline.core.orders import MOST_BROADCAST, BarrierPlace, BarrierState, Orders, Phase
from shardline.errors import JobError, TaskLostError, UnreachableError, UsageError
from shardline.host.awake import awake_s
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")

TOLD_S = 10.0
"""Seconds between two log messages that name the missing workers."""


class Barrier:
    """The barriers of one worker. Used by the session's thread."""

    def __init__(self) -> None:
        self._step = 0
        self._begun = False
        self._number = 0
        """Barriers passed in this step."""
        self._met = 0
        """Barriers passed since this process started."""

    def begin(self, step: int, *, begun: bool) -> None:
        """Start a pass of the loop's body, maybe a repetition of the same step. begun: False right after attaching."""
        self._step, self._begun, self._number = step, begun, 0

    def meet(self, link: ChiefLink, step: int, *, by_step: bool, timeout_s: float, value: str = "") -> str | None:
        """Wait until all workers have reached this barrier; returns worker/0's value there.

        None if the job ends first without having failed. value: this worker's, for worker/0's to reach all.

        Raises JobError if another worker has ended without coming here, UnreachableError after timeout_s or if the
        chief is away for too long, TaskLostError if the job fails, FencedError.
        """
        if by_step and step != self._step:
            # The loop is not over steps().
            self.begin(step, begun=True)
        place = BarrierPlace(step, self._begun, self._number) if by_step else BarrierPlace(0, True, self._met)
        place = replace(place, value=value)
        where = f"{link.task} {{}} at a barrier in step {step} for {{}}"
        link.reach(place)
        orders = self._wait(link, place, where, timeout_s)
        state = _state(orders, place)
        if state is not None and state.passed:
            self._number += 1
            self._met += 1
            return state.place.value
        if orders.phase in (Phase.STOPPING, Phase.ENDED) and not orders.exit_code:
            log.info("leaving the barrier, since the job is ending: %s", orders.reason)
            return None
        if orders.phase is Phase.ENDED:
            raise TaskLostError(
                f"{link.task} waited at a barrier, and the job has ended with exit code {orders.exit_code}: "
                f"{orders.reason}"
            )
        assert state is not None
        names = ", ".join(state.waits_for)
        raise JobError(
            f"{where.format('is waiting', names)}, which has ended: all workers must call barrier() the same "
            "number of times"
        )

    def _wait(self, link: ChiefLink, place: BarrierPlace, where: str, timeout_s: float) -> Orders:
        """Return the orders that settle the barrier. Raises UnreachableError if none arrive within timeout_s."""
        began_s = awake_s()

        def decided(orders: Orders) -> bool:
            state = _state(orders, place)
            return orders.fenced or orders.phase is Phase.ENDED or bool(state and (state.passed or state.hopeless))

        while True:
            left_s = began_s + timeout_s - awake_s()
            if link.wait(decided, timeout_s=max(0.0, min(left_s, TOLD_S))):
                return link.orders
            state = _state(link.orders, place)
            missing = ", ".join(state.waits_for) if state is not None else "the chief's answer"
            if left_s <= TOLD_S and awake_s() - began_s >= timeout_s:
                raise UnreachableError(
                    f"{where.format(f'waited {timeout_s:g} s', missing)}; see its log, or allow more time with "
                    "barrier(timeout_s=...)"
                )
            log.warning("%s: %.0f s of %g", where.format("waits", missing), awake_s() - began_s, timeout_s)


def to_json(value: Any) -> str:
    """Text of a value for broadcast(). Raises UsageError if it is too long, or no JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"broadcast() takes JSON values, such as numbers, text, lists and dicts: {error}") from None
    if len(text) > MOST_BROADCAST:
        raise UsageError(f"broadcast() was given {len(text):,} characters of JSON; {MOST_BROADCAST:,} are allowed")
    return text


def _state(orders: Orders, place: BarrierPlace) -> BarrierState | None:
    """State of this barrier in the chief's orders; None if the chief has not heard of it yet."""
    return orders.barrier if orders.barrier is not None and orders.barrier.place == place else None
