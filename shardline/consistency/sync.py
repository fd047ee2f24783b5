"""Synchronous rules (PROTOCOL 1.4): which contribution counts, which pull is served. Pure.

A bucket at `step` t holds theta_t, collects contributions of step t, and still publishes theta_{t-1}.
"""

from __future__ import annotations

from collections.abc import Collection

from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block, is_node


def admit_push(step: int, counted: Collection[int], block: Block, *, bucket_step: int, replicas: int) -> Decision:
    """Whether a whole contribution of `block` for `step` counts in a bucket at bucket_step.

    counted: replicas whose contribution to bucket_step is held. The caller holds the bucket's lock.
    """
    if block.count < 1 or block.end > replicas:
        return Decision(Outcome.REFUSED, f"block {block} is outside the job's {replicas} replicas")
    if not is_node(block, replicas):
        return Decision(Outcome.REFUSED, f"block {block} is no node of the sum over {replicas} replicas")
    if step < bucket_step:
        return Decision(Outcome.DUPLICATE, f"step {step} is closed, the bucket is at {bucket_step}")
    if step > bucket_step:
        return Decision(Outcome.REFUSED, f"step {step} is ahead of the bucket, which is at {bucket_step}")
    held = sum(replica in counted for replica in range(block.first, block.end))
    if held == block.count:
        return Decision(Outcome.DUPLICATE, f"replicas {block} are counted in step {step}")
    if held:
        return Decision(Outcome.SPLIT, f"{held} of {block.count} replicas of {block} are counted in step {step}")
    return Decision(Outcome.COUNTED)


def serve_pull(want: int, *, bucket_step: int, oldest: int = 0) -> Outcome:
    """Whether theta_want can be sent: SERVED, WAITING (not there yet) or OVERTAKEN (gone).

    oldest: step at which the bucket got its values by Init or Restore; what came before it was never published here,
    and the second buffer holds nothing yet.
    """
    if want > bucket_step:
        return Outcome.WAITING
    if want < max(bucket_step - 1, oldest):
        return Outcome.OVERTAKEN
    return Outcome.SERVED


def progress(bucket_step: int, replica_counted: bool) -> int:
    """The step a replica has to work on, as far as one bucket knows. A (re)started worker takes the lowest."""
    return bucket_step + 1 if replica_counted else bucket_step
