"""The shardline command: parse, run, and end with one sentence and an exit code on an error."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from shardline import errors, methods
from shardline.cli.certs import certs
from shardline.cli.cluster_commands import export, page, stop
from shardline.cli.health import health
from shardline.cli.options import JOB_ARGS, plugin
from shardline.cli.roles import COMMANDS, role_command
from shardline.cli.status import status, top
from shardline.cli.train import train
from shardline.host import files, lifeline
from shardline.host.printable import printable_lines
from shardline.native.library import describe
from shardline.roles import ROLES


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


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@plugin
def name_plugins() -> None:
    """Take --plugin from the arguments of a command that is not known yet."""


class Commands(click.Group):
    """The commands, among them one for each role that a plugin adds."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; plugins named in its arguments are read before."""
        name = args[0]
        if name not in self.commands:
            name_plugins.make_context(name, args[1:])
            if name in ROLES:
                self.add_command(role_command(name))
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    epilog=f"\b\nExit codes:\n{exit_codes()}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="shardline", message="%(prog)s %(version)s\n" + describe().replace("%", "%%"))
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


@click.command()
@click.argument("seam", required=False, type=click.Choice(list(methods.SEAMS)))
@plugin
def list_methods(seam: str | None) -> None:
    """List the choices for --consistency, --rule, --codec and the other methods of a job, with their settings."""
    for name, (_, _, about) in methods.SEAMS.items():
        if seam in (None, name):
            rows = methods.table(name).describe()
            width = max(len(usage) for usage, _ in rows)
            click.echo(f"--{name}: {about}")
            for usage, line in rows:
                click.echo(f"  {usage:<{width}}  {line}")


cli.add_command(list_methods, "methods")
for command in (train, *COMMANDS):
    cli.add_command(command)
for installed in importlib.metadata.entry_points(group="shardline.commands"):
    try:
        cli.add_command(installed.load())
    except Exception as problem:
        # Tasks of a cluster are commands, too, and need none of these.
        package = installed.dist.name if installed.dist is not None else ""
        print(
            f"shardline: its command {installed.name} can't be loaded from {installed.value} ({problem}); "
            f"repair the package {package}, or remove it",
            file=sys.stderr,
        )
for command in (status, top, page, stop, export, certs, health):
    cli.add_command(command)


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
