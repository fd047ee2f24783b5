"""A reader of a running job: connect(read_only=True)."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from shardline.core.timeouts import Timeouts
from shardline.errors import CheckpointError, MismatchError, ProtocolError, UsageError
from shardline.model import load_values
from shardline.nn import flat_ids, tables_of
from shardline.rpc.client import ChiefClient
from shardline.security import Security

T = TypeVar("T")


class Reader:
    """Parameters and rows of a running job at one of its checkpoints, asked of the chief.

    It is no task of the cluster: no step waits for it, and its death is nobody's concern. All that it returns is of the
    checkpoint `step` until refresh(). Each method raises UnreachableError where the chief does not answer in time,
    CheckpointError if it can't send this checkpoint, such as one deleted since, and UsageError after close().
    """

    def __init__(self, chief: str, timeouts: Timeouts, security: Security) -> None:
        """chief: its address. Raises as refresh() does."""
        self._client = ChiefClient(chief, timeouts, security)
        self._closed = False
        self.step = -1
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def refresh(self) -> int:
        """Go on to the job's newest checkpoint; its step. Raises CheckpointError if there is none yet."""
        step = self._ask(self._client.status).checkpoint_step
        if step < 0:
            raise CheckpointError(
                f"the job of {self._client.peer} has no checkpoint yet, so there is nothing to read; connect again "
                "after its first one (checkpoint_every)"
            )
        self.step = step
        return step

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, on the CPU; they belong to the caller."""
        return dict(self._ask(lambda: self._client.fetch_parameters(self.step)).tensors)

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table: float32 [*ids.shape, dim]. ids: int of any shape; a row that has had no gradient is as the
        table's `init` makes it. Raises JobError for ids that are none.
        """
        flat = flat_ids(table, ids)
        found = self._ask(lambda: self._client.fetch_rows(self.step, table, flat))
        return found.view(*ids.shape, found.shape[1])

    def load(self, model: nn.Module) -> None:
        """Load parameters and buffers into a model of the job, in place; its tables then read their rows here.

        Raises MismatchError, naming the tensor or the table, if the model is another one.
        """
        for name, table in tables_of(model).items():
            dim = self.rows(name, torch.empty(0, dtype=torch.int64)).shape[1]
            if dim != table.dim:
                raise MismatchError(f"table {name!r} has dim {dim} in the checkpoint, {table.dim} in the model")
        load_values(model, self.tensors(), self.rows)

    def _ask(self, question: Callable[[], T]) -> T:
        if self._closed:
            raise UsageError("this reader is closed; connect(read_only=True) makes another one")
        try:
            return question()
        except ProtocolError as error:
            raise CheckpointError(f"{error}; checkpoint_keep says how many stay; refresh() takes the newest") from error

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._client.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
