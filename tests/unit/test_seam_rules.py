"""Nobody outside of a seam's package asks which resident it is: modes of consistency, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.consistency import RESIDENTS

ROOT = Path(__file__).parents[2]
FOLDERS = ("shardline", "services", "chief", "worker", "evaluator")
HOME = ("shardline/consistency/", "services/shardline_aggregator/sums.py")
"""The modes; the second is an aggregator's own."""
MODES = {resident.name for resident in RESIDENTS} | {"eager"}
OWN = ("eager", "voted", "asynchronous", "softsync", "ssp", "spares", "replica_steps", "numbered_pushes")
"""Modules of single modes; others know the package, its base and its two halves."""
QUESTIONS = {"is_sync", "is_async", "voted"}


def questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that depends on which mode it is."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                names = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
                found = sorted(MODES.intersection(name for name in names if isinstance(name, str)))
                if found:
                    yield node.lineno, f"compares with {found[0]!r}"
            case ast.Dict(keys=keys):
                held = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
                if held and held <= MODES:
                    yield node.lineno, "is a table by mode"
            case ast.MatchValue(value=ast.Constant(value=str() as name)) if name in MODES:
                yield node.value.lineno, f"matches {name!r}"
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name) if name in QUESTIONS:
                yield node.lineno, f"asks for {name}"
            case ast.Import() | ast.ImportFrom():
                base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    module = f"{base}.{alias.name}" if base else alias.name
                    if any(f"{module}.".startswith(f"shardline.consistency.{own}.") for own in OWN):
                        yield node.lineno, f"imports {module}"


def asked(folder: str) -> dict[str, list[str]]:
    """What files of a folder ask, by file."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith((*HOME, "shardline/rpc/v1/")):
            continue
        lines = [f"{name}:{line} {what}" for line, what in questions(ast.parse(path.read_text(), name))]
        if lines:
            found[name] = lines
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_nobody_asks_which_mode_it_is(folder: str) -> None:
    found = asked(folder)
    new = [line for name, lines in found.items() for line in lines]
    assert not new, "\n".join(
        [*new, "have shardline.consistency.of(job.consistency) give an object that does what differs"]
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('if job.consistency.mode == "sync": pass', 1),
        ('if mode in ("sync", "other"): pass', 1),
        ('half = {"sync": A, "async": B}[mode]', 1),
        ("if shard.is_sync and x: pass", 1),
        ("def f(*, voted): pass", 1),
        ('match mode:\n    case "async":\n        pass', 1),
        ("from shardline.consistency import eager", 1),
        ("from shardline.consistency.voted import VotedSteps", 1),
        ("import shardline.consistency.asynchronous", 1),
        ("from shardline.consistency import of\nof(spec).cuts.due(1, 2, 3)", 0),
        ("from shardline.consistency.server import Terms", 0),
        ('mode = "sync"', 0),
    ],
)
def test_questions_are_seen(source: str, count: int) -> None:
    assert len(list(questions(ast.parse(source)))) == count
