"""shardline bench codecs: what each codec makes of a gradient."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.cli import options
from shardline.cli.quantities import bytes_per_s
from shardline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardline.codecs.measuring import CodecFigures
    from shardline.core.spec import TensorSpec

SIDE = 2500
"""Rows and columns of the matrix that stands for a model: 25 MB of float32."""
PASSES = 3
"""The gradient is that of the last of these: the first ones are of a model that has only begun."""


@click.command(short_help="Measure what each codec makes of a job's gradients.")
@click.argument("job", metavar="[JOB.py]", required=False, type=click.Path(path_type=Path))
@options.job_fields
@options.plugin
@click.option(
    "--only",
    multiple=True,
    metavar="CODEC",
    help="This one, with any settings (topk:ratio=0.05); may be repeated. Default: all, as they are.",
)
@click.option("--link", default="none", metavar="RATE", help="Also the time of a push over such a link: 1Gbit, 25MB.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures here.")
def codecs(**flags: Any) -> int:
    """Encode and decode the gradients of JOB.py, or 25 MB of random numbers, with every codec of gradients.

    On one core. The error is that of a single step: codecs with error memory send the rest in later steps.
    """
    # These take long to import, which --help must not do.
    from shardline.cli.terminal import aligned
    from shardline.codecs import CODECS, keep_whole
    from shardline.codecs.auto import undecided
    from shardline.codecs.base import Direction
    from shardline.codecs.coding import JobCodec
    from shardline.codecs.measuring import measure_codec
    from shardline.core.plan import make_plan

    link = bytes_per_s(flags["link"], "--link")
    chosen = [CODECS.parse(text) for text in flags["only"]] or [kind() for kind in CODECS if not undecided(kind())]
    specs, values = gradients(flags)
    found = []
    for codec in chosen:
        if codec.direction is Direction.PULL:
            if flags["only"]:
                raise UsageError(f"--only {codec}: it does not encode gradients; choose another codec")
            continue
        plan = make_plan(keep_whole(JobCodec.both(codec), specs), 1)
        found.append(measure_codec(codec, plan, values))
    for line in aligned(rows(found, link), texts=1):
        click.echo(line)
    if flags["json_path"] is not None:
        lines = [{**asdict(item), "ratio": item.ratio} for item in found]
        options.write_file(flags["json_path"], json.dumps(lines, indent=2) + "\n")
    return 0


def gradients(flags: Mapping[str, Any]) -> tuple[tuple[TensorSpec, ...], dict[str, torch.Tensor]]:
    """The tensors of the job's model, and their gradients by name; random ones without a job."""
    import torch

    from shardline.core.spec import TensorSpec, joined
    from shardline.data import BatchSource, replica_gradients
    from shardline.job import load_job

    torch.set_num_threads(1)
    path = options.existing_job(flags["job"])
    if path is None:
        if options.overrides(flags):
            raise UsageError("fields of a job are set, but there is no job file to set them in; give one, or neither")
        # Gradients have heavier tails than a normal distribution.
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(SIDE, SIDE, generator=generator) * torch.randn(SIDE, SIDE, generator=generator).abs()
        return (TensorSpec(name="matrix", shape=(SIDE, SIDE), dtype="float32"),), {"matrix": values}
    # Gradients are those of one process.
    job = replace(load_job(path, options.overrides(flags)), pipeline="whole-model", tensor_ranks=1)
    model, source = job.build_model(), BatchSource(job)
    optimizer = job.build_optimizer(model)
    for step in range(PASSES):
        replica_gradients(model, job, source, step, 0)
        if step < PASSES - 1:
            optimizer.step()
    found = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return joined(job.spec(model).tensors), found


def rows(found: Sequence[CodecFigures], link_bytes_per_s: float) -> list[tuple[str, ...]]:
    """A row per codec; the last column only for a link."""
    limited = link_bytes_per_s < math.inf
    head = ("codec", "MB", "ratio", "error", "encode GB/s", "decode GB/s", *(["ms over the link"] if limited else []))
    lines = [head]
    for item in found:
        speeds = (f"{item.raw_bytes / seconds / 1e9:.2f}" for seconds in (item.encode_s, item.decode_s))
        sent = [f"{1e3 * item.sent_s(link_bytes_per_s):,.1f}"] if limited else []
        error = f"{100 * item.relative_error:.3g} %"
        lines.append((item.codec, f"{item.wire_bytes / 1e6:.3g}", f"{item.ratio:.1f}", error, *speeds, *sent))
    return lines
