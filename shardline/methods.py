"""All seams and their tables: `python -m shardline.methods` writes the JSON that --help shows.

Everything that lists methods gets them here: the checks of jobs, `shardline methods`, --help and the docs.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.core.settings import KINDS, Setting, check_field, read
from shardline.errors import JobError, nearest
from shardline.seams import Resident, Table

if TYPE_CHECKING:
    from shardline.core.spec import JobSpec

SEAMS: Mapping[str, tuple[str, str, str]] = {
    "consistency": (
        "shardline.consistency",
        "CONSISTENCIES",
        "Which contributions count, and when a worker may proceed.",
    ),
    "rule": ("shardline.update", "RULES", "How the servers apply gradients to the parameters."),
    "codec": ("shardline.codecs", "CODECS", "How gradients and parameters are encoded on the wire."),
    "cadence": ("shardline.cadence", "CADENCES", "When a worker exchanges with the servers, and what it sends."),
    "topology": ("shardline.topology", "TOPOLOGIES", "Which tasks a worker exchanges with."),
    "pipeline": ("shardline.division", "PIPELINES", "How workers share the layers of a model."),
}
"""By the name of the job's field: module and name of the table, and what it decides."""
PARTS: Mapping[str, str] = {"codec_up": "codec", "codec_down": "codec", "codec_parcels": "codec"}
"""Job fields that choose from the table of another field, for a part of what it decides; empty = none."""
FIELDS = (*SEAMS, *PARTS)
"""Every field of a job that chooses a method."""
WRITTEN = Path(__file__).parent / "cli" / "methods.json"
"""The same as text, for --help: importing the tables would import torch."""


ARGUMENTS = ("lr", "momentum", "weight_decay")
"""Numbers in a job's `optimizer_args` that the command line can set like its fields."""
OVERRIDES: Mapping[str, type] = {**KINDS, **dict.fromkeys(FIELDS, str), **dict.fromkeys(ARGUMENTS, float)}
"""Job fields that the command line can set, and the types to parse."""


def override(name: str, text: str) -> tuple[str, Setting]:
    """The field and value for a job field from the command line. Raises JobError for an unknown field or no value."""
    key = name.replace("-", "_")
    kind = OVERRIDES.get(key)
    if kind is None:
        raise JobError(
            f"job field {name!r} can't be set from the command line; these can: {', '.join(OVERRIDES)}"
            f"{nearest(key, OVERRIDES)}"
        )
    return key, read(key, text, kind)


def check_override(name: str, text: str) -> None:
    """Raise JobError for a field from the command line that no job can have; cheap where it is right.

    A method's settings are left to check_method().
    """
    field, value = override(name, text)
    seam = PARTS.get(field, field)
    if field in ARGUMENTS:
        return
    if seam not in SEAMS:
        check_field(field, value)
    elif str(value).partition(":")[0] not in {usage.partition(":")[0] for usage, _ in written()[seam]}:
        canonical(field, str(value))


def check_method(name: str, text: str) -> None:
    """Raise JobError for settings that a method from the command line can't have; imports torch if there are any."""
    field, value = override(name, text)
    if field in FIELDS and ":" in text:
        canonical(field, str(value))


def table(seam: str) -> Table[Any]:
    module, name, _ = SEAMS[seam]
    found: Table[Any] = getattr(importlib.import_module(module), name)
    return found


def canonical(field: str, choice: str | Resident) -> str:
    """The canonical text of a job's choice. Raises JobError for one that does not exist."""
    if field in PARTS and choice == "":
        return ""
    if field not in PARTS:
        return table(field).canonical(choice)
    seam = PARTS[field]
    fitting: list[str] = importlib.import_module(SEAMS[seam][0]).fitting(field)
    return table(seam).canonical(choice, field, fitting)


def chosen(job: JobSpec) -> dict[str, str]:
    """A job's choices by seam, as text."""
    # A codec may have brought the rule along.
    rule = importlib.import_module(SEAMS["rule"][0]).chosen(job.rule)
    given = {"consistency": canonical("consistency", job.consistency.mode), "rule": str(rule)}
    found = {field: given.get(field) or canonical(field, getattr(job, field)) for field in FIELDS}
    return {field: choice for field, choice in found.items() if choice or field in SEAMS}


def described() -> dict[str, list[tuple[str, str]]]:
    """(usage, description) of each method, by seam."""
    return {seam: table(seam).describe() for seam in SEAMS}


def written() -> dict[str, list[tuple[str, str]]]:
    """The same for the package's own methods, read from a file."""
    found: dict[str, list[tuple[str, str]]] = json.loads(WRITTEN.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    json.dump(described(), sys.stdout, indent=1)
    print()
