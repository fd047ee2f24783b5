"""shardline doctor: what of this machine a task would miss, and which tasks of a cluster it reaches."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from shardline.cli import options
from shardline.cluster import ClusterSpec, parse_address, read_spec
from shardline.core.timeouts import LEAST_S, Timeouts
from shardline.errors import ShardlineError, UsageError
from shardline.host.ports import held_port
from shardline.host.printable import printable
from shardline.native import library
from shardline.security import Security

OK, WARNING, PROBLEM = "OK", "warning", "problem"
OPEN_FILES = 1024
"""A task has some for each task that it speaks to; a chief of 64 workers has a few hundred."""
SHM_BYTES = 256 << 20
LOCKED_BYTES = 1 << 30
DIAL_S = 2.0
DRIFT_S, AHEAD_S = 0.05, 2.0
"""Most that the wall clock may move against the monotonic one in WATCH_S, and be ahead of or behind the chief's."""
WATCH_S = 0.2


@dataclass(frozen=True)
class Diagnosis:
    """The result of a check. `remedy`: what to do; empty where nothing is wrong."""

    level: str
    found: str
    remedy: str = ""
    listens: bool = False
    """A task answers at the address that was checked."""


def _judged(good: bool, said: str, remedy: str) -> Diagnosis:
    return Diagnosis(OK, said) if good else Diagnosis(WARNING, said, remedy)


def check_python() -> Diagnosis:
    return Diagnosis(OK, f"{platform.python_version()} ({sys.executable})")


def check_torch() -> Diagnosis:
    try:
        import torch
    except Exception as error:
        return Diagnosis(PROBLEM, f"can't be imported: {error}", "pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return Diagnosis(OK, f"{torch.__version__}, {build} build, {torch.get_num_threads()} threads")


def check_native() -> Diagnosis:
    if library.level() is not None:
        return Diagnosis(OK, f"{library.describe().partition(': ')[2]}, of {', '.join(library.levels())}")
    why = library.describe().partition(": ")[2]
    return Diagnosis(WARNING, why, "install the wheel for this platform, or a C compiler")


def check_segments() -> Diagnosis:
    from shardline.host.segments import Segment, SegmentError

    try:
        Segment.create(1 << 20, name="shardline-doctor", read_only=True)
    except SegmentError as error:
        return Diagnosis(WARNING, f"lane shm can't be used: {error}", "tasks of this machine use tcp or grpc instead")
    return Diagnosis(OK, "lane shm can be used; its memory is no part of /dev/shm")


def check_dev_shm() -> Diagnosis:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Diagnosis(WARNING, f"/dev/shm: {error.strerror}", "leave loaders and DataLoader's num_workers at 0")
    free = found.f_bavail * found.f_frsize
    said = f"/dev/shm has {free >> 20} MiB free, for batches of DataLoader's processes"
    return _judged(free >= SHM_BYTES, said, "docker run --shm-size 1g, or remount it")


def check_open_files() -> Diagnosis:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_limit(soft)} open files (ulimit -n)"
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    return _judged(enough, said, f"ulimit -n {OPEN_FILES}; at most {_limit(hard)} here")


def check_locked() -> Diagnosis:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = f"{_limit(soft)} bytes of locked memory (ulimit -l)"
    enough = soft == resource.RLIM_INFINITY or soft >= LOCKED_BYTES or not nvidia()
    return _judged(enough, said, "ulimit -l unlimited; otherwise a worker's GPU copies gradients once more")


def check_ports() -> Diagnosis:
    try:
        with held_port() as held:
            return Diagnosis(OK, f"127.0.0.1 has free ones, such as {held.getsockname()[1]}")
    except UsageError as error:
        return Diagnosis(PROBLEM, str(error), "bring up the loopback interface")


def check_clock() -> Diagnosis:
    wall, steady = time.time(), time.monotonic()
    time.sleep(WATCH_S)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    said = f"the wall clock moved {drift * 1000:+.1f} ms against the monotonic one in {WATCH_S} s"
    return _judged(abs(drift) < DRIFT_S, said, "synchronize it by NTP, without steps")


def check_gpu() -> Diagnosis:
    try:
        import torch
    except Exception:
        return Diagnosis(WARNING, "torch can't be imported", "see torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Diagnosis(OK, f"{', '.join(names)}; --device cuda")
    if not nvidia():
        return Diagnosis(OK, "none; --device cpu")
    if torch.version.cuda is None:
        return Diagnosis(WARNING, "there is one, but this torch is a CPU build", "pip install a CUDA build of torch")
    return Diagnosis(WARNING, "there is one, but torch sees none", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


CHECKS: dict[str, Callable[[], Diagnosis]] = {
    "Python": check_python,
    "torch": check_torch,
    "native kernels": check_native,
    "GPU": check_gpu,
    "shared memory": check_segments,
    "batches": check_dev_shm,
    "files": check_open_files,
    "memory": check_locked,
    "ports": check_ports,
    "clock": check_clock,
}


def check_task(address: str) -> Diagnosis:
    """Check that a task's address resolves and its machine answers; nothing needs to listen there yet."""
    host, port = parse_address(address)
    if port == 0:
        return Diagnosis(OK, f"{address}: it takes a free port")
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "correct the name, or add it to DNS or /etc/hosts"
        return Diagnosis(PROBLEM, f"{host} has no address: {error.strerror}", remedy)
    try:
        with socket.create_connection((host, port), timeout=DIAL_S):
            return Diagnosis(OK, f"{address} accepts connections", listens=True)
    except ConnectionRefusedError:
        return Diagnosis(OK, f"{address}: the machine answers, and nothing listens there yet")
    except OSError as error:
        why = f"no answer within {DIAL_S:g} s" if isinstance(error, TimeoutError) else error.strerror
        return Diagnosis(PROBLEM, f"{address}: {why}", "check the address, routes and firewalls between the machines")


def check_chief(address: str, security: Security) -> Diagnosis:
    """The chief's clock, if it answers. Its page, journal and certificates have the wall clock's time."""
    # Imports grpc.
    from shardline.rpc.watch import ChiefWatch

    watch = ChiefWatch(address, Timeouts(total_s=LEAST_S), security)
    try:
        sent = time.time()
        said = watch.status()
        ahead = (sent + time.time()) / 2 - said.time
    except ShardlineError as error:
        return Diagnosis(WARNING, f"can't be asked: {error}", "give the job's token and TLS files")
    finally:
        watch.close()
    found = f"{ahead:+.2f} s against the chief's, job {said.job} {said.phase}"
    return Diagnosis(OK, found) if abs(ahead) < AHEAD_S else Diagnosis(PROBLEM, found, "synchronize both by NTP")


def check_cluster(spec: ClusterSpec, security: Security) -> Iterator[tuple[str, Diagnosis]]:
    """A row for each task with an address; all are dialled at once."""
    tasks = [task for task in spec.task_names() if spec.address(task)]
    with ThreadPoolExecutor(32) as dialling:
        found = list(dialling.map(lambda task: check_task(spec.address(task)), tasks))
    yield from zip(tasks, found, strict=True)
    if found[tasks.index("chief/0")].listens:
        yield "chief's clock", check_chief(spec.chief, security)


@click.command(short_help="Check this machine, and the way to a cluster's tasks.")
@options.cluster
@options.secured
def doctor(cluster: str | None, **files: Path | None) -> int:
    """Check what a task needs of this machine and, with --cluster, whether each task's address can be reached.

    Each line is OK, a warning or a problem, with a remedy. The exit code is 2 if there is a problem, else 0.
    """
    rows = [(name, check()) for name, check in CHECKS.items()]
    if cluster is not None:
        rows += check_cluster(read_spec(cluster), options.security(files))
    width = max(len(name) for name, _ in rows)
    for name, verdict in rows:
        remedy = f"; {verdict.remedy}" if verdict.remedy else ""
        click.echo(f"{verdict.level:<7}  {name:<{width}}  {printable(verdict.found + remedy)}")
    return UsageError.exit_code if any(verdict.level == PROBLEM for _, verdict in rows) else 0
