"""Gradients sent during the backward pass: hooks report them, AsComputed decides when they may leave."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from shardline import codecs
from shardline.client.exchange.shard_exchange import Observer
from shardline.client.exchange.streaming_payloads import (
    LivePayloads,
    SendQueue,
    bucket_ranks,
    default_credit,
    pull_order,
)
from shardline.client.layout import homes
from shardline.client.step.staging import NonFinite, PushTools, loss_names
from shardline.consistency.worker import WorkerHalf
from shardline.core.plan import Plan
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec, TensorKind
from shardline.core.tensor_bytes import digest, tensor_bytes
from shardline.division import Key
from shardline.errors import JobError
from shardline.waist import Payload

Listener = Callable[[int, torch.Tensor], None]
"""(tensor number, parameter): called when its gradient of a backward pass is complete."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Facts about a replica's part of a step that are known before its last backward pass."""

    replica: int
    owned: Sequence[int]
    """Replicas for which this worker contributes to the step."""
    samples: int = 0
    loss: float | None = None
    hyper: Callable[[], Mapping[int, Mapping[str, float]]] = dict
    """Hyper-parameters sent with the push, by group; called when the first bucket leaves."""


Values = Mapping[int, torch.Tensor]
"""By tensor number."""
Begin = Callable[[Block, Mapping[int, LivePayloads]], None]
"""(block, payloads by shard): called when the first bucket is ready, to start their exchange."""


class GradientHooks:
    """A hook on every trained parameter; calls one listener, if any."""

    def __init__(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        self._trained = [
            (number, tensors[number]) for number, spec in enumerate(plan.tensors) if spec.kind is TensorKind.PARAM
        ]
        self._handles: dict[int, RemovableHandle] = {}
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on. Parameters that have become trainable since get hooks too.

        Each is the parameter's last hook, so that the user's can't change a gradient that has left.
        """
        self._listener = listener
        for number, tensor in self._trained:
            if not (tensor.requires_grad and tensor.is_leaf):
                continue
            handle = self._handles.get(number)
            others = tensor._post_accumulate_grad_hooks
            if handle is not None and (not others or next(reversed(others)) != handle.id):
                handle.remove()
                handle = None
            if handle is None:
                hook = functools.partial(self._fired, number)
                self._handles[number] = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def ignore(self) -> None:
        self._listener = None

    def _fired(self, number: int, parameter: torch.Tensor) -> None:
        listener = self._listener
        if listener is not None:
            listener(number, parameter)

    def close(self) -> None:
        self.ignore()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def once_each(fired: Iterable[int]) -> set[int]:
    """Numbers of the parameters whose gradients are complete when their hook is called.

    fired: of every call in one backward pass. It is called once, unless a pass runs others within itself (reentrant
    checkpointing) or there are several passes: then the gradient is complete only when all have ended.
    """
    return {number for number, count in Counter(fired).items() if count == 1}


def why_not_early(job: JobSpec, half: WorkerHalf, expected: Expected, *, first: bool) -> str:
    """Why a replica's gradients can't be sent before all of them are computed; "" if they can. Pure.

    first: this is the first step after a (re)start.
    """
    if first:
        return "in the first step after a start, parts of it may already be counted"
    if reason := half.why_not_early(expected.replica, expected.owned):
        return reason
    if job.consistency.nan_policy == "skip" and expected.loss is None:
        return "a loss that is not finite must be detected before anything is sent"
    if len(expected.owned) > 1 and not all(codec.exact for codec in codecs.of(job).ups):
        return "gradients that the codec rounds are not summed before they are sent"
    return ""


class EarlyPush:
    """One replica's gradients, sent to all shards while they are computed. A listener of GradientHooks.

    block: the replica is its last one, earlier ones are in staging. once: see once_each(). begin: starts the exchange;
    called when the first bucket is ready. watched: the user's code runs between backward() and step(), so gradients are
    read once more before the step: writes to `.data` and the like change no version. on_nonfinite: called on a lane's
    thread with the names of tensors whose gradients have NaN or infinity, before their bucket leaves; an error that it
    raises ends the push.
    """

    def __init__(
        self,
        tools: PushTools,
        replica: int,
        block: Block,
        *,
        once: set[int],
        ranks: Sequence[Sequence[int]],
        begin: Callable[[], None],
        watched: bool,
        on_nonfinite: Callable[[Sequence[str]], None],
    ) -> None:
        plan = tools.plan
        self._plan = plan
        self._gpu = tools.gpu
        self._marks: dict[int, torch.cuda.Event] = {}
        """On a GPU: the event after which each gradient is complete."""
        self._end: torch.cuda.Event | None = None
        self._staging = tools.staging
        self._replica = replica
        self._presum = block.count > 1
        self.block = block
        """The replicas of the push."""
        self._once = once
        self._begin = begin
        self._on_nonfinite = on_nonfinite
        self._lock = threading.Lock()
        self._gradients: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._digests: dict[int, int] = {}
        """Of gradients in host memory, if they are watched."""
        self._watched = watched
        self._twice: set[int] = set()
        self._added: set[Key] = set()
        """Buckets for which staging already has this replica's part."""
        self._early: set[Key] = set()
        """Buckets sent during the backward pass."""
        self.begun = False
        """Something may have left."""
        self._closed = False
        self.error: Exception | None = None
        """The first error. A hook must not raise it into autograd."""
        self._lacking = {
            (s, b): len({piece.tensor for piece in bucket.slices})
            for s, shard in enumerate(plan.shards)
            for b, bucket in enumerate(shard.buckets)
            if bucket.kind is TensorKind.PARAM
        }
        self.payloads = {
            s: LivePayloads(
                SendQueue(
                    ranks[s], [bucket.nbytes for bucket in shard.buckets], tools.credit_bytes or default_credit(shard)
                ),
                functools.partial(self._prepare, s),
                nbytes=shard.nbytes,
                interrupted=tools.interrupted,
            )
            for s, shard in enumerate(plan.shards)
        }
        self._homes = homes(plan)

    def __call__(self, number: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        gradient = parameter.grad
        ready: list[Key] = []
        with self._lock:
            if self._closed or gradient is None:
                return
            if number in self._gradients:
                self._twice.add(number)
                return
            self._gradients[number], self._versions[number] = gradient, gradient._version
            if self._watched and gradient.device.type == "cpu":
                self._digests[number] = digest(tensor_bytes(gradient))
            if self._gpu is not None:
                # The hook runs on the stream that completed the gradient.
                self._marks[number] = self._gpu.mark()
            if number in self._once:
                for key in self._homes[number]:
                    self._lacking[key] -= 1
                    if self._lacking[key] == 0:
                        ready.append(key)
            self._early.update(ready)
            first = bool(ready) and not self.begun
            self.begun = self.begun or bool(ready)
        try:
            if first:
                self._begin()
            for shard, bucket in ready:
                self.payloads[shard].offer(bucket)
        except Exception as error:
            self.error = self.error or error

    def close(self, gradients: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor]) -> None:
        """After the backward pass: offer the remaining buckets.

        gradients, buffers: by tensor number; missing ones stay absent.

        Raises JobError if a gradient has changed since it was sent.
        """
        with self._lock:
            self._closed = True
        left = [number for number in self._gradients if any(key in self._early for key in self._homes[number])]
        for number in left:
            now, then = gradients.get(number), self._gradients[number]
            changed = now is not then or now._version != self._versions[number] or number in self._twice
            if changed or (number in self._digests and digest(tensor_bytes(then)) != self._digests[number]):
                raise JobError(
                    f"the gradient of {self._plan.tensors[number].name!r} was changed after the backward pass had "
                    "sent it (for example by a second backward() or clip_grad_norm_ before step()); train this model "
                    "without overlap: --no-overlap, or attach(..., overlap=False) in a script"
                )
        self._gradients = dict(gradients)
        if self._gpu is not None:
            self._end = self._gpu.mark()
        if not self.begun:
            self.begun = True
            self._begin()
        empty: dict[int, list[int]] = {shard: [] for shard in self.payloads}
        offered: dict[int, list[int]] = {shard: [] for shard in self.payloads}
        for key in self._staging.keys:
            if key not in self._early:
                (offered if self._has_values(key, buffers) else empty)[key[0]].append(key[1])
        for shard, payloads in self.payloads.items():
            for bucket in offered[shard]:
                payloads.offer(bucket)
            payloads.close(empty[shard])

    def fail(self, error: Exception) -> None:
        """Send nothing more, because of this error."""
        self.error = self.error or error
        for payloads in self.payloads.values():
            payloads.fail(error)

    def _has_values(self, key: Key, buffers: Mapping[int, torch.Tensor]) -> bool:
        """Whether a bucket that is offered only now contains values; adds those that need no lane's thread."""
        spec = self._plan.shards[key[0]].buckets[key[1]]
        is_buffer = spec.kind is TensorKind.BUFFER
        source = buffers if is_buffer else self._gradients
        there = any(piece.tensor in source for piece in spec.slices)
        if there and not is_buffer:
            return True
        # Buffers are restored before the push has left, so these are copied now.
        self._staging.add_bucket(
            key, self._replica, source, presum=self._presum, keep=False, after=[self._end] if self._end else ()
        )
        self._added.add(key)
        return there or self._staging.partials(key)[self.block].values is not None

    def _prepare(self, shard: int, bucket: int) -> Payload:
        """Fill, check and encode one bucket, on the thread of the lane that sends it."""
        key = shard, bucket
        names: list[str] = []
        if key not in self._added:
            with torch.no_grad():
                bad = self._staging.add_bucket(
                    key, self._replica, self._gradients, presum=self._presum, keep=True, after=self._after(key)
                )
            names = [self._plan.tensors[number].name for number in bad]
        if names:
            self._on_nonfinite(names)
        return self._staging.payload(self.block, *key, names)

    def _after(self, key: Key) -> list[torch.cuda.Event]:
        """On a GPU: the events after which all gradients of a bucket are complete."""
        if key not in self._early and self._end is not None:
            return [self._end]
        slices = self._plan.shards[key[0]].buckets[key[1]].slices
        return [self._marks[piece.tensor] for piece in slices if piece.tensor in self._marks]

    def drop(self) -> None:
        """Free gradients and payloads: the push is acknowledged or given up."""
        with self._lock:
            self._closed = True
            self._gradients = {}
        for payloads in self.payloads.values():
            payloads.drop()


log = logging.getLogger("shardline.client")


class AsComputed:
    """Watches backward passes; the first step after a start shows how often each gradient is completed in one."""

    def __init__(
        self,
        job: JobSpec,
        half: WorkerHalf,
        hooks: GradientHooks,
        tools: PushTools,
        observer: Observer,
    ) -> None:
        self._plan = tools.plan
        self.ranks = bucket_ranks(tools.plan, range(len(tools.plan.tensors)))
        """Rank of each bucket by shard, 0 = most urgent."""
        self._job = job
        self._half = half
        self._hooks = hooks
        self._tools = tools
        self._nonfinite = NonFinite(job.consistency.nan_policy, tools.staging, observer)
        self.uses: dict[int, None] | None = {}
        """Tensors in the order of their first use, filled in the first step by the gate."""
        self._fired: list[int] = []
        """Calls of hooks, while it is not known how often each is called in a backward pass."""
        self._once: set[int] = set()
        self._sent_order: dict[int, list[int]] = {}
        """Order of sending in the previous step, by shard."""
        self._push: EarlyPush | None = None
        self._expected: Expected | None = None
        self._told: set[str] = set()

    @property
    def armed(self) -> bool:
        """Whether gradients of the open step are expected to leave, or have left, during the backward pass."""
        return self._push is not None

    @property
    def begun(self) -> bool:
        """Whether gradients of the open step may have left during the backward pass."""
        return self._push is not None and self._push.begun

    def pull_order(self, shard: int, *, hold: bool) -> list[int]:
        """Buckets in the order in which to request them. hold: the backward pass is still running."""
        at_once = not self._half.by_bucket or not hold
        return pull_order(self.ranks[shard], at_once=at_once, sent=self._sent_order.get(shard, ()))

    def expect(self, expected: Expected, *, first: bool, begin: Begin) -> None:
        """Expect a replica's last backward pass. first: in the first step after a start. Raises NonFiniteError."""
        step = self._half.step
        if not self._once:
            # The first step only counts how often hooks are called; nothing leaves early.
            self._fired = []
            self._hooks.listen(lambda number, parameter: self._fired.append(number))
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
            ranks=self.ranks,
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
        """End the backward pass of an early push: the rest may leave. Raises any error of the pass."""
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
        """End an early push that no step() followed; returns the error to raise."""
        assert self._push is not None
        error = self._push.error or JobError(
            f"step {step}: backward() has sent gradients, but no step() followed; with overlap every backward() needs "
            "its step(), since its gradients are already sent. To skip a batch, or only inspect gradients, use "
            "attach(..., overlap=False), SHARDLINE_OVERLAP=0 or torch.autograd.grad()"
        )
        self._push.fail(error)
        return error

    def end_step(self) -> None:
        """Free what the open step used; it is acknowledged or given up."""
        self._hooks.ignore()
        if self._push is not None:
            self._push.drop()
        self._push = self._expected = None

    def learn(self) -> None:
        """Learn from a finished step: order of use and of sending."""
        if self._fired and not self._once:
            self._once = once_each(self._fired)
            self.ranks = bucket_ranks(self._plan, list(self.uses) if self.uses else range(len(self._plan.tensors)))
        if self._push is not None:
            self._sent_order = {shard: payloads.order for shard, payloads in self._push.payloads.items()}

    def detach(self) -> None:
        self._hooks.close()
