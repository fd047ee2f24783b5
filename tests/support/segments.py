"""Shared segments held by this process, and segments that must not be mapped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path


def knock_message(token: bytes, nbytes: int, magic: bytes = b"shardln1") -> bytes:
    """The message of a worker that shares a segment of so many bytes."""
    return struct.pack("<8s32sQ", magic, token, nbytes)


def welcome_message(areas: int, area_bytes: int, reply_bytes: int) -> bytes:
    """The answer of a server that shares so many areas."""
    return struct.pack("<BBQQ", 1, areas, area_bytes, reply_bytes)


def mappings(name: str) -> set[str]:
    """Inodes of this process's mappings of segments with this name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if f"/memfd:{name}" in line}


def descriptors(name: str) -> int:
    """Number of open descriptors of segments with this name."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += f"/memfd:{name}" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def unsealed(nbytes: int, seals: int = 0) -> int:
    fd = os.memfd_create("shardline-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
