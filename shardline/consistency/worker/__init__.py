"""The worker's half of a consistency: what a step waits for, and what is sent again after a restart."""

from shardline.consistency.worker.base import ComputedAt, Stamp, WorkerHalf
from shardline.consistency.worker.own_pushes import OwnPushes
from shardline.consistency.worker.shared_steps import SharedSteps

__all__ = ["ComputedAt", "OwnPushes", "SharedSteps", "Stamp", "WorkerHalf"]
