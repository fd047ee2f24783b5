"""Placement of shards on parameter servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ps of a shard, and its address."""

    shard: int
    task: str
    address: str
    standby_task: str = ""
    """The ps of its standby, and that one's address; empty = it has none."""
    standby_address: str = ""
    appointment: int = 0
    """A new number for each standby of the shard; 0 = it has none, or the chief does not number them."""


@dataclass(frozen=True, kw_only=True)
class Post:
    """A task that computes one unit of a pipeline, or that another one exchanges with, and where to reach it."""

    task: str
    address: str
    incarnation: int
    key: bytes = b""
    """Digest of the secret of this life; see security.key_of. Without one, it needs no secret."""
