"""How the allocator treats blocks of some megabytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardline.host import allocator


def test_allocator_keeps_what_is_freed() -> None:
    """Counted where it matters: pages that are faulted in again by a block taken and freed over and over."""
    code = """
import ctypes, resource, sys
from shardline.host.allocator import tune_allocator
assert tune_allocator() is (sys.argv[1] == "glibc")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 48 << 20
def touch():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    assert printed(code) < 12288  # Untuned, every round faults all of its 12288 pages of 4 KB.


def test_threads_share_one_arena() -> None:
    """An arena of a thread's own gives its memory back whenever it is empty: after every push."""
    code = """
import ctypes, sys, threading
from shardline.host.allocator import tune_allocator
assert tune_allocator() is (sys.argv[1] == "glibc")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
own = []
def take():
    block = libc.malloc(4 << 20)
    # glibc's chunk header: bit 2 of the size says that the chunk is of another arena than the main one.
    own.append(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value >> 2 & 1)
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(sum(own))
"""
    assert printed(code) == 0


def printed(code: str) -> int:
    """The number that a fresh process prints that runs this code with no MALLOC_* set."""
    libc = "glibc" if os.confstr("CS_GNU_LIBC_VERSION") else "another"
    if libc != "glibc":
        pytest.skip("the C library is not glibc")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code, libc], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_allocator_of_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert allocator.tune_allocator() is False
