"""Rows of tables in a worker's pass: pulled when a layer asks for them, their gradients taken when it has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from shardline.client.exchange.shard_exchange import Interrupted, PullSink, ShardTask
from shardline.client.step.trainer import Trainer
from shardline.codecs.base import Turn
from shardline.codecs.rows import PackedRows
from shardline.core.rows import part_of
from shardline.errors import ProtocolError, UsageError
from shardline.nn import EmbeddingTable
from shardline.waist import Arrival, Want

log = logging.getLogger("shardline.client")


class RowsSink(PullSink):
    """The memory that rows of one shard's buckets come to. coders, counts: by bucket; counts: numbers of rows."""

    def __init__(self, coders: Mapping[int, PackedRows], counts: Mapping[int, int]) -> None:
        self.values: dict[int, torch.Tensor] = {}
        """Rows that have arrived: float32 [count, dim], by bucket."""
        self._coders, self._counts = coders, counts
        self._payloads: dict[int, bytearray] = {}
        super().__init__(len(counts), sum(coder.most_bytes(counts[bucket]) for bucket, coder in coders.items()))

    def buffer(self, arrival: Arrival) -> memoryview:
        coder = self._coders.get(arrival.bucket)
        if coder is None or arrival.payload_bytes > coder.most_bytes(self._counts[arrival.bucket]):
            raise ProtocolError(f"bucket {arrival.bucket}: {arrival.payload_bytes} bytes of rows that were not wanted")
        held = self._payloads[arrival.bucket] = bytearray(arrival.payload_bytes)
        return memoryview(held)

    def done(self, arrival: Arrival) -> None:
        payload, bucket = self._payloads.pop(arrival.bucket, bytearray()), arrival.bucket
        self.values[bucket] = self._coders[bucket].decode_rows(payload, self._counts[bucket], Turn(arrival.step))
        self.wire_bytes += len(payload)
        self.raw_bytes += self.values[bucket].nbytes
        self.arrived.add(bucket)


class ServedRows:
    """The servers as the RowSource of a model's tables. Used by the computing thread.

    trainer: the current one. waits: makes of a failed exchange what ends the pass.
    """

    def __init__(self, trainer: Callable[[], Trainer], waits: Callable[[], AbstractContextManager[None]]) -> None:
        self._tables: Mapping[str, EmbeddingTable] = {}
        self._trainer = trainer
        self.waits = waits
        self._closed = False

    def serve(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Serve these tables of a model, by name."""
        self._tables = tables
        for table in tables.values():
            table.source = self

    def rows(self, wanted: Sequence[tuple[EmbeddingTable, torch.Tensor]]) -> list[torch.Tensor]:
        """Pull rows of the open step. Raises StepAgain; UsageError after the session's end."""
        if self._closed:
            raise UsageError(
                f"the rows of table {wanted[0][0].name!r} are on the servers, and this session has ended; read them "
                "from its last checkpoint, with `shardline lookup`, or Checkpoint.rows()"
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
                at = ((parts >= piece.first_row) & (parts < piece.first_row + piece.rows)).nonzero().squeeze(1)
                if len(at):
                    here.setdefault(shard, {})[bucket] = name, at
        with self.waits():
            sinks = pull(trainer, {s: {b: unique[n][at] for b, (n, at) in own.items()} for s, own in here.items()})
        for shard, held in here.items():
            for bucket, (name, at) in held.items():
                values = sinks[shard].values[bucket]
                if len(at) == len(found[name]):
                    found[name] = values
                else:
                    found[name].index_copy_(0, at, values)
        return [
            found[table.name]
            if len(by_table[table.name]) == 1
            else found[table.name].index_select(0, torch.searchsorted(unique[table.name], ids))
            for table, ids in wanted
        ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The rows' gradients since the last call, packed, by table."""
        return {name: packed for name, table in self._tables.items() if (packed := table.take()) is not None}

    def clear_gradients(self) -> None:
        for table in self._tables.values():
            table.clear_gradients()

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
    coding = trainer.weights.coding.pull
    for shard, rows in wanted.items():
        coders = {bucket: coding.bucket(shard, bucket).coder for bucket in rows}
        packed = {bucket: coder for bucket, coder in coders.items() if isinstance(coder, PackedRows)}
        sink = sinks[shard] = RowsSink(packed, {bucket: len(ids) for bucket, ids in rows.items()})
        wait_s = trainer.exchange.timeouts.server_wait_s
        want = Want(step=trainer.half.exact, buckets=list(rows), rows=rows, wait_s=wait_s)
        tasks[shard] = ShardTask(shard=shard, contributions=[], want=want, sink=sink, moves=sink.shard_bytes)
    trainer.exchange.start(trainer.sender, tasks, here=True).wait()
    return sinks
