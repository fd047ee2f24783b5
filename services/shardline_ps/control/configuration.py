"""Memory that a configuration requires. Pure. PROTOCOL 3.22."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shardline import consistency
from shardline.core.plan import ShardSpec
from shardline.core.spec import TensorKind
from shardline.rpc.messages.configuration import PsConfiguration
from shardline.server.staging import limit_bytes
from shardline.storage.cuts import HELD_CUTS
from shardline.update import bucket_rule


def _hosted(configuration: PsConfiguration) -> list[ShardSpec]:
    return [configuration.plan.shards[number] for number in configuration.shards]


def value_bytes(configuration: PsConfiguration) -> int:
    """Bytes of the published values, of both steps if both are kept."""
    publishing = consistency.of(configuration.consistency).publishing
    return sum(publishing.nbytes(bucket) for shard in _hosted(configuration) for bucket in shard.buckets)


def optimizer_bytes(configuration: PsConfiguration) -> int:
    """Bytes of the whole optimizer state, including per-worker state if the rule keeps any.

    Where workers run the optimizer, it is here only in cuts, and from a rollback to the next step.
    """
    total, cpu = 0, torch.device("cpu")
    for shard in _hosted(configuration):
        for bucket in shard.buckets:
            if bucket.kind is TensorKind.PARAM:
                rule = bucket_rule(configuration.rule, configuration.schedule, bucket, configuration.plan.tensors, cpu)
                total += rule.full_nbytes(workers=configuration.replicas)
    return total


def standby_bytes(configuration: PsConfiguration) -> int:
    """Bytes of the standbys that this ps is to hold: as much as the shards themselves."""
    if not configuration.standbys:
        return 0
    return planned_bytes(replace(configuration, shards=configuration.standbys, standbys=()))


def planned_bytes(configuration: PsConfiguration) -> int:
    """Bytes that shards and standbys need permanently: parameters and the whole optimizer state.

    Transient memory (contributions that wait for others, cuts that wait for the chief) is in memory_plan().
    """
    held = value_bytes(configuration) + optimizer_bytes(configuration) + codec_bytes(configuration)
    return held + standby_bytes(configuration)


def codec_bytes(configuration: PsConfiguration) -> int:
    """Bytes of what the codec of parameters remembers of its receivers."""
    pull, shards = configuration.coding.pull, configuration.plan.shards
    return sum(
        bucket.nbytes * pull.bucket(number, at).codec.memory.copies
        for number in configuration.shards
        for at, bucket in enumerate(shards[number].buckets)
    )


def staging_limit(configuration: PsConfiguration, asked: int | None) -> int:
    """The staging limit for a configuration, in bytes. asked: the user's setting, or None; 0 = the lowest possible."""
    intake = consistency.of(configuration.consistency).intake
    return limit_bytes(_hosted(configuration), configuration.replicas, intake, asked)


def memory_plan(configuration: PsConfiguration, *, staging: int | None = None, lanes: int = 0) -> dict[str, int]:
    """Most bytes that the shards may hold, by kind; their sum bounds the process's memory except for its code.

    Kinds: "parameters" (both published steps), "optimizer", "codec" (what that of parameters remembers), "cuts",
    "contributions" (one per replica, if they are kept until the lead has chosen), "sums" (of pushes that wait to be
    applied, if the mode adds them up), "staging" (the limit in force), "lanes", and "standbys" if there are any.
    staging: the limit asked for. lanes: additional bytes
    held by lanes.
    """
    optimizer, mode = optimizer_bytes(configuration), consistency.of(configuration.consistency)
    image = sum(shard.nbytes for shard in _hosted(configuration)) + optimizer
    return {
        "parameters": value_bytes(configuration),
        "optimizer": optimizer,
        **({"codec": codec_bytes(configuration)} if codec_bytes(configuration) else {}),
        # Without a cadence the chief requests one cut at a time.
        "cuts": image * (HELD_CUTS if configuration.cut_every else 1),
        **mode.held(image - optimizer, configuration.replicas),
        "staging": staging_limit(configuration, staging),
        "lanes": lanes,
        **({"standbys": standby_bytes(configuration)} if configuration.standbys else {}),
    }


def memory_sentence(plan: Mapping[str, int], configuration: PsConfiguration) -> str:
    """One line with the sum, such as "memory: parameters 2 x 64.0 MB, optimizer 0.0 MB; 128.0 MB in all"."""
    one = sum(shard.nbytes for shard in _hosted(configuration))
    times = "2 x " if one and plan["parameters"] == 2 * one else ""
    parts = [f"parameters {times}{plan['parameters'] / (2 if times else 1) / 1e6:.1f} MB"]
    parts += [f"{kind} {size / 1e6:.1f} MB" for kind, size in plan.items() if kind != "parameters"]
    return f"memory: {', '.join(parts)}; {sum(plan.values()) / 1e6:.1f} MB in total"
