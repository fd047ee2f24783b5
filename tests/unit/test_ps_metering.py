"""What a ps's heartbeat sets in its metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch

from shardline.consistency.intake import TREE
from shardline.core.reduce import Block
from shardline.observability.metrics import Metrics
from shardline.server.staging import Ask, Ledger
from shardline_ps.memory.metering import Meter
from shardline_ps.standby.record_log import RecordLog
from shardline_ps.store import ParameterStore


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"task": "ps/0", **labels})
    assert found is not None, name
    return found


def test_staging_and_attachments_are_told_with_every_heartbeat() -> None:
    metrics, store = Metrics("ps", "ps/0"), ParameterStore(device=torch.device("cpu"), pool_threads=1)
    store.lane_attachments = lambda: {"tcp": 2, "shm": 0}
    store.staging.configure(Ledger(1000, {}, 1, intake=TREE, view=lambda shard, bucket: None), lambda: 30)
    meter = Meter(metrics, store)
    observe = meter.observed(lambda: SimpleNamespace(shards=[], standbys=[]))

    async def run() -> None:
        lease = await store.staging.reserve(Ask(0, None, Block(0, 1), 900), 1.0)
        waiting = asyncio.create_task(store.staging.reserve(Ask(0, None, Block(1, 1), 200), 10.0))
        await asyncio.sleep(0)
        observe()
        assert value(metrics, "shardline_staging_bytes") == 930
        lease.release()
        await waiting

    asyncio.run(run())
    observe()
    store.close()
    assert value(metrics, "shardline_staging_bytes") == 230
    assert value(metrics, "shardline_staging_limit_bytes") == 1000
    assert value(metrics, "shardline_staging_wait_seconds_count") == 1
    assert value(metrics, "shardline_lane_attachments", lane="tcp") == 2
    assert value(metrics, "shardline_held_bytes", kind="staged") == 230


def test_standbys_are_told_and_go_to_zero_where_there_are_none_any_more() -> None:
    metrics, store = Metrics("ps", "ps/0"), ParameterStore(device=torch.device("cpu"), pool_threads=1)
    log = RecordLog(on_entry=lambda: None, run=lambda release: None)
    log.restart(7)
    store.shards = {1: SimpleNamespace(log=log, buckets=()), 2: SimpleNamespace(log=None, buckets=())}  # type: ignore[dict-item]
    standbys = [SimpleNamespace(shard=0, synced=False, bytes=900), SimpleNamespace(shard=3, synced=True, bytes=50)]
    observe = Meter(metrics, store).observed(lambda: SimpleNamespace(shards=[], standbys=standbys))

    def seen(name: str) -> dict[str, float]:
        return {
            sample.labels["shard"]: sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"shardline_ps_standby_{name}"
        }

    store.held_by_kind = dict  # type: ignore[method-assign]
    for _ in range(3):
        log.mark(7)
    log.acknowledge(7, 1)
    observe()
    assert seen("synced") == {"0": 0, "3": 1}
    assert seen("bytes") == {"0": 900, "3": 50}
    assert seen("lag_records") == {"1": 2}
    # Shard 3 moves here as primary, and shard 1 goes alone.
    del standbys[1]
    store.shards = {}
    observe()
    store.close()
    assert seen("synced") == {"0": 0, "3": 0}
    assert seen("bytes") == {"0": 900, "3": 0}
    assert seen("lag_records") == {"1": 0}
