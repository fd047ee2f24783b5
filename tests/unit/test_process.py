"""What every task's process does alike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardline import process


def test_allocator_keeps_what_is_freed() -> None:
    """Counted where it matters: pages that are faulted in again by a block taken and freed over and over."""
    code = """
import ctypes, resource, sys
from shardline.process import tune_allocator
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
    libc = "glibc" if os.confstr("CS_GNU_LIBC_VERSION") else "another"
    if libc != "glibc":
        pytest.skip("the C library is not glibc")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code, libc], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    # Untuned, every round faults all of its 12288 pages of 4 KB.
    assert int(done.stdout) < 12288


def test_allocator_of_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.ctypes, "CDLL", lambda _name: object())
    assert process.tune_allocator() is False
