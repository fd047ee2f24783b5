"""Ranges of this process's addresses: reserved, mapped to files, and filled by moving page tables. Linux only."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import numpy as np

HUGE_BYTES = 2 << 20
"""One page of the upper page table on x86-64 and arm64: the kernel moves the tables of so much memory in one piece."""
PROT = mmap.PROT_READ | mmap.PROT_WRITE
MAP_NORESERVE = 0x4000
MAP_FIXED = 0x10
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4
"""In linux/mman.h, like all of these; DONTUNMAP is of Linux 5.13 for mapped files."""
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""Linux 5.14."""


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    place, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = place
    libc.mmap.argtypes = [place, length, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [place, length, length, number, place]
    libc.madvise.argtypes = [place, length, number]
    return libc


def address_of(memory: memoryview) -> int:
    """Address of the first byte. The memory must not be empty."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def pages_of(nbytes: int) -> int:
    """Number of pages that so many bytes take."""
    return -(-nbytes // mmap.PAGESIZE)


def reserve(nbytes: int) -> memoryview:
    """Private memory of whole pages, zeros, at a multiple of HUGE_BYTES: two such ranges can swap their page tables.

    It takes memory only where it is written to, and is freed with the last view. Raises OSError.
    """
    length = pages_of(nbytes) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapped = memoryview(mmap.mmap(-1, length + HUGE_BYTES, flags=flags, prot=PROT))
    start = -address_of(mapped) % HUGE_BYTES
    return mapped[start : start + length]


def map_file(memory: memoryview, fd: int) -> None:
    """Map a file over reserved memory, from its beginning; what is written there stays in this process.

    Raises OSError.
    """
    address = address_of(memory)
    flags = mmap.MAP_PRIVATE | MAP_FIXED
    _check(_libc().mmap(address, len(memory), PROT, flags, fd, 0) == address, "mmap")


def move_pages(source: int, target: int, nbytes: int) -> None:
    """Move a mapping's pages from one address to another, in place of what is there.

    The source stays mapped to the same file or, without one, becomes zeros: no reader ever meets a gap at either
    address. All of it must be one mapping. Raises OSError; then nothing has changed.
    """
    flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
    _check(_libc().mremap(source, nbytes, nbytes, flags, target) == target, "mremap")


def advise(address: int, nbytes: int, advice: int) -> None:
    """See madvise(2). Raises OSError."""
    _check(_libc().madvise(address, nbytes, advice) == 0, "madvise")


def _check(succeeded: bool, call: str) -> None:
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
