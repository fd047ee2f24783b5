"""The machine's part in the bits of a gradient."""

from __future__ import annotations

import platform

import torch


def machine_fingerprint(threads: int, device: str) -> dict[str, str]:
    """Facts about this machine that affect the last bits of a gradient (PROTOCOL 1.10, E)."""
    facts = {
        "torch": torch.__version__,
        "cpu_vendor": cpu_vendor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
        "device": device.split(":")[0],
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name(torch.device(device))
    return facts


def cpu_vendor() -> str:
    """Vendor of the processor according to Linux, else what Python reports."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("vendor_id", "CPU implementer")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
