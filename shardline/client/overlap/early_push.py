"""Gradients sent during the backward pass, and the push they belong to."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from shardline import codecs
from shardline.client.exchange.arrivals import Key
from shardline.client.exchange.streaming_payloads import LivePayloads, SendQueue, default_credit
from shardline.client.layout import homes
from shardline.client.step.open_step import Expected, PushTools
from shardline.consistency.worker import WorkerHalf
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec, TensorKind
from shardline.core.tensor_bytes import digest, tensor_bytes
from shardline.errors import JobError
from shardline.waist import Payload


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


def not_stepped(step: int) -> JobError:
    """The error for a backward pass that sent gradients and was not followed by a step."""
    return JobError(
        f"step {step}: backward() has sent gradients, but no step() followed; with overlap every backward() needs its "
        "step(), since its gradients are already sent. To skip a batch, or only inspect gradients, use attach(..., "
        "overlap=False), SHARDLINE_OVERLAP=0 or torch.autograd.grad()"
    )


class EarlyPush:
    """One replica's gradients, sent to all shards while they are computed. A listener of GradientHooks.

    block: the replica is its last one, earlier ones are in staging. once: see FireCount. begin: starts the exchange;
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
        self._begun = False
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
            first = bool(ready) and not self._begun
            self._begun = self._begun or bool(ready)
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
        if not self._begun:
            self._begun = True
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

    @property
    def begun(self) -> bool:
        """Whether something may have left."""
        return self._begun

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
        return there or not self._staging.is_empty(key, self.block)

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
