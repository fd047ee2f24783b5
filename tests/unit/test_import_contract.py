"""The layers of the house: what may import what. Read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.sources import ROOT, nodes_in

ROLES = {
    "shardline_ps": "services",
    "shardline_aggregator": "services",
    "shardline_worker": "worker",
    "shardline_chief": "chief",
    "shardline_evaluator": "evaluator",
    "shardline_pipeline": "pipeline",
    "shardline_lab": "lab",
    "shardline_launchers": "launchers",
}
"""Packages beside the library, by folder: the roles, pipelines, the laboratory of simulations, and launchers."""
SIMULATED = ("shardline_lab", "shardline_pipeline")
"""The laboratory simulates pipelines: the only package beside the library that imports another."""
CONTAINERS = ("worker", "chief", "services", "evaluator", "pipeline", "lab", "launchers", "proto")
STUBS = "shardline.rpc.v1"
DOORS = "shardline.integrations"
NOTEBOOK = "shardline/integrations/notebook.py"
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")


@dataclass(frozen=True)
class Import:
    """One imported module, and each name taken from it as a module of its own."""

    path: str
    line: int
    module: str
    typing: bool = False
    """Under `if TYPE_CHECKING`: nothing is imported when it runs."""


def type_checking_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """Lines under `if TYPE_CHECKING`."""
    found: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.update(line for part in node.body for line in range(part.lineno, (part.end_lineno or 0) + 1))
    return found


def modules_of(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; `from a import b` counts as a and as a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


@functools.cache
def imports_of(source: str, path: str, package: str) -> list[Import]:
    nodes = nodes_in(source)
    typing = type_checking_lines(nodes)
    return [Import(path, line, module, line in typing) for line, module in modules_of(nodes, package)]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


PURE = (
    "shardline/core",
    "shardline/consistency",
    "shardline/update",
    "shardline/codecs",
    "shardline/cadence",
    "shardline/topology",
    "shardline/division",
    "shardline/storage",
    "chief/shardline_chief/rules",
)
"""Domain values and rules: no message, no transport and no socket in them."""
OUTER = (
    "shardline.rpc",
    "shardline.lanes",
    "shardline.client",
    "shardline.cli",
    "shardline.server",
    "grpc",
    "google.protobuf",
    "shardline_chief.io",
    "socket",
    "asyncio",
)
LAYERS = (
    ("errors", "native", "rpc.v1"),
    ("core", "host", "data"),
    ("plugins",),
    ("roles",),
    ("schedule", "scheduler", "cluster", "tls", "waist", "loading"),
    ("seams", "security"),
    ("codecs",),
    ("update",),
    ("storage",),
    ("cadence", "consistency", "methods"),
    ("division", "beside"),
    ("topology",),
    ("nn", "ensemble"),
    ("checkpoint", "model", "fit"),
    ("job", "rpc"),
    ("lanes", "testing", "certs"),
    ("server", "config"),
    ("observability",),
    ("client",),
    ("cli",),
    ("__main__",),
    # Doors for other libraries, of which `shardline` has some by name; nothing else imports them.
    ("integrations",),
    ("__init__",),
)
"""Packages and modules of the library. Each may import those of the layers before its own, and itself."""


def part_of(module: str) -> str | None:
    """The entry of LAYERS that a module of the library belongs to; None for those of others."""
    if within(module, STUBS):
        return "rpc.v1"
    parts = module.split(".")
    return parts[1] if parts[0] == "shardline" and len(parts) > 1 else None


def layer(part: str) -> int | None:
    """None where a name of the library is no module, such as one that `shardline` exports."""
    return next((number for number, parts in enumerate(LAYERS) if part in parts), None)


def module_of(path: str) -> str:
    """Name of the module in a file of the library or of a role."""
    return path.removesuffix(".py").replace("/", ".")


def under(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def may_use_stubs(path: str) -> bool:
    """Messages are for those who send and read them."""
    if path.startswith("shardline/"):
        return any(under(path, f"shardline/{part}") for part in ("rpc", "server", "lanes"))
    return any(under(path, folder) for folder in SPEAKERS)


SPEAKERS = ("services/shardline_ps", "services/shardline_aggregator", "chief/shardline_chief/io")


def refusal(item: Import) -> str | None:
    """Why this import breaks a rule; None where it doesn't."""
    top = item.module.split(".", maxsplit=1)[0]
    own = Path(item.path).parts[1] if Path(item.path).parts[0] in ROLES.values() else Path(item.path).parts[0]
    if top in CONTAINERS:
        return f"{top} is a folder, not a package: a person's own {top}.py must not clash with it"
    if top in ROLES and top != own and (own, top) != SIMULATED:
        return (
            "the library imports no package beside it"
            if own == "shardline"
            else "packages beside it never import each other"
        )
    if within(item.module, STUBS) and not may_use_stubs(item.path):
        return "generated stubs are for the packages that speak the protocol"
    if any(under(item.path, folder) for folder in PURE) and any(within(item.module, outer) for outer in OUTER):
        return "domain values and rules know no transport"
    if under(item.path, "chief/shardline_chief/rules") and item.module in ("threading", "time"):
        return "the chief's rules have no thread and no clock"
    mine, other = part_of(module_of(item.path)), part_of(item.module)
    if mine is not None and other is not None and mine != other and not item.typing:
        below, above = layer(other), layer(mine)
        if below is not None and above is not None and below >= above:
            return f"{mine} lies below {other}, or beside it"
    if within(item.module, DOORS) and mine is None:
        return "doors are for people's scripts"
    if top in UNSAFE_MODULES and not under(item.path, "shardline/loading") and item.path != NOTEBOOK:
        return "nothing is pickled, but batches of a worker's own forks, and a notebook's function for its own workers"
    return None


def sources() -> list[Path]:
    """Python files of the library and of the roles, without the generated ones."""
    folders = [ROOT / "shardline", *(ROOT / folder / package for package, folder in ROLES.items())]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in files if (ROOT / "shardline" / "rpc" / "v1") not in path.parents]


def package_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    parts = relative.parent.parts if relative.parts[0] == "shardline" else relative.parent.parts[1:]
    return ".".join(parts)


def test_every_source_file_is_seen() -> None:
    seen = {package_of(path).split(".", maxsplit=1)[0] for path in sources()}
    assert seen == {"shardline", *ROLES}


def test_layers_hold() -> None:
    broken = []
    for path in sources():
        relative = str(path.relative_to(ROOT))
        for item in imports_of(path.read_text(), relative, package_of(path)):
            reason = refusal(item)
            if reason is not None:
                broken.append(f"{item.path}:{item.line} imports {item.module}: {reason}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("shardline/job.py", "from shardline_worker import loop", "the library imports no package beside it"),
        ("shardline/job.py", "def f():\n    import shardline_pipeline", "the library imports no package beside it"),
        ("worker/shardline_worker/x.py", "from shardline_pipeline import GPipe", "never import each other"),
        ("pipeline/shardline_pipeline/x.py", "import shardline_worker", "never import each other"),
        ("pipeline/shardline_pipeline/x.py", "import shardline_lab", "never import each other"),
        ("lab/shardline_lab/x.py", "from shardline_pipeline import GPipe", None),
        ("chief/shardline_chief/x.py", "def f():\n    import shardline_ps.store", "never import each other"),
        ("chief/shardline_chief/x.py", "import worker", "a folder, not a package"),
        ("shardline/job.py", "from chief.shardline_chief import state", "a folder, not a package"),
        ("shardline/job.py", "from shardline.rpc.v1 import chief_pb2", "generated stubs"),
        ("shardline/job.py", "from shardline.rpc import v1", "generated stubs"),
        ("shardline/cli/x.py", "from ..rpc.v1 import chief_pb2", "generated stubs"),
        ("worker/shardline_worker/loop.py", "import shardline.rpc.v1.chief_pb2 as p", "generated stubs"),
        ("shardline/job.py", "import shardline.rpc.v1.chief_pb2", "generated stubs"),
        ("shardline/job.py", "import pickle", "nothing is pickled"),
        ("shardline/client/x.py", "import shardline.rpc.messages.status", None),
        ("shardline/rpc/x.py", "from .v1 import chief_pb2", None),
        ("chief/shardline_chief/io/servicer.py", "from shardline.rpc.v1 import chief_pb2", None),
        ("chief/shardline_chief/rules/x.py", "from shardline.rpc.v1 import chief_pb2", "generated stubs"),
        ("chief/shardline_chief/rules/x.py", "from shardline.rpc.link import ChiefLink", "no transport"),
        ("chief/shardline_chief/rules/x.py", "import time", "no clock"),
        ("shardline/core/x.py", "from shardline.rpc import channel", "no transport"),
        ("shardline/core/x.py", "from shardline.job import Job", "lies below"),
        ("shardline/core/x.py", "from shardline.host.files import sync", "or beside it"),
        ("shardline/lanes/x.py", "if TYPE_CHECKING:\n    from shardline.config import RoleConfig", None),
        ("shardline/rpc/x.py", "from shardline.lanes.base import Lane", "lies below"),
        ("shardline/lanes/x.py", "from shardline.server import staging", "lies below"),
        ("shardline/cli/x.py", "import shardline.integrations.accelerate", "lies below"),
        ("shardline/__main__.py", "from shardline import integrations", "lies below"),
        ("worker/shardline_worker/x.py", "from shardline.integrations import lightning", "doors"),
        ("services/shardline_ps/x.py", "from shardline.rpc.v1 import data_pb2", None),
        ("services/shardline_ps/x.py", "from shardline_ps import store", None),
    ],
)
def test_rules_refuse_what_they_are_for(path: str, source: str, says: str | None) -> None:
    reasons = [refusal(item) for item in imports_of(source, path, package_of(ROOT / path))]
    if says is None:
        assert reasons == [None] * len(reasons)
    else:
        assert any(says in reason for reason in reasons if reason)


def unsafe_loads(source: str, path: str) -> list[str]:
    """Calls of a `load` of torch, or of numpy's with pickles, that could run code from a file."""
    found = []
    for node in nodes_in(source):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and keywords.get("weights_only") != "True":
            found.append(f"{path}:{node.lineno} torch.load without weights_only=True runs code from the file")
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"{path}:{node.lineno} {called} with allow_pickle runs code from the file")
    return found


def test_nothing_is_unpickled() -> None:
    broken = [line for path in sources() for line in unsafe_loads(path.read_text(), str(path.relative_to(ROOT)))]
    assert not broken, "\n".join(broken)


def test_unsafe_loads_are_seen() -> None:
    assert unsafe_loads("torch.load(path)", "x.py")
    assert unsafe_loads("torch.load(path, weights_only=False)", "x.py")
    assert unsafe_loads("np.load(path, allow_pickle=True)", "x.py")
    assert not unsafe_loads("torch.load(path, weights_only=True)", "x.py")


def test_role_folders_are_no_packages() -> None:
    found = [str(path) for folder in CONTAINERS for path in [ROOT / folder / "__init__.py"] if path.exists()]
    assert not found, f"{found} would make `import worker` work, which a person's own worker.py must win"


CLIENT = (
    "partners",
    "ways",
    "exchange",
    "layout",
    "watch",
    "applied",
    "step",
    "overlap",
    "api",
    "job_loop",
)
"""Parts of the client, inner ones first: each may import those before it."""


def test_parts_of_the_client_are_layers() -> None:
    broken = []
    for path in sources():
        relative = str(path.relative_to(ROOT))
        if not under(relative, "shardline/client") or path.stem == "__init__":
            continue
        own = Path(relative).parts[2].removesuffix(".py")
        allowed = CLIENT[: CLIENT.index(own) + 1]
        for item in imports_of(path.read_text(), relative, package_of(path)):
            parts = item.module.split(".")
            if parts[:2] == ["shardline", "client"] and len(parts) > 2 and parts[2] not in allowed:
                broken.append(f"{item.path}:{item.line} imports {item.module}")
    assert not broken, "\n".join(broken)


def test_every_part_of_the_library_has_a_layer() -> None:
    found = {
        part_of(module_of(str(path.relative_to(ROOT))))
        for path in sources()
        if path.relative_to(ROOT).parts[0] == "shardline"
    }
    assert found | {"rpc.v1"} == {part for parts in LAYERS for part in parts}
