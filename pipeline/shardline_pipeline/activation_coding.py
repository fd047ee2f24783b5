"""A job's codec for what stages hand to each other: activations, and their gradients.

Tensors are encoded wherever one stage ends and the next begins, also if one worker computes both, so that the bits of a
training do not depend on who computes what.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from shardline import codecs
from shardline.codecs.base import Fidelity, Layout, Turn
from shardline.codecs.coding import BucketCoding
from shardline.core.parcel import Form, Parcel, ParcelKey, flat, memory_order, unflat
from shardline.core.plan import BucketSpec, Slice
from shardline.core.reduce import magnitude
from shardline.core.settings import Settings
from shardline.core.spec import DTYPES, TensorKind, TensorSpec, dtype_name
from shardline.core.tensor_bytes import borrowed_tensor, memory_of
from shardline.data import derive
from shardline.errors import NonFiniteError, ProtocolError

SHAPES = 64
"""Shapes of which the coders are kept."""


class ActivationCoding:
    """Encodes and decodes parcels. Used by one thread.

    codec: a job's codec_parcels. seed: the job's. Random numbers of a codec depend on the seed, the key of the parcel,
    and the number of the tensor among the activation's.
    """

    def __init__(self, codec: str, seed: int) -> None:
        self._codec = codecs.of_parcels(Settings(codec_parcels=codec))
        self._name = str(self._codec)
        self._seed = seed
        self.coder = functools.lru_cache(maxsize=SHAPES)(self._make)
        """By dtype, and shape in memory; None if the codec does not take such tensors."""

    def encoded(self, parcel: Parcel, which: Sequence[bool], what: str) -> Parcel:
        """The parcel with its tensors encoded, those of `which` that the codec takes.

        what: whose output it is, for messages. Raises NonFiniteError for NaN or infinity that the codec can't write.
        """
        if self._codec.is_view or not any(which):
            return parcel
        numbers = parcel.places if parcel.key.back else range(len(parcel.values))
        made = [
            self.encode(value, parcel.key, number, what) if wanted else (value, None)
            for value, number, wanted in zip(parcel.values, numbers, which, strict=True)
        ]
        return replace(parcel, values=tuple(value for value, _ in made), forms=tuple(form for _, form in made))

    def decoded(self, parcel: Parcel, what: str) -> tuple[torch.Tensor, ...]:
        """The parcel's tensors. Raises ProtocolError for bytes that the codec can't have made."""
        return tuple(
            self.decode(value, parcel.form(number), parcel.key, what) for number, value in enumerate(parcel.values)
        )

    # One tensor

    def encode(self, value: torch.Tensor, key: ParcelKey, number: int, what: str) -> tuple[torch.Tensor, Form | None]:
        """The bytes of one tensor, and what it was; the tensor itself and None if the codec does not take it."""
        if value.layout is not torch.strided or value.dtype not in DTYPES.values():
            return value, None
        order, dtype = memory_order(value), dtype_name(value.dtype, str(key))
        coder = self.coder(dtype, tuple(value.shape[one] for one in order))
        if coder is None:
            return value, None
        values = flat(value, order)
        # Refuse what the codec can't write. Some write NaN and infinity as such, but no number may become infinite.
        largest = magnitude(values)
        where = f"in step {key.step} of replica {key.replica}, microbatch {key.microbatch}"
        if not math.isfinite(largest):
            if self._codec.fidelity is Fidelity.LOSSY:
                raise NonFiniteError(
                    f"{what} has NaN or infinity in it, {where}, which codec {self._name} can't write; lower the "
                    "learning rate, or if infinity is meant, choose codec_parcels='bf16', which can"
                )
        elif not self._codec.stays_finite(largest):
            raise NonFiniteError(
                f"{what} has numbers up to {largest:.6g}, {where}, of which codec {self._name} makes infinity; choose "
                "codec_parcels='bf16', which has the range of float32, or lower the learning rate"
            )
        turn = Turn(
            step=key.step,
            replica=key.replica,
            seed=derive(self._seed, key.step, key.replica, key.stage, key.microbatch, key.back, number),
        )
        payload = borrowed_tensor(coder.coder.encode(values, turn), "uint8")
        return payload, Form(self._name, dtype, tuple(value.shape), order)

    def decode(self, value: torch.Tensor, form: Form | None, key: ParcelKey, what: str) -> torch.Tensor:
        if form is None:
            return value
        where = f"{key}, {what}, {form.dtype} {form.shape} in {value.nbytes} bytes of codec {form.codec}"
        coder = self.coder(form.dtype, tuple(form.shape[one] for one in form.order))
        if form.codec != self._name or coder is None:
            raise ProtocolError(f"{where}: the job's codec_parcels is {self._name!r}, which does not encode it so")
        misfit = coder.misfit(value.nbytes)
        if misfit:
            raise ProtocolError(f"{where}: {misfit} of it")
        try:
            values = coder.coder.decode(memory_of(value), Turn())
        except ProtocolError as error:
            raise ProtocolError(f"{where}: {error}") from error
        return unflat(values, form.shape, form.order)

    def usual_bytes(self, dtype: str, shape: Sequence[int]) -> int | None:
        """Bytes of a tensor of which this is the shape in memory, encoded; None if the codec does not take it."""
        coder = self.coder(dtype, tuple(shape)) if dtype in DTYPES else None
        return None if coder is None else coder.usual_bytes

    def _make(self, dtype: str, shape: tuple[int, ...]) -> BucketCoding | None:
        # Where dimensions of size 1 are in memory says nothing: a gradient may have them elsewhere than its activation.
        ordered = tuple(sorted(shape, key=lambda size: size == 1))
        codec, tensor = self._codec, TensorSpec(name="", shape=ordered, dtype=dtype)
        elements = tensor.elements
        if codec.is_view or not elements or not codec.takes(tensor):
            return None
        piece = Slice(tensor=0, first_row=0, rows=tensor.rows, offset=0, elements=elements)
        bucket = BucketSpec(dtype=tensor.dtype, kind=TensorKind.PARAM, elements=elements, slices=(piece,))
        layout = Layout(bucket=bucket, tensors=(tensor,))
        return BucketCoding(
            codec, self._name, layout, codec.coder(layout), codec.usual_bytes(layout), *codec.sizes(layout)
        )


def is_encoded(value: torch.Tensor) -> bool:
    """Whether a stage's output is encoded, if the codec takes it.

    Weights that it hands on are not, nor are tensors without a gradient, such as masks and indices.
    """
    return value.requires_grad and not isinstance(value, nn.Parameter)
