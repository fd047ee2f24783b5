"""A job's numbers and choices: declared once, for jobs, the command line, the wire and checkpoints.

A field added here can be set in a job file, by `--set` and by shardline.connect(), is sent to every task, is compared
when a task joins, and is stored in checkpoints. Nothing else has to change.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from shardline.errors import JobError, nearest

RESET, EXACT = "reset", "exact"
"""Values of Settings.error_memory."""
SERVER, WORKER = "server", "worker"
"""Values of Settings.apply."""
REFUSE, UNSAVED = "refuse", "unsaved"
"""Values of Settings.extra_state."""

Setting = bool | int | float | str
"""Types of a setting."""
MAX_WHOLE = 2**63


def setting(
    default: Any = dataclasses.MISSING,
    *,
    lowest: int | None = None,
    highest: int | None = None,
    choices: Sequence[str] = (),
    doc: str = "",
) -> Any:
    """A field of Settings. lowest, highest: the allowed numbers. choices: the allowed texts, if not all are."""
    metadata = {"lowest": lowest, "highest": highest, "choices": tuple(choices), "doc": doc}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A job's settings besides its model, data and optimizer. Checked by check()."""

    replicas: int = setting(1, lowest=1, doc="Number of logical replicas, independent of the number of workers.")
    batch_size: int = setting(1, lowest=1, doc="Samples per microbatch of a replica.")
    accumulate: int = setting(1, lowest=1, doc="Microbatches per replica and step, whose gradients are averaged.")
    seed: int = setting(0, lowest=0, doc="Seed of the initial values, the data order and all random numbers.")
    steps: int = setting(0, lowest=0, doc="Steps to train; 0 = until the script ends.")
    checkpoint_every: int = setting(0, lowest=0, doc="Steps between checkpoints; 0 = only at the start and the end.")
    checkpoint_keep: int = setting(3, lowest=0, doc="Number of checkpoints to keep on disk; 0 = all.")
    patience: int = setting(
        0,
        lowest=0,
        highest=99,
        doc="Scores in a row that are no better than the best after which the job ends; 0 = it trains all steps.",
    )
    threads: int = setting(1, lowest=1, doc="Intra-op threads per replica; the last bits of gradients depend on it.")
    codec: str = setting("raw", doc="How gradients and parameters are encoded on the wire.")
    codec_up: str = setting("", doc="The codec of gradients; empty = that of `codec`.")
    codec_down: str = setting("", doc="The codec of parameters; empty = that of `codec`.")
    codec_parcels: str = setting(
        "", doc="The codec of activations and their gradients between stages; empty = they travel as they are."
    )
    error_memory: str = setting(
        RESET,
        choices=(RESET, EXACT),
        doc="What becomes of a codec's error memory when its worker is lost: reset = it is dropped; exact = every "
        "checkpoint is complete without it, and the job goes back to one.",
    )
    apply: str = setting(
        SERVER,
        choices=(SERVER, WORKER),
        doc="Who runs the optimizer: the servers, or every worker, for which the servers only sum gradients.",
    )
    extra_state: str = setting(
        REFUSE,
        choices=(REFUSE, UNSAVED),
        doc="What becomes of a model with extra state (get_extra_state): refuse = it is refused; unsaved = checkpoints "
        "do without it.",
    )
    cadence: str = setting("every-step", doc="When a worker exchanges with the servers, and what it sends.")
    topology: str = setting("flat", doc="Which tasks a worker exchanges with.")
    pipeline: str = setting("whole-model", doc="How workers share the layers of a model.")
    tensor_ranks: int = setting(
        2, lowest=1, doc="Workers that share each layer in `tensor_parallel`; 1 = none is shared."
    )

    def settings(self) -> dict[str, Any]:
        """The values of the fields declared here, to make another object with the same settings."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(Settings)}


@dataclass(frozen=True, kw_only=True)
class JobSettings(Settings):
    """Settings of a job file, with those that other tasks get in another form or not at all."""

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse a field that doesn't exist with the nearest name. Raises JobError."""
        fields = [item.name for item in dataclasses.fields(cls)] if given else []
        for name in given:
            if name not in fields:
                raise JobError(f"Job has no field {name!r}; its fields are {', '.join(fields)}{nearest(name, fields)}")
        return super().__new__(cls)

    batch_size: int = setting(0, lowest=1, doc="Samples per microbatch of a replica.")
    epochs: int = setting(0, lowest=0, doc="Passes over the data to train, instead of `steps`; of whole steps each.")
    steps: int = setting(0, lowest=1, doc="Steps to train; in asynchronous mode, batches of all workers together.")
    clip_norm: float = setting(
        0.0, lowest=0, doc="Global gradient norm above which gradients are scaled down; 0 = off."
    )
    nan_policy: str = setting(
        "stop",
        choices=("stop", "skip"),
        doc="On a NaN or infinity in a loss or gradient: stop the job, or skip it.",
    )
    best_metric: str = setting("", doc="Metric for choosing the best checkpoint; empty = the first of `evaluate`.")
    best_mode: str = setting(
        "",
        choices=("", "max", "min"),
        doc="max or min; empty = min if the metric's name contains loss, error, perplexity or bits, else max.",
    )
    loaders: int = setting(
        0, lowest=0, highest=256, doc="Processes of each worker that read its batches ahead; 0 = none."
    )
    prefetch: int = setting(2, lowest=1, highest=64, doc="Batches per loader that are read before they are needed.")
    name: str = setting("", doc="Name in logs and checkpoints; empty = taken from the file.")


S = TypeVar("S", bound=Settings)


def known() -> Mapping[str, dataclasses.Field[Any]]:
    return {item.name: item for item in dataclasses.fields(Settings)}


KINDS: Mapping[str, type] = typing.get_type_hints(JobSettings)
"""Types of a job file's settings, by name: int, float, bool or str."""


def check(holder: Settings, where: str = "Job") -> None:
    """Raise JobError naming a setting with an invalid value."""
    for item in dataclasses.fields(holder):
        if item.metadata:
            _check_value(item, getattr(holder, item.name), where)


def check_field(name: str, value: Setting) -> None:
    """Raise JobError if no job file can have this value of a setting."""
    _check_value(next(item for item in dataclasses.fields(JobSettings) if item.name == name), value, "Job")


def _check_value(item: dataclasses.Field[Any], value: Any, where: str) -> None:
    kind, choices = KINDS[item.name], item.metadata["choices"]
    lowest, highest = item.metadata["lowest"], item.metadata["highest"]
    said = f"{where}.{item.name} is {short(value)}"
    if kind in (int, float) and lowest is not None:
        # A bool is an int in Python.
        number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not number or not lowest <= value < (MAX_WHOLE if kind is int else math.inf) or value > (highest or value):
            most = MAX_WHOLE - 1 if highest is None and kind is int and number and value >= MAX_WHOLE else highest
            allowed = f">= {lowest}" if most is None else f"from {lowest} to {most}"
            raise JobError(f"{said}; give a {'whole' if kind is int else 'finite'} number {allowed}")
    elif not isinstance(value, kind):
        raise JobError(f"{said}; give a {kind.__name__}")
    elif choices and value not in choices:
        named = " or ".join(choice for choice in choices if choice)
        raise JobError(f"{said}; it must be {named}{nearest(str(value), choices)}")


def read(name: str, text: str, kind: type) -> Setting:
    """A value of `kind` from its text. Raises JobError naming the setting if the text is invalid."""
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


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
