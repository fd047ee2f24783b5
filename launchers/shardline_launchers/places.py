"""A process's place in the cluster, read from the environment that its launcher gave it. Pure.

    place = find(os.environ, Asked(ps=2), expand=host_names)
    place.task    # "worker/3"
    place.spec    # the addresses; that of the chief may still have to be asked for, see ProcessPlace.meeting

Each launcher is one row of LAUNCHERS: a function that returns a Claim if its variables are set, else None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardline.cluster import MAX_TASKS, UNNAMED, ClusterSpec, format_address, from_tf_config
from shardline.errors import UsageError
from shardline.roles import ROLES

LOOPBACK = "127.0.0.1"
PORT = 2222
"""The chief's port where each task has a network of its own, as in TensorFlow's examples."""
SLURM_PORTS = range(16_384, 32_768)
"""Ports of chiefs in Slurm's steps: below those that Linux gives to outgoing connections."""
POD = re.compile(r"(?P<set>.+)-(?P<group>[a-z][a-z0-9]*)-(?P<job>\d+)-(?P<pod>\d+)")
"""Host name of a JobSet's pod."""

Environment = Mapping[str, str]
Expand = Callable[[str], Sequence[str]]
"""The host names in Slurm's short form, "node[3-5,9]". Raises UsageError."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Numbers of tasks from the command line; None = as many as the launcher started."""

    ps: int = 1
    evaluators: int = 0
    workers: int | None = None
    chief_trains: bool = False

    @property
    def others(self) -> int:
        """Tasks that are no workers."""
        return 1 + self.ps + self.evaluators

    def spec(self, chief: str, workers: int, other: str) -> ClusterSpec:
        """A cluster of these numbers of tasks. other: the address of all but the chief."""
        counts = {"ps": self.ps, "worker": workers, "evaluator": self.evaluators}
        return ClusterSpec({"chief": (chief,), **{role: (other,) * count for role, count in counts.items() if count}})


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A TCPStore of torch.distributed, in which the process that hosts the chief leaves its address."""

    host: str
    port: int
    key: str
    """Names the run and its restart: an address from before a restart leads nowhere."""
    serves: bool
    """This process opens the store; otherwise torchrun's agent or another rank does."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    task: str
    spec: ClusterSpec
    source: str
    """Its launcher, for the log: "Slurm, task 3 of 6"."""
    hosted: tuple[str, ...] = ()
    """Tasks that this process starts as its children, its own among them; () = it is its own task."""
    meeting: Rendezvous | None = None
    """Where the chief's address is, if the spec has port 0 for it."""
    restarts: int = 0
    """How often the launcher has started the job before."""
    run: str = ""
    """Name of the run, which stays when the launcher restarts it; empty if the launcher has none."""
    resolves: bool = False
    """The chief's host must have an address by now; a pod's name may come later."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The variables of one launcher. rank, size: the number of this process, and of all; None = not said."""

    launcher: str
    rank: int | None
    size: int | None
    place: Callable[[], ProcessPlace]
    """Raises UsageError."""
    nodes: int | None = None
    """Number of this launcher's agents, each of which an outer launcher may have started as its task."""

    def __str__(self) -> str:
        if self.rank is None:
            return self.launcher
        return f"{self.launcher}, rank {self.rank}" + (f" of {self.size}" if self.size is not None else "")

    def within(self, outer: Claim) -> bool:
        """Return whether the other launcher started this one's agents: srun torchrun."""
        return self.nodes is not None and outer.nodes is None and outer.size in (None, self.nodes)

    def agrees(self, other: Claim) -> bool:
        """Return whether both number the processes alike."""
        sizes = {self.size, other.size} - {None}
        return self.rank is not None and self.rank == other.rank and len(sizes) <= 1


def find(environ: Environment, asked: Asked, *, expand: Expand, by: str | None = None) -> ProcessPlace | None:
    """The place that a launcher gave this process; None without any launcher's variables.

    by: the launcher to follow, a name in LAUNCHERS, if several have set theirs. Raises UsageError.
    """
    names = (by,) if by is not None else tuple(LAUNCHERS)
    found = [claim for name in names if (claim := LAUNCHERS[name](environ, asked, expand)) is not None]
    if not found:
        if by is not None:
            raise UsageError(f"--by {by}: this process has none of its variables; was it started by {by}?")
        return None
    chosen = found[0]
    for other in found[1:]:
        if other.within(chosen):
            chosen = other
        elif not (chosen.within(other) or chosen.agrees(other)):
            raise UsageError(
                f"two launchers have numbered this process, as {chosen} and as {other}; choose one: "
                f"--by {_name(chosen)} or --by {_name(other)}"
            )
    return chosen.place()


def _name(claim: Claim) -> str:
    return next(name for name in LAUNCHERS if claim.launcher.lower().replace(" ", "") == name)


# Kubeflow


def tf_config(environ: Environment, asked: Asked, expand: Expand) -> Claim | None:
    """TFJob of Kubeflow, and whatever else sets TF_CONFIG."""
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None

    def place() -> ProcessPlace:
        found = from_tf_config(dense(text, asked, environ.get("HOSTNAME", "")))
        return ProcessPlace(task=found.task, spec=found.spec, source="TF_CONFIG")

    return Claim(launcher="TF_CONFIG", rank=None, size=None, place=place)


def dense(text: str, asked: Asked, pod: str) -> str:
    """A TF_CONFIG with lists of addresses only. pod: the name of this pod.

    A sparse one has {"1": address}, without the tasks that this one doesn't talk to. TFJob's operator writes another,
    "sparseCluster", with enableDynamicWorker: a worker has the servers and itself, a server itself alone, the chief
    nothing. The chief's name then follows from the task's own, JOB-worker-1.NAMESPACE.svc.
    """
    try:
        data = json.loads(text)
        task = data["task"]
        role, index = str(task["type"]), int(task.get("index", 0))
        cluster = dict(data["cluster"] if "cluster" in data else data["sparseCluster"])
        if "cluster" not in data:
            if role == "ps":
                cluster["ps"] = {str(index): cluster["ps"][0]}
            own = cluster[role][str(index)] if role in cluster else f"{pod}:{PORT}"
            chief = re.sub(rf"-{role}-{index}(?=[.:])", "-chief-0", own, count=1)
            cluster = {"chief": [chief], **cluster, "ps": cluster["ps"] or asked.ps}
        filled = {name: _filled(entries) for name, entries in cluster.items() if entries != {}}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        # It is told what is wrong with it by who reads it next.
        return text
    return json.dumps({**data, "cluster": filled})


def _filled(entries: Any) -> Any:
    if not isinstance(entries, dict):
        return entries
    numbered = {int(index): address for index, address in entries.items()}
    if min(numbered) < 0 or max(numbered) >= MAX_TASKS:
        return entries
    return [numbered.get(index, UNNAMED) for index in range(max(numbered) + 1)]


# Launchers that number their processes


def divided(claim: str, rank: int, size: int, asked: Asked) -> str:
    """The task of a numbered process: first the chief, then servers, evaluators, and workers for the rest."""
    workers = size - asked.others
    if workers < (0 if asked.chief_trains else 1):
        raise UsageError(
            f"{claim} started {size} task{'s' if size > 1 else ''}, but 1 chief, {asked.ps} ps, {asked.evaluators} "
            f"evaluators and at least 1 worker are {asked.others + 1}; start more tasks, or lower --ps"
        )
    if asked.workers not in (None, workers):
        raise UsageError(
            f"--workers is {asked.workers}, but {claim} started {size} tasks, of which {workers} are left for workers; "
            "leave --workers out, or start another number of tasks"
        )
    for role, count in (("chief", 1), ("ps", asked.ps), ("evaluator", asked.evaluators)):
        if rank < count:
            return f"{role}/{rank}"
        rank -= count
    return f"worker/{rank}"


def numbered(claim: str, rank: int, size: int, asked: Asked, *, chief: str, own: str) -> ProcessPlace:
    """The place of a numbered process. chief: the chief's address. own: this process's host; LOOPBACK: that of all."""
    task = divided(claim, rank, size, asked)
    other = format_address(LOOPBACK, 0) if own == LOOPBACK else UNNAMED
    spec = asked.spec(chief, size - asked.others, other)
    if task != "chief/0" and own:
        spec = spec.with_address(task, format_address(own, 0))
    return ProcessPlace(task=task, spec=spec, source=f"{claim}, task {rank} of {size}", resolves=True)


def slurm(environ: Environment, asked: Asked, expand: Expand) -> Claim | None:
    """A task of a job step, as srun starts it; a batch script itself is none."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= environ.keys():
        return None
    size = number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", least=1)
    rank = number(environ, "SLURM_PROCID", below=size)

    def place() -> ProcessPlace:
        hosts = expand(needed(environ, "SLURM_STEP_NODELIST", "Slurm"))
        job, step = number(environ, "SLURM_JOB_ID"), number(environ, "SLURM_STEP_ID")
        port = SLURM_PORTS[(job * 7 + step) % len(SLURM_PORTS)]
        alone = len(hosts) == 1
        own = LOOPBACK if alone else environ.get("SLURMD_NODENAME", "")
        chief = format_address(LOOPBACK if alone else hosts[0], port)
        found = numbered("Slurm", rank, size, asked, chief=chief, own=own)
        return replace(found, restarts=number(environ, "SLURM_RESTART_COUNT", default=0), run=f"slurm-{job}")

    return Claim(launcher="Slurm", rank=rank, size=size, place=place)


def torchrun(environ: Environment, asked: Asked, expand: Expand) -> Claim | None:
    """A rank of torchrun, or of another launcher with the variables of torch.distributed. Each is a worker.

    Rank 0's process hosts the chief, the servers and the evaluators too.
    """
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    size = number(environ, "WORLD_SIZE", least=1)
    rank = number(environ, "RANK", below=size)
    elastic = "TORCHELASTIC_RUN_ID" in environ

    def place() -> ProcessPlace:
        if asked.workers not in (None, size):
            raise UsageError(
                f"--workers is {asked.workers}, but torchrun started {size} ranks, each of which is a worker; leave "
                "--workers out, or change --nproc-per-node"
            )
        master = needed(environ, "MASTER_ADDR", "torchrun")
        alone = number(environ, "LOCAL_WORLD_SIZE", default=1) == size
        host = LOOPBACK if alone else master
        spec = asked.spec(format_address(host, 0), size, format_address(LOOPBACK, 0) if alone else UNNAMED)
        restarts = number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
        others = tuple(name for name in spec.task_names() if not name.startswith("worker/"))
        return ProcessPlace(
            task=f"worker/{rank}",
            spec=spec,
            source=f"torchrun, rank {rank} of {size}",
            hosted=(*others, "worker/0") if rank == 0 else (),
            meeting=Rendezvous(
                host=master,
                port=number(environ, "MASTER_PORT", below=65_536),
                key=f"shardline/{environ.get('TORCHELASTIC_RUN_ID', '')}/{restarts}/chief",
                serves=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            ),
            restarts=restarts,
        )

    nodes = number(environ, "GROUP_WORLD_SIZE", least=1) if elastic and "GROUP_WORLD_SIZE" in environ else None
    return Claim(launcher="torchrun", rank=rank, size=size, place=place, nodes=nodes)


def kubernetes(environ: Environment, asked: Asked, expand: Expand) -> Claim | None:
    """A pod of a JobSet whose groups are named after roles, or of one indexed Job or group for all roles.

    Host names are JobSet's, SET-GROUP-JOB-POD.SET, or an indexed Job's, JOB-POD.JOB, with a headless service of the
    Job's name.
    """
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    rank = number(environ, "JOB_COMPLETION_INDEX")

    def place() -> ProcessPlace:
        host = needed(environ, "HOSTNAME", "Kubernetes")
        pod = POD.fullmatch(host)
        if pod is not None and pod["group"] in ROLES:
            role, job = pod["group"], int(pod["job"])
            if rank and job:
                raise UsageError(
                    f"pod {host} is number {rank} of Job number {job} of its group; give the group either one Job "
                    "with several pods, or several Jobs with one"
                )
            # Other tasks of the role may have higher numbers than the command line says; the chief admits them.
            spec = asked.spec(f"{pod['set']}-chief-0-0.{pod['set']}:{PORT}", asked.workers or 1, UNNAMED)
            task, address = f"{role}/{rank + job}", f"{host}.{pod['set']}:{PORT}"
            return ProcessPlace(task=task, spec=spec.with_place(task, address), source=f"Kubernetes, pod {host}")
        size = _said_size("Kubernetes", asked)
        if rank >= size:
            raise UsageError(f"pod {host} has number {rank}, but 1 chief, --ps, --evaluators and --workers are {size}")
        stem = host.removesuffix(f"-{rank}")
        domain = pod["set"] if pod is not None else stem
        found = numbered("Kubernetes", rank, size, asked, chief=f"{stem}-0.{domain}:{PORT}", own="")
        spec = found.spec.with_place(found.task, f"{host}.{domain}:{PORT}")
        return replace(found, spec=spec, resolves=False)

    return Claim(launcher="Kubernetes", rank=rank, size=None, place=place)


def open_mpi(environ: Environment, asked: Asked, expand: Expand) -> Claim | None:
    """A process of mpirun, or of another launcher with PMIx."""
    name = next((name for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if name in environ), None)
    if name is None:
        return None
    said = "OMPI_COMM_WORLD_SIZE" in environ
    size = number(environ, "OMPI_COMM_WORLD_SIZE", least=1) if said else None
    rank = number(environ, name, below=size)

    def place() -> ProcessPlace:
        whole = size if size is not None else _said_size("PMIx", asked)
        alone = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", default=0) == whole
        chief = LOOPBACK if alone else environ.get("MASTER_ADDR", "")
        if not chief:
            raise UsageError(
                "Open MPI tells its processes no address of rank 0; name its host: mpirun -x MASTER_ADDR=HOST"
            )
        port = number(environ, "MASTER_PORT", default=PORT, least=1, below=65_536)
        own = LOOPBACK if alone else ""
        return numbered("Open MPI", rank, whole, asked, chief=format_address(chief, port), own=own)

    return Claim(launcher="Open MPI", rank=rank, size=size, place=place)


LAUNCHERS: Mapping[str, Callable[[Environment, Asked, Expand], Claim | None]] = {
    "tf_config": tf_config,
    "slurm": slurm,
    "torchrun": torchrun,
    "kubernetes": kubernetes,
    "openmpi": open_mpi,
}
"""In the order in which they are asked."""


def number(
    environ: Environment, name: str, *, default: int | None = None, least: int = 0, below: int | None = None
) -> int:
    """A launcher's variable as a number. Raises UsageError with its value and what it must be."""
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text:
        raise UsageError(f"{name} is not set, though the launcher's other variables are; start the process again by it")
    if not (text.isascii() and text.isdigit()) or int(text) < least or (below is not None and int(text) >= below):
        most = f" to {below - 1}" if below is not None else ""
        raise UsageError(f"{name} is {text[:40]!r}; it must be a number from {least}{most}")
    return int(text)


def needed(environ: Environment, name: str, launcher: str) -> str:
    """A launcher's variable. Raises UsageError if it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        raise UsageError(f"{name} is not set, though other variables of {launcher} are; start the process again by it")
    return text


def _said_size(launcher: str, asked: Asked) -> int:
    if asked.workers is None:
        raise UsageError(f"{launcher} tells its processes no total; add --workers with the number of workers")
    return asked.others + asked.workers
