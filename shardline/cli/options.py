"""Flags shared by several commands, and the settings made from them.

Precedence is flag > SHARDLINE_* > TF_CONFIG or file > default. Nothing here imports torch: --help must be quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardline import methods, plugins
from shardline.cluster import TaskPlace, check_chief_port, locate, own_address, parse_address, read_spec, wants_place
from shardline.config import TRACKERS, RoleConfig, profiled_steps
from shardline.core.settings import known
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, JobError, UsageError
from shardline.host import files
from shardline.lanes import AUTO, CHOICES, check_choice
from shardline.roles import ROLES
from shardline.security import Security

if TYPE_CHECKING:
    from shardline.job import Job

F = TypeVar("F", bound=Callable[..., Any])

JOB_ARGS = "SHARDLINE_JOB_ARGS"
"""Environment variable with the arguments after "--", for the job file (parse it with shlex.split)."""


SETTINGS_BYTES = 1 << 20
MAX_NAMED_FILES = 4
"""If a folder is given as the job file, the error names at most this many of its .py files."""


def variable(name: str) -> str:
    """Environment variable of a flag: --gpu-memory-fraction is SHARDLINE_GPU_MEMORY_FRACTION; --x/--no-x is X."""
    return f"SHARDLINE_{name.partition('/')[0].lstrip('-').upper().replace('-', '_')}"


def option(name: str, *declarations: str, **settings: Any) -> Callable[[F], F]:
    """A click option that SHARDLINE_<NAME> sets as well."""
    is_switch = settings.get("is_flag") or "/" in name
    settings.setdefault("show_default", settings.get("default") is not None and not is_switch)
    return click.option(name, *declarations, envvar=variable(name), show_envvar=True, **settings)


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Combine decorators into one; --help shows the options in this order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def check_device(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Refuse an invalid device name; whether the device exists is checked by the task."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise click.BadParameter(f"{value!r} is not a device; use cpu, cuda or cuda:N")
    return value


def check_fraction(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0.0 < value <= 1.0:
        raise click.BadParameter(f"{value} is not a fraction of a device's memory; use a number above 0, at most 1")
    return value


def check_tasks(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[tuple[str, int], ...]:
    pairs = [text.partition("=") for text in value]
    for role, _, count in pairs:
        if not count.isdecimal() or int(count) < 1:
            raise click.BadParameter(f"{role!r} needs a number of tasks, at least 1; use ROLE=N, such as aggregator=2")
    return tuple((role, int(count)) for role, _, count in pairs)


def check_settings(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in value:
        field, equals, setting = text.partition("=")
        if not equals or not field.isidentifier():
            raise click.BadParameter(f"{text!r} is not of the form FIELD=VALUE, such as batch_size=64")
        pairs.append((field, setting))
    return tuple(pairs)


METHOD = "NAME[:KEY=VALUE,...]"


class MethodOption(click.Option):
    """A choice from a seam's table; --help lists the built-in ones, the job checks the value."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names = ", ".join(usage.partition(":")[0] for usage, _ in methods.written()[str(self.name)])
        self.help = f"{methods.SEAMS[str(self.name)][2]} Overrides the job's: {names}. See: shardline methods."
        return super().get_help_record(ctx)


def method(seam: str) -> Callable[[F], F]:
    return option(f"--{seam}", cls=MethodOption, metavar=METHOD)


def method_part(field: str) -> Callable[[F], F]:
    """The flag for a job field that chooses for a part of what a seam decides."""
    text = known()[field].metadata["doc"]
    return option(f"--{field.replace('_', '-')}", metavar=METHOD, help=f"Overrides the job's. {text}")


def add_plugins(_context: click.Context, _parameter: click.Parameter, value: tuple[Path, ...]) -> tuple[Path, ...]:
    """Put the files into the environment, for this process and its children to load when they read a table."""
    plugins.add(value)
    return value


def read_settings(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Take defaults of the flags from a launcher's JSON file, which has those of all roles."""
    if path is not None:
        try:
            found = dict(json.loads(files.read_text(path, SETTINGS_BYTES)))
        except (OSError, ValueError, TypeError) as error:
            raise click.BadParameter(f"{path} can't be read: {error}") from None
        # A flag that is hidden is for another role.
        own = {option.name for option in context.command.params if not getattr(option, "hidden", False)}
        context.default_map = {name: value for name, value in found.items() if name in own and value is not None}


plugin = click.option(
    "--plugin",
    "plugins",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    expose_value=False,
    is_eager=True,
    callback=add_plugins,
    help=f"Python file that adds methods; may be repeated. {plugins.VARIABLE} lists more.",
)
other_fields = together(
    option("--seed", type=click.IntRange(min=0), help="Override the seed of the job."),
    option(
        "--loaders",
        type=click.IntRange(min=0),
        help="Processes of each worker that read its batches ahead, instead of the job's; 0 = none.",
    ),
    *(method(seam) for seam in methods.SEAMS),
    *(method_part(field) for field in methods.PARTS),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="FIELD=VALUE",
        callback=check_settings,
        help="Override another field of the job; may be repeated.",
    ),
)
job_fields = together(
    option(
        "--steps",
        type=click.IntRange(min=1),
        help="Train this many steps instead of the job's: rounds if the cadence has several passes, batches in "
        "asynchronous mode.",
    ),
    other_fields,
)

tasks = option(
    "--tasks",
    multiple=True,
    metavar="ROLE=N",
    callback=check_tasks,
    help="Tasks of another role, such as aggregator=2, or of one that a plugin adds; may be repeated.",
)
device = option(
    "--device", default="cpu", callback=check_device, help="cpu, cuda (each task on a machine another GPU) or cuda:N."
)
gpu_memory_fraction = option(
    "--gpu-memory-fraction",
    type=float,
    callback=check_fraction,
    help="Share of the device's memory that this task may use.",
)
timeout = option(
    "--timeout", type=float, default=60.0, help="Seconds from which all deadlines and heartbeat intervals are derived."
)
join_timeout = option(
    "--join-timeout",
    type=float,
    default=600.0,
    help="Seconds that a task keeps trying to join, and that a starting chief waits for its tasks.",
)
cluster = option("--cluster", metavar="FILE", help="cluster.json. Default: TF_CONFIG.")
resume = option("--resume", is_flag=True, help="Resume from the newest checkpoint in --out.")
chief_trains = option("--chief-trains", is_flag=True, help="The chief trains too, as in TensorFlow.")
min_workers = option(
    "--min-workers",
    type=click.IntRange(min=1),
    default=1,
    help="With fewer tasks that train the job pauses; after --timeout it ends.",
)
bucket_mb = option(
    "--bucket-mb",
    type=click.IntRange(0, 1024),
    default=0,
    help="MiB of parameters that are sent and updated together. 0 = 1 to 4, by the model's size; 1024 where workers "
    "and servers use lane cuda.",
)
shards = option(
    "--shards",
    type=click.IntRange(0, 1024),
    default=0,
    help="Parts into which the model is cut. 0 = one for each ps; with more, a ps that joins later can take some.",
)
max_workers = option(
    "--max-workers",
    type=click.IntRange(min=1),
    default=64,
    help="Maximum number of workers, including those that join later and are not in the cluster spec.",
)
cold_dir = option(
    "--cold-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Folder of a ps for rows of tables beyond their memory_rows, on a disk with room. Default: --out.",
)
standbys = option(
    "--standbys",
    type=int,
    default=0,
    help="1 = another ps keeps an identical copy of each shard and takes over if its server dies; no step is repeated.",
)
replay = option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Repeat the synchronous run in this --out folder to the bit; with spares, with the gradients that it used.",
)
inexact = option(
    "--inexact", is_flag=True, help="Allow machines whose gradients differ in the last bits in one synchronous job."
)


def _file(name: str, text: str) -> Callable[[F], F]:
    return option(name, type=click.Path(path_type=Path), metavar="FILE", help=text)


token = _file("--token-file", "File with the job's token; calls without it are refused.")
secured = together(
    _file("--tls-cert", "PEM certificate of this task; connections use TLS if it and --tls-key are set."),
    _file("--tls-key", "PEM private key of --tls-cert."),
    _file(
        "--tls-ca", "PEM certificates of the CAs to trust; both sides of a connection must then present a certificate."
    ),
    token,
)
admin = _file(
    "--admin-token-file",
    "File with the admin token, required for commands of the chief and to end the job; not for workers.",
)
insecure_bind = option(
    "--insecure-bind",
    is_flag=True,
    help="Listen beyond this machine without TLS; only for a network that nobody else uses.",
)
lanes = together(
    option(
        "--lane",
        metavar=f"[{'|'.join(CHOICES)}]",
        default=AUTO,
        callback=lambda _context, _parameter, value: check_choice(value),
        help="How tensors are transferred; auto picks the best lane available.",
    ),
    option(
        "--overlap/--no-overlap",
        default=True,
        help="Send gradients while backward runs, and wait for parameters layer by layer.  [default: overlap]",
    ),
    option(
        "--run-dir",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="DIR",
        help="Folder for the unix sockets of the shm lane. Default: none; the sockets have no file.",
    ),
)


def check_profile(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Refuse a range without a step in it."""
    profiled_steps(value)
    return value


profile = option(
    "--profile",
    metavar="FIRST:END",
    default="",
    callback=check_profile,
    help="Trace each worker's steps from FIRST to before END with torch.profiler, with the exchanges beside it, into "
    "trace-worker-N.json in --out, for ui.perfetto.dev.",
)

page = together(
    option(
        "--page",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="Address of the chief's page; port 0 = a free one. Beyond this machine it needs --token-file; off = none.",
    ),
    click.option("--no-page", is_flag=True, help="Don't serve a page."),
)


def check_trackers(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a tracker that no package has, or whose library is missing."""
    for name in names:
        known = sorted(entry.name for entry in importlib.metadata.entry_points(group=TRACKERS))
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}{hint}")
        module = inspect.getmodule(plugins.installed(TRACKERS, name, f"the tracker {name!r}"))
        needed = getattr(module, "REQUIRES", "")
        if needed and importlib.util.find_spec(needed) is None:
            raise click.BadParameter(f"{name!r} needs a package that is missing: pip install {needed}")
    return names


trackers = option(
    "--tracker",
    "trackers",
    metavar="NAME",
    multiple=True,
    callback=check_trackers,
    help="Show the run's curves in this experiment tracker, too: wandb or mlflow, set up by its own variables; may be "
    "repeated.",
)


def timeouts(flags: Mapping[str, Any]) -> Timeouts:
    return Timeouts(total_s=flags["timeout"], join_s=flags["join_timeout"])


def page_address(flags: Mapping[str, Any]) -> str | None:
    """Address of the chief's page, or None for no page. Refuses an invalid address."""
    text: str = flags["page"]
    if flags["no_page"] or text.lower() in ("off", "none", ""):
        return None
    parse_address(text, "--page")
    return text


def security(flags: Mapping[str, Any]) -> Security:
    """TLS files and tokens from parsed flags; reads the files."""
    return Security(
        tls_cert=flags["tls_cert"],
        tls_key=flags["tls_key"],
        tls_ca=flags["tls_ca"],
        token_file=flags["token_file"],
        admin_token_file=flags.get("admin_token_file"),
    )


def _role_security(role: str, flags: Mapping[str, Any]) -> Security:
    """Security settings of a task: roles that send no commands don't read the admin token, even if given its path."""
    if not ROLES[role].commands:
        return security({**flags, "admin_token_file": None})
    if flags["admin_token_file"] is not None and flags["token_file"] is None:
        raise UsageError("--admin-token-file needs --token-file too: a job with an admin token has a job token")
    return security(flags)


JOB_FIELDS = ("steps", "seed", "loaders", *methods.FIELDS)
"""Fields of the job that have a flag of their own."""


def loaded_job(flags: Mapping[str, Any]) -> Job:
    """The job of a command that takes JOB.py, flags of its fields, and --workers or --cluster."""
    path = existing_job(flags["job"])
    assert path is not None
    # Imports torch, which --help must not do.
    from shardline.job import load_job

    named = flags.get("cluster")
    workers = len(read_spec(named).addresses("worker")) if named is not None else flags["workers"]
    return load_job(path, overrides(flags), workers=workers)


def overrides(flags: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Job fields given on the command line; refuses duplicates."""
    given: tuple[tuple[str, str], ...] = flags["settings"]
    pairs = tuple((field, str(flags[field])) for field in JOB_FIELDS if flags.get(field) is not None) + given
    fields = [field for field, _ in pairs]
    for field in fields:
        if fields.count(field) > 1:
            raise UsageError(f"job field {field!r} is set {fields.count(field)} times; set it once")
    return pairs


def write_file(path: Path, content: str) -> None:
    """Write what the user asked for. Raises UsageError if it can't be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}; choose another file") from None


def existing_job(path: Path | None) -> Path | None:
    """The job file. Raises JobError if it doesn't exist or is a folder."""
    if path is None:
        return None
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise JobError(f"job file {path} does not exist; give the .py file that defines the job") from None
    except OSError as error:
        raise JobError(
            f"job file {path} can't be read: {error.strerror}; give this user permission to read it"
        ) from None
    except ValueError as error:
        raise JobError(f"{str(path)!r} is not a file name: {error}") from None
    if stat.S_ISDIR(mode):
        raise JobError(f"{path} is a folder, not a job file; {_job_files(path)}")
    if not stat.S_ISREG(mode):
        raise JobError(f"{path} is no regular file; give the .py file that defines the job: each task reads it")
    return path


def _job_files(folder: Path) -> str:
    with contextlib.suppress(OSError):
        found = [str(one) for one in sorted(folder.glob("*.py")) if one.name != "__init__.py"]
        if len(found) > MAX_NAMED_FILES:
            return f"give one of its {len(found)} .py files, such as {found[0]}"
        if found:
            return f"give a file in it: {' or '.join(found)}"
    return "it contains no .py file"


def role_config(role: str, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> RoleConfig:
    """Settings of a role's process from its parsed flags; TF_CONFIG is taken from `environ`."""
    job, secured_by = existing_job(flags["job"]), _role_security(role, flags)
    if wants_place(flags["task"]):
        place = _take_place(role, flags, secured_by)
    else:
        place = locate(
            role,
            cluster=flags["cluster"],
            task=flags["task"],
            tf_config=environ.get("TF_CONFIG") or None,
            host=flags["host"],
        )
    address = own_address(flags["address"] or place.spec.address(place.task))
    place = TaskPlace(place.spec.with_place(place.task, address), place.role, place.index)
    check_chief_port(place, ready_fd=flags["ready_fd"])
    given = {
        "role": role,
        "index": place.index,
        "cluster": place.spec,
        "job": job,
        "timeouts": timeouts(flags),
        "overrides": overrides(flags),
        "security": secured_by,
        "page": page_address(flags),
    }
    return RoleConfig(**{**same_names(RoleConfig, flags), **given})


def same_names(kind: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that have the names of fields of a dataclass."""
    return {item.name: flags[item.name] for item in dataclasses.fields(kind) if item.name in flags}


def _take_place(role: str, flags: Mapping[str, Any], secured_by: Security) -> TaskPlace:
    """The index that the chief assigns for --task ROLE/any."""
    if wants_place(flags["task"]) != role:
        task = flags["task"]
        raise ClusterSpecError(
            f"task {task} does not have the role {role}; start it with: shardline {wants_place(task)}"
        )
    # Imports grpc, which --help must not do.
    from shardline.rpc.index_request import assigned_place

    return assigned_place(
        flags["task"], flags["cluster"], address=flags["address"], timeouts=timeouts(flags), security=secured_by
    )
