"""Gradients that leave while the backward pass still runs: hooks per parameter, and the push they feed."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from shardline.client.api.live import LivePayloads
from shardline.client.exchange.device import HostPath
from shardline.client.overlap.arrivals import Key
from shardline.client.overlap.priority import SendQueue, default_credit
from shardline.client.step.staging import Staging
from shardline.codecs import CODECS
from shardline.codecs.coding import pushed
from shardline.core.plan import Plan
from shardline.core.reduce import Block, cover
from shardline.core.spec import JobSpec, TensorKind
from shardline.errors import JobError
from shardline.lanes.base import BucketPayload

Listener = Callable[[int, torch.Tensor], None]
"""(tensor number, parameter) when its gradient of a backward pass is complete."""


class GradientHooks:
    """A hook on every trained parameter; calls one listener, or nobody."""

    def __init__(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        self._trained = [
            (number, tensors[number]) for number, spec in enumerate(plan.tensors) if spec.kind is TensorKind.PARAM
        ]
        self._handles: dict[int, RemovableHandle] = {}
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on. A parameter that has become trainable since is hooked too."""
        self._listener = listener
        for number, tensor in self._trained:
            if tensor.requires_grad and tensor.is_leaf and number not in self._handles:
                hook = functools.partial(self._fired, number)
                self._handles[number] = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def ignore(self) -> None:
        """Call nobody."""
        self._listener = None

    def _fired(self, number: int, parameter: torch.Tensor) -> None:
        listener = self._listener
        if listener is not None:
            listener(number, parameter)

    def close(self) -> None:
        """Leave the parameters as they were."""
        self.ignore()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class FireCount:
    """How often each parameter's gradient is completed in one backward pass. A listener of GradientHooks.

    Once, except where a pass runs others within itself (reentrant checkpointing) or there are several passes: the
    gradient is whole only when they have all ended.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, number: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        with self._lock:
            self._counts[number] += 1

    @property
    def once(self) -> set[int]:
        """Parameters whose gradients are whole when their hook is called."""
        return {number for number, count in self._counts.items() if count == 1}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is known of a replica's part of a step before its last backward pass."""

    replica: int
    owned: Sequence[int]
    """Replicas that this worker contributes to the step."""
    samples: int = 0
    loss: float | None = None
    hyper: Callable[[], Mapping[int, Mapping[str, float]]] = dict
    """Numbers of parameter groups that travel with the push; asked when the first bucket leaves."""


def why_not_early(job: JobSpec, expected: Expected, *, first: bool) -> str:
    """Why a replica's gradients can't leave before all of them have been computed; "" where they can. Pure.

    first: it is the first step after a (re)start.
    """
    terms = job.consistency
    is_sync = terms.mode == "sync"
    if first:
        return "in the first step after a start, parts of it may be counted already"
    if not is_sync and terms.clip_norm > 0.0:
        return "clipping in asynchronous mode needs all of them"
    if not is_sync and terms.nan_policy == "skip":
        return "all shards have to skip a gradient that is not finite, in asynchronous mode on the worker's word"
    if terms.nan_policy == "skip" and expected.loss is None:
        return "a loss that is not finite has to be known before anything leaves"
    if is_sync and (len(cover(expected.owned, job.replicas)) > 1 or max(expected.owned) != expected.replica):
        return "this worker's replicas make more than one push"
    if len(expected.owned) > 1 and not pushed(CODECS.parse(job.codec)).exact:
        return "what a codec rounds is not added up before it is sent"
    return ""


def not_stepped(step: int) -> JobError:
    """Gradients have left in a backward pass that no step followed."""
    return JobError(
        f"step {step}: backward() has sent gradients, and no step() followed; with overlap every backward() needs its "
        f"step(), since what it computed has left. Where a batch may be left out, or is only looked at, use "
        f"attach(..., overlap=False), SHARDLINE_OVERLAP=0 or torch.autograd.grad()"
    )


class EarlyPush:
    """One replica's gradients on their way to all shards while they are computed. A listener of GradientHooks.

    block: the replica is its last one, earlier ones are in `staging`. once: see FireCount.
    begin: starts the exchange; called when the first bucket is ready. on_nonfinite: called with names of tensors whose
    gradients have NaN or infinity before their bucket leaves, on the thread of a lane; what it raises ends the push.
    """

    def __init__(
        self,
        plan: Plan,
        staging: Staging,
        *,
        replica: int,
        block: Block,
        presum: bool,
        once: set[int],
        ranks: Sequence[Sequence[int]],
        credit_bytes: int = 0,
        begin: Callable[[], None],
        on_nonfinite: Callable[[Sequence[str]], None],
        interrupted: Callable[[], Exception | None],
        host: HostPath | None = None,
    ) -> None:
        self._plan = plan
        self._host = host
        self._marks: dict[int, torch.cuda.Event] = {}
        """On a GPU: what each gradient is complete after."""
        self._end: torch.cuda.Event | None = None
        self._staging = staging
        self._replica = replica
        self._presum = presum
        self.block = block
        """What the push counts for."""
        self._once = once
        self._begin = begin
        self._on_nonfinite = on_nonfinite
        self._lock = threading.Lock()
        self._gradients: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._twice: set[int] = set()
        self._added: set[Key] = set()
        """Buckets that staging has this replica's part of already."""
        self._early: set[Key] = set()
        """Buckets that could leave during the backward pass."""
        self._begun = False
        self._closed = False
        self.error: Exception | None = None
        """What went wrong. In a hook it is kept, since autograd must not see it."""
        self._lacking = {
            (s, b): len({piece.tensor for piece in bucket.slices})
            for s, shard in enumerate(plan.shards)
            for b, bucket in enumerate(shard.buckets)
            if bucket.kind is TensorKind.PARAM
        }
        self.payloads = {
            s: LivePayloads(
                SendQueue(ranks[s], [bucket.nbytes for bucket in shard.buckets], credit_bytes or default_credit(shard)),
                functools.partial(self._prepare, s),
                nbytes=shard.nbytes,
                interrupted=interrupted,
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
            if self._host is not None:
                # The hook runs on the stream that completed the gradient.
                self._marks[number] = self._host.mark()
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
        """The backward pass is over: offer the rest, by tensor number; what has no gradient stays absent.

        Raises JobError where a gradient is not what has left.
        """
        with self._lock:
            self._closed = True
        self._check_unchanged(gradients)
        self._gradients = dict(gradients)
        if self._host is not None:
            self._end = self._host.mark()
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
        """Nothing more leaves: this is why."""
        self.error = self.error or error
        for payloads in self.payloads.values():
            payloads.fail(error)

    def _has_values(self, key: Key, buffers: Mapping[int, torch.Tensor]) -> bool:
        """Whether a bucket that is offered only now has anything in it; what needs no lane's thread is added here."""
        spec = self._plan.shards[key[0]].buckets[key[1]]
        is_buffer = spec.kind is TensorKind.BUFFER
        source = buffers if is_buffer else self._gradients
        there = any(piece.tensor in source for piece in spec.slices)
        if there and not is_buffer:
            return True
        # Buffers go back to what they were before the push has left, so these are copied now.
        self._staging.add_bucket(
            key, self._replica, source, presum=self._presum, keep=False, after=[self._end] if self._end else ()
        )
        self._added.add(key)
        return there or not self._staging.is_empty(key, self.block)

    def _check_unchanged(self, gradients: Mapping[int, torch.Tensor]) -> None:
        left = [number for number in self._gradients if any(key in self._early for key in self._homes[number])]
        for number in left:
            now, then = gradients.get(number), self._gradients[number]
            if now is not then or now._version != self._versions[number] or number in self._twice:
                raise JobError(
                    f"the gradient of {self._plan.tensors[number].name!r} changed after the backward pass had sent it "
                    f"(a second backward(), clip_grad_norm_ or the like before step()); train this model without "
                    f"overlap: --no-overlap, or attach(..., overlap=False) in a script"
                )

    def _prepare(self, shard: int, bucket: int) -> BucketPayload:
        """Fill, check and encode one bucket; on the thread of the lane that sends it."""
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
        return self._staging.payload(key, self.block, names)

    def _after(self, key: Key) -> list[torch.cuda.Event]:
        """On a GPU: what all gradients of a bucket are complete after."""
        if key not in self._early and self._end is not None:
            return [self._end]
        slices = self._plan.shards[key[0]].buckets[key[1]].slices
        return [self._marks[piece.tensor] for piece in slices if piece.tensor in self._marks]

    def drop(self) -> None:
        """Free gradients and payloads: they are acknowledged or given up."""
        with self._lock:
            self._closed = True
            self._gradients = {}
        for payloads in self.payloads.values():
            payloads.drop()


def filled_payloads(
    plan: Plan,
    staging: Staging,
    shard: int,
    block: Block,
    *,
    ranks: Sequence[int],
    credit_bytes: int,
    interrupted: Callable[[], Exception | None],
) -> LivePayloads:
    """A block's push to one shard, all of whose buckets are in `staging`; each is encoded when it is sent."""
    spec = plan.shards[shard]
    # Nothing more can overtake, so a few large batches do: the shard begins with the first while others are encoded.
    # Where all bytes are in their place one is enough. Of many workers' pushes the shard then takes one after another,
    # where with small batches its threads met at the same buckets again and again.
    in_place = staging.in_place(shard)
    window = credit_bytes or (spec.nbytes if in_place else max(default_credit(spec), spec.nbytes // 4))
    queue = SendQueue(ranks, [bucket.nbytes for bucket in spec.buckets], window)
    payloads = LivePayloads(
        queue,
        lambda bucket: staging.payload((shard, bucket), block),
        nbytes=spec.nbytes,
        in_place=in_place,
        interrupted=interrupted,
    )
    empty = [bucket for bucket in range(len(spec.buckets)) if staging.is_empty((shard, bucket), block)]
    for bucket in range(len(spec.buckets)):
        if bucket not in empty:
            payloads.offer(bucket)
    payloads.close(empty)
    return payloads


def homes(plan: Plan) -> list[list[Key]]:
    """Buckets that hold a slice of each tensor, by tensor number."""
    found: list[list[Key]] = [[] for _ in plan.tensors]
    for s, shard in enumerate(plan.shards):
        for b, bucket in enumerate(shard.buckets):
            for tensor in dict.fromkeys(piece.tensor for piece in bucket.slices):
                found[tensor].append((s, b))
    return found


def keys_of(places: Sequence[Sequence[Key]], tensors: Iterable[int]) -> list[Key]:
    """Every bucket that holds a slice of one of these tensors; places: of homes()."""
    return list(dict.fromkeys(key for tensor in tensors for key in places[tensor]))
