"""Can a job resume from a checkpoint? Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardline import consistency
from shardline.consistency import Gives, named
from shardline.core.spec import JobSpec, TensorKind, TensorSpec, flattened, joined
from shardline.errors import CheckpointError, JobError
from shardline.update import chosen

_IDENTITY = ("replicas", "batch_size", "accumulate", "seed", "samples")
"""Settings that decide which samples and random numbers a step sees: changing one changes results to be repeated."""


def resume_notes(stored: JobSpec, job: JobSpec, where: str) -> list[str]:
    """Differences despite which `job` may resume from the checkpoint `where` of `stored`, one phrase each.

    Raises CheckpointError, naming the differences, if it may not: tensors (names, shapes, dtypes, kinds), the update
    rule, the consistency mode, and in synchronous mode everything that the data order depends on.
    """
    ours, theirs = chosen(job.rule), chosen(stored.rule)
    pairs: list[tuple[str, Any, Any]] = [("consistency", named(job.consistency), named(stored.consistency))]
    if (ours.name, job.rule.name) != (theirs.name, stored.rule.name):
        pairs.insert(0, ("the update rule", job.rule.label, stored.rule.label))
    else:
        # Settings and arguments may change as long as the stored state stays the same.
        pairs += [("the state of the update rule", _states(job), _states(stored))]
    if Gives.SAME_BITS in consistency.of(job.consistency).gives:
        pairs += [(name, getattr(job, name), getattr(stored, name)) for name in _IDENTITY]
    if job.follows_scores and stored.follows_scores:
        # It says which scores the learning rate has followed.
        pairs += [("checkpoint_every", job.checkpoint_every, stored.checkpoint_every)]
    blocking = [
        *_tensor_differences(stored, job),
        *[f"{what} is {ours} in the job, {theirs} in the checkpoint" for what, ours, theirs in pairs if ours != theirs],
    ]
    if blocking:
        shown = "; ".join(blocking[:5]) + (f"; and {len(blocking) - 5} more" if len(blocking) > 5 else "")
        raise CheckpointError(
            f"{where} belongs to another job ({stored.name!r}), so {job.name!r} can't resume from it: {shown}. Choose "
            "another --out, or use the job that wrote the checkpoint"
        )
    return list(resume_changes(stored, job).values())


def resume_changes(stored: JobSpec, job: JobSpec) -> dict[str, str]:
    """How `job` differs from the checkpoint's `stored`: a phrase by the path of each setting, such as "steps"."""
    before, after = (flattened(_whole(one)) for one in (stored, job))
    return {
        path: f"{path}: {_shown(after, path)} in the job, {_shown(before, path)} in the checkpoint"
        for path in [*before, *(path for path in after if path not in before)]
        # Fragments follow from the cadence, and from who computes what.
        if before.get(path, "absent") != after.get(path, "absent") and not path.endswith(".fragment")
    }


def _shown(values: Mapping[str, Any], path: str) -> Any:
    value = values.get(path, "")
    return "absent" if value == "" else value


def _whole(job: JobSpec) -> JobSpec:
    """The job as it is without a pipeline or workers that share layers."""
    mode = replace(job.consistency, mode=named(job.consistency))
    return replace(job, tensors=joined(job.tensors), consistency=mode)


def _tensor_differences(stored: JobSpec, job: JobSpec) -> list[str]:
    before: dict[str, TensorSpec] = {tensor.name: tensor for tensor in joined(stored.tensors)}
    after: dict[str, TensorSpec] = {tensor.name: tensor for tensor in joined(job.tensors)}
    out = [f"tensor {name!r} is in the job but not in the checkpoint" for name in after if name not in before]
    out += [f"tensor {name!r} is in the checkpoint but not in the job" for name in before if name not in after]
    for name, new in after.items():
        if name not in before:
            continue
        old = before[name]
        tables = new.kind is old.kind is TensorKind.TABLE
        pairs = [
            ("dim", new.row_elements, old.row_elements) if tables else ("shape", new.shape, old.shape),
            ("dtype", new.dtype, old.dtype),
            ("kind", new.kind.value, old.kind.value),
            # Settings of a rule may change, as those of the job's may.
            ("rule", new.rule.partition(":")[0], old.rule.partition(":")[0]),
            ("init", new.init, old.init),
        ]
        out += [
            f"{'table' if tables else 'tensor'} {name!r} has {what} {ours} in the job, {theirs} in the checkpoint"
            for what, ours, theirs in pairs
            if ours != theirs
        ]
    return out


def _states(job: JobSpec) -> str:
    """The states that the rule keeps per parameter, by its groups' arguments, such as "step, exp_avg"."""
    found = []
    for group in job.rule.groups:
        # Arguments that the rule does not accept are reported elsewhere.
        with contextlib.suppress(JobError, LookupError, TypeError, ValueError):
            kinds = chosen(job.rule).states(job.rule, group, torch.float32, torch.device("cpu"))
            # A momentum of gradients is none of what replicas have moved in a round.
            found.append((", ".join(kinds) + " of deltas" * (job.inner is not None)) if kinds else "nothing")
    return "; ".join(dict.fromkeys(found))
