"""Runs a Python file named by the user as a module of its own, which its child processes can import too."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from shardline.errors import JobError, ShardlineError
from shardline.host import files

PREFIX = "shardline_"
"""Modules' names begin with it."""
FILE_BYTES = 64 << 20
"""Most bytes of a file."""


class _FileFinder(MetaPathFinder):
    """Finds modules of run_file() on sys.path, of which a child has its parent's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        kind, _, rest = fullname.removeprefix(PREFIX).partition("_")
        stem, _, digest = rest.rpartition("_")
        if not fullname.startswith(PREFIX) or not digest:
            return None
        found = (Path(folder, f"{stem}.py") for folder in sys.path)
        file = next((file for file in found if file.exists() and module_name(file, kind) == fullname), None)
        return importlib.util.spec_from_file_location(fullname, file.resolve()) if file is not None else None


def find_files() -> None:
    """Have this process import the modules that its parent made of files.

    Such a name is in every pickled object of a class of the file, also in those for a worker of a DataLoader.
    """
    if not any(isinstance(finder, _FileFinder) for finder in sys.meta_path):
        sys.meta_path.append(_FileFinder())


def module_name(path: Path, kind: str) -> str:
    """The unique name of a file's module: shardline_KIND_STEM_DIGEST."""
    resolved = Path(os.path.realpath(path))
    return f"{PREFIX}{kind}_{resolved.stem}_{hashlib.blake2b(os.fsencode(resolved), digest_size=6).hexdigest()}"


def run_file(path: Path, kind: str, *, check: Callable[[ast.Module], None] = lambda tree: None) -> ModuleType:
    """The module created by running the file, under a unique name by which child processes can import it.

    kind: a word for the name, such as "job". check: inspects the parsed file before any of it runs, and may raise. The
    file's folder becomes first on sys.path, as with `python FILE`. Raises JobError with the file, the line and the
    original error.
    """
    resolved = Path(os.path.realpath(path))
    try:
        tree = ast.parse(files.read_bytes(resolved, FILE_BYTES), filename=str(resolved))
    except OSError as error:
        raise JobError(f"{path} can't be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise JobError(f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {error}") from error
    check(tree)
    folder = str(resolved.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = module_name(resolved, kind)
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as in an import: dataclasses and typing look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise JobError(_what_it_raised(path, resolved, error)) from error
    return module


def installed_imports(path: Path) -> list[str]:
    """Modules of installed packages that the file imports at its top, in order; [] for one that can't be read.

    Nothing is run. Modules in the file's own folder are left out, also where they hide an installed one.
    """
    resolved = Path(os.path.realpath(path))
    try:
        tree = ast.parse(files.read_bytes(resolved, FILE_BYTES), filename=str(resolved))
    except (OSError, SyntaxError, ValueError):
        return []
    search = [str(resolved.parent), *sys.path]
    names = dict.fromkeys(name for statement in tree.body for name in _imported(statement))
    return [name for name in names if _is_installed(name.partition(".")[0], search)]


def _imported(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
        yield statement.module


def _is_installed(package: str, search: list[str]) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(package, search)
    if spec is None or spec.origin is None:
        return False
    folders = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return not folders.isdisjoint(Path(spec.origin).resolve().parents)


def _what_it_raised(path: Path, resolved: Path, error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(resolved)]
    where = f"{path}, line {lines[-1]}" if lines else f"{path}"
    if isinstance(error, ShardlineError):
        return f"{where}: {error}"
    if isinstance(error, SystemExit):
        return f"{where}: the file ends the process (SystemExit: {error.code}) instead of defining `job`"
    return f"{where}: {type(error).__name__}: {error}"
