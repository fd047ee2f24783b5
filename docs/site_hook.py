"""Make what the site has besides the pages of docs/: a front page, a reference made from the code, and linked files.

A hook of mkdocs, named in mkdocs.yml. Pages of docs/ link to files elsewhere in the repository, such as
../proto/shardline/rpc/v1/shard.proto; in the site such a link leads to a copy of the file.
"""

from __future__ import annotations

import ast
import dataclasses
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import shardline
from shardline import errors, methods
from shardline.cli.main import cli, exit_codes
from shardline.core.settings import JobSettings

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
OUTSIDE = "repository"
IMAGES = {".png", ".svg"}
ENTRY = "::: {path}\n    options:\n      heading: {name}\n"


def on_config(config: MkDocsConfig) -> None:
    """List all decisions in the navigation."""
    internals: list[Any] = next(part["Internals"] for part in config.nav or [] if "Internals" in part)
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/decisions").glob("*.md"))
    internals.append({"Decisions": ["decisions/index.md", *pages]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that docs/ lacks."""
    front = (ROOT / "README.md").read_text().replace("](docs/decisions)", "](docs/decisions/index.md)")
    pages = {
        "index.md": LINK.sub(lambda link: posixpath.relpath(link[1], "docs"), front),
        "decisions/index.md": decisions(),
        "reference/api.md": api(),
        "reference/cli.md": commands(),
        "reference/settings.md": settings(),
        "reference/errors.md": failures(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of docs/ into links to copies. Raises PluginError if there is no such file."""
    folder = posixpath.dirname(page.file.src_uri)

    def place(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if not path.startswith("../"):
            return link[1]
        source = ROOT / path.removeprefix("../")
        if not source.exists():
            raise PluginError(f"{page.file.src_uri}: {link[1]} leads to no file")
        name = f"{OUTSIDE}/{path.removeprefix('../')}" + ("" if source.suffix in IMAGES else ".txt")
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=content_of(source)))
        return posixpath.relpath(name, folder or ".")

    return LINK.sub(place, markdown)


def content_of(source: Path) -> bytes:
    """The file, or the names of the files in the folder."""
    if source.is_file():
        return source.read_bytes()
    return "\n".join(str(path.relative_to(ROOT)) for path in sorted(source.rglob("*")) if path.is_file()).encode()


def decisions() -> str:
    """Number and title of each."""
    lines = ["# Decisions\n"]
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def api() -> str:
    """Every public name, once: what scripts call, then a job, then the methods by seam, then errors."""
    groups = {"Jobs": ["Job", "schedule", "Pipeline"]}
    for seam, (_, _, about) in methods.SEAMS.items():
        residents = list(methods.table(seam))
        names = [name for name in shardline.__all__ if getattr(shardline, name) in residents]
        groups[f"{seam.capitalize()}: {about[0].lower()}{about[1:]}"] = names
    groups["Errors"] = ["ShardlineError", "JobStopped", "RolledBackError"]
    grouped = {name for names in groups.values() for name in names}
    first = ["connect", "Session", "ShardlineOptimizer"]
    left = [name for name in shardline.__all__ if name not in grouped and name not in first]
    parts = ["# Python API\n"]
    for title, names in {"Scripts": [*first, *left], **groups}.items():
        parts.append(f"## {title}\n")
        for name in names:
            value = getattr(shardline, name)
            path = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value.__name__
            members = "" if title in ("Scripts", "Jobs") else "      members: false\n"
            parts.append(ENTRY.format(path=path, name=name) + members)
    return "\n".join(parts)


def commands() -> str:
    """Every command with its options, as --help has them."""
    top = click.Context(cli, info_name="shardline")
    lines = ["# Commands\n", click.Context(cli).command.help or "", ""]

    def add(command: click.Command, context: click.Context, level: int) -> None:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        lines.extend([f"{'#' * level} {context.command_path}\n", f"    {usage}\n", cell(command.help or ""), ""])
        options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
        records = [option.get_help_record(context) for option in options]
        rows = [f"| `{record[0]}` | {cell(record[1])} |" for record in records if record is not None]
        lines.extend(["| option | meaning |", "|---|---|", *rows, ""])
        if isinstance(command, click.Group):
            for name, found in named(command, context):
                add(found, click.Context(found, info_name=name, parent=context), level + 1)

    for name, found in named(cli, top):
        add(found, click.Context(found, info_name=name, parent=top), 2)
    return "\n".join(lines)


def named(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group by name."""
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None, name
        yield name, found


def cell(text: str) -> str:
    """A text of click as one line of Markdown."""
    return re.sub(r"([\[\]|<>*_])", r"\\\1", " ".join(text.replace("\b", "").split()))


def settings() -> str:
    """Fields of a job, and the environment variables of the commands."""
    lines = ["# Settings\n", "## Of a job\n", "| field | type | default | meaning |", "|---|---|---|---|"]
    for item in dataclasses.fields(JobSettings):
        default = "required" if item.default is dataclasses.MISSING else f"`{item.default!r}`"
        lines.append(f"| `{item.name}` | {item.type} | {default} | {cell(item.metadata.get('doc', ''))} |")
    lines += ["", "## Environment variables\n", "| variable | commands | meaning |", "|---|---|---|"]
    found: dict[str, tuple[list[str], str]] = {}
    for name, command in named(cli, click.Context(cli)):
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.envvar, str):
                found.setdefault(option.envvar, ([], option.help or ""))[0].append(name)
    for variable, (names, doc) in sorted(found.items()):
        lines.append(f"| `{variable}` | {', '.join(names)} | {cell(doc)} |")
    return "\n".join(lines) + "\n"


def failures() -> str:
    """Exit codes, and the classes of errors with their gRPC status."""
    lines = ["# Errors and exit codes\n", "## Exit codes\n", "| code | meaning |", "|---|---|"]
    for line in exit_codes().splitlines():
        code, _, meaning = line.strip().partition("  ")
        lines.append(f"| {code} | {meaning.strip()} |")
    lines += ["", "## Classes\n", "| class | base | exit code | gRPC status | meaning |", "|---|---|---|---|---|"]
    tree = ast.parse((ROOT / "shardline/errors.py").read_text())
    for node in tree.body:
        cls = getattr(errors, node.name, None) if isinstance(node, ast.ClassDef) else None
        if isinstance(cls, type) and issubclass(cls, errors.ShardlineError):
            doc = (cls.__doc__ or "").partition("\n")[0]
            lines.append(
                f"| `{cls.__name__}` | `{cls.__base__.__name__}` | {cls.exit_code} | {cls.grpc_status} | {doc} |"
            )
    return "\n".join(lines) + "\n"
