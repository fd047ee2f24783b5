"""shardline run: the task that this process's launcher gave it, whatever the launcher."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil
from click.core import ParameterSource

from shardline.cli import options, train
from shardline.cli.launcher import LIFE_FD
from shardline.cli.roles import reads, role_command, role_options
from shardline.cluster import TaskPlace, locate, own_address, parse_address, parse_task, wants_place
from shardline.errors import UsageError, as_error
from shardline.host.printable import printable_lines
from shardline.host.run_lock import ever_begun
from shardline.observability import log
from shardline.roles import ROLES
from shardline.rpc.names import is_literal, unknown_name
from shardline_launchers.host_tasks import LIFE_FD as LIFE_HERE, serve
from shardline_launchers.places import LAUNCHERS, PORT, Asked, ProcessPlace, find
from shardline_launchers.ssh import RemoteTasks, host_name, spread

EXPAND_S = 20.0
FINAL_CODES = (0, 2, 5, 6, 7)
"""Exit codes after which the same process would end the same way: done, a bad setting, NaN, a bad checkpoint, a task
that another has replaced."""
LOCAL = (
    *("file", "job", "hosts", "port", "python", "by", "ps", "workers", "evaluators", "task", "cluster", "restart_code"),
    *("host_tasks", "address", "life_fd"),
)
"""Flags that --hosts does not pass on."""
NOT_FOR_SCRIPTS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG"),
)
"""Variables with which a library in a script would start torch.distributed or TensorFlow's cluster."""

log_ = logging.getLogger("shardline.launchers")


@click.command(
    epilog="Arguments after -- are passed to the script, or to the job file as SHARDLINE_JOB_ARGS.",
    options_metavar="[OPTIONS]",
    short_help="Run the task that Slurm, torchrun, Kubernetes, Open MPI or TF_CONFIG gives this process.",
)
@click.argument("file", metavar="[JOB.py]", required=False, type=click.Path(path_type=Path))
@options.option("--ps", type=click.IntRange(min=1), default=1, help="Parameter servers, of the launcher's tasks.")
@options.option("--workers", type=click.IntRange(min=0), help="Workers. Default: the rest of the launcher's tasks.")
@options.option("--evaluators", type=click.IntRange(min=0), default=0, help="Evaluators, of the launcher's tasks.")
@options.option("--script", is_flag=True, help="JOB.py is a training script that calls shardline.connect().")
@options.option("--ps-device", default="cpu", callback=options.check_device, help="Device of the parameter servers.")
@options.option(
    "--by", type=click.Choice(tuple(LAUNCHERS)), help="Launcher to follow, if several have set their variables."
)
@options.option("--hosts", metavar="HOST,HOST,...", help="Start every task by ssh on these hosts, from here.")
@options.option(
    "--port", type=click.IntRange(1, 65_535), default=PORT, help="Port of the chief on the first of --hosts."
)
@options.option("--python", metavar="PATH", help="Python on --hosts. Default: this one's path.")
@options.option(
    "--restart-code",
    type=click.IntRange(1, 255),
    help="Exit code in place of those after which a restart may help, for launchers that tell them apart.",
)
@click.option("--host-tasks", is_flag=True, hidden=True)
@click.option("--tell", hidden=True)
@role_options
def run(**flags: Any) -> int:
    """Run one process of a cluster that a launcher starts: the same command for every task.

    The place in the cluster comes from --task and --cluster, TF_CONFIG (Kubeflow's TFJob), Slurm, torchrun, Kubernetes
    (JobSet, indexed Job) or Open MPI, in this order. `shardline train` runs a whole cluster on one machine without any.
    """
    if flags["file"] is not None and flags["job"] is not None:
        raise UsageError(f"two job files are given, {flags['file']} and --job {flags['job']}; give one")
    flags["job"] = flags.pop("file") or flags["job"]
    if flags["script"] and flags["restart_code"]:
        raise UsageError("--restart-code is for job files: the exit code of --script is the script's own")
    options.existing_job(flags["job"])
    try:
        code = _run(flags)
    except Exception as error:
        known = as_error(error)
        if known is None or _told(known.exit_code, flags) == known.exit_code:
            raise
        print(f"shardline: {printable_lines(str(known))}", file=sys.stderr)
        code = known.exit_code
    return _told(code, flags)


def _told(code: int, flags: Mapping[str, Any]) -> int:
    """The exit code that the launcher is to see."""
    return code if code in FINAL_CODES else flags["restart_code"] or code


def _run(flags: dict[str, Any]) -> int:
    if flags["host_tasks"]:
        return serve()
    if wants_place(flags["task"]):
        # The chief decides on the index, once the task asks it for one.
        return _run_task(flags["task"], None, flags)
    if flags["hosts"] is not None:
        return _by_ssh(flags)
    place = _place(flags)
    if flags["tell"] is not None and place.meeting is not None:
        from shardline_launchers.meeting import tell

        tell(place.meeting, flags["tell"], flags["join_timeout"], flags["life_fd"])
        return 0
    log.setup(place.task)
    log_.info("place from %s", place.source)
    if place.hosted:
        return _host(place, flags)
    if place.meeting is not None:
        # Imports torch, which --help must not do.
        from shardline_launchers.meeting import ask

        place = replace(place, spec=place.spec.with_address("chief/0", ask(place.meeting, flags["join_timeout"])))
    return _run_task(place.task, place, flags)


def _place(flags: Mapping[str, Any]) -> ProcessPlace:
    """The place of this process. Raises UsageError if nothing names it."""
    if flags["task"] is not None or flags["cluster"] is not None:
        at: TaskPlace = locate(
            None, cluster=flags["cluster"], task=flags["task"], tf_config=os.environ.get("TF_CONFIG") or None
        )
        return ProcessPlace(task=at.task, spec=at.spec, source="--task")
    asked = Asked(**options.same_names(Asked, flags))
    place = find(os.environ, asked, expand=_host_names, by=flags["by"])
    if place is None:
        raise UsageError(
            "no launcher has started this process: there is no --task, TF_CONFIG, and no variable of Slurm, torchrun, "
            "Kubernetes or Open MPI; to run the whole cluster on this machine use: shardline train"
        )
    host = parse_address(place.spec.chief)[0]
    if place.resolves and not is_literal(host) and (cause := unknown_name(host)):
        raise UsageError(
            f"{place.source}: the chief's host {host!r} has no address ({cause}); give the machines names that all of "
            "them can resolve"
        )
    if place.restarts and not flags["resume"]:
        place = replace(place, source=f"{place.source}, restarted {place.restarts} times")
    return place


def _by_ssh(flags: Mapping[str, Any]) -> int:
    """Start every task on --hosts, and follow them to the end."""
    asked = Asked(**options.same_names(Asked, flags))
    named = "--task or --cluster" if flags["task"] or flags["cluster"] else ""
    place = None if named else find(os.environ, asked, expand=_host_names, by=flags["by"])
    if named := named or (place.source if place is not None else ""):
        raise UsageError(
            f"--hosts starts processes by ssh, but the place of this one is known from {named}; use only one"
        )
    if flags["job"] is None:
        raise UsageError("no job file is given; use: shardline run JOB.py --hosts HOST,HOST")
    targets = [target.strip() for target in flags["hosts"].split(",") if target.strip()]
    if not targets or len(set(targets)) < len(targets) or any(target.startswith("-") for target in targets):
        raise UsageError(f"--hosts is {flags['hosts']!r}; give names of hosts, each once, such as a,b,user@c")
    spec, on = spread(targets, asked, flags["port"], host_name)
    given = {name: value for name, value in flags.items() if name not in LOCAL and _on_command_line(name)}
    shared = [*_arguments(run.params, given), str(flags["job"]), "--life-fd", LIFE_HERE]
    local = {options.variable(f"--{name.replace('_', '-')}") for name in LOCAL}
    variables = {
        name: value for name, value in os.environ.items() if name.startswith("SHARDLINE_") and name not in local
    }
    cluster = json.dumps(spec.tasks)

    def arguments(task: str) -> list[str]:
        return ["run", *shared, "--task", task, "--cluster", cluster]

    python = shlex.join([flags["python"] or sys.executable, "-P", "-m", "shardline", "run", "--host-tasks"])
    line = f"cd {shlex.quote(os.getcwd())} && exec {python}"
    head = [variables, None if flags["script"] else str(flags["job"])]
    grace_s = 2 * options.timeouts(flags).total_s
    return RemoteTasks(on, line, head, arguments, script=flags["script"], asked=asked, grace_s=grace_s).run()


def _host_names(short: str) -> Sequence[str]:
    """Slurm's list of hosts in full."""
    if "[" not in short and "," not in short:
        return (short,)
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise UsageError(f"SLURM_STEP_NODELIST is {short!r}, which only scontrol can read, and it is not on PATH")
    try:
        said = subprocess.run(
            [scontrol, "show", "hostnames", short], capture_output=True, text=True, timeout=EXPAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"`scontrol show hostnames {short}` did not answer within {EXPAND_S:.0f} s") from None
    if said.returncode or not said.stdout.strip():
        raise UsageError(f"`scontrol show hostnames {short}` failed: {said.stderr.strip() or 'no output'}")
    return said.stdout.split()


def _out(place: ProcessPlace, flags: Mapping[str, Any]) -> Path | None:
    """The folder of the run: --out, or one that is the same when the launcher starts the job again."""
    given: Path | None = flags["out"]
    if given is not None or not (place.run or place.hosted):
        return given
    # torchrun's agent stays while it restarts its ranks.
    begun = time.strftime("%Y%m%d-%H%M%S", time.localtime(psutil.Process(os.getppid()).create_time()))
    return Path("runs") / f"{flags['job'].stem if flags['job'] else 'job'}-{place.run or begun}"


def _host(place: ProcessPlace, flags: Mapping[str, Any]) -> int:
    """Run the chief, the servers and a worker as children, as `shardline train` does."""
    from shardline_launchers.hosting import HostingCluster, HostingOptions

    if flags["job"] is None:
        raise UsageError("no job file is given; use: shardline run JOB.py, or --script train.py")
    out = _out(place, flags)
    assert out is not None
    resume = ever_begun(out) if place.restarts else flags["resume"]
    known = {**flags, "out": out, "resume": resume, "workers": place.spec.num("worker")}
    launch = train.launch_options(known)
    variables = {name: os.environ.pop(name) for name in NOT_FOR_SCRIPTS if name in os.environ}
    hosting = HostingOptions(**{**vars(launch), "place": place, "bind": flags["bind"], "variables": variables})
    return train.run(hosting, kind=HostingCluster)


def _run_task(task: str, place: ProcessPlace | None, flags: Mapping[str, Any]) -> int:
    """Run a task in this process. place: None if the chief assigns its index."""
    role = wants_place(task) or parse_task(task)[0]
    given = dict(flags)
    if place is not None:
        address = own_address(flags["address"] or place.spec.address(task))
        spec = place.spec.with_place(task, address)
        given |= {"cluster": spec.to_json(), "task": task, "address": None, "out": flags["out"]}
        if ROLES[role].leads:
            given |= {"out": _out(place, flags), "resume": flags["resume"] or place.restarts > 0}
    given["exit_with_job"] = not ROLES[role].leads
    if ROLES[role].holds:
        given["device"] = flags["ps_device"]
    if flags["script"] and ROLES[role].computes:
        if not ROLES[role].leads:
            return _become_script(role, given)
        given["job"] = None
    known = [option for option in role_command(role).params if reads(role, str(option.name))]
    code = role_command(role).main(list(_arguments(known, given)), prog_name="shardline run", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _arguments(known: Iterable[click.Parameter], given: Mapping[str, Any]) -> Iterator[str]:
    """A command line with the options that are given. Their variables are read by whoever gets it, too."""
    for option in known:
        name = str(option.name)
        if not isinstance(option, click.Option) or name not in given:
            continue
        said = _on_command_line(name)
        if option.is_flag:
            # One that is off can't be said, if it has no opposite.
            if given[name] != (option.default is True) or (said and option.secondary_opts):
                yield option.opts[0] if given[name] else option.secondary_opts[0]
            continue
        for value in given[name] if option.multiple else (given[name],):
            if value is not None and (value != option.default or said):
                yield from (option.opts[0], "=".join(value) if isinstance(value, tuple) else str(value))


def _on_command_line(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _become_script(role: str, given: Mapping[str, Any]) -> int:
    """Replace this process by the user's script, which takes its place in shardline.connect()."""
    if role != "worker":
        raise UsageError(f"--script has no {role}: its loop trains only; leave --evaluators out")
    job = given["job"]
    if job is None:
        raise UsageError("no script is given; use: shardline run --script train.py")
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_SCRIPTS}
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
    device = f"cuda:{local}" if given["device"] == "cuda" and local else given["device"]
    for option in click.get_current_context().command.params:
        value = {**given, "device": device}.get(str(option.name))
        if isinstance(option, click.Option) and isinstance(option.envvar, str) and value not in (None, option.default):
            environment[option.envvar] = str(int(value)) if isinstance(value, bool) else str(value)
    if given["life_fd"] is not None:
        environment[LIFE_FD] = str(given["life_fd"])
    # That of the launcher, which the script is not.
    environment.pop("SHARDLINE_SCRIPT", None)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = shlex.split(os.environ.get(options.JOB_ARGS, ""))
    os.execve(sys.executable, [sys.executable, str(job), *arguments], environment)
