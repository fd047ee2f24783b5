"""Rows of tables in a worker's pass: pulled when a layer asks for them, their gradients taken when it has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from shardline.client.exchange.shard_exchange import Interrupted, PullSink, ShardTask
from shardline.client.step.trainer import Trainer
from shardline.core.contributions import dim_of
from shardline.core.rows import part_of
from shardline.core.tensor_bytes import copy_bytes, tensor_bytes
from shardline.errors import ProtocolError, UsageError
from shardline.nn import EmbeddingTable
from shardline.waist import Arrival, Memory, Want, octets

log = logging.getLogger("shardline.client")


class RowsSink(PullSink):
    """The memory that rows of one shard's buckets come to. sizes: (rows, dim) by bucket."""

    def __init__(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        self.values = {bucket: torch.empty(*size) for bucket, size in sizes.items()}
        self.num_buckets = len(sizes)
        self.shard_bytes = sum(one.nbytes for one in self.values.values())
        self.arrived: set[int] = set()
        self.raw_bytes = self.wire_bytes = 0
        self.first_s = 0.0

    def begin(self) -> None:
        self.arrived.clear()

    def buffer(self, arrival: Arrival) -> memoryview:
        values = self.values.get(arrival.bucket)
        if values is None or arrival.payload_bytes != values.nbytes:
            raise ProtocolError(f"bucket {arrival.bucket}: {arrival.payload_bytes} bytes of rows that were not wanted")
        return tensor_bytes(values)

    def done(self, arrival: Arrival) -> None:
        self.wire_bytes += len(self.buffer(arrival))
        self.arrived.add(arrival.bucket)

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        copy_bytes(self.buffer(arrival), memoryview(octets(payload)))
        self.done(arrival)

    def take(self, arrival: Arrival, memory: Memory) -> None:
        self.whole(arrival, memory)


class ServedRows:
    """The servers as the RowSource of a model's tables. Used by the computing thread.

    trainer: the current one. waits: makes of a failed exchange what ends the pass.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingTable],
        trainer: Callable[[], Trainer],
        waits: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._tables = tables
        self._trainer = trainer
        self._waits = waits
        self._closed = False
        for table in tables.values():
            table.source = self

    def rows(self, wanted: Sequence[tuple[EmbeddingTable, torch.Tensor]]) -> list[torch.Tensor]:
        """Pull rows of the open step. Raises StepAgain; UsageError after the session's end."""
        if self._closed:
            raise UsageError(
                f"the rows of table {wanted[0][0].name!r} are on the servers, and this session has ended; read them "
                "from its last checkpoint, with shardline.checkpoint.tables.StoredTables as the table's `source`"
            )
        trainer = self._trainer()
        by_table: dict[str, list[torch.Tensor]] = {}
        for table, ids in wanted:
            by_table.setdefault(table.name, []).append(ids)
        # Of a table that comes twice, each row is pulled once.
        unique = {name: ids[0] if len(ids) == 1 else torch.unique(torch.cat(ids)) for name, ids in by_table.items()}
        found = {name: torch.empty(len(ids), self._tables[name].dim) for name, ids in unique.items()}
        here: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
        for name, ids in unique.items():
            parts = part_of(ids)
            for shard, bucket, piece in trainer.plan.pieces(trainer.plan.index[name]):
                own = (parts >= piece.first_row) & (parts < piece.first_row + piece.rows)
                if bool(own.any()):
                    here.setdefault(shard, {})[bucket] = name, own.nonzero().squeeze(1)
        with self._waits():
            sinks = pull(trainer, {s: {b: unique[n][at] for b, (n, at) in own.items()} for s, own in here.items()})
        for shard, held in here.items():
            for bucket, (name, at) in held.items():
                found[name][at] = sinks[shard].values[bucket]
        return [
            found[table.name]
            if len(by_table[table.name]) == 1
            else found[table.name][torch.searchsorted(unique[table.name], ids)]
            for table, ids in wanted
        ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The rows' gradients since the last call, packed, by table."""
        return {name: packed for name, table in self._tables.items() if (packed := table.take()) is not None}

    def close(self) -> None:
        """The session has ended."""
        self._closed = True

    def forget(self) -> None:
        for table in self._tables.values():
            table.forget()


def pull(trainer: Trainer, wanted: Mapping[int, Mapping[int, torch.Tensor]]) -> dict[int, RowsSink]:
    """Pull rows by shard, bucket and id, again where new orders that change nothing for this step interrupt it.

    Raises Restart, Interrupted, Stopped, UnreachableError.
    """
    while True:
        trainer.exchange.arm()
        # Looks at orders that came before; later ones interrupt.
        if not trainer.exchange.observer.still_ordered():
            raise Interrupted
        try:
            return _pull(trainer, wanted)
        except Interrupted:
            log.debug("new orders have interrupted a pull of rows")


def _pull(trainer: Trainer, wanted: Mapping[int, Mapping[int, torch.Tensor]]) -> dict[int, RowsSink]:
    sinks, tasks = {}, {}
    for shard, rows in wanted.items():
        dims = {bucket: dim_of(trainer.plan.shards[shard].buckets[bucket]) for bucket in rows}
        sink = sinks[shard] = RowsSink({bucket: (len(ids), dims[bucket]) for bucket, ids in rows.items()})
        wait_s = trainer.exchange.timeouts.server_wait_s
        want = Want(step=trainer.half.exact, buckets=list(rows), rows=rows, wait_s=wait_s)
        tasks[shard] = ShardTask(shard=shard, contributions=[], want=want, sink=sink, moves=sink.shard_bytes)
    trainer.exchange.start(trainer.sender, tasks, here=True).wait()
    return sinks
