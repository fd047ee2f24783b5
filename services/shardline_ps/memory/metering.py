"""A ps's metrics for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram

from shardline.errors import NonFiniteError
from shardline.observability.metrics import Metrics
from shardline.rpc.v1 import common_pb2
from shardline.server.admission import outcome_name
from shardline.server.incoming_push import PushResult
from shardline_ps.store import ParameterStore


class _Traffic(NamedTuple):
    """What is told of a push or a pull of one peer, by one codec and lane."""

    raw: Counter
    wire: Counter
    seconds: Histogram


class Meter:
    """Counts pushes as they end, and takes the other figures from the status in every heartbeat."""

    def __init__(self, metrics: Metrics, store: ParameterStore) -> None:
        self._metrics = metrics
        self._store = store
        self._seen: dict[str, int] = {}
        self._held_standbys: set[int] = set()
        self._followed: set[int] = set()
        """Shards whose standbys have gauges, here and elsewhere."""
        # Looked up once: this is part of every small step's price.
        self._traffic = functools.cache(self._find_traffic)
        self._outcomes = functools.cache(
            lambda peer, outcome: metrics.counter("shardline_pushes_total", peer=peer, outcome=outcome_name(outcome))
        )
        self._of_shard = functools.cache(lambda name, shard: metrics.histogram(name, shard=shard))
        store.on_pulled = functools.partial(metrics.later, self._pulled)
        store.on_barrier = functools.partial(metrics.later, self._waited)
        store.on_applied = functools.partial(metrics.later, self._applied)
        store.staging.on_wait = self._kept_waiting

    def pushed(self, result: PushResult) -> None:
        """Count a finished push."""
        self._metrics.later(self._count_push, result)

    def _count_push(self, result: PushResult) -> None:
        peer, outcome = result.task or "not admitted", result.ack.outcome
        self._outcomes(peer, outcome).inc()
        if outcome == common_pb2.OUTCOME_FENCED:
            self._metrics.counter("shardline_fenced_messages_total", peer=peer).inc()
        if not result.task:
            return
        traffic = self._traffic("push", result.task, result.codec, result.lane)
        traffic.raw.inc(result.raw_bytes)
        traffic.wire.inc(result.wire_bytes)
        traffic.seconds.observe(result.seconds)
        if outcome == common_pb2.OUTCOME_APPLIED:
            self._of_shard("shardline_staleness_updates", result.shard).observe(result.ack.staleness)

    def _find_traffic(self, direction: str, peer: str, codec: str, lane: str) -> _Traffic:
        metrics, name = self._metrics, f"shardline_{direction}"
        return _Traffic(
            metrics.counter(f"{name}_raw_bytes_total", peer=peer, codec=codec, lane=lane),
            metrics.counter(f"{name}_wire_bytes_total", peer=peer, codec=codec, lane=lane),
            metrics.histogram(f"{name}_seconds", peer=peer),
        )

    def _pulled(self, peer: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        traffic = self._traffic("pull", peer, codec, lane)
        traffic.raw.inc(raw_bytes)
        traffic.wire.inc(wire_bytes)
        traffic.seconds.observe(seconds)

    def refused(self, method: str, error: Exception) -> None:
        """Count a message that was answered with an error."""
        self._metrics.counter("shardline_refused_messages_total", method=method).inc()
        if isinstance(error, NonFiniteError):
            self._metrics.counter("shardline_nonfinite_total", what="gradient").inc()

    def _waited(self, shard: int, wait_s: float) -> None:
        self._of_shard("shardline_barrier_wait_seconds", shard).observe(wait_s)

    def _applied(self, shard: int, seconds: float) -> None:
        self._of_shard("shardline_apply_seconds", shard).observe(seconds)

    def _kept_waiting(self, wait_s: float) -> None:
        self._metrics.histogram("shardline_staging_wait_seconds").observe(wait_s)

    def _raise_to(self, name: str, total: int) -> None:
        """Raise a counter to a total kept elsewhere."""
        self._metrics.counter(name).inc(max(0, total - self._seen.get(name, 0)))
        self._seen[name] = max(total, self._seen.get(name, 0))

    def _standbys(self, reply: Any) -> None:
        """Set the gauges for the standbys held here and the lag of this ps's own; 0 for those that are gone."""
        held = {item.shard: (int(item.synced), item.bytes) for item in reply.standbys}
        logs = {number: shard.log for number, shard in self._store.shards.items()}
        lags = {number: log.lag for number, log in logs.items() if log is not None}
        self._held_standbys |= held.keys()
        self._followed |= lags.keys()
        for shard in self._held_standbys:
            synced, nbytes = held.get(shard, (0, 0))
            self._metrics.gauge("shardline_ps_standby_synced", shard=shard).set(synced)
            self._metrics.gauge("shardline_ps_standby_bytes", shard=shard).set(nbytes)
        for shard in self._followed:
            self._metrics.gauge("shardline_ps_standby_lag_records", shard=shard).set(lags.get(shard, 0))

    def _codec(self) -> None:
        coding = self._store.configuration.coding.pull if self._store.configuration is not None else None
        if coding is not None and coding.relative_error is not None:
            gauge = self._metrics.gauge("shardline_codec_error_ratio", codec=coding.name, way="pull")
            gauge.set(coding.relative_error)

    def observed(self, status: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the status function so that each call also updates the gauges."""

        def observe() -> Any:
            reply = status()
            metrics = self._metrics
            for item in reply.shards:
                metrics.gauge("shardline_shard_version", shard=item.shard).set(item.version)
                metrics.gauge("shardline_shard_step", shard=item.shard).set(item.step_min)
            if reply.shards:
                metrics.gauge("shardline_step").set(min(item.step_min for item in reply.shards))
                self._raise_to("shardline_skipped_steps_total", max(item.skipped_steps for item in reply.shards))
                mismatches = sum(item.duplicate_mismatches for item in reply.shards)
                self._raise_to("shardline_duplicate_mismatches_total", mismatches)
                cuts = sum(shard.cuts.skipped_total for shard in self._store.shards.values())
                self._raise_to("shardline_cuts_skipped_total", cuts)
            self._standbys(reply)
            self._codec()
            for kind, held in self._store.held_by_kind().items():
                metrics.gauge("shardline_held_bytes", kind=kind).set(held)
            for lane, attachments in self._store.lane_attachments().items():
                metrics.gauge("shardline_lane_attachments", lane=lane).set(attachments)
            metrics.gauge("shardline_staging_bytes").set(self._store.staging.in_use)
            metrics.gauge("shardline_staging_limit_bytes").set(self._store.staging.limit)
            metrics.counter("shardline_heartbeats_total", peer="chief").inc()
            return reply

        return observe
