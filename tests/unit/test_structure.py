"""The shape of the code: no circles, short functions and classes. Signs of an order, not its aim."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.support.sources import nodes_of
from tests.unit.test_import_contract import ROOT, imports_of, package_of, sources

ARGUMENTS = 8
FUNCTION_LINES = 60
CLASS_LINES = 300
METHODS = 25

TEXTS = (".md", ".py", ".pyi", ".proto", ".toml", ".yml", ".yaml", ".json", ".html", ".js", ".css", ".txt")
ALLOWED: dict[str, tuple[int, int, str]] = {
    "shardline/cli/launcher.py:LocalCluster": (
        322,
        28,
        "processes of one cluster: starting, watching and ending share all",
    ),
    "shardline/rpc/link.py:ChiefLink": (305, 27, "the tie to the chief: what a task tells it and what it says"),
    "shardline/server/push_receiver.py:PushReceiver": (
        463,
        26,
        "the grammar of one stream, by chunks and by references",
    ),
    "services/shardline_ps/servicer.py:ParameterServer": (355, 24, "one method per call of the service"),
    "services/shardline_ps/store.py:ParameterStore": (
        403,
        34,
        "a server's shards, and Backend for push and pull over them",
    ),
}
"""Classes beyond CLASS_LINES or METHODS: file:class, lines and methods at most, and why. Numbers only fall."""
MANY_ARGUMENTS: dict[str, tuple[int, str]] = {
    "shardline/nn.py:EmbeddingTable": (9, "a table's settings, as a model names them"),
}
"""Constructors beyond ARGUMENTS, with how many, and why."""
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}
"""Functions beyond FUNCTION_LINES, with how many lines, and why."""
INSTALLED = {".venv", ".venvs"}
"""Folders within others' where libraries that tests and benchmarks compare with are installed."""
PRIVATE_IN_TESTS = 30
"""Places in tests that touch a private member of something else than `self`; the number only falls."""
MAY_TOUCH = re.compile(r"(?<!\bself\.)(?<!\bcls\.)(?<!\bdef )(?<!\w)_[a-zA-Z]")
"""In every file that touches one. Parsing all tests would take seconds."""
NOT_OURS = {"_concrete_class", "_exit", "_post_accumulate_grad_hooks", "_replace"}
"""Names of other libraries that begin with an underscore."""
SHARED_NAMES = {
    "Lease": "the same batches, as the chief hands them out and as a worker gets them",
}
"""Public classes that share their name with another one, and why."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@functools.cache
def functions() -> list[tuple[str, Function]]:
    return [
        (f"{name_of(path)}:{node.name}", node)
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, Function)
    ]


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef, list[Function]]]:
    return [
        (f"{name_of(path)}:{node.name}", node, [part for part in node.body if isinstance(part, Function)])
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    ]


def arguments(function: Function) -> int:
    """All that a call may give; neither self nor *args."""
    found = function.args
    return len(found.posonlyargs) + len(found.args) + len(found.kwonlyargs) - 1


def test_no_modules_import_each_other() -> None:
    """Imports within functions count, those for type checkers don't."""
    needs: dict[str, set[str]] = {}
    for path in sources():
        own = ".".join(filter(None, (package_of(path), path.stem if path.stem != "__init__" else "")))
        found = imports_of(path.read_text(), name_of(path), package_of(path))
        needs[own] = {item.module for item in found if not item.typing}
    for name, modules in needs.items():
        # `from package import module` needs the module; what a package itself imports counts where names come from it.
        named = modules & needs.keys() - {name}
        packages = {module for module in named if any(other.startswith(module + ".") for other in named)}
        needs[name] = named - packages
    while free := [name for name, modules in needs.items() if not modules & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs, f"these import each other: {sorted(needs)}"


def test_constructors_take_few_arguments() -> None:
    many = {}
    for name, _, methods in classes():
        for method in methods:
            if method.name == "__init__" and arguments(method) > ARGUMENTS:
                many[name] = arguments(method)
    assert many == {name: count for name, (count, _) in MANY_ARGUMENTS.items()}


def test_functions_are_short() -> None:
    long = {name: lines(node) for name, node in functions() if lines(node) > FUNCTION_LINES}
    assert long == {name: count for name, (count, _) in LONG_FUNCTIONS.items()}


def test_classes_are_small() -> None:
    large = {
        name: (lines(node), len(methods))
        for name, node, methods in classes()
        if lines(node) > CLASS_LINES or len(methods) > METHODS
    }
    known = {name: (most_lines, most) for name, (most_lines, most, _) in ALLOWED.items()}
    assert large.keys() == known.keys(), "a class is new here, or fits now: take it out of the list"
    grown = {name: size for name, size in large.items() if size[0] > known[name][0] or size[1] > known[name][1]}
    assert not grown, f"larger than the list says: {grown}"


def private(name: str) -> bool:
    name = name.rpartition(".")[2]
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name not in NOT_OURS


def touched(node: ast.AST) -> str:
    """The private member that this node touches; empty if it touches none."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return ""
        case ast.Attribute(attr=name) if private(name):
            return name
        case ast.ImportFrom(names=aliases):
            return ", ".join(alias.name for alias in aliases if private(alias.name))
        case ast.Call(func=ast.Attribute(attr="setattr") | ast.Name(id="getattr" | "setattr"), args=arguments):
            texts = [item.value for item in arguments[:2] if isinstance(item, ast.Constant)]
            return ", ".join(text for text in texts if isinstance(text, str) and private(text))
    return ""


def test_private_members_are_touched_only_where_there_is_no_other_way() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if not INSTALLED.intersection(path.parts) and MAY_TOUCH.search(path.read_text())
        for node in nodes_of(path)
        if isinstance(node, ast.expr | ast.stmt) and (name := touched(node))
    ]
    assert len(found) <= PRIVATE_IN_TESTS, (
        f"{len(found)} places, at most {PRIVATE_IN_TESTS}: check what can be seen from outside, use a builder of "
        "tests/support, or give the class a public member that others want too\n" + "\n".join(found)
    )
    assert len(found) == PRIVATE_IN_TESTS, f"{len(found)} places are left: lower PRIVATE_IN_TESTS to that"


def test_no_two_public_classes_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for place, node, _ in classes():
        if not node.name.startswith("_"):
            files.setdefault(node.name, []).append(place.partition(":")[0])
    shared = {name: found for name, found in files.items() if len(found) > 1}
    assert shared.keys() == SHARED_NAMES.keys(), {
        name: shared.get(name) for name in shared.keys() ^ SHARED_NAMES.keys()
    }


def test_what_is_allowed_says_why() -> None:
    reasons = [entry[-1] for table in (ALLOWED, MANY_ARGUMENTS, LONG_FUNCTIONS) for entry in table.values()]
    reasons += SHARED_NAMES.values()
    assert all(len(str(reason)) > 20 for reason in reasons)


def test_no_file_keeps_the_marks_of_a_merge() -> None:
    folders = (
        "docs",
        "deploy",
        "proto",
        "shardline",
        "services",
        "worker",
        "chief",
        "evaluator",
        "tests",
        "benchmarks",
    )
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    found = [path for path in found if not INSTALLED.intersection(path.parts)]
    found += [path for path in ROOT.iterdir() if path.suffix in TEXTS]
    marked = [
        name_of(path)
        for path in found
        if any(line.startswith(("<" * 7 + " ", ">" * 7 + " ")) for line in path.read_text().splitlines())
    ]
    assert marked == []
