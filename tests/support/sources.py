"""The project's own sources, each parsed once per process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def nodes_in(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source's syntax tree, its module first; don't change them."""
    return tuple(ast.walk(ast.parse(source)))


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return nodes_in(path.read_text())
