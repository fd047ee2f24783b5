"""Whose gradients make each step, as one shard knows it: the lead chooses, the others ask it. PROTOCOL 1.4."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from shardline.core.choices import Choices, choice_of, members
from shardline.errors import InternalError

KEPT_CHOICES = 1 << 16
"""Choices that a shard keeps for the chief at most; it asks for them with every heartbeat."""


def choose(arrived: Sequence[int], count: int) -> int | None:
    """The choice when these replicas are at the lead, in order of arrival; None if there are too few. Pure."""
    return choice_of(arrived[:count]) if len(arrived) >= count else None


class StepChoices:
    """The choices that a shard knows. Methods ending in `_held` are called with the storage's lock held.

    A choice holds for all shards from the moment that one of them knows it, whatever dies: a standby that becomes the
    lead chooses only after all shards have told it what they know.
    """

    def __init__(
        self, shard: int, lock: threading.Lock, replayed: Choices, *, on_change: Callable[[int | None], None]
    ) -> None:
        """lock: the storage's. replayed: choices that the lead repeats. on_change(step): called without the lock when
        the choice of a step is known; step None: the lead may choose from now on.
        """
        self._shard = shard
        self._lock = lock
        self._replayed = replayed
        self._on_change = on_change
        self._may_choose = self.leads
        self._known: dict[int, int] = {}
        """By step: of the open step and of the one before, which a late worker may still push."""
        self._first = 0
        self._made: list[int] = []
        """Choices of the closed steps from `_first` on, for the chief."""

    @property
    def leads(self) -> bool:
        return self._shard == 0

    def of(self, step: int) -> int | None:
        """The choice of a step; None if it is not known (any more). Needs no lock."""
        return self._known.get(step)

    def made_held(self, step: int, arrived: Sequence[int], count: int) -> int | None:
        """The choice of the open step, made here if this is the lead and `count` replicas have arrived."""
        if step not in self._known and self.leads:
            choice = self._replayed.at(step)
            if choice is None and self._may_choose:
                choice = choose(arrived, count)
            if choice is not None:
                self._known[step] = choice
        return self._known.get(step)

    def adopt(self, step: int, choice: int) -> None:
        """Take over a choice that the lead has made. Raises InternalError if another one is known."""
        with self._lock:
            known = self._known.setdefault(step, choice)
        if known != choice:
            raise InternalError(
                f"shard {self._shard}, step {step}: replicas {members(choice)} were chosen according to another shard, "
                f"{members(known)} according to this one"
            )
        self._on_change(step)

    def newest(self) -> tuple[int, int]:
        """(step, choice) of the newest step whose choice is known; (0, 0) if there is none."""
        with self._lock:
            return max(self._known.items(), default=(0, 0))

    def heard_all(self) -> None:
        """Every shard has told this one, the lead, its newest choice: from now on it may choose."""
        with self._lock:
            self._may_choose = True
        self._on_change(None)

    def closed_held(self, step: int, choice: int) -> None:
        """A step is published under this choice."""
        self._known[step] = choice
        for old in [old for old in self._known if old < step]:
            del self._known[old]
        end = self._first + len(self._made)
        if step < end:
            # A standby has had the record before the copy's mark repeats it.
            return
        if step > end:
            # A standby was copied in the middle of training: it knows nothing of what was before.
            self._made.clear()
        self._made.append(choice)
        del self._made[:-KEPT_CHOICES]
        self._first = step + 1 - len(self._made)

    # For the chief

    def made(self) -> Choices:
        """The choices of the closed steps that the chief has not noted yet."""
        with self._lock:
            return Choices(self._first, tuple(self._made))

    def noted(self, until: int) -> None:
        """The chief has noted the choices of all steps before `until`."""
        with self._lock:
            gone = min(max(0, until - self._first), len(self._made))
            del self._made[:gone]
            self._first += gone

    # Timelines and standbys

    def begin_held(self, step: int) -> None:
        """The shard was restored at a step, as all others were: they choose anew."""
        self._known.clear()
        self._first, self._made = step, []
        self._may_choose = self.leads

    def copied_held(self, step: int) -> None:
        """The shard is a copy at a step: the lead may have told others a choice that it does not live to apply."""
        self._may_choose = False
        if not self._made:
            self._first = step

    def inherit(self, before: Choices) -> None:
        """The primary had these choices when its copy was complete; records may have brought later ones."""
        with self._lock:
            if before.made:
                mine = Choices(self._first, tuple(self._made))
                found = before.followed_by(mine) if mine.made else before
                self._first, self._made = found.first, list(found.made)
