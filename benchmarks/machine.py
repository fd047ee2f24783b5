"""What stands beside every figure: the machine, the versions, the settings."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.process import ALLOCATOR, ROOT, THREADS

PACKAGES = ("torch", "grpcio", "protobuf", "numpy")


def cpu_model(text: str) -> str:
    """Model name in /proc/cpuinfo."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def memory_gib(text: str) -> float:
    """Total memory in /proc/meminfo."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return round(int(value.split()[0]) / (1 << 20), 1)
    return 0.0


def git(*arguments: str) -> str:
    """Output of git, empty where there is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def describe() -> dict[str, Any]:
    """Plain values; names nothing that identifies a person or a host."""
    return {
        "cpu": cpu_model(_read("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(_read("/proc/meminfo")),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": git("rev-parse", "HEAD"),
        "clean": not git("status", "--porcelain", "--untracked-files=no"),
        "load_before": list(os.getloadavg()),
        "environment": {**THREADS, **ALLOCATOR},
    }
