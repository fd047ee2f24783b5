"""Size of the house, and signs that special cases have moved into the middle. `make house` prints them."""

from __future__ import annotations

import ast
import enum
import importlib
from collections.abc import Iterable, Iterator, Mapping

from shardline.cadence.base import Cadence
from shardline.codecs.base import Codec
from shardline.consistency.base import Clock, Consistency
from shardline.consistency.intake import BothSteps, Publishing
from shardline.consistency.server import ServerHalf
from shardline.consistency.worker import WorkerHalf
from shardline.lanes.kind import LaneKind
from shardline.topology.base import Topology
from shardline.update.base import UpdateRule
from tests.support.sources import ROOT, nodes_of
from tests.unit.test_import_contract import ROLES, imports_of, package_of, sources

BESIDE = ("lab", "launchers", "pipeline", "shardline/integrations")
"""Folders of packages that are no part of the library or of a role."""
OWN = "shardline.consistency"
WRITTEN = {"consistent"}
"""What a checkpoint's manifest has under this name, too: it is copied there, and read from there."""
BASES = (Consistency, ServerHalf, WorkerHalf, Codec, Cadence, UpdateRule, Topology, LaneKind)


def lines() -> tuple[int, int]:
    """Hand-written lines of library and roles, and of them with the packages beside them."""
    counts = {path: path.read_text().count("\n") for path in sources()}
    beside = sum(count for path, count in counts.items() if any(ROOT / folder in path.parents for folder in BESIDE))
    return sum(counts.values()) - beside, sum(counts.values())


def descendants(base: type) -> Iterator[type]:
    for child in base.__subclasses__():
        yield child
        yield from descendants(child)


def members_for_one(bases: Iterable[type] = BASES) -> list[str]:
    """Members of seams' bases that exactly one class of the product overrides."""
    for path in sources():
        # Doors need the libraries that they are for.
        if path.stem != "__main__" and "integrations" not in path.parts:
            importlib.import_module(".".join(filter(None, (package_of(path), path.stem.replace("__init__", "")))))
    names = {"shardline", *ROLES}
    found = []
    for base in bases:
        heirs = [heir for heir in {*descendants(base)} if heir.__module__.split(".")[0] in names]
        for name in vars(base):
            if name.startswith("_") or name == "name" or len(heirs) < 2:
                continue
            if sum(name in vars(heir) for heir in heirs) == 1:
                found.append(f"{base.__name__}.{name}")
    return found


def traits_asked_outside() -> list[str]:
    """Places outside its package that ask a mode, or an object that it gives, for one of its traits.

    A trait is a boolean or a member of an enumeration, as a class variable, a field or a property; the clock, which is
    the unit of steps, is none.
    """
    modes = (Consistency, *descendants(Consistency))
    given = {type(value) for mode in modes for value in vars(mode).values() if type(value).__module__.startswith(OWN)}
    traits = {
        name
        for owner in {kind for one in (*modes, *given, Publishing, BothSteps) for kind in one.__mro__}
        for name, value in vars(owner).items()
        if owner.__module__.startswith(OWN)
        if is_trait(value)
    } - WRITTEN
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in sources()
        if "consistency" not in path.parts
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in traits and isinstance(node.ctx, ast.Load)
    ]


def is_trait(value: object) -> bool:
    if isinstance(value, property) and value.fget is not None:
        return value.fget.__annotations__.get("return") == "bool"
    return isinstance(value, bool) or (isinstance(value, enum.Enum) and not isinstance(value, Clock))


def circles() -> list[tuple[str, ...]]:
    """Modules that import each other, with the imports for type checkers."""
    needs: dict[str, set[str]] = {}
    for path in sources():
        own = ".".join(filter(None, (package_of(path), path.stem.replace("__init__", ""))))
        needs[own] = {
            item.module for item in imports_of(path.read_text(), str(path.relative_to(ROOT)), package_of(path))
        }
    for name, modules in needs.items():
        named = modules & needs.keys() - {name}
        needs[name] = named - {module for module in named if any(other.startswith(module + ".") for other in named)}
    return [tuple(sorted(group)) for group in strongly_connected(needs) if len(group) > 1]


def strongly_connected(needs: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Groups of names that all reach each other, each once."""
    reach = {name: reached(name, needs) for name in needs}
    seen: set[str] = set()
    for name in needs:
        if name not in seen:
            group = {other for other in reach[name] if name in reach[other]} | {name}
            seen |= group
            yield group


def reached(name: str, needs: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        new = needs[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def main() -> None:
    own, everything = lines()
    print(f"{own} lines of library and roles, {everything} with the packages beside them")
    for title, found in (
        ("members of a seam's base that one class overrides", members_for_one()),
        ("places that ask for a mode's trait outside its package", traits_asked_outside()),
        ("circles of imports, with those for type checkers", [" ".join(group) for group in circles()]),
    ):
        print(f"\n{len(found)} {title}")
        print("".join(f"  {item}\n" for item in found), end="")


if __name__ == "__main__":
    main()
