"""Cuts: when each shard is copied for a checkpoint, and how a job stops and goes back accordingly. Pure but for take().

A mode has one of two policies. AT_ONE_STEP: all shards are cut at the same step, which can be agreed on in advance, and
a rollback takes all of them back to it. EACH_BY_ITSELF: the chief orders a cut, each shard is copied when the order
arrives, and a lost shard goes back alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from shardline.consistency.server import ServerHalf
from shardline.core.image import WorkerSequence
from shardline.errors import ProtocolError
from shardline.storage.cuts import CutBook

PushTables = Mapping[int, Mapping[str, WorkerSequence]]
"""By shard: each worker's last push."""


class Cuts:
    """Rules for cuts, stops and rollbacks: those of AT_ONE_STEP. Steps are counted by the mode's clock."""

    consistent: ClassVar[bool] = True
    """The entry of this name in a checkpoint's manifest."""
    goes_back: ClassVar[str] = "rolling back all shards"
    """What is done about a lost server, for a sentence."""
    loss: ClassVar[str] = "{lost} steps are repeated"
    """Result of lost(), for a sentence."""

    def interval(self, every: int) -> int:
        """Steps between cuts that shards make by themselves; 0 = only when told. every: the job's checkpoint_every."""
        return every

    def due(self, step: int, since: int, every: int) -> bool:
        """Whether the chief has to order a cut now. since: step of the last one."""
        return False

    def reported(self, steps: Sequence[int]) -> Sequence[int]:
        """The cuts to save, or give up, because shards have reported them; others need the chief that ordered them."""
        return steps

    def take(self, shard: ServerHalf, book: CutBook, step: int, *, stop: bool) -> bool:
        """Cut a shard at `step`; returns whether it has passed already. stop: let it go no further."""
        # Registered first: a bucket that reaches the step meanwhile then copies itself.
        book.request(step)
        storage = shard.storage
        before = storage.stop_step
        if stop:
            storage.stop_step = step
        for bucket in storage.buckets:
            with bucket.lock:
                # A step waiting for the standby is computed already: the optimizer's state is that of the next step.
                if bucket.step + (bucket.pending is not None) > step:
                    # The request came too late: stop nothing, and keep no copy that can't be completed.
                    storage.stop_step = before
                    book.withdraw(step)
                    return True
                if bucket.step == step and bucket.initialized:
                    image = bucket.image() if bucket.has_state else book.offered(bucket.number, step)
                    if image is not None:
                        book.store(image)
        return False

    def passed(self, checkpoint_step: int) -> int:
        """The step that all shards have reached, as far as this checkpoint, which is written, says."""
        return checkpoint_step

    def check(self, shard: int, steps: Collection[int]) -> None:
        """Raise ProtocolError if images of these steps can't be one shard's part of a cut."""
        if len(set(steps)) > 1:
            raise ProtocolError(f"shard {shard}: images of different steps are not a consistent cut")

    def last_step(self, steps: int) -> int:
        """The step at which shards stop by themselves in a job of `steps`; 0 if the chief decides when to stop."""
        return steps

    def stop_ahead(self, highest: int, margin: int) -> int | None:
        """A step that no shard has passed when the order to stop there arrives; None: stop without one."""
        return highest + 2 + margin

    def stop_here(self, common: int | None) -> int | None:
        """The step to stop at, where no shard goes on. common: the one that all are at, if they are at one."""
        return common

    def stopped(self, stop_step: int, step: int, *, drained: bool) -> bool:
        """Whether the last cut can be taken. stop_step: 0 = not decided. drained: nothing more is to be pushed."""
        return 0 < stop_step <= step

    def last_cut(self, stop_step: int) -> int | None:
        """The last cut, which stopped shards make by themselves; None: the chief asks first how far they are."""
        return stop_step

    def kept(self, whole: frozenset[int]) -> frozenset[int]:
        """Shards that keep their values in a rollback. whole: those that have them."""
        return frozenset()

    def lost(self, steps: int, restored: Mapping[int, int]) -> int:
        """Work that a rollback loses. steps: those of the job. restored: updates of each restored shard."""
        return steps

    def alone(self, restored: PushTables) -> PushTables | None:
        """The pushes that restored shards have, if these went back without the others."""
        return None

    def undone(self, timeline: int, before: int) -> bool:
        """Whether a timeline undoes logged steps, or is the first (before: 0)."""
        return timeline != before


class EachByItself(Cuts):
    consistent, goes_back = False, "rolling it back"
    loss = "at least {lost} acknowledged updates are lost"

    def interval(self, every: int) -> int:
        return 0

    def due(self, step: int, since: int, every: int) -> bool:
        return step // every > since // every

    def reported(self, steps: Sequence[int]) -> Sequence[int]:
        return ()

    def take(self, shard: ServerHalf, book: CutBook, step: int, *, stop: bool) -> bool:
        storage = shard.storage
        with storage.order:
            # Taken at the same instant: a restored shard must know which pushes it includes.
            sequences = shard.settle()
            images = []
            for bucket in storage.buckets:
                with bucket.lock:
                    images.append(bucket.image())
        book.store_all(step, images, sequences)
        if stop:
            storage.stop_step = 0
        return False

    def passed(self, checkpoint_step: int) -> int:
        return 0

    def check(self, shard: int, steps: Collection[int]) -> None: ...

    def last_step(self, steps: int) -> int:
        return 0

    def stop_ahead(self, highest: int, margin: int) -> int | None:
        return None

    def stop_here(self, common: int | None) -> int | None:
        return None

    def stopped(self, stop_step: int, step: int, *, drained: bool) -> bool:
        return drained

    def last_cut(self, stop_step: int) -> int | None:
        return None

    def kept(self, whole: frozenset[int]) -> frozenset[int]:
        return whole

    def lost(self, steps: int, restored: Mapping[int, int]) -> int:
        return sum(restored.values())

    def alone(self, restored: PushTables) -> PushTables | None:
        return restored

    def undone(self, timeline: int, before: int) -> bool:
        return not before


AT_ONE_STEP, EACH_BY_ITSELF = Cuts(), EachByItself()
