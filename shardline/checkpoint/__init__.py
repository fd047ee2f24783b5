"""Checkpoints: cuts on disk that survive crashes and can be read onto any number of parameter servers."""

from shardline.checkpoint.export import export as export, find_checkpoint as find_checkpoint
from shardline.checkpoint.reader import Checkpoint as Checkpoint
from shardline.checkpoint.store import (
    Best as Best,
    CheckpointContents as CheckpointContents,
    CheckpointStore as CheckpointStore,
    committed_steps as committed_steps,
    newest_valid as newest_valid,
)
