"""Sends each gradient as it is computed, where possible: see PushAtEnd."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch

from shardline.client.exchange.retrying import Observer
from shardline.client.exchange.streaming_payloads import bucket_ranks, pull_order
from shardline.client.overlap.early_push import EarlyPush, not_stepped, why_not_early
from shardline.client.overlap.hooks import FireCount, GradientHooks
from shardline.client.step.open_step import Begin, Expected, PushAtEnd, PushTools, Values
from shardline.client.step.staging import NonFinite, loss_names
from shardline.consistency.worker.base import WorkerHalf
from shardline.core.spec import JobSpec
from shardline.errors import JobError

log = logging.getLogger("shardline.client")


class AsComputed(PushAtEnd):
    """Watches backward passes; the first step after a start shows how often each gradient is completed in one."""

    def __init__(
        self,
        job: JobSpec,
        half: WorkerHalf,
        hooks: GradientHooks,
        tools: PushTools,
        observer: Observer,
    ) -> None:
        super().__init__(tools.plan)
        self._job = job
        self._half = half
        self._hooks = hooks
        self._tools = tools
        self._nonfinite = NonFinite(job.consistency.nan_policy, tools.staging, observer)
        self.uses: dict[int, None] | None = {}
        self._count: FireCount | None = None
        self._once: set[int] = set()
        self._sent_order: dict[int, list[int]] = {}
        """Order of sending in the previous step, by shard."""
        self._push: EarlyPush | None = None
        self._expected: Expected | None = None
        self._told: set[str] = set()

    @property
    def early(self) -> bool:
        return self._push is not None

    @property
    def begun(self) -> bool:
        return self._push is not None and self._push.begun

    def pull_order(self, shard: int, *, hold: bool) -> list[int]:
        at_once = not self._half.by_bucket or not hold
        return pull_order(self._ranks[shard], at_once=at_once, sent=self._sent_order.get(shard, ()))

    def expect(self, expected: Expected, *, first: bool, begin: Begin) -> None:
        """See PushAtEnd. Raises NonFiniteError for the loss."""
        step = self._half.step
        if not self._once:
            # The first step only counts how often hooks are called; nothing leaves early.
            self._count = FireCount()
            self._hooks.listen(self._count)
            return
        reason = why_not_early(self._job, self._half, expected, first=first)
        if reason:
            if reason not in self._told:
                self._told.add(reason)
                log.debug("step %d: gradients are sent at the end of the step: %s", step, reason)
            return
        self._nonfinite.judge(step, expected.replica, loss_names(expected.loss))
        self._expected = expected
        self._tools.staging.extras.samples[expected.replica] = expected.samples
        (block, *_) = self._half.blocks(expected.owned)
        self._push = EarlyPush(
            self._tools,
            self._half.slot(expected.replica),
            block,
            once=self._once,
            ranks=self._ranks,
            begin=functools.partial(self._start, expected, begin),
            watched=bool(self._job.script),
            on_nonfinite=functools.partial(self._nonfinite.judge, step, expected.replica, early=True),
        )
        self._hooks.listen(self._push)

    def _start(self, expected: Expected, begin: Begin) -> None:
        """Start the exchange when the first bucket is ready. Called by a hook during the backward pass."""
        assert self._push is not None
        if self._half.brings_buffers(expected.replica):
            self._tools.staging.extras.hyper = expected.hyper()
        begin(self._push.block, self._push.payloads)

    def close(self, gradients: Values, buffers: Values, hyper: Mapping[int, Mapping[str, float]]) -> None:
        push, expected = self._push, self._expected
        assert push is not None and expected is not None
        self._hooks.ignore()
        try:
            with torch.no_grad():
                push.close(gradients, buffers)
            if self._half.brings_buffers(expected.replica) and hyper != self._tools.staging.extras.hyper:
                raise JobError(
                    "a hyper-parameter (lr ...) was changed after the backward pass had sent gradients with the old "
                    "value; change it before backward(), or use attach(..., overlap=False)"
                )
            if push.error is not None:
                raise push.error
        except Exception as error:
            push.fail(error)
            raise

    def not_stepped(self, step: int) -> Exception:
        assert self._push is not None
        error = self._push.error or not_stepped(step)
        self._push.fail(error)
        return error

    def disarm(self) -> None:
        if not self.begun:
            self.end_step()

    def end_step(self) -> None:
        self._hooks.ignore()
        if self._push is not None:
            self._push.drop()
        self._push = self._expected = None

    def learn(self) -> None:
        if self._count is not None and not self._once:
            self._once = self._count.once
            self._ranks = bucket_ranks(self._plan, list(self.uses) if self.uses else range(len(self._plan.tensors)))
        if self._push is not None:
            self._sent_order = {shard: payloads.order for shard, payloads in self._push.payloads.items()}

    def detach(self) -> None:
        self._hooks.close()
