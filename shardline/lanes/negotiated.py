"""The best lane that two tasks can use: tried in order when first needed, and left when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from shardline.cluster import parse_address
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.plan import ShardSpec
from shardline.core.spec import TensorKind
from shardline.errors import UnreachableError
from shardline.host.ports import on_this_host
from shardline.lanes import candidates
from shardline.lanes.base import Lane, LaneUnavailable, SharedMemory
from shardline.rpc.channel import Peer
from shardline.waist import Exchanged, Memory, Push, Sender, Sink, Standing, Want

if TYPE_CHECKING:
    import torch

    from shardline.config import RoleConfig

log = logging.getLogger("shardline.lanes")
BREAKS = 3
"""Failed exchanges in a row, while the shard still answers calls, before another lane takes over."""

Fallback = Callable[[str, str], None]
"""Called with (lane, reason) once for each requested lane that can't be used."""


class NegotiatedLane:
    """One of several candidate lanes. See Lane; the last candidate is grpc, which always works.

    expected: lanes whose failure is logged as a warning; others are tried silently (automatic choice on one host).
    """

    def __init__(
        self,
        candidates: Sequence[Lane],
        *,
        peer: str,
        expected: Sequence[str] = (),
        on_fallback: Fallback = lambda lane, reason: None,
    ) -> None:
        self._left = list(candidates)
        self._peer = peer
        self._expected = tuple(expected)
        self._on_fallback = on_fallback
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._broken = 0
        self._said = False

    @property
    def current(self) -> Lane:
        """The lane in use, or the next to try."""
        return self._left[0]

    @property
    def name(self) -> str:
        return self.current.name

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        try:
            while True:
                lane = self._left[0]
                try:
                    done = lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)
                except LaneUnavailable as reason:
                    self._leave(lane, str(reason))
                except UnreachableError as error:
                    if self._cancelled.is_set():
                        # This side gave up, which says nothing about the lane.
                        raise
                    self._broken += 1
                    if self._broken >= BREAKS and len(self._left) > 1 and self._answers(lane, sender, timeout_s):
                        self._leave(lane, f"it failed {self._broken} times in a row, most recently: {error}")
                    raise
                else:
                    self._broken = 0
                    if not self._said:
                        self._said = True
                        log.info("%s: lane %s", self._peer, lane.name)
                    return done
        finally:
            # At the end, not at the beginning: cancel() may come before its exchange has begun.
            if self._cancelled.is_set():
                self._cancelled.clear()

    def _answers(self, lane: Lane, sender: Sender, timeout_s: float) -> bool:
        """Whether the shard answers calls and is still wanted: then the lane is broken, not the shard."""
        try:
            # With a replica: without one it would say that this worker rests.
            lane.standing(sender, (0,), timeout_s=min(timeout_s, 5.0))
        except UnreachableError:
            return False
        return not self._cancelled.is_set()

    def _leave(self, lane: Lane, reason: str) -> None:
        with self._lock:
            if self._left[0] is not lane or len(self._left) == 1:
                return
            self._left.pop(0)
            following = self._left[0].name
            self._broken = 0
        lane.close()
        if lane.name in self._expected:
            log.warning("%s: lane %s can't be used (%s); using %s", self._peer, lane.name, reason, following)
            self._on_fallback(lane.name, reason)
        else:
            log.debug("%s: lane %s can't be used (%s)", self._peer, lane.name, reason)

    @property
    def by_reference(self) -> bool:
        return self._left[0].by_reference

    @property
    def published(self) -> SharedMemory | None:
        return self._left[0].published

    def allocate(self, bucket: int, nbytes: int) -> Memory | None:
        return self._left[0].allocate(bucket, nbytes)

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        return self.current.standing(sender, replicas, timeout_s=timeout_s)

    def state(
        self, sender: Sender, step: int, buckets: Sequence[int], *, timeout_s: float
    ) -> Sequence[BucketImage] | None:
        return self.current.state(sender, step, buckets, timeout_s=timeout_s)

    def bring_state(self, sender: Sender, images: Sequence[BucketImage], *, timeout_s: float) -> Outcome:
        return self.current.bring_state(sender, images, timeout_s=timeout_s)

    def cancel(self) -> None:
        self._cancelled.set()
        self.current.cancel()

    def close(self) -> None:
        with self._lock:
            left = list(self._left)
        for lane in left:
            lane.close()


def open_lane(
    config: RoleConfig,
    peer: Peer,
    shard: int,
    spec: ShardSpec,
    *,
    tensors: Collection[torch.Tensor] = (),
    on_fallback: Fallback = lambda lane, reason: None,
) -> Lane:
    """The lane from this task to one shard, as --lane says; connects only with the first exchange.

    tensors: the model's. on_fallback: called with (lane, reason) for a requested lane that
    can't be used.
    """
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    local = on_this_host(parse_address(peer.address)[0]) or config.run_dir is not None
    kinds = candidates(config.lane, local=local, device=device)
    if any(bucket.kind is TensorKind.TABLE for bucket in spec.buckets):
        kinds = tuple(kind for kind in kinds if not kind.fixed_places)
    lanes = [kind.connect(config, peer, shard, spec, device=device) for kind in kinds]
    return NegotiatedLane(lanes, peer=str(peer), expected=[kind.name for kind in kinds], on_fallback=on_fallback)
