"""A ps's metrics for Prometheus."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import prometheus_client

from shardline.errors import NonFiniteError
from shardline.observability.metrics import Metrics, Spread
from shardline.rpc.v1 import common_pb2
from shardline.server.admission import outcome_name
from shardline.server.incoming_push import PushResult
from shardline.storage.population import BELOW_ADMISSION, CAP
from shardline_ps.store import ParameterStore

Key = TypeVar("Key")
Item = TypeVar("Item")
Moved = tuple[int, int, float]
"""Bytes before the codec, bytes on the wire, and seconds of one push or pull."""


class _Traffic(NamedTuple):
    """What is told of a push or a pull of one peer, by one codec and lane."""

    raw: prometheus_client.Counter
    wire: prometheus_client.Counter
    seconds: Spread

    def add(self, moved: Sequence[Moved]) -> None:
        self.raw.inc(sum([raw for raw, _, _ in moved]))
        self.wire.inc(sum([wire for _, wire, _ in moved]))
        self.seconds.observe_all([seconds for _, _, seconds in moved])


def _by_key(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


class Meter:
    """Counts pushes as they end, and takes the other figures from the status in every heartbeat."""

    def __init__(self, metrics: Metrics, store: ParameterStore) -> None:
        self._metrics = metrics
        self._store = store
        self._seen: dict[tuple[object, ...], int] = {}
        self._held_standbys: set[int] = set()
        self._followed: set[int] = set()
        """Shards whose standbys have gauges, here and elsewhere."""
        # Looked up once: this is part of every small step's price.
        self._traffic = functools.cache(self._find_traffic)
        self._outcomes = functools.cache(
            lambda peer, outcome: metrics.counter("shardline_pushes_total", peer=peer, outcome=outcome_name(outcome))
        )
        self._of_shard = functools.cache(lambda name, shard: metrics.histogram(name, shard=shard))
        store.on_pulled = lambda *pull: metrics.later(self._pulled, pull)
        store.on_barrier = lambda *wait: metrics.later(self._waited, wait)
        store.on_applied = lambda *applied: metrics.later(self._applied, applied)
        store.staging.on_wait = self._kept_waiting

    def pushed(self, result: PushResult) -> None:
        self._metrics.later(self._count_pushes, result)

    def _count_pushes(self, results: Sequence[PushResult]) -> None:
        ends = Counter([(result.task or "not admitted", result.ack.outcome) for result in results])
        for (peer, outcome), number in ends.items():
            self._outcomes(peer, outcome).inc(number)
            if outcome == common_pb2.OUTCOME_FENCED:
                self._metrics.counter("shardline_fenced_messages_total", peer=peer).inc(number)
        admitted = [result for result in results if result.task]
        moved = [((r.task, r.codec, r.lane), (r.raw_bytes, r.wire_bytes, r.seconds)) for r in admitted]
        for key, pushes in _by_key(moved).items():
            self._traffic("push", *key).add(pushes)
        applied = [result for result in admitted if result.ack.outcome == common_pb2.OUTCOME_APPLIED]
        for shard, updates in _by_key([(result.shard, result.ack.staleness) for result in applied]).items():
            self._of_shard("shardline_staleness_updates", shard).observe_all(updates)

    def _find_traffic(self, direction: str, peer: str, codec: str, lane: str) -> _Traffic:
        metrics, name = self._metrics, f"shardline_{direction}"
        return _Traffic(
            metrics.counter(f"{name}_raw_bytes_total", peer=peer, codec=codec, lane=lane),
            metrics.counter(f"{name}_wire_bytes_total", peer=peer, codec=codec, lane=lane),
            metrics.histogram(f"{name}_seconds", peer=peer),
        )

    def _pulled(self, pulls: Sequence[tuple[str, str, str, int, int, float]]) -> None:
        for key, moved in _by_key([(pull[:3], pull[3:]) for pull in pulls]).items():
            self._traffic("pull", *key).add(moved)

    def refused(self, method: str, error: Exception) -> None:
        self._metrics.counter("shardline_refused_messages_total", method=method).inc()
        if isinstance(error, NonFiniteError):
            self._metrics.counter("shardline_nonfinite_total", what="gradient").inc()

    def _waited(self, waits: Sequence[tuple[int, float]]) -> None:
        for shard, seconds in _by_key(waits).items():
            self._of_shard("shardline_barrier_wait_seconds", shard).observe_all(seconds)

    def _applied(self, applied: Sequence[tuple[int, float]]) -> None:
        for shard, seconds in _by_key(applied).items():
            self._of_shard("shardline_apply_seconds", shard).observe_all(seconds)

    def _kept_waiting(self, wait_s: float) -> None:
        self._metrics.histogram("shardline_staging_wait_seconds").observe(wait_s)

    def _raise_to(self, name: str, total: int, **labels: str | int) -> None:
        """Raise a counter to a total kept elsewhere."""
        key = name, *labels.values()
        self._metrics.counter(name, **labels).inc(max(0, total - self._seen.get(key, 0)))
        self._seen[key] = max(total, self._seen.get(key, 0))

    def _table(self, shard: int, held: Any) -> None:
        labels: dict[str, str | int] = {"shard": shard, "table": held.table}
        self._metrics.gauge("shardline_table_rows", **labels).set(held.rows)
        for reason in (BELOW_ADMISSION, CAP):
            self._raise_to("shardline_table_refused_total", getattr(held, reason), **labels, reason=reason)
        self._raise_to("shardline_table_evicted_total", held.evicted, **labels)
        for result, total in (("hit", held.memory_hits), ("miss", held.memory_misses)):
            self._raise_to("shardline_table_memory_total", total, **labels, result=result)
        self._metrics.gauge("shardline_table_disk_rows", **labels).set(held.disk_rows)
        self._metrics.gauge("shardline_table_disk_bytes", **labels).set(held.disk_bytes)

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

    def observed(self, status: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the status function so that each call also updates the gauges."""

        def observe() -> Any:
            reply = status()
            metrics = self._metrics
            for item in reply.shards:
                metrics.gauge("shardline_shard_version", shard=item.shard).set(item.version)
                metrics.gauge("shardline_shard_step", shard=item.shard).set(item.step_min)
                for held in item.tables:
                    self._table(item.shard, held)
            if reply.shards:
                metrics.gauge("shardline_step").set(min(item.step_min for item in reply.shards))
                self._raise_to("shardline_skipped_steps_total", max(item.skipped_steps for item in reply.shards))
                mismatches = sum(item.duplicate_mismatches for item in reply.shards)
                self._raise_to("shardline_duplicate_mismatches_total", mismatches)
                cuts = sum(shard.cuts.skipped_total for shard in self._store.shards.values())
                self._raise_to("shardline_cuts_skipped_total", cuts)
            self._standbys(reply)
            coding = self._store.configuration.coding.pull if self._store.configuration is not None else None
            if coding is not None and coding.relative_error is not None:
                gauge = self._metrics.gauge("shardline_codec_error_ratio", codec=coding.name, way="pull")
                gauge.set(coding.relative_error)
            for kind, held in self._store.held_by_kind().items():
                metrics.gauge("shardline_held_bytes", kind=kind).set(held)
            for lane, attachments in self._store.lane_attachments().items():
                metrics.gauge("shardline_lane_attachments", lane=lane).set(attachments)
            metrics.gauge("shardline_staging_bytes").set(self._store.staging.in_use)
            metrics.gauge("shardline_staging_limit_bytes").set(self._store.staging.limit)
            metrics.counter("shardline_heartbeats_total", peer="chief").inc()
            return reply

        return observe
