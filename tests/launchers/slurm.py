"""A whole Slurm on this machine: munged, slurmctld and two slurmd, with files and ports of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from shardline.host.ports import held_port
from tests.e2e.support import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
START_S, END_S = 60.0, 20.0
CONFIG = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
ReturnToService=2
KillWait=30
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Name what a test needs and this machine lacks; empty if nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root only"


def path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Slurm:
    """The daemons, ended by their process ids. nodes: their names in the cluster; all are this machine."""

    def __init__(self, folder: Path, nodes: Sequence[str] = ("node1", "node2")) -> None:
        self.folder = folder
        self._nodes = nodes
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path()}

    def __enter__(self) -> Slurm:
        for name in ("state", *(f"spool-{node}" for node in self._nodes)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        held = [held_port() for _ in range(1 + len(self._nodes))]
        ports = [socket.getsockname()[1] for socket in held]
        rows = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=16"
            for node, port in zip(self._nodes, ports[1:], strict=True)
        ]
        config = CONFIG.format(folder=self.folder, port=ports[0], nodes="\n".join(rows))
        (self.folder / "slurm.conf").write_text(config)
        for socket in held:
            socket.close()
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        files = {name: self.folder / f"munge.{name}" for name in ("key", "socket", "pid", "log", "seed")}
        flags = [f"--key-file={files['key']}", f"--socket={files['socket']}", f"--pid-file={files['pid']}"]
        flags += [f"--log-file={files['log']}", f"--seed-file={files['seed']}", "--foreground", "--force"]
        self._daemon("munged", *flags)
        wait_until(files["socket"].exists, "munged's socket", limit_s=START_S)
        self._daemon("slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"])
        for node in self._nodes:
            self._daemon("slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"])
        wait_until(self._idle, "idle nodes", limit_s=START_S, seen=lambda: self._ask("sinfo", "-N"))

    def _daemon(self, name: str, *flags: str) -> None:
        program = shutil.which(name, path=path())
        assert program is not None
        number = len(self._daemons)
        with (self.folder / f"{number}-{name}.out").open("wb") as output:
            command = [program, *flags]
            self._daemons.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **self.env})
            )

    def _idle(self) -> bool:
        return self._ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(self._nodes)

    def _ask(self, *command: str) -> str:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env={**os.environ, **self.env}
        )
        return found.stdout if found.returncode == 0 else ""

    def call(self, *command: str | Path) -> str:
        """Run one of Slurm's commands; it must succeed."""
        found = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **self.env},
        )
        assert found.returncode == 0, f"{command}: {found.stdout}{found.stderr}"
        return found.stdout

    def submit(self, script: str, *flags: str) -> str:
        """Submit a batch script; returns the job's id. Its output goes to job-ID.log."""
        file = self.folder / "batch.sh"
        file.write_text(f"#!/bin/sh\n{script}\n")
        log = f"--output={self.folder}/job-%j.log"
        return self.call("sbatch", "--parsable", "--open-mode=append", log, *flags, file).strip()

    def log(self, job: str) -> str:
        found = self.folder / f"job-{job}.log"
        return found.read_text(errors="replace") if found.exists() else ""

    def state(self, job: str) -> str:
        fields = self._ask("scontrol", "show", "job", job)
        return fields.partition("JobState=")[2].partition(" ")[0]

    def wait(self, job: str, *states: str, limit_s: float = 180.0) -> str:
        """Wait until a job is in one of these states; returns it."""

        def reached() -> str:
            state = self.state(job)
            return state if state in states else ""

        return str(wait_until(reached, f"job {job} {states}", limit_s=limit_s, seen=lambda: self._seen(job)))

    def _seen(self, job: str) -> str:
        return f"{self.state(job)}\n{self.log(job)}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        # munged last: the others sign what they say as they end.
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
