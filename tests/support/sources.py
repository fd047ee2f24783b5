"""The project's own sources, each of them read and parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file: not to be changed."""
    return ast.parse(path.read_text(), path.relative_to(ROOT).as_posix())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))
