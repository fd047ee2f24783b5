"""Memory of a run doesn't grow with its steps, its checkpoints or its scores."""

from __future__ import annotations

import gc
import types

import pytest

from shardline.consistency.eager import Spares
from shardline.core.choices import Choices
from shardline.core.orders import StepReport
from shardline.core.status import HeldCut
from shardline_chief.rules.state.leases import MOST_GIVEN
from shardline_chief.rules.state.state import KEPT_SCORES
from tests.support.chief_cluster import Cluster, make_job

ROUNDS = max(KEPT_SCORES, MOST_GIVEN) + 20
"""Checkpoints, each with ten steps, a score and leases; more of them than anything is kept for."""


def reachable(*roots: object) -> int:
    """Number of objects that these keep alive, without code."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
    seen, left = {id(root) for root in roots}, list(roots)
    while left:
        for other in gc.get_referents(left.pop()):
            if id(other) not in seen and not isinstance(other, code):
                seen.add(id(other))
                left.append(other)
    return len(seen)


def train(cluster: Cluster, first: int) -> None:
    """ROUNDS times ten steps with a checkpoint, a score, reports and what each mode has besides."""
    program, life = cluster.program, cluster.lives["evaluator/0"]
    for step in range(first, first + 10 * ROUNDS, 10):
        if isinstance(program.state.mode, Spares):
            cluster.ps[0].choices = cluster.ps[0].choices.followed_by(Choices(step, (0b0111, 0b1101) * 5))
        reports = tuple(StepReport(step=step, replica=n, loss=1.0, samples=1) for n in range(2))
        cluster.beat("worker/0", steps=reports)
        for task in ("worker/0", "worker/1") if program.state.work.leases else ():
            lease = program.lease(task, cluster.lives[task], (), cluster.now_s)
            program.lease(task, cluster.lives[task], (lease.lease,), cluster.now_s)
        if program.state.last_step:
            for ps in cluster.ps:
                ps.cuts[step + 10] = HeldCut(step=step + 10, complete=True)
        cluster.advance(step + 10)
        program.report("evaluator/0", life, step, {"loss": 1.0 / (1 + step)}, "", cluster.now_s)
        cluster.settle()


@pytest.mark.parametrize("mode", ["sync", "sync:spares=1", "async", "softsync:n=2", "ssp:slack=2"])
def test_what_the_chief_keeps_does_not_grow_with_the_steps(mode: str) -> None:
    cluster = Cluster(job=make_job(mode=mode, steps=1_000_000, checkpoint_every=10))
    cluster.start()
    cluster.join("evaluator", 0)
    train(cluster, 0)
    before = reachable(cluster.program)
    train(cluster, 10 * ROUNDS)
    after = reachable(cluster.program)
    saved, noted = len(cluster.saves), [line.fields for line in cluster.journal if line.kind == "chosen"]
    assert saved > ROUNDS, "there were no checkpoints"
    assert bool(noted) == ("spares" in mode)
    assert after - before < ROUNDS, f"{after - before} more objects after {10 * ROUNDS} more steps, of {after}"
