"""All durations, derived from one number set by the user."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardline.errors import UsageError

LEAST_S = 2
"""Least --timeout: a pause of this process counts as half a second of silence (host/awake.py), less than T/3."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All durations in seconds: the time for joining, and those derived from --timeout T."""

    total_s: float = 60.0
    join_s: float = 600.0
    """How long a task tries to join its cluster, and a starting chief waits for its tasks; independent of T, since
    tasks are started by hand, one after another, and a busy machine needs minutes to import torch."""

    def __post_init__(self) -> None:
        for flag, value, least in (("--timeout", self.total_s, LEAST_S), ("--join-timeout", self.join_s, 1)):
            if not least <= value <= 86_400.0:
                raise UsageError(f"{flag} is {value}; it must be between {least} and 86400 seconds")

    @functools.cached_property
    def rpc_s(self) -> float:
        return self.total_s / 3

    @functools.cached_property
    def heartbeat_s(self) -> float:
        return self.total_s / 60

    @functools.cached_property
    def suspect_s(self) -> float:
        return self.total_s / 10

    @functools.cached_property
    def dead_s(self) -> float:
        return self.total_s / 3

    @functools.cached_property
    def lost_s(self) -> float:
        """How long the cluster waits for a lost task, a task for a lost chief, and the job's end for the last score."""
        return self.total_s

    @functools.cached_property
    def server_wait_s(self) -> float:
        """How long a server holds a pull before it answers WAITING."""
        return self.total_s / 12
