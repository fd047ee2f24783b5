"""shardline ps|worker|chief|evaluator: one task on this machine. The roles are those of shardline.roles."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shardline.cli import options
from shardline.cluster import wants_place
from shardline.config import DEFAULT_OUT, RoleConfig
from shardline.host import lifeline
from shardline.host.run_lock import RunLock
from shardline.observability import log
from shardline.observability.log import protect_output
from shardline.roles import ROLES, Role

CHIEFS = (
    "resume",
    "chief_trains",
    "min_workers",
    "max_workers",
    "bucket_mb",
    "shards",
    "standbys",
    "inexact",
    "replay",
    "page",
    "no_page",
    "trackers",
)
READERS: Mapping[str, Callable[[Role], bool]] = {
    **dict.fromkeys(("job", *options.JOB_FIELDS, "settings", "with_ps"), lambda role: role.computes),
    **dict.fromkeys(("lane", "run_dir", "cold_dir"), lambda role: role.exchanges),
    **dict.fromkeys(("overlap", "profile"), lambda role: role.trains),
    "exit_with_job": lambda role: not role.leads,
    "admin_token_file": lambda role: role.commands,
    **dict.fromkeys(CHIEFS, lambda role: role.leads),
}
"""Which roles read a setting, if not all do. Lanes and overlap are for a chief that trains."""

role_options = options.together(
    options.cluster,
    options.option(
        "--task",
        metavar="ROLE/INDEX",
        help="This task, such as ps/0; optional if there is only one. ps/any: the chief assigns the index.",
    ),
    options.option(
        "--address",
        metavar="HOST:PORT",
        help="Address at which other tasks reach this one, if not the one in the cluster spec. :PORT = at this "
        "machine's name.",
    ),
    options.option(
        "--bind", metavar="HOST", help="Interface that the services bind to. Default: the host of the task's address."
    ),
    options.option("--job", type=click.Path(path_type=Path), metavar="JOB.py", help="File that defines the job."),
    options.option(
        "--out",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Folder for the results; for tasks other than the chief, for their log.",
    ),
    options.resume,
    options.timeout,
    options.join_timeout,
    options.device,
    options.gpu_memory_fraction,
    options.option(
        "--metrics-port", type=click.IntRange(0, 65_535), default=0, help="Port of the metrics; 0 = a free one."
    ),
    options.option("--host", default="127.0.0.1", help="Interface that the metrics endpoint binds to."),
    options.option(
        "--exit-with-job",
        is_flag=True,
        help="Exit with the exit code of a failed job, for supervisors that restart failed tasks.",
    ),
    options.chief_trains,
    options.min_workers,
    options.bucket_mb,
    options.shards,
    options.max_workers,
    options.standbys,
    options.cold_dir,
    options.inexact,
    options.replay,
    options.job_fields,
    options.plugin,
    options.lanes,
    options.profile,
    options.option(
        "--with-ps",
        is_flag=True,
        help="Each worker is also the ps with its index, as with train --mirrored: set it for chief and workers.",
    ),
    options.page,
    options.trackers,
    options.secured,
    options.admin,
    options.insecure_bind,
    click.option(
        "--settings-file",
        type=click.Path(path_type=Path),
        hidden=True,
        is_eager=True,
        expose_value=False,
        callback=options.read_settings,
    ),
    click.option("--ready-fd", type=int, hidden=True),
    click.option("--lock-fd", type=int, hidden=True),
    click.option("--life-fd", type=int, hidden=True),
)


def run_role(role: str, flags: dict[str, Any]) -> int:
    protect_output()
    if wants_place(flags["task"]):
        # Until its index is known, its log lines carry the role only.
        log.setup(role)
    config = options.role_config(role, flags)
    if config.life_fd is not None:
        lifeline.watch(config.life_fd)
    if config.row.leads:
        config = _locked(config)
    json_path = config.out / "logs" / f"{role}-{config.index}.jsonl" if config.out is not None else None
    log.setup(config.task, json_path=json_path)
    for caution in (*_not_read(role, config.task), *config.cautions()):
        logging.getLogger("shardline").warning("%s", caution)
    # These import torch, as the role is about to; the allocator is tuned before either allocates much.
    from shardline.host.allocator import tune_allocator
    from shardline.rpc.names import wait_for_own_name
    from shardline.update.torch_optim.eager import leave_compiler_out

    tune_allocator()
    leave_compiler_out()
    wait_for_own_name(config.task, config.listens_at, config.timeouts.join_s)
    return config.row.runner()(config)


def _locked(config: RoleConfig) -> RoleConfig:
    """The settings with the chief's folder locked; nothing is written before, since another run may hold the lock."""
    folder = (config.out or DEFAULT_OUT).absolute() / "chief"
    # A new folder has no run to protect: a command refused before its run begins leaves no folder.
    if config.lock_fd is not None or not folder.exists():
        return config
    return dataclasses.replace(config, lock_fd=RunLock.take(folder).fd)


def reads(role: str, setting: str) -> bool:
    """Whether tasks of a role read the setting of this name, such as "chief_trains"."""
    return setting not in READERS or READERS[setting](ROLES[role])


def role_command(role: str, run: Callable[[str, dict[str, Any]], int] = run_role) -> click.Command:
    """The click command of a role; run(role, flags) runs its task.

    It accepts the flags of all roles, so that all tasks of a cluster can get the same ones, shows only its own, and
    ignores variables for others.
    """

    def start(**flags: Any) -> int:
        return run(role, flags)

    row = ROLES[role]
    command = click.command(role, help=row.about, short_help=row.about.split(".")[0] + ".")(role_options(start))
    for option in command.params:
        if isinstance(option, click.Option) and not reads(role, str(option.name)):
            option.hidden, option.envvar = True, None
        if row.leads and option.name == "address":
            # Others call the chief at the address in the cluster spec, and a variable may be there for all tasks.
            option.envvar = None
    return command


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@options.plugin
def _name_plugins() -> None:
    """Take --plugin from the arguments of a command that is not known yet."""


def role_of_a_plugin(name: str, arguments: list[str]) -> click.Command | None:
    """The command of a role that is added by a plugin named in these arguments or before."""
    _name_plugins.make_context(name, arguments)
    return role_command(name) if name in ROLES else None


def _not_read(role: str, task: str) -> list[str]:
    """A sentence for each flag on the command line that is for other roles."""
    context = click.get_current_context()
    return [
        f"{task} does not use {option.opts[0]}; it is for {', '.join(ROLES.having(READERS[str(option.name)]))}"
        for option in context.command.params
        if not reads(role, str(option.name))
        and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]


COMMANDS = tuple(role_command(role) for role in ROLES.declared)
