"""A worker's partners: those with which it computes a replica's step; see shardline.division."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import Orders
from shardline.core.spec import JobSpec
from shardline.data import BatchSource
from shardline.job import Job
from shardline.observability.metrics import Metrics
from shardline.rpc.report_queue import PassQueue
from shardline.rpc.server import RpcServer


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What partners ask of the worker's loop, on its thread."""

    still_ordered: Callable[[], bool]
    """Whether the orders are still those that the open step began with."""
    still_open: Callable[[int], bool]
    """Whether this step still has to be computed."""
    settle: Callable[[], None]
    """Wait for the whole previous step. Raises StepAgain if it has to be found again."""
    settled: Callable[[], bool]
    """Whether settle() need not wait; Partners.look() is called when this changes."""


class Partners(Protocol):
    """Used by the session's thread, except interrupt() and look(). A worker that computes whole replicas has none."""

    passes: PassQueue
    """Passes that were computed, for the chief."""

    def services(self) -> tuple[Sequence[Any], Sequence[str]]:
        """What the worker's server offers: functions that register it, and its services' names."""

    def begin(self, job: JobSpec, orders: Orders, step: int, who: Identity) -> None:
        """Compute this step by these orders. who: this life. Called before every step."""

    def reports(self, replica: int) -> bool:
        """Whether this worker reports a replica's step: the chief counts one report each."""

    def look(self) -> None:
        """Ask Hooks.settled again."""

    def arm(self) -> None:
        """Forget earlier interruptions."""

    def interrupt(self) -> None:
        """End waits: the orders have changed."""

    def close(self) -> None:
        """Free threads and sockets."""


class WorkerSide(Protocol):
    """What workers of a division do besides: see Division.worker."""

    def partners(self, config: RoleConfig, metrics: Metrics, hooks: Hooks) -> Partners: ...

    def train(self, session: Any, job: Job, model: nn.Module, spec: JobSpec, source: BatchSource) -> None:
        """Attach the session, see shardline.client.api.session, and train until the job ends."""


def server_of(config: RoleConfig, partners: Partners | None) -> RpcServer:
    """A worker's server, on which its partners call."""
    register, names = partners.services() if partners is not None else ((), ())
    return RpcServer(
        config.cluster.address(config.task),
        name=config.task,
        security=config.security,
        bind=config.bind,
        register=register,
        service_names=names,
    )
