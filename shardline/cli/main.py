"""The shardline command: parse, run, and end with one sentence and an exit code on an error."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from shardline import errors
from shardline.host import files, lifeline
from shardline.host.printable import printable_lines

COMMANDS = {
    "certs": "certs:certs",
    "drain": "status:drain",
    "export": "status:export",
    "health": "health:health",
    "lookup": "status:lookup",
    "methods": "list_methods:list_methods",
    "page": "status:page",
    "rebalance": "status:rebalance",
    "status": "status:status",
    "stop": "status:stop",
    "top": "status:top",
    "train": "train:train",
}
"""Modules beside this one, and what to take of them. The others are roles, and entry points of packages."""
ENTRY_POINTS = "shardline.commands"


def exit_codes() -> str:
    """The exit codes, from shardline.errors, one per line."""
    classes: dict[int, type[errors.ShardlineError]] = {1: errors.InternalError}
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.ShardlineError):
            classes.setdefault(cls.exit_code, cls)
    lines = ["  0  Done."]
    for code, cls in sorted(classes.items()):
        # python -OO leaves out docstrings.
        lines.append(f"{code:>3}  {(cls.__doc__ or cls.__name__).splitlines()[0]}")
    lines.append("130  Interrupted (Ctrl-C).")
    lines.append("143  Terminated (SIGTERM).")
    return "\n".join(lines)


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """Commands of the packages beside the library, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


class Commands(click.Group):
    """The commands, each imported when it is asked for: every container checks its health every few seconds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from shardline.roles import ROLES

        return sorted({*COMMANDS, *ROLES.declared, *installed()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            own: click.Command = getattr(importlib.import_module(f"shardline.cli.{module}"), attribute)
            return own
        from shardline.roles import ROLES

        if cmd_name in ROLES.declared:
            from shardline.cli.roles import role_command

            return role_command(cmd_name)
        point = installed().get(cmd_name)
        if point is None:
            return None
        try:
            found: click.Command = point.load()
        except Exception as problem:
            package = point.dist.name if point.dist is not None else ""
            print(
                f"shardline: its command {cmd_name} can't be loaded from {point.value} ({problem}); "
                f"repair the package {package}, or remove it",
                file=sys.stderr,
            )
            return None
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command. Plugins named in its arguments are read if it is not known: it may be their role."""
        if self.get_command(ctx, args[0]) is None:
            from shardline.cli.roles import role_of_a_plugin

            added = role_of_a_plugin(args[0], args[1:])
            if added is not None:
                return args[0], added, args[1:]
            if not ctx.resilient_parsing and not args[0].startswith("-"):
                raise click.UsageError(f"no command {args[0]!r}{errors.nearest(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


def version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version, and how the C library is used; then end."""
    if not wanted or ctx.resilient_parsing:
        return
    from shardline.native.library import describe

    click.echo(f"shardline {importlib.metadata.version('shardline')}\n{describe()}")
    ctx.exit()


@click.group(
    cls=Commands,
    epilog=f"\b\nExit codes:\n{exit_codes()}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=version, help="Show the version.")
def cli() -> None:
    """Train PyTorch models on parameter servers.

    Flags may be given as SHARDLINE_* environment variables. Arguments after "--" are passed to the job file, as
    SHARDLINE_JOB_ARGS, or to the script.
    """
    files.check_descriptors()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise errors.UsageError(
            "the working directory of this process was deleted, and torch can't be loaded there; change to one that "
            "exists"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Only a defect in Shardline prints a traceback, others a sentence."""
    if argv is None:
        code = main(sys.argv[1:])
        lifeline.leave(code)
        return code
    # Before gRPC is imported, here and in all tasks of a launcher: each stranger whose handshake fails costs a line.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    arguments = list(argv)
    if "--" in arguments:
        from shardline.cli.options import JOB_ARGS

        cut = arguments.index("--")
        os.environ[JOB_ARGS] = shlex.join(arguments[cut + 1 :])
        del arguments[cut:]
    try:
        code = cli.main(arguments, prog_name="shardline", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return errors.UsageError.exit_code
    except click.Abort:
        return 128 + signal.SIGINT
    except click.ClickException as error:
        return _refuse(_sentence(error), errors.UsageError.exit_code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        known = errors.as_error(error)
        if known is not None:
            return _refuse(str(known), known.exit_code)
        print(printable_lines(traceback.format_exc()), end="", file=sys.stderr)
        return errors.InternalError.exit_code
    return code if isinstance(code, int) else 0


def _sentence(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{text}; see: {error.ctx.command_path} --help"
    return text


def _refuse(sentence: str, code: int) -> int:
    print(f"shardline: {printable_lines(sentence)}", file=sys.stderr, flush=True)
    return code
