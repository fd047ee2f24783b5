"""Rows of tables in a worker's pass: pulled when a layer asks for them, their gradients taken when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from shardline.client.exchange.shard_exchange import PullSink, ShardTask
from shardline.client.step.trainer import Trainer
from shardline.core.rows import part_of
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import ProtocolError
from shardline.nn import EmbeddingTable
from shardline.waist import Arrival, Memory, Want, octets


class RowsSink(PullSink):
    """The memory that the rows of one bucket come to."""

    num_buckets = 1

    def __init__(self, rows: int, dim: int) -> None:
        self.values = torch.empty(rows, dim)
        self.shard_bytes = self.values.nbytes
        self.arrived: set[int] = set()
        self.raw_bytes = self.wire_bytes = 0
        self.first_s = 0.0

    def begin(self) -> None:
        self.arrived.clear()

    def buffer(self, arrival: Arrival) -> memoryview:
        self._check(arrival)
        return tensor_bytes(self.values)

    def done(self, arrival: Arrival) -> None:
        self._check(arrival)
        self.arrived.add(arrival.bucket)

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        self.buffer(arrival)[:] = memoryview(octets(payload))
        self.arrived.add(arrival.bucket)

    take = whole

    def _check(self, arrival: Arrival) -> None:
        if arrival.payload_bytes != self.shard_bytes:
            raise ProtocolError(
                f"bucket {arrival.bucket}: {arrival.payload_bytes} bytes for rows of {self.shard_bytes} bytes"
            )


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
        for table in tables.values():
            table.source = self

    def rows(self, table: EmbeddingTable, ids: torch.Tensor) -> torch.Tensor:
        """Pull rows of the open step. Raises StepAgain."""
        trainer, parts = self._trainer(), part_of(ids)
        plan, found = trainer.plan, torch.empty(len(ids), table.dim)
        pulled = []
        tasks = {}
        for shard, bucket, piece in plan.pieces(plan.index[table.name]):
            here = (parts >= piece.first_row) & (parts < piece.first_row + piece.rows)
            own = ids[here]
            if not len(own):
                continue
            sink = RowsSink(len(own), table.dim)
            want = Want(
                step=trainer.half.exact,
                buckets=[bucket],
                rows={bucket: own},
                wait_s=trainer.exchange.timeouts.server_wait_s,
            )
            moves = sink.shard_bytes + own.nbytes
            tasks[shard] = ShardTask(shard=shard, contributions=[], want=want, sink=sink, moves=moves)
            pulled.append((here, sink))
        with self._waits():
            trainer.exchange.start(trainer.sender, tasks, here=True).wait()
        for here, sink in pulled:
            found[here] = sink.values
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        """The rows' gradients since the last call, packed, by table."""
        return {name: packed for name, table in self._tables.items() if (packed := table.take()) is not None}

    def forget(self) -> None:
        for table in self._tables.values():
            table.forget()
