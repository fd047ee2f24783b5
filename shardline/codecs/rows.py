"""Rows of tables on the wire: ids as they are, and the rows by the table's codec, if it needs no memory.

A codec with memory remembers an error for every element of a bucket; of rows nobody knows how many there will be.
"""

from __future__ import annotations

import torch

from shardline.codecs.base import Codec, Fidelity, Layout, Memory, Part, Turn
from shardline.codecs.parts import Lossy
from shardline.codecs.quantizing.base import Blocked
from shardline.codecs.raw import Raw
from shardline.core.plan import BucketSpec, Slice, padded
from shardline.core.rows import ID_ELEMENTS, MOST_BYTES, ids_of, pack, rows_of
from shardline.core.spec import TensorKind, TensorSpec
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError

PLAIN: Codec = Raw()
"""The codec of initial values, and of tensors that the job's codec doesn't encode."""
COUNT_BYTES = 8
"""Before encoded rows: how many they are, int64."""


def codec_of_rows(own: Codec, dim: int) -> Codec:
    """The codec that a table's rows of dim elements are sent by, where `own` is that of other tensors.

    It encodes each row as if alone: which others are sent with it depends on the servers, and no number may.
    """
    if isinstance(own, Blocked):
        return own.of_rows(dim) or PLAIN
    rounds_each = own.fidelity is not Fidelity.LOSSY and own.memory is Memory.NONE
    return own if rounds_each and not (own.at_server.rule or own.at_server.votes) else PLAIN


class PackedRows:
    """The Coder of a table's bucket: of packed rows (core.rows), and of rows alone."""

    def __init__(self, codec: Codec, table: TensorSpec) -> None:
        self.codec = codec
        self._name, self._dim = table.name, table.row_elements

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        if self.codec.is_view:
            return tensor_bytes(values)
        ids = ids_of(values, self._dim)
        head = torch.cat([torch.tensor([len(ids)]), ids])
        return b"".join([tensor_bytes(head), self.encode_rows(rows_of(values, self._dim), turn)])

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """Packed rows, a view of writable bytes where the codec is raw. Raises ProtocolError."""
        if self.codec.is_view:
            return tensor_from_bytes(payload, "float32")
        data = memoryview(payload)
        count = int(tensor_from_bytes(bytes(data[:COUNT_BYTES]), "int64")[0]) if len(data) >= COUNT_BYTES else -1
        end = COUNT_BYTES + count * ID_ELEMENTS * 4
        if not count >= 0 or end > len(data):
            raise ProtocolError(f"table {self._name!r}: {len(data)} bytes can't be {count} encoded rows and their ids")
        ids = tensor_from_bytes(bytes(data[COUNT_BYTES:end]), "int64")
        return pack(ids, self.decode_rows(data[end:], count, turn))

    def encode_rows(self, rows: torch.Tensor, turn: Turn) -> Buffer:
        """Bytes of rows: float32 [U, dim]."""
        if self.codec.is_view:
            return tensor_bytes(rows)
        if isinstance(self.codec, Lossy):
            return self.codec.encode_part(rows.reshape(-1), self._part(len(rows)), turn) if len(rows) else b""
        layout = self._layout(len(rows))
        flat = torch.zeros(layout.bucket.elements)
        flat[: rows.numel()] = rows.reshape(-1)
        return self.codec.coder(layout).encode(flat, turn)

    def decode_rows(self, payload: Buffer, count: int, turn: Turn) -> torch.Tensor:
        """Rows: float32 [count, dim]. Raises ProtocolError."""
        if self.codec.is_view:
            return tensor_from_bytes(payload, "float32").view(count, self._dim)
        if isinstance(self.codec, Lossy):
            part = self._part(count)
            fits = len(payload) <= self.codec.max_part_bytes(part) and 4 * part.elements <= MOST_BYTES
            if not fits or (count == 0) != (len(payload) == 0):
                raise ProtocolError(f"table {self._name!r}: {len(payload)} bytes can't be {count} rows")
            found = self.codec.decode_part(memoryview(payload), part) if count else torch.empty(0)
            return found.view(count, self._dim)
        layout = self._layout(count)
        least, most = self.codec.sizes(layout)
        # Else a short payload could have memory taken for as many rows as it says it has.
        if not least <= len(payload) <= most:
            raise ProtocolError(
                f"table {self._name!r}: {len(payload)} bytes can't be {count} rows; codec {self.codec} makes "
                f"{least} to {most} bytes"
            )
        flat = self.codec.coder(layout).decode(payload, turn)
        return flat[: count * self._dim].view(count, self._dim)

    def most_bytes(self, count: int) -> int:
        """Most bytes of this many rows."""
        if isinstance(self.codec, Lossy):
            return self.codec.max_part_bytes(self._part(count))
        return self.codec.sizes(self._layout(count))[1] if not self.codec.is_view else 4 * count * self._dim

    def _part(self, count: int) -> Part:
        """All rows, each of which has scales of its own."""
        tensor = TensorSpec(name=self._name, shape=(count, self._dim), dtype="float32")
        return Part(tensor=tensor, first_row=0, offset=0, elements=tensor.elements, piece=0)

    def _layout(self, count: int) -> Layout:
        """Rows as one tensor in one bucket."""
        elements = count * self._dim
        tensor = TensorSpec(name=self._name, shape=(count, self._dim), dtype="float32")
        piece = Slice(tensor=0, first_row=0, rows=count, offset=0, elements=elements)
        bucket = BucketSpec(dtype="float32", kind=TensorKind.PARAM, elements=padded(elements), slices=(piece,))
        return Layout(bucket=bucket, tensors=(tensor,))
