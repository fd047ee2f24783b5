"""Data loaders with a state in a script: kept by step, so that a step that is made again reads the same samples."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from shardline.core.settings import short
from shardline.core.spec import DTYPE_NAMES, DTYPES
from shardline.errors import JobError, UnreachableError, UsageError
from shardline.host import files

log = logging.getLogger("shardline.client")

STATE_BYTES = 64 << 20
"""Most bytes of a state's file."""
CHECKPOINT_BYTES = 1_000_000
"""Most characters of a state that goes into a checkpoint; a larger one is in the run's folder alone."""
RECENT = 3
"""The newest steps whose state is kept: a worker may have to make its last one again."""
CHECKPOINTS = 16
"""Newest multiples of checkpoint_every whose state is kept, beside that of the step that this process began with: the
job may go back to one."""


@runtime_checkable
class HasState(Protocol):
    """A loader for session.stateful(): torchdata's StatefulDataLoader, or anything with these methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Stateful(Iterator[Any]):
    """A loader whose next batch is that of the open step; it begins again when it is exhausted.

    Its states are files of the run's folder, by step: each is written before the gradients of the step before it leave,
    so whatever step the job goes on from has one; those of checkpoints go to the chief as well, at the same moment.
    """

    def __init__(
        self, loader: HasState, folder: Path | None, chief: Callable[[int, str], str] = lambda step, state: ""
    ) -> None:
        """chief(step, state) hands over a state, or returns the step's if that is empty; "" = it is not there."""
        self._loader = loader
        self._folder = folder
        self._chief = chief
        self._batches: Iterator[Any] | None = None
        self._states: dict[int, str] = {}
        """As JSON; with a folder the newest ones alone."""
        self._first: int | None = None
        """The step that this process began with."""
        self._at: int | None = None
        """The step before which the loader stands; None = unknown."""

    def __next__(self) -> Any:
        """Return the next batch. Raises StopIteration for a loader without any, UsageError for one without batches."""
        if self._batches is None:
            self._batches = self._begin()
        batch = next(self._batches, self)
        if batch is self:
            self._batches = self._begin()
            batch = next(self._batches)
        self._at = None
        return batch

    def _begin(self) -> Iterator[Any]:
        if not isinstance(self._loader, Iterable):
            raise UsageError(f"{type(self._loader).__name__} has a state, but no batches: it can't be iterated over")
        return iter(self._loader)

    def enter(self, step: int) -> None:
        """Stand before a step. Raises JobError if its state is not there, or is another loader's."""
        if self._first is None:
            self._first = step
        if self._at == step:
            return
        if self._at is None and not self._states and step == 0:
            self._keep(0)
        else:
            self._restore(step)
        self._at = step
        # The chief learns of the loader, and where it is: checkpoints of later steps wait for its state.
        self.hand_over(step)

    def leave(self, step: int, every: int) -> None:
        """Keep the state before the next step; what is drawn from now on belongs to that. every: checkpoint_every."""
        if not self._states:
            raise UsageError("session.stateful() needs a loop over session.steps(), which can make a step again")
        self._keep(step + 1)
        self._at = step + 1
        if every and (step + 1) % every == 0:
            self.hand_over(step + 1)
        self._forget(step + 1, every)

    def hand_over(self, step: int) -> None:
        """Give the chief the state before a step, for the step's checkpoint."""
        if len(text := self._states.get(step, "")) > CHECKPOINT_BYTES:
            log.warning("the loader's state of %d characters is in the run's folder, not in checkpoints", len(text))
        elif text:
            try:
                self._chief(step, text)
            except UnreachableError as error:
                log.warning("the loader's state before step %d is in the run's folder alone: %s", step, error)

    def _keep(self, step: int) -> None:
        held = [self._loader.state_dict(), [one.get_state() for one in self._generators()]]
        state = {"loader": self._about(), "state": encode(held, type(self._loader).__name__)}
        text = self._states[step] = json.dumps(state)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                files.replace(self._path(step), text.encode(), durable=False)
            except OSError as error:
                raise JobError(f"the loader's state can't be written to {self._path(step)}: {error.strerror}") from None

    def _restore(self, step: int) -> None:
        text = self._states.get(step)
        if text is None and self._folder is not None:
            with contextlib.suppress(OSError):
                text = files.read_text(self._path(step), STATE_BYTES)
        text = text or self._chief(step, "")
        if not text:
            where = f"there is no {self._path(step)}" if self._folder is not None else "SHARDLINE_OUT names no folder"
            raise JobError(
                f"the state of the {type(self._loader).__name__} before step {step} is neither in its checkpoint nor "
                f"here ({where}); start the worker where it was, with the folder of its run"
            )
        found = json.loads(text)
        if found["loader"] != self._about():
            raise JobError(
                f"the state before step {step} is of a loader with {_words(found['loader'])}, and this one has "
                f"{_words(self._about())}; resume with the one that it was"
            )
        try:
            held, generators = decode(found["state"])
            self._loader.load_state_dict(held)
            self._batches = self._begin() if isinstance(self._loader, Iterable) else None
            # An iterator of torchdata draws its epoch's order as it is made; the next epoch's comes from these.
            for generator, state in zip(self._generators(), generators, strict=True):
                generator.set_state(state)
        except Exception as error:
            raise JobError(
                f"the loader refuses its state before step {step}: {type(error).__name__}: {error}"
            ) from error
        self._states[step] = text

    def _generators(self) -> list[torch.Generator]:
        """The generators of a DataLoader and its sampler, whose states torchdata restores for one epoch only."""
        found = [getattr(one, "generator", None) for one in (self._loader, getattr(self._loader, "sampler", None))]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def _about(self) -> dict[str, Any]:
        """Facts that a loader has in common with the one whose state it takes."""
        length: int | None = None
        with contextlib.suppress(TypeError):
            length = len(self._loader)  # type: ignore[arg-type]
        workers, size = (getattr(self._loader, name, None) for name in ("num_workers", "batch_size"))
        about = {"class": type(self._loader).__name__, "batches": length, "num_workers": workers, "batch_size": size}
        return {name: value for name, value in about.items() if isinstance(value, str | int)}

    def _forget(self, step: int, every: int) -> None:
        """Drop the states that nobody goes back to from this step."""
        old = step - RECENT
        kept = every > 0 and old % every == 0
        for number in {old - CHECKPOINTS * every if kept else old} - {self._first}:
            if number > 0:
                self._states.pop(number, None)
                if self._folder is not None:
                    self._path(number).unlink(missing_ok=True)
        if self._folder is not None:
            self._states.pop(old, None)

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step-{step:08d}.json"


def _words(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def encode(value: Any, where: str) -> Any:
    """A state as JSON, exactly. Raises JobError, with its place, for a value that can't be kept."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [DTYPE_NAMES[value.dtype], list(value.shape), base64.b64encode(data).decode()]}
    raise JobError(
        f"the loader's state has {short(value)} at {where}, which can't be kept: numbers, texts, bytes, tensors, "
        "lists, tuples and dicts can"
    )


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tuple":
        return tuple(map(decode, content))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, data = content
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    octets = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    return octets.view(DTYPES[dtype]).reshape(shape)
