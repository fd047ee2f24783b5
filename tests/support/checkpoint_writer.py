"""A process that writes one checkpoint after another until it is killed; see test_checkpoint_kills."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from shardline.checkpoint import CheckpointStore
from tests.support.checkpoints import cut_of

KEEP = 2


def write_on(folder: Path, reports: Connection) -> None:
    """Continue from the newest valid checkpoint; report -1 before the first write, then each committed step."""
    store = CheckpointStore(folder, KEEP)
    step = store.newest_valid().step
    reports.send(-1)
    while True:
        step += 1
        store.commit(cut_of(step=step))
        reports.send(step)
