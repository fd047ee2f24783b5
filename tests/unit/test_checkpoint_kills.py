"""kill -9 of a real process that writes checkpoints, at moments drawn from a seed: what was committed stays whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from shardline.checkpoint import CheckpointStore, committed_steps, newest_valid
from shardline.core.plan import make_plan
from tests.support.checkpoint_writer import KEEP, write_on
from tests.support.checkpoints import SMALL, assert_same_images, cut_of, images_of, state_of

KILLS = 32
PATIENCE_S = 60.0
LONGEST_S = 0.03
"""Some commits of a quiet disk."""


@pytest.fixture
def processes() -> ForkServerContext:
    """Processes forked from one that has imported everything: each starts in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.checkpoint_writer"])
    return context


def reported(reports: Connection, last: int) -> int:
    """The last step that the dead writer told of."""
    try:
        while reports.poll():
            last = max(last, reports.recv())
    except EOFError:
        return last
    return last


def killed_after(process: BaseProcess, reports: Connection, seconds: float) -> int:
    """Kill -9 that long after it began to write; returns the last step it told of."""
    assert reports.poll(PATIENCE_S), "the writer never began"
    assert reports.recv() == -1
    # Nothing is waited for: the writer goes on until it is killed.
    process.join(seconds)
    assert process.pid is not None and process.is_alive(), f"the writer ended by itself with {process.exitcode}"
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    return reported(reports, -1)


def test_kill_9_at_any_moment_leaves_the_newest_checkpoint_whole_and_the_next_writer_goes_on(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    moments = random.Random(20_251)
    folder = tmp_path / "checkpoints"
    plan = make_plan(SMALL, 2)
    step, torn = 1, 0
    CheckpointStore(folder, KEEP).commit(cut_of(step=step))
    for _ in range(KILLS):
        reports, telling = processes.Pipe(duplex=False)
        process = processes.Process(target=write_on, args=(folder, telling), daemon=True)
        process.start()
        telling.close()
        told = killed_after(process, reports, moments.uniform(0.0, LONGEST_S))
        reports.close()
        torn += bool([path for path in folder.iterdir() if path.name.startswith(("tmp-", "trash-"))])
        # What it told of is there; one more may be, killed between the rename and the telling.
        found = newest_valid(folder)
        assert found.warnings == ()
        assert max(step, told) <= found.step <= max(step, told) + 1
        step = found.step
        for name, expected in state_of(SMALL, step).items():
            assert torch.equal(found.tensor(name), expected)
        for shard, images in images_of(plan, step).items():
            assert_same_images(list(found.images(plan, shard)), images)
    assert torn >= KILLS // 4, "hardly a kill met a writer at work"
    # Kills before a deletion left too many; one commit that nobody disturbs puts all in order.
    CheckpointStore(folder, KEEP).commit(cut_of(step=step + 1))
    assert committed_steps(folder) == [step, step + 1]
    assert {path.name for path in folder.iterdir() if not path.name.startswith("step-")} == {"latest"}
