"""Waits for the worker that had them, where stages of a lost one don't fit into memory."""

from __future__ import annotations

import functools
import logging
import operator

from torch import nn

from shardline.client.api.session import Session
from shardline.client.overlap.gate import StepAgain
from shardline.errors import JobError
from shardline.host.awake import awake_s
from shardline_pipeline.activations.post import PostOffice
from shardline_pipeline.worker.memory import Stages, check_memory

log = logging.getLogger("shardline.worker")


class MemoryCheck:
    """Checks that what is assigned fits into memory, when it changes."""

    def __init__(self, session: Session, office: PostOffice, model: nn.Module) -> None:
        self._session = session
        self._office = office
        self._model = model
        self._had: Stages = {}

    def check(self) -> None:
        """Raise JobError, see check_memory(), if the job begins.

        Later, stages come from a worker that was lost. Those that don't fit wait for it as long as the cluster waits
        for a lost task: raises StepAgain when the orders change, JobError when the time is up.
        """
        session, stages = self._session, self._office.all_stages()
        if stages == self._had:
            return
        try:
            check_memory(self._model, session.job, stages, session.device, rank=self._office.rank, had=self._had)
        except JobError as error:
            if self._had or session.link.orders.moved:
                self._await_others(error)
            raise
        self._had = stages

    def _await_others(self, error: JobError) -> None:
        link, lost_s = self._session.link, self._session.config.timeouts.lost_s
        log.warning("%s; waiting %.0f s for the worker that had it, or another", error, lost_s)
        end_s = awake_s() + lost_s
        while self._office.still_ordered():
            left_s = end_s - awake_s()
            if left_s <= 0.0:
                raise JobError(f"{error}; the worker that had it has not returned within {lost_s:.0f} s") from error
            link.wait(functools.partial(operator.ne, link.orders), timeout_s=min(left_s, link.timeouts.heartbeat_s))
        raise StepAgain
