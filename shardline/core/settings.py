"""The numbers and choices of a job: declared here once, for jobs, the command line, the wire and checkpoints alike.

A field that is added here can be set in a job file, by `--set` and by shardline.connect(), travels to every task,
is compared when a task joins, and is kept in checkpoints. Nothing else has to be told of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shardline.errors import JobError

Setting = bool | int | float | str
"""What a setting can be."""
MAX_WHOLE = 2**63


def setting(default: Any = dataclasses.MISSING, *, lowest: int | None = None, doc: str = "") -> Any:
    """A field of Settings. lowest: the smallest whole number that it may be."""
    return dataclasses.field(default=default, metadata={"lowest": lowest, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job has besides its model, data and optimizer. Checked by check()."""

    replicas: int = setting(1, lowest=1, doc="Logical replicas, whatever the number of workers that run them.")
    batch_size: int = setting(1, lowest=1, doc="Samples of one microbatch of one replica.")
    accumulate: int = setting(1, lowest=1, doc="Microbatches whose gradients a replica averages in a step.")
    seed: int = setting(0, lowest=0, doc="Of the model's first values, the order of the data and all random numbers.")
    steps: int = setting(0, lowest=0, doc="Steps to train; 0 = a script ends the job by itself.")
    checkpoint_every: int = setting(0, lowest=0, doc="Steps between checkpoints; 0 = at the start and the end only.")
    checkpoint_keep: int = setting(3, lowest=0, doc="Newest checkpoints that stay on disk; 0 = all.")
    threads: int = setting(1, lowest=1, doc="Intra-op threads of one replica; gradients' last bits depend on it.")
    codec: str = setting("raw", doc="How gradients and parameters travel.")
    cadence: str = setting("every-step", doc="When a worker talks to the servers, and what it then sends.")
    topology: str = setting("flat", doc="Whom a worker talks to.")

    def settings(self) -> dict[str, Any]:
        """The fields declared here and their values, to make another holder of them."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(Settings)}


S = TypeVar("S", bound=Settings)


def known() -> Mapping[str, dataclasses.Field[Any]]:
    """The declared settings by name."""
    return {item.name: item for item in dataclasses.fields(Settings)}


def kind_of(name: str) -> type:
    """int, float, bool or str: what a setting holds."""
    return type(known()[name].default)


def check(holder: Settings, where: str = "Job") -> None:
    """Raise JobError naming a setting that holds what it can't."""
    for name, item in known().items():
        value, kind = getattr(holder, name), kind_of(name)
        lowest = item.metadata["lowest"]
        if kind is int and lowest is not None:
            # A bool is an int in Python.
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not lowest <= value < MAX_WHOLE:
                raise JobError(f"{where}.{name} is {_short(value)}; give a whole number >= {lowest}")
        elif not isinstance(value, kind):
            raise JobError(f"{where}.{name} is {_short(value)}; give a {kind.__name__}")


def read(name: str, text: str, kind: type) -> Setting:
    """A value of `kind` from its text. Raises JobError naming the setting for text that is none."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        value: Setting = kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise JobError(f"{name} is set to {text!r}; it must be {wanted}") from None
    if value != value:
        raise JobError(f"{name} is set to {text!r}; it must be a number")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
