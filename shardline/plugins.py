"""Methods and roles from outside the library: Python files that add to its tables, and installed packages.

SHARDLINE_PLUGINS lists the files, as PATH lists folders; `--plugin FILE` adds to it. Every task that reads a table runs
them once, servers too: a plugin is code chosen by the person who starts the task, and is never sent over the network.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shardline.errors import JobError, UsageError
from shardline.host.python_file import run_file

VARIABLE = "SHARDLINE_PLUGINS"

_lock = threading.RLock()
_loaded: dict[str, object] = {}
_loading = False


def named(environ: Mapping[str, str] = os.environ) -> list[str]:
    return [path for path in environ.get(VARIABLE, "").split(os.pathsep) if path]


def add(paths: Iterable[Path], environ: MutableMapping[str, str] = os.environ) -> None:
    """Add files for this process and its children. Raises UsageError if one is not there."""
    names = dict.fromkeys(named(environ))
    for path in paths:
        if not path.is_file():
            wrong = "is not a file" if path.exists() else "does not exist"
            raise UsageError(f"plugin {path} {wrong}; give a .py file that adds methods to Shardline's tables")
        names[str(path.absolute())] = None
    if names:
        environ[VARIABLE] = os.pathsep.join(names)


def load() -> None:
    """Run the named files, each once. Raises UsageError naming the file and line of an error."""
    global _loading
    names = named()
    if all(path in _loaded for path in names):
        return
    with _lock:
        if _loading:
            # A plugin reads a table while it runs.
            return
        _loading = True
        try:
            for path in names:
                if path not in _loaded:
                    _loaded[path] = run_file(Path(path), "plugin")
        except JobError as error:
            raise UsageError(f"plugin {error}") from error
        finally:
            _loading = False


@functools.cache
def packages() -> tuple[ModuleType, ...]:
    """Import the installed packages with methods of their own, which import torch: those of `shardline.plugins`."""
    return tuple(entry.load() for entry in importlib.metadata.entry_points(group="shardline.plugins"))


@functools.cache
def installed(group: str, name: str, what: str) -> Any:
    """The object that an installed package has under an entry point. what: for the message.

    Raises UsageError if no package has one.
    """
    found = tuple(importlib.metadata.entry_points(group=group, name=name))
    if not found:
        raise UsageError(f"no installed package provides {what}; install Shardline: pip install -e .")
    return found[0].load()
