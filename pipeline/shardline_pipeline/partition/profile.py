"""What the layers of a model need: a value that a plan is made of, and that can be written to a file. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardline.errors import UsageError
from shardline_pipeline.activation_coding import ActivationCoding

VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A tensor that the next layer gets."""

    dtype: str
    """As torch names it: "float32"."""
    shape: tuple[int, ...]
    """In memory: the slowest dimension first."""
    needs_grad: bool
    """A gradient comes back for it."""
    weight: bool = False
    """A parameter, which is handed on as it is, whatever the job's codec_parcels."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, for one microbatch. Times in seconds."""

    name: str
    """Such as "3 (Linear)"."""
    forward_s: float
    backward_s: float
    """With the loss, in the last layer."""
    flops: int = 0
    """Of the forward pass, as torch.utils.flop_counter counts them: multiplications of matrices and convolutions."""
    handed: tuple[Handed, ...] = ()
    """What the next layer gets; nothing of the last one."""
    trained_bytes: int
    """Parameters that are trained. Those that layers share count in the first one."""
    largest_bytes: int = 0
    """The largest tensor among them: where gradients of several microbatches are added up, there is one more of it."""
    fixed_bytes: int = 0
    """Buffers, and parameters that are not trained."""
    output: tuple[tuple[int, int], ...] = ()
    """What it is in memory, without the parameters in it: see `saved`."""
    saved: tuple[tuple[int, int], ...] = ()
    """What the forward pass keeps for the backward pass, parameters aside: (number of a storage, bytes). Neighbours may
    keep the same storage."""

    passing_bytes: int = 0
    """What its backward pass makes for a moment, as its tensors: without gradients of parameters and of its output, and
    less what it gives back of `saved` by then. With the loss, in the last layer."""
    between_bytes: int = 0
    """The same with the gradient of its output, where that comes from another layer and goes as soon as it can."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    @cached_property
    def output_bytes(self) -> int:
        return sum(one.nbytes for one in self.handed)

    @cached_property
    def weight_bytes(self) -> int:
        """Of the parameters among it: memory of the stage that gets them."""
        return sum(one.nbytes for one in self.handed if one.weight)

    @cached_property
    def gradient_bytes(self) -> int:
        """Of what comes back for it; 0 if it depends on nothing that is trained."""
        return sum(one.nbytes for one in self.handed if one.needs_grad)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The layers of a model, in order, with one microbatch of `samples` samples."""

    layers: tuple[Layer, ...]
    samples: int
    measured: str = ""
    """Where, such as "cpu, 1 thread"."""
    batch_bytes: int = 0
    """What the job's loss is given."""
    joined: tuple[int, ...] = ()
    """Layers that can't begin a stage, since one on each side have the same weights."""
    split: bool = False
    """They are parts of a model of Pipeline.split, with the names of the modules that they begin with."""

    def module(self, layer: int) -> str:
        """The module that a part of a split model begins with: blocks.1 of "3 (blocks.1)"."""
        return self.layers[layer].name.partition("(")[2][:-1]

    def text(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, text: str, where: str) -> Profile:
        """What text() has written. Raises UsageError, naming `where`, if it is something else."""
        try:
            found = json.loads(text)
            if found.pop("version") != VERSION:
                raise ValueError("it is of another version of Shardline")
            found["layers"] = tuple(_layer(one) for one in found["layers"])
            found["joined"] = tuple(found["joined"])
            if not found["layers"]:
                raise ValueError("it has no layers")
            return cls(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{where} is no profile of a model: {error}; leave it out or name a new file, to measure again"
            ) from None


def _layer(found: Mapping[str, Any]) -> Layer:
    storages = {name: tuple((int(number), int(size)) for number, size in found[name]) for name in ("output", "saved")}
    handed = tuple(Handed(**{**one, "shape": tuple(map(int, one["shape"]))}) for one in found["handed"])
    layer = Layer(**{**found, **storages, "handed": handed})
    for name, value in dataclasses.asdict(layer).items():
        if name not in ("name", "handed", "output", "saved") and not (isinstance(value, int | float) and value >= 0):
            raise ValueError(f"{name} of layer {layer.name} is {value!r}")
    return layer


def coded(profile: Profile, codec: str) -> list[tuple[float, float]]:
    """Bytes of what each layer hands to another stage, and of its gradient, of one microbatch.

    codec: a job's codec_parcels. Raises JobError, see codecs.of_parcels().
    """
    coding = ActivationCoding(codec, 0)

    def size(one: Handed) -> int:
        made = coding.usual_bytes(one.dtype, one.shape) if one.needs_grad and not one.weight else None
        return one.nbytes if made is None else made

    sizes = [[(size(one), one.needs_grad) for one in layer.handed] for layer in profile.layers]
    return [(sum(size for size, _ in own), sum(size for size, needs in own if needs)) for own in sizes]
