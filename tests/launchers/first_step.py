"""Seconds from a launcher's command to the first step, beside `shardline train` with the same tasks.

python -m tests.launchers.first_step [--runs N] [ENGINE...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardline.host.ports import held_port
from tests.e2e.support import wait_until, write_job
from tests.launchers import slurm
from tests.launchers.support import RUN
from tests.launchers.test_ssh import FAKE

Start = Callable[[Path, Path], list[subprocess.Popen[bytes]]]
"""Starts a job with 1 server and 2 workers; job, folder of the results."""


def start(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with (cwd / "log").open("ab") as log:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )


def run(job: Path, out: Path, *flags: str) -> list[str | Path]:
    return [*RUN, job, "--out", out, "--page", "off", *flags]


def train(job: Path, out: Path) -> list[subprocess.Popen[bytes]]:
    command = [*RUN[:-1], "train", job, "--out", out, "--page", "off", "--ps", "1", "--workers", "2"]
    return [start(*command, cwd=out.parent)]


def torchrun(job: Path, out: Path) -> list[subprocess.Popen[bytes]]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardline"]
    return [start(*agent, *run(job, out)[4:], cwd=out.parent)]


def tfjob(job: Path, out: Path) -> list[subprocess.Popen[bytes]]:
    with held_port() as held:
        chief = f"127.0.0.1:{held.getsockname()[1]}"
    cluster = {"chief": [chief], "ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"] * 2}
    tasks = [{"type": kind, "index": index} for kind, each in cluster.items() for index in range(len(each))]
    return [
        start(*run(job, out), cwd=out.parent, env={"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
        for task in tasks
    ]


def by_ssh(job: Path, out: Path) -> list[subprocess.Popen[bytes]]:
    fake = out.parent / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(FAKE)
    fake.chmod(0o755)
    with held_port() as held:
        port = str(held.getsockname()[1])
    path = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    return [start(*run(job, out, "--hosts", "a,b", "--port", port), cwd=out.parent, env=path)]


RAY = """
import sys, ray
import shardline.integrations.ray as door
ray.init({address})
door.run(sys.argv[1], out=sys.argv[2], ps=1, workers=2, options={{"page": "off"}})
"""


def ray_script(**init: object) -> Start:
    text = RAY.format(address=", ".join(f"{name}={value!r}" for name, value in init.items()))

    def begin(job: Path, out: Path) -> list[subprocess.Popen[bytes]]:
        return [start(sys.executable, "-c", text, job, out, cwd=out.parent)]

    return begin


@contextmanager
def running_ray() -> Iterator[Start]:
    import ray

    found = ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20)
    try:
        yield ray_script(address=found["address"] if isinstance(found, dict) else found.address_info["address"])
    finally:
        ray.shutdown()


@contextmanager
def running_slurm() -> Iterator[Start]:
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with slurm.Slurm(folder) as cluster:

            def begin(job: Path, out: Path) -> list[subprocess.Popen[bytes]]:
                command = ["srun", "-N1", "-n4", *run(job, out)]
                return [start(*command, cwd=out.parent, env=cluster.env)]

            yield begin
    finally:
        shutil.rmtree(folder)


def engines(stack: ExitStack, wanted: list[str]) -> dict[str, Start]:
    found: dict[str, Start] = {"train": train, "torchrun": torchrun, "tfjob": tfjob, "hosts": by_ssh}
    if "slurm" in wanted and not slurm.missing():
        found["slurm"] = stack.enter_context(running_slurm())
    if "ray" in wanted:
        found["ray"] = stack.enter_context(running_ray())
    return {name: begin for name, begin in found.items() if name in wanted or name == "train"}


def seconds(begin: Start) -> float:
    """Seconds until the chief has logged the first step of a new run."""
    with tempfile.TemporaryDirectory() as folder:
        job, out = write_job(Path(folder) / "job.py", replicas=2, steps=40), Path(folder) / "run"
        begun = time.perf_counter()
        processes = begin(job, out)
        steps = out / "logs" / "steps.jsonl"

        def made() -> bool:
            assert not any(process.poll() for process in processes), (Path(folder) / "log").read_text()
            return steps.exists() and steps.stat().st_size > 0

        wait_until(made, "the first step", limit_s=300)
        took = time.perf_counter() - begun
        for process in processes:
            assert process.wait(300) == 0, (Path(folder) / "log").read_text()
        return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("engines", nargs="*", default=["torchrun", "tfjob", "hosts", "slurm", "ray"])
    given = parser.parse_args()
    with ExitStack() as stack:
        rows = engines(stack, given.engines)
        # Taken in turn, so that a busy minute is everybody's.
        took: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(given.runs):
            for name, begin in rows.items():
                took[name].append(seconds(begin))
                print(f"{name}: {took[name][-1]:.1f} s", flush=True)
    base = statistics.median(took["train"])
    for name, each in took.items():
        print(f"{name:<10} {statistics.median(each):6.1f} s   {statistics.median(each) / base:.2f}")


if __name__ == "__main__":
    main()
