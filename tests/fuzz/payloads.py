"""Payloads of codecs with bytes changed: decoded to a bucket, or refused; nothing else, and quickly."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass

import torch

from shardline.codecs import CODECS
from shardline.codecs.base import MemoryKey, Turn
from shardline.codecs.coding import BucketCoding
from shardline.core.spec import DTYPES
from shardline.errors import ProtocolError
from tests.support.codecs import first, model, numbers

NAMES = tuple(CODECS.names)
OVERWRITES = (0, 1, 127, 128, 255)


class Broken(AssertionError):
    """A decoder did something else than decode or refuse; the text ends with the payload."""


@dataclass(frozen=True)
class Seed:
    """A payload that an encoder has made, and what its receiver remembers."""

    written: BucketCoding
    payload: bytes
    memory: dict[MemoryKey, torch.Tensor]


def seeds(name: str) -> list[Seed]:
    """Payloads of a codec: of both dtypes, of ordinary and of tiny numbers, with zeros, and with NaN."""
    found = []
    for dtype in ("float32", "float64"):
        written = first(CODECS[name](), model(dtype))
        values = numbers(written.layout)
        spoilt = values.clone()
        spoilt[7] = float("nan")
        for one in (values, values * 1e-30, torch.zeros_like(values), spoilt):
            found.append(Seed(written, bytes(written.coder.encode(one, Turn(0))), {}))
        found.append(_second(written, values))
    return found


def _second(written: BucketCoding, values: torch.Tensor) -> Seed:
    """The payload of a second step, for a receiver that has the first one."""
    sent: dict[MemoryKey, torch.Tensor] = {}
    had: dict[MemoryKey, torch.Tensor] = {}
    for step in (0, 1):
        turn = Turn(step, base=step - 1 if step else None, changed=step, memory=sent)
        payload = bytes(written.coder.encode(values * (1.0 + 0.001 * step), turn))
        if not step:
            written.coder.decode(bytearray(payload), Turn(step, memory=had))
    return Seed(written, payload, had)


def mutated(rng: random.Random, data: bytes) -> bytearray:
    """Some bytes changed, cut off, added or swapped; most often near the start, where lengths and scales are."""
    found = bytearray(data)
    match rng.randrange(5):
        case 0 if found:
            for _ in range(rng.randrange(1, 6)):
                found[rng.randrange(len(found))] = rng.randrange(256)
        case 1:
            del found[rng.randrange(len(found) + 1) :]
        case 2:
            found += rng.randbytes(rng.randrange(1, 40))
        case 3 if found:
            found[rng.randrange(min(64, len(found)))] = rng.choice(OVERWRITES)
        case _ if len(found) > 8:
            at = rng.randrange(len(found) - 4)
            found[at : at + 4] = rng.randbytes(4)
    return found


def check(name: str, seed: Seed, data: bytearray) -> bool:
    """Decode; returns whether it was decoded. Raises Broken."""
    written = seed.written
    if written.misfit(len(data)):
        return False
    given = bytes(data)
    before = {key: value.clone() for key, value in seed.memory.items()}
    memory = dict(seed.memory)
    try:
        found = written.coder.decode(data, Turn(1, memory=memory))
    except ProtocolError:
        if memory.keys() != before.keys():
            raise Broken(f"codec {name}: a refused payload changed the memory: {_text(given)}") from None
        return False
    except Exception as error:
        raise Broken(f"codec {name}: {type(error).__name__}: {error}: {_text(given)}") from error
    bucket = written.layout.bucket
    if found.shape != (bucket.elements,) or found.dtype != DTYPES[bucket.dtype]:
        raise Broken(f"codec {name}: decoded to {tuple(found.shape)} of {found.dtype}: {_text(given)}")
    if any(not torch.equal(seed.memory[key], value) for key, value in before.items()):
        raise Broken(f"codec {name}: memory was written to: {_text(given)}")
    return True


def _text(data: bytes) -> str:
    return base64.b85encode(data).decode()
