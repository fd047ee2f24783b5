"""How servers take in pushes, and what they publish of an update: what a mode tells the data plane. Pure."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shardline.core.reduce import Block


class PullAnswer(enum.Enum):
    """When a pull of the latest values is answered that comes in one call with pushes."""

    BESIDE = "beside"
    """At once: it has nothing to do with them."""
    AFTER = "after"
    """From values that contain them."""
    WITH = "with"
    """From the values right after the push, before anybody else's."""


@dataclass(frozen=True)
class Intake:
    """How a push is taken in."""

    by_bucket: bool = True
    """Each bucket counts as soon as it is complete. False: the push is numbered, kept until its commit, and counted in
    all buckets at once, with one outcome."""
    in_tree: bool = False
    """Buckets are parts of sums over replicas in the canonical tree, of which a worker may send a whole block."""
    total_waits: bool = False
    """A complete sum waits for the lead's decision for all shards."""
    answer: PullAnswer = PullAnswer.BESIDE

    def why_not(self, block: Block, replicas: int) -> str:
        """Why a push of this block can't be taken in; empty if it can."""
        if not self.by_bucket or block.end <= replicas:
            return ""
        return f"block {block} is outside the job's {replicas} replicas"

    def next_number(self, last: int) -> int:
        """Number expected of a worker's next push; 0 if pushes have none. last: ServerHalf.last_push()."""
        return 0 if self.by_bucket else last + 1


INITIAL = Intake()
"""That of initial values, in every mode: each bucket is set by itself and waits for nobody."""
TREE, VOTED_TREE, VOTED_APART = Intake(in_tree=True), Intake(in_tree=True, total_waits=True), Intake(total_waits=True)
WHOLE, WHOLE_ANSWERED = (
    Intake(by_bucket=False, answer=PullAnswer.AFTER),
    Intake(by_bucket=False, answer=PullAnswer.WITH),
)


@dataclass(frozen=True)
class Publishing:
    """Which values of a bucket can be pulled, and when a standby must have an update: before, or before the answer."""

    steps: int = 1
    """Steps whose values are published: 2 = also the previous one's, which a replaced worker may still need."""
    lends: bool = False
    """A pull may be answered with the published memory itself: nothing is written to what somebody reads, since an
    update that overwrites it needs the reader's contribution."""

    def release(self, release: Callable[[], None]) -> Callable[[], None] | None:
        """What publishes an update once the standby has it; None: it is published at once, and answers wait instead."""
        return release if self.steps > 1 else None

    async def answerable(self, passed: Callable[[], Awaitable[None]]) -> None:
        """Return once a push may be answered. passed: waits until the standby has everything recorded so far."""
        if self.steps == 1:
            await passed()


LATEST, BOTH_STEPS, LENT = Publishing(), Publishing(2), Publishing(2, lends=True)
