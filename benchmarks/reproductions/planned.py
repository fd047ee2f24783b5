"""R13: bytes of PipeDream's split of VGG-16, and what is planned for ResNet-50, by counting."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reproductions.base import Found, Reproduction, Row
from shardline_pipeline import Stash
from shardline_pipeline.partition.choose import choose
from shardline_pipeline.partition.costs import ALL_REDUCE, SERVERS, Cluster, Costs, LinkLevel, PlannedStage
from shardline_pipeline.partition.forecast import forecast_of
from shardline_pipeline.partition.profile import Handed, Layer, Profile

WORKERS = 8
LINK_BYTES_PER_S = 10e9 / 8
OPERATIONS_PER_S = 1e13
"""Of a worker; a multiplication and an addition are two. Of the order of a V100's in float32."""
FLOAT = 4
VGG = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions between two poolings."""
RESNET = ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))
"""Channels, blocks, and pixels of a side."""


def layer(name: str, parameters: int, operations: float, outputs: int, samples: int) -> Layer:
    """A layer by its parameters, and multiplications and outputs per sample; a backward pass takes twice as long."""
    forward_s = 2 * operations * samples / OPERATIONS_PER_S
    return Layer(
        name=name,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        handed=(Handed(dtype="float32", shape=(samples, outputs), needs_grad=True),),
        trained_bytes=FLOAT * parameters,
    )


def vgg16(samples: int, *, side: int = 224, hidden: int = 4096, classes: int = 1000) -> Profile:
    """VGG-16 (Simonyan, Zisserman, 2015) for images of side x side pixels."""
    found, channels = [], 3
    for block, (wider, count) in enumerate(VGG):
        for number in range(count):
            parameters = 9 * channels * wider + wider
            pooled = side // 2 if number == count - 1 else side
            name = f"conv{block + 1}_{number + 1}"
            found.append(layer(name, parameters, parameters * side * side, wider * pooled * pooled, samples))
            channels = wider
        side //= 2
    size = channels * side * side
    for number, wider in enumerate((hidden, hidden, classes)):
        found.append(layer(f"fc{number + 6}", size * wider + wider, size * wider, wider, samples))
        size = wider
    return Profile(layers=tuple(found), samples=samples)


def resnet50(samples: int) -> Profile:
    """ResNet-50 (He et al., 2016) by its blocks, for images of 224 x 224 pixels."""
    found, channels = [layer("conv1", 9_536, 9_408 * 112 * 112, 64 * 56 * 56, samples)], 64
    for width, blocks, side in RESNET:
        for number in range(blocks):
            wide = 4 * width
            parameters = channels * width + 9 * width * width + width * wide + (channels * wide if not number else 0)
            name = f"conv{len(found) + 1}, {width} channels"
            found.append(layer(name, parameters, parameters * side * side, wide * side * side, samples))
            channels = wide
    found.append(layer("fc", 2048 * 1000 + 1000, 2048 * 1000, 1000, samples))
    return Profile(layers=tuple(found), samples=samples)


def costs(profile: Profile, microbatches: int, sync: str = ALL_REDUCE) -> Costs:
    """A model on the cluster, as `shardline partition` counts."""
    cluster = Cluster(levels=(LinkLevel(count=WORKERS, bytes_per_s=LINK_BYTES_PER_S),), servers=WORKERS, sync=sync)
    return Costs(profile=profile, cluster=cluster, schedule=Stash(), microbatches=microbatches)


def counted(profile: Profile, sync: str) -> tuple[float, float]:
    """Bytes on all wires per microbatch: data parallel, and convolutions on all workers but one, which has the rest."""
    end, convolutions = len(profile.layers), len(profile.layers) - 3
    whole = forecast_of(costs(profile, WORKERS, sync), (PlannedStage(first=0, end=end, workers=tuple(range(WORKERS))),))
    split = forecast_of(
        costs(profile, WORKERS - 1, sync),
        (
            PlannedStage(first=0, end=convolutions, workers=tuple(range(WORKERS - 1))),
            PlannedStage(first=convolutions, end=end, workers=(WORKERS - 1,)),
        ),
    )
    return whole.bytes / WORKERS, split.bytes / (WORKERS - 1)


def plans(seeds: Sequence[int]) -> Found:
    """R13."""
    rows: list[Row] = []
    fewer: dict[tuple[str, str], float] = {}
    models = {
        "VGG-16, 32 of 224 x 224": vgg16(32),
        "VGG-16, 64 of 224 x 224": vgg16(64),
        "VGG-16, 64 of 32 x 32, 10 classes": vgg16(64, side=32, classes=10),
    }
    for name, profile in models.items():
        for sync, by in ((ALL_REDUCE, "all-reduce"), (SERVERS, "servers")):
            whole, split = counted(profile, sync)
            fewer[name, by] = 1 - split / whole
            rows.append(
                {
                    "model and samples": name,
                    "parameters by": by,
                    "data parallel, MB": f"{whole / 1e6:.1f}",
                    "7-1 split, MB": f"{split / 1e6:.1f}",
                    "fewer": f"{100 * fewer[name, by]:.0f} %",
                }
            )
    vgg, resnet = (choose(costs(profile, WORKERS)) for profile in (vgg16(64), resnet50(128)))
    imagenet = [fewer[name, "all-reduce"] for name in models if "224" in name]
    return Found(
        rows=rows,
        verdicts={
            "with an all-reduce the split moves 88 to 89 % fewer bytes": all(0.88 <= one < 0.895 for one in imagenet),
            "with parameter servers, which Shardline has, it moves as many fewer": all(
                fewer[name, "servers"] >= 0.88 for name in models if "224" in name
            ),
            "for VGG-16 a pipeline is planned": vgg.pipeline_is_better,
            "for ResNet-50 data parallelism is": not resnet.pipeline_is_better,
        },
    )


ALL = (
    Reproduction(
        number="R13",
        title="Bytes of a pipeline and of data parallelism",
        source="Narayanan et al., PipeDream, 2019",
        claim="For VGG-16 a pipeline with the convolutions on all workers but one, and the linear layers on that one, "
        "moves a fraction of the bytes of data parallelism; for ResNet-50 data parallelism is best.",
        setting=f"As `shardline partition` counts: {WORKERS} workers, bytes on all wires per microbatch, everything in "
        "float32. Plans: links of 10 Gbit/s, workers of 10^13 operations "
        "per second, an all-reduce, 64 samples per microbatch for VGG-16, 128 for ResNet-50.",
        run=plans,
    ),
)
