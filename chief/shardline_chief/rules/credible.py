"""What a task may say of itself: a message that contradicts what the chief knows is refused before any rule sees it.

Pure: each function is given the state and a message, and may raise ProtocolError, which names the task, the field and
what was expected. Lengths and numbers of items are limited before, where messages become values
(io/servicer.py). A number that an honest task may send, such as the loss of a model that diverges, is no reason to
refuse its message. Steps that no server has reached wait in page/steps.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardline.core.orders import MOST_BROADCAST, StepReport
from shardline.errors import ProtocolError
from shardline_chief.rules.messages import Beat
from shardline_chief.rules.state.state import State

MOST = 1 << 53
"""Most of anything that a task counts: JSON, and readers of logs that use floating point, are exact up to here."""
MOST_BYTES = 1 << 62
"""Most bytes that a task has moved: at 10 GB/s those of ten days are more than MOST."""
MOST_SAMPLES = 1 << 32
"""Most samples of one step of one replica."""
LAST_EXIT_CODE = 255
SCORES_EACH = 16
"""Scores taken for each checkpoint of the run: evaluators that are restarted score the newest one again."""
SCORE_NAMES = 1024
"""Different names of metrics in one run: each is a label of the metrics page, and a curve."""
SCORE_BYTES = 64 << 10
"""Characters of all names of metrics in one score, and with them its lines in the journal and in the logs."""


def beat(state: State, said: Beat) -> None:
    where = f"heartbeat of {said.task}"
    _count(where, "step", said.step)
    if not 0 <= said.failure_code <= LAST_EXIT_CODE:
        raise ProtocolError(f"{where}: failure_code is {said.failure_code}; an exit code is 0 to {LAST_EXIT_CODE}")
    for name, value in said.figures.items():
        if not 0.0 <= value <= MOST:
            raise ProtocolError(f"{where}: figure {name!r} is {value}; it must be a number from 0 to {MOST}")
    _counts(where, "traffic", said.traffic, MOST_BYTES)
    _counts(where, "usage", said.usage, MOST_BYTES)
    for name in ("cores", "gpu_share"):
        if not 0.0 <= (value := getattr(said.usage, name)) <= MOST:
            raise ProtocolError(f"{where}: usage: {name} is {value}; it must be a number from 0 to {MOST}")
    moved = [number for peer in said.links.peers for number in (peer.out_bytes, peer.in_bytes)]
    for number in (said.links.line_bytes_per_s, *moved):
        if not 0.0 <= number <= MOST_BYTES:
            raise ProtocolError(f"{where}: links: bytes are {number}; they must be a number from 0 to {MOST_BYTES}")
    if said.barrier is not None:
        _counts(where, "barrier", said.barrier)
        if len(said.barrier.value) > MOST_BROADCAST:
            raise ProtocolError(
                f"{where}: barrier: value has {len(said.barrier.value)} characters; {MOST_BROADCAST} are allowed"
            )
    servers = {f"ps/{index}" for index in range(len(state.settings.ps))} if said.suspects else set()
    joined = {member.task for member in state.tasks.members if member.row.holds} if said.suspects else set()
    if unknown := sorted(set(said.suspects) - servers - joined):
        raise ProtocolError(f"{where}: it can't reach {unknown[0]!r}, which is no parameter server of this cluster")
    # Where workers get none, their numbers of replicas mean nothing.
    known = state.job is not None and state.mode.assigns_replicas
    _steps(where, said.steps, state.job.replicas if state.job is not None and known else MOST)
    for one in said.passes:
        if max(one.step, one.version) > MOST:
            raise ProtocolError(f"{where}: a pass of step {one.step} and version {one.version}; the limit is {MOST}")
    if not math.isfinite(said.clock_s):
        raise ProtocolError(f"{where}: clock_s is {said.clock_s}; it must be a finite number")
    if said.ps is not None:
        for shard in said.ps.shards:
            _counts(where, f"shard {shard.shard}", shard)


def score(state: State, task: str, step: int, metrics: Mapping[str, float]) -> None:
    where, saves = f"score of step {step} by {task}", state.saves
    # Not by a list of all steps, which would grow with the run: a score of one without a checkpoint can't be the best
    # that is kept, and lies no more than a false score does.
    if step > saves.furthest_step:
        raise ProtocolError(f"{where}: there is no checkpoint of that step; the furthest is of {saves.furthest_step}")
    if saves.scores >= SCORES_EACH * saves.commits:
        raise ProtocolError(
            f"{where}: {saves.scores} scores were taken of this run's {saves.commits} checkpoints, {SCORES_EACH} for "
            "each; no other is taken before the next checkpoint"
        )
    length = sum(map(len, metrics))
    if length > SCORE_BYTES:
        raise ProtocolError(
            f"{where}: the names of its metrics have {length} characters; the limit is {SCORE_BYTES}, use shorter ones"
        )
    names = len(state.figures.names | metrics.keys())
    if names > SCORE_NAMES:
        raise ProtocolError(
            f"{where}: with it this run has {names} different names of metrics; the limit is {SCORE_NAMES}"
        )


def _steps(where: str, steps: Iterable[StepReport], replicas: int) -> None:
    for one in steps:
        if one.replica >= replicas:
            raise ProtocolError(f"{where}: a step of replica {one.replica}; this job has {replicas}")
        if max(one.step, one.staleness) > MOST or one.samples > MOST_SAMPLES:
            raise ProtocolError(
                f"{where}: step {one.step} with {one.samples} samples and staleness {one.staleness}; the limits are "
                f"{MOST}, {MOST_SAMPLES} and {MOST}"
            )


def _counts(where: str, what: str, value: Any, most: int = MOST) -> None:
    """Check every integer of a dataclass value."""
    for field in dataclasses.fields(value):
        number = getattr(value, field.name)
        if isinstance(number, int):
            _count(where, f"{what}: {field.name}", number, most)


def _count(where: str, what: str, number: int, most: int = MOST) -> None:
    if not 0 <= number <= most:
        raise ProtocolError(f"{where}: {what} is {number}; it must be from 0 to {most}")
