"""Codecs: how a bucket's numbers are written on the wire. A new one is one file here and an entry in CODECS."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.codecs.base import Codec
from shardline.codecs.cast import CastCodec
from shardline.codecs.raw import RawCodec
from shardline.core.plan import BucketSpec
from shardline.core.spec import TensorKind
from shardline.errors import JobError, ProtocolError

RAW = RawCodec()
CODECS: Mapping[str, Codec] = {
    codec.name: codec for codec in (RAW, CastCodec("bf16", "bfloat16"), CastCodec("fp16", "float16"))
}


def get_codec(name: str) -> Codec:
    """The codec of this name ("" = raw); raises ProtocolError for one this version doesn't know."""
    try:
        return CODECS[name or "raw"]
    except KeyError:
        raise ProtocolError(f"codec {name!r} is unknown; use one of {', '.join(CODECS)}") from None


def check_codec(name: str) -> None:
    """Raise JobError where a job names an unknown codec."""
    if name not in CODECS:
        raise JobError(f"codec is {name!r}; use one of {', '.join(CODECS)}")


def codec_for(name: str, bucket: BucketSpec) -> Codec:
    """The codec in effect for one bucket: lossy ones apply to trained float parameters only, all else travels raw."""
    if bucket.kind is TensorKind.PARAM and bucket.dtype in ("float32", "float64"):
        return get_codec(name)
    return RAW


__all__ = ["CODECS", "RAW", "Codec", "check_codec", "codec_for", "get_codec"]
