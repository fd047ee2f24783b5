"""The job as it is compared: with nothing in it that plain PyTorch has no equal for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardline import codecs
from shardline.job import Job
from shardline.schedule import complete


@dataclass(frozen=True)
class CheckedJob:
    """job: its first steps. replaced: settings that were left out, "codec=bf16"."""

    job: Job
    replaced: tuple[str, ...]


def checked_job(job: Job, steps: int) -> CheckedJob:
    """The job with `steps` steps, as the comparison trains it: synchronous, every step, exact codecs, whole models."""
    chosen = codecs.of(job)
    exact = all(codec.exact for codec in (*chosen.ups, *chosen.downs))
    plain: dict[str, Any] = {
        "consistency": "sync",
        "rule": "torch",
        "cadence": "every-step",
        "pipeline": "whole-model",
        "codec": job.codec if exact else "raw",
        "codec_up": job.codec_up if exact else "",
        "codec_down": job.codec_down if exact else "",
        "codec_tensors": job.codec_tensors if exact else {},
        "codec_parcels": "",
        "tensor_parallel": {},
    }
    replaced = tuple(
        f"{name}={getattr(job, name)}" for name, value in plain.items() if getattr(job, name) not in (value, "", {})
    )
    return CheckedJob(
        dataclasses.replace(
            job,
            **plain,
            tensor_ranks=1,
            steps=steps,
            # The curve of the whole job.
            schedule=complete(job.schedule, job.steps),
            checkpoint_every=0,
        ),
        replaced,
    )
