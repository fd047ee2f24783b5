"""What a job's codec_parcels makes of activations and their gradients."""

from __future__ import annotations

from shardline_pipeline.parcel_coding import ParcelCoding
from shardline_pipeline.partition.profile import Handed, Profile


def coded(profile: Profile, codec: str) -> list[tuple[float, float]]:
    """Bytes of what each layer hands to another stage, and of its gradient, of one microbatch.

    codec: a job's codec_parcels. Raises JobError, see codecs.of_parcels().
    """
    coding = ParcelCoding(codec, 0)

    def size(one: Handed) -> int:
        made = coding.usual_bytes(one.dtype, one.shape) if one.needs_grad and not one.weight else None
        return one.nbytes if made is None else made

    sizes = [[(size(one), one.needs_grad) for one in layer.handed] for layer in profile.layers]
    return [(sum(size for size, _ in own), sum(size for size, needs in own if needs)) for own in sizes]
