"""Steps of GPT-2 small through servers on a GPU, beside plain torch on the same machine.

    python -m benchmarks.gpu [--steps 60] [--only NUMBER ...] [--flags "--bucket-mb 64"] [--out FILE]

Without a GPU (--device cpu) it only shows that the benchmark runs; set SHARDLINE_BENCH_SMALL=1 then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_job

JOB = Path(gpu_job.__file__)
LIMIT_S = 300.0
WARM = 1 / 3
"""Part of the steps that is not counted."""


def stepped_ms(stamps: Sequence[float]) -> float:
    """Median milliseconds from one forward pass to the next, without the first steps."""
    kept = list(stamps)[int(len(stamps) * WARM) :]
    return 1e3 * statistics.median(later - earlier for earlier, later in itertools.pairwise(kept))


def plain(steps: int, device: str) -> float:
    """Milliseconds a step of one process: the same model and batches, torch's default AdamW."""
    torch.manual_seed(0)
    model = gpu_job.Gpt2().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = gpu_job.data().tensors[0].to(device)
    stamps = []
    for step in range(steps):
        first = step * gpu_job.BATCH % (len(text) - gpu_job.BATCH)
        stamps.append(time.perf_counter())
        gpu_job.loss(model, (text[first : first + gpu_job.BATCH],)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            # So that the processor's time stamps are the device's.
            torch.cuda.synchronize()
    return stepped_ms(stamps)


def served(steps: int, flags: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """Milliseconds a step of one worker with one server, and the lane that it used."""
    with tempfile.TemporaryDirectory() as folder:
        stamps, out = Path(folder) / "stamps", Path(folder) / "out"
        command = [sys.executable, "-m", "shardline", "train", str(JOB), "--ps", "1", "--workers", "1"]
        command += ["--steps", str(steps), "--out", str(out), "--no-page", *flags]
        done = subprocess.run(
            command,
            env={**os.environ, **environment, gpu_job.STAMPS: str(stamps)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            logs = "".join(path.read_text()[-3000:] for path in sorted(out.glob("logs/*.log")))
            raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}{logs}")
        lines = [json.loads(line) for line in (out / "logs" / "worker-0.jsonl").read_text().splitlines()]
        lane = next((line["message"].rpartition(" ")[2] for line in lines if ": lane " in line["message"]), "")
        steps_file = [json.loads(line) for line in (out / "logs" / "steps.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
        return {
            "ms": stepped_ms([float(line) for line in stamps.read_text().split()]),
            "lane": lane,
            "loss": steps_file[-1].get("loss"),
            "sha256": summary["sha256"][:16],
        }


def works(device: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Flags and environment by name of the work."""
    bf16 = {gpu_job.BF16: "1"}
    host = ["--device", device]
    both = [*host, "--ps-device", device]
    return {
        "server on the same GPU": (both, {}),
        "server on the same GPU, bf16 autocast": (both, bf16),
        "server on the same GPU, no overlap": ([*both, "--no-overlap"], {}),
        "server on the same GPU, bf16 autocast, no overlap": ([*both, "--no-overlap"], bf16),
        "server in host memory, shm": (host, {}),
        "server in host memory, shm, 16 MB": ([*host, "--bucket-mb", "16"], {}),
        "server in host memory, tcp": ([*host, "--lane", "tcp"], {}),
        "server in host memory, tcp, bf16 both ways": ([*host, "--lane", "tcp", "--codec", "bf16"], {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=None, help="numbers of the works, from 0")
    parser.add_argument("--flags", default="", help="more flags of shardline train, for all works")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if given.device != "cpu" else "cpu"}
    found["plain torch"] = {"ms": plain(given.steps, given.device)}
    os.environ[gpu_job.BF16] = "1"
    found["plain torch, bf16 autocast"] = {"ms": plain(given.steps, given.device)}
    del os.environ[gpu_job.BF16]
    print(json.dumps(found), flush=True)
    for number, (name, (flags, environment)) in enumerate(works(given.device).items()):
        if given.only is not None and str(number) not in given.only:
            continue
        row = served(given.steps, [*flags, *given.flags.split()], environment)
        alone = found["plain torch, bf16 autocast" if environment else "plain torch"]["ms"]
        found[name] = {**row, "ratio": alone / row["ms"]}
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
