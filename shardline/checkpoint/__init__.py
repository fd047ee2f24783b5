"""Checkpoints: cuts on disk that survive crashes and can be read onto any number of parameter servers."""

from __future__ import annotations

from shardline.checkpoint.export import export, find_checkpoint
from shardline.checkpoint.reader import Checkpoint
from shardline.checkpoint.store import Best, CheckpointContents, CheckpointStore, committed_steps, newest_valid

__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointContents",
    "CheckpointStore",
    "committed_steps",
    "export",
    "find_checkpoint",
    "newest_valid",
]
