"""Measure this process: cores, memory, and its GPU."""

from __future__ import annotations

import importlib
import math

import psutil
import torch

from shardline.core.status import Usage
from shardline.host.awake import awake_s

EVERY_S = 1.0
"""Seconds in which a measurement is not repeated: over less, the share of a core is noise."""


class UsageMeter:
    """Measures this process, which has a device such as "cpu" or "cuda:1". Used by one thread."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._measured_s = -math.inf
        self._usage = Usage()

    def read(self) -> Usage:
        """The usage now, or that of a moment ago."""
        if (now_s := awake_s()) - self._measured_s >= EVERY_S:
            self._measured_s = now_s
            gpu_bytes, gpu_share = gpu(self._device)
            self._usage = Usage(
                cores=self._process.cpu_percent() / 100,
                resident_bytes=self._process.memory_info().rss,
                gpu_bytes=gpu_bytes,
                gpu_share=gpu_share,
            )
        return self._usage


def gpu(device: str) -> tuple[int, float]:
    """Bytes in use on a GPU, and the share of the last moments in which it computed, of all processes together.

    Zeros where the device is no GPU, without the package nvidia-ml-py, and where the driver does not tell.
    """
    if torch.device(device).type != "cuda":
        return 0, 0.0
    try:
        failed = importlib.import_module("pynvml").NVMLError
    except ImportError:
        return 0, 0.0
    try:
        return torch.cuda.device_memory_used(device), torch.cuda.utilization(device) / 100
    except (failed, RuntimeError):
        return 0, 0.0
