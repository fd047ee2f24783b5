"""docs/glossary.md: its words are those of the code, and words that it advises against name nothing there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.sources import ROOT, nodes_of

PRODUCT = ("shardline", "services", "chief", "worker", "evaluator", "pipeline", "lab", "launchers")
STANDBY = ROOT / "services/shardline_ps/standby"
OF_THE_WIRE = {"Replicate"}
"""Methods that implement calls of the contract have the call's name."""


def rows(text: str) -> list[list[str]]:
    """Cells of the tables in this part of the glossary, without heads and rules."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [row for row in cells if row[0] not in ("word", "don't use") and not row[0].startswith("---")]


_WORDS, _, _AVOIDED = (ROOT / "docs/glossary.md").read_text().partition("## Words to avoid")
WORDS, AVOIDED = rows(_WORDS), rows(_AVOIDED)


def sources() -> list[Path]:
    found = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "v1" not in path.parts]


@functools.cache
def names(path: Path) -> frozenset[str]:
    """Names of a module's classes and functions, and its own."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset({path.stem}) | {node.name for node in nodes_of(path) if isinstance(node, kinds)}


@functools.cache
def identifiers() -> frozenset[str]:
    """Everything that the product's code names: definitions, variables, arguments, attributes."""
    found: set[str] = set()
    for path in sources():
        found |= names(path)
        for node in nodes_of(path):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return frozenset(found)


def parts(name: str) -> set[str]:
    """Words of an identifier, in lower case: "ParallelMap" and "parallel_map" have "parallel" and "map"."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_each_word_is_explained_once() -> None:
    words = [word.strip() for row in WORDS for word in row[0].split(",")]
    assert len(words) >= 30
    assert sorted(set(words)) == sorted(words)


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row[0])
def test_the_code_has_the_words_of_the_glossary(row: list[str]) -> None:
    word, meaning, code = row
    told = re.findall(r"`(\w+)`", code)
    assert told and meaning.endswith("."), word
    assert set(told) <= identifiers(), f"{word}: not in the code: {sorted(set(told) - identifiers())}"


@pytest.mark.parametrize("row", AVOIDED, ids=lambda row: row[0])
def test_no_name_has_a_word_that_the_glossary_advises_against(row: list[str]) -> None:
    avoided, better = row
    wrong = [
        f"{path.relative_to(ROOT)}: {name}" for path in sources() for name in names(path) if avoided in parts(name)
    ]
    assert not wrong, f"say {better!r}: {wrong}"
    assert set(better.split()) <= {part for name in identifiers() for part in parts(name)}, better


def test_no_name_of_the_standbys_speaks_of_replicas() -> None:
    for path in sorted(STANDBY.glob("*.py")):
        wrong = {name for name in names(path) if "replica" in name.lower() or "replicat" in name.lower()} - OF_THE_WIRE
        assert not wrong, f"{path.name}: {sorted(wrong)}"
