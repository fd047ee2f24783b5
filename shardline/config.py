"""Settings of one process. Precedence everywhere: flag > environment > file > default."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from shardline.cluster import ClusterSpec, parse_address
from shardline.core.timeouts import Timeouts
from shardline.errors import UsageError
from shardline.host.printable import unicode
from shardline.roles import ROLES, Role
from shardline.security import PLAIN, Security, check_bind, is_loopback

TRACKERS = "shardline.trackers"
"""Entry points of functions (TrackedRun) -> tracker, each with REQUIRES, the library it needs, in its module."""
DEFAULT_OUT = Path("out")
"""The chief's default output folder."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings from the command line that tasks and those who start them have alike."""

    resume: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    device: str = "cpu"
    gpu_memory_fraction: float | None = None
    insecure_bind: bool = False
    """Listen beyond loopback without TLS."""
    chief_trains: bool = False
    replay: Path | None = None
    """Output folder of the run to repeat."""
    inexact: bool = False
    """Allow machines with differently rounded gradients in one synchronous job."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Job fields from the command line: ("steps", "200"), ("consistency", "async"), ("seed", "3")."""
    min_workers: int = 1
    """With fewer training tasks the job pauses, and ends if none joins for --timeout."""
    bucket_mb: int = 0
    """Target size of a bucket in MiB, for the chief; 0 = by the size of a shard."""
    shards: int = 0
    """Parts into which the model is cut, for the chief; 0 = one for each parameter server."""
    security: Security = PLAIN
    lane: str = "auto"
    """Lane: one of shardline.lanes.choices(); auto = the best that the two tasks can use."""
    overlap: bool = True
    """Gradients leave while backward() is still running, and the next forward pass waits per layer."""
    page: str | None = None
    """Address of the chief's page, "host:port"; None = no page."""
    trackers: tuple[str, ...] = ()
    """Services that show the run's curves beside TensorBoard, for the chief: names in the entry points TRACKERS."""
    run_dir: Path | None = None
    """Folder for the unix sockets of the shm lane; None = the kernel's abstract namespace."""
    cold_dir: Path | None = None
    """Folder of a server for rows of tables beyond their memory_rows; None = `out`, or the system's for such files."""
    standbys: int = 0
    """Standbys of each shard: 0 or 1."""
    with_ps: bool = False
    """Each worker's process is also the ps with its index."""
    profile: str = ""
    """Steps to trace with torch.profiler, "20:30" = 20 to 29; "" = none."""


@dataclass(frozen=True, kw_only=True)
class RoleConfig(TaskSettings):
    """Settings of a role's run(): parsed by the CLI from flags, SHARDLINE_* and TF_CONFIG."""

    role: str
    """A name in ROLES, such as "ps"."""
    index: int
    cluster: ClusterSpec
    job: Path | None = None
    out: Path | None = None
    metrics_port: int = 0
    """0 = a free port."""
    host: str = "127.0.0.1"
    """Interface that the metrics bind to."""
    bind: str | None = None
    """Interface that the services bind to; None = the host of the task's address in the cluster spec."""
    exit_with_job: bool = False
    """End with the job's exit code if the chief ends a failed job; otherwise with 0, having followed orders."""
    """Job fields from the command line: ("steps", "200"), ("consistency", "async"), ("seed", "3")."""
    ready_fd: int | None = None
    """Inherited file descriptor, to which the bound address is written as one line, for launchers."""
    lock_fd: int | None = None
    """Descriptor with the lock of --out; if None, the chief takes the lock itself."""
    life_fd: int | None = None
    """Inherited pipe; the process ends when its other end closes (the launcher died)."""
    max_workers: int = 64
    """Maximum number of workers, including those beyond the cluster spec."""
    """Address of the chief's page, "host:port"; None = no page."""
    """Steps to trace with torch.profiler, "20:30" = 20 to 29; "" = none."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise UsageError(
                f"--min-workers is {self.min_workers} and --max-workers is {self.max_workers}; --min-workers must be "
                "at least 1 and at most --max-workers"
            )
        profiled_steps(self.profile)
        if self.with_ps and self.chief_trains:
            raise UsageError(
                "--with-ps is for workers: a chief that trains holds no parameters; leave --chief-trains out"
            )
        if self.out is not None or self.row.leads:
            check_out((self.out or DEFAULT_OUT).absolute())
        for what, host, flag in self._listens():
            check_bind(what, host, flag, self.security, insecure=self.insecure_bind)

    @property
    def row(self) -> Role:
        return ROLES[self.role]

    @property
    def neighbours(self) -> int:
        """Number of tasks before this one on its machine; see ClusterSpec.neighbours."""
        return self.cluster.neighbours(self.task)

    @property
    def own_ps(self) -> int:
        """Number of servers in workers' processes: the first by index."""
        return min(self.cluster.num("worker"), self.cluster.num("ps")) if self.with_ps else 0

    @property
    def is_ps_too(self) -> bool:
        """Whether this worker's process is also a ps. A worker beyond the cluster spec's is none."""
        return self.role == "worker" and self.index < self.own_ps

    @property
    def task(self) -> str:
        """Name of the process, such as "worker/3"."""
        return f"{self.role}/{self.index}"

    @property
    def listens_at(self) -> str:
        """Host that the task's services bind to."""
        return self.bind or parse_address(self.cluster.address(self.task))[0]

    def _listens(self) -> list[tuple[str, str, str]]:
        """(what, host, flag that sets the host) for everything of this task that listens."""
        found = [(f"the metrics of {self.task}", self.host, "--host")]
        # A task that only calls others, as in benchmarks, need not be in the cluster.
        if self.bind is not None or self.index < self.cluster.num(self.role):
            found.insert(0, (f"the services of {self.task}", self.listens_at, "--bind"))
        if self.row.leads and self.page is not None:
            found.append(("the chief's page", parse_address(self.page, "--page")[0], "--page"))
        return found

    def cautions(self) -> list[str]:
        """Warnings about open access for the user; empty if there are none."""
        held, found = self.security, []
        exposed = [host for _, host, _ in self._listens() if not is_loopback(host)]
        if exposed and held.tls_cert is None:
            found.append(
                f"--insecure-bind: {self.task} listens at {exposed[0]} without TLS; anyone on that network can "
                "read and change the traffic"
                + ("" if held.token else ", and without a token anyone can send it commands")
            )
        elif exposed and not held.token and held.tls_ca is None:
            found.append(
                f"{self.task} listens at {exposed[0]} and admits anyone who can reach it; set --token-file or --tls-ca"
            )
        if held.token and not held.admin_token and self.row.commands:
            found.append(
                "there is no --admin-token-file, so the job token grants every right: anyone who has it can also "
                "command the parameter servers and end the job"
            )
        return found


def check_out(path: Path) -> None:
    """Raise UsageError if messages and files can't hold the path of the results."""
    if unicode(str(path)) != str(path):
        raise UsageError(f"--out {unicode(str(path))} is not UTF-8; choose a folder whose whole path is")


def profiled_steps(text: str) -> range | None:
    """The steps that --profile names, None for "". Raises UsageError for what is no range with a step in it."""
    if not text:
        return None
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise UsageError(f"--profile is {text!r}; give the first step and the one after the last, such as 20:30")
    return range(int(first), int(end))


def check_standbys(standbys: int, servers: int) -> None:
    """Raise UsageError if this number of standbys per shard is not possible."""
    if standbys not in (0, 1):
        raise UsageError(f"--standbys is {standbys}; use 0 or 1")
    if standbys and servers < 2:
        raise UsageError(
            f"--standbys {standbys} needs at least 2 parameter servers; this cluster has {servers}: a standby on the "
            "same server as its primary would be lost with it"
        )


def environment(name: str) -> str | None:
    """SHARDLINE_<NAME>, or None if unset or empty."""
    return os.environ.get(f"SHARDLINE_{name.upper()}") or None


def environment_switch(name: str, *, default: bool) -> bool:
    """SHARDLINE_<NAME> as a switch, with the same words as flags. Raises UsageError for other words."""
    text = environment(name)
    if text is None:
        return default
    words = {True: ("1", "true", "t", "yes", "y", "on"), False: ("0", "false", "f", "no", "n", "off")}
    for value, known in words.items():
        if text.strip().lower() in known:
            return value
    raise UsageError(f"SHARDLINE_{name.upper()} is {text!r}; use true or false")


def environment_path(name: str) -> Path | None:
    """SHARDLINE_<NAME> as a path, or None if unset or empty."""
    text = environment(name)
    return Path(text) if text else None


def environment_security() -> Security:
    """TLS files and job token from SHARDLINE_TLS_CERT, _TLS_KEY, _TLS_CA and _TOKEN_FILE, for scripts.

    A script only trains and gives no commands, so it does not get the admin token.
    """
    return Security(
        tls_cert=environment_path("tls_cert"),
        tls_key=environment_path("tls_key"),
        tls_ca=environment_path("tls_ca"),
        token_file=environment_path("token_file"),
    )
