"""A job's codec applied to its plan: the actual codec, coders and size bound for each bucket and direction."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from shardline.codecs.base import Codec, Decoder, Direction, Encoder, Layout, Memory, MemoryKey, Scope
from shardline.codecs.raw import Raw
from shardline.core.plan import Plan
from shardline.errors import JobError, ProtocolError

PLAIN: Codec = Raw()
"""The codec of initial values, and of tensors that the job's codec doesn't encode."""


@dataclass(frozen=True, slots=True)
class BucketCoding:
    """The coding of one bucket in one direction."""

    codec: Codec
    """The actual codec: the job's, or PLAIN if that encodes none of the bucket's tensors."""
    name: str
    """The codec's name in messages."""
    layout: Layout
    encoder: Encoder
    decoder: Decoder
    max_bytes: int

    def misfit(self, nbytes: int) -> str:
        """Why no payload of this bucket has this length; "" if one may. Checked before memory is allocated for it."""
        if self.codec.fixed_size:
            return "" if nbytes == self.max_bytes else f"codec {self.name} makes {self.max_bytes} bytes"
        return "" if 0 <= nbytes <= self.max_bytes else f"codec {self.name} makes at most {self.max_bytes} bytes"


class Coding:
    """One codec applied to a plan. Buckets' codings are cached; any thread may use it."""

    def __init__(self, codec: Codec, plan: Plan) -> None:
        self.codec = codec
        self.plan = plan
        self.name = str(codec)
        self._buckets: dict[tuple[int, int], BucketCoding] = {}
        self._memories: dict[tuple[int, int, str], dict[MemoryKey, torch.Tensor]] = {}

    def bucket(self, shard: int, number: int) -> BucketCoding:
        """The coding of one bucket. Raises JobError if the plan cuts a tensor that the codec needs whole."""
        found = self._buckets.get((shard, number))
        if found is None:
            found = self._buckets[shard, number] = self._make(shard, number)
        return found

    def _make(self, shard: int, number: int) -> BucketCoding:
        spec = self.plan.shards[shard].buckets[number]
        layout = Layout(bucket=spec, tensors=self.plan.tensors)
        taken = [part for part in layout.parts(Scope.TENSOR) if self.codec.takes(part.tensor)]
        cut = next((part for part in taken if not part.is_whole and self.codec.wants_whole(part.tensor.shape)), None)
        if cut is not None:
            raise JobError(f"codec {self.name} needs whole tensors, but the plan cuts {cut.tensor.name!r}")
        codec = self.codec if taken else PLAIN
        return BucketCoding(
            codec, str(codec), layout, codec.encoder(layout), codec.decoder(layout), codec.max_bytes(layout)
        )

    def memory(self, shard: int, number: int, receiver: str) -> MutableMapping[MemoryKey, torch.Tensor]:
        """Memory of a bucket's pulls by one receiver: at a server what it sent, at a worker what it received."""
        if self.codec.memory is Memory.NONE:
            return {}
        return self._memories.setdefault((shard, number, receiver), {})


class JobCoding:
    """A job's codec in both directions."""

    def __init__(self, codec: Codec, plan: Plan) -> None:
        self.push = Coding(pushed(codec), plan)
        self.pull = Coding(pulled(codec), plan)
        self._plan = plan

    @functools.cached_property
    def plain(self) -> Coding:
        """Coding of initial values, and of what a sender leaves unencoded although the job has a codec."""
        return Coding(PLAIN, self._plan)

    def of_push(self, name: str) -> Coding:
        """The coding that a push names. Raises ProtocolError for another codec than the job's."""
        return self._named(name, self.push, "pushed")

    def of_pull(self, name: str) -> Coding:
        """The coding that a pulled bucket names. Raises ProtocolError for another codec than the job's."""
        return self._named(name, self.pull, "pulled")

    def _named(self, name: str, ours: Coding, what: str) -> Coding:
        if name == ours.name:
            return ours
        if name in ("", PLAIN.name):
            return self.plain
        raise ProtocolError(f"{what} with codec {name[:100]!r}; the job uses {ours.name!r}")


def pushed(codec: Codec) -> Codec:
    """The codec of a job's gradients."""
    return PLAIN if codec.direction is Direction.PULL else codec


def pulled(codec: Codec) -> Codec:
    """The codec of a job's parameters."""
    return PLAIN if codec.direction is Direction.PUSH else codec
