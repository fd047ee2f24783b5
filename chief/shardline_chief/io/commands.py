"""Carries out orders to the servers: one order at a time, each on every ps in parallel, with one combined result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from shardline import consistency
from shardline.checkpoint import Checkpoint
from shardline.core.placement import Placement
from shardline.core.timeouts import Timeouts
from shardline.errors import InternalError, ProtocolError, ShardlineError, UnreachableError
from shardline.rpc.client import PsControl
from shardline.rpc.messages.configuration import Configuration
from shardline.security import PLAIN, Security
from shardline_chief.io.checkpointer import restore
from shardline_chief.rules.actions import (
    Activate,
    AskStatus,
    Command,
    CommandResult,
    Configure,
    Cut,
    Lead,
    Members,
    Order,
    Promote,
    Release,
    Restore,
)

log = logging.getLogger("shardline_chief.io.commands")


class Commander:
    """Sends the chief's commands to the servers. Their order matters (F4), so one thread sends them one by one."""

    def __init__(
        self, timeouts: Timeouts, *, term: int, chief_uuid: str, resume: Checkpoint | None, security: Security = PLAIN
    ) -> None:
        """resume: checkpoint that Restore fills shards from; may be replaced while no command is running."""
        self._timeouts = timeouts
        self._security = security
        self._term = term
        self._uuid = chief_uuid
        self.resume = resume
        self._controls: dict[str, PsControl] = {}
        self._closed = False
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="ps-command")

    def connect(self, task: str, address: str) -> PsControl:
        """A separate connection to a ps, owned by the caller."""
        return PsControl(task, address, self._timeouts, term=self._term, chief_uuid=self._uuid, security=self._security)

    def open(self, addresses: Mapping[str, str]) -> None:
        """Connect to these ps; later commands go to all of them, and to no others."""
        self.drop(self._controls.keys() - addresses.keys())
        for task, address in addresses.items():
            held = self._controls.get(task)
            if held is None or held.peer.address != address:
                if held is not None:
                    held.close()
                self._controls[task] = self.connect(task, address)

    def drop(self, tasks: Iterable[str]) -> None:
        """Disconnect from lost servers: calls to them end at once."""
        for task in list(tasks):
            control = self._controls.pop(task, None)
            if control is not None:
                control.close()

    def submit(self, command: Command, told: Callable[[CommandResult], None]) -> None:
        """Run after the commands already queued; told() is called on the command thread."""
        self._queue.submit(lambda: told(self._all(command.order)))

    def _all(self, order: Order) -> CommandResult:
        controls = dict(self._controls)
        futures: dict[str, Future[Any]] = {
            task: self._pool.submit(self._one, task, control, order) for task, control in controls.items()
        }
        values: dict[str, Any] = {}
        errors: dict[str, ShardlineError] = {}
        for task, future in futures.items():
            try:
                values[task] = future.result()
            except ShardlineError as error:
                errors[task] = error
            except (Exception, CancelledError) as error:
                if self._controls.get(task) is not controls[task]:
                    # The channel was closed during the call.
                    errors[task] = UnreachableError(
                        f"{task} was declared lost before it answered {type(order).__name__}"
                    )
                    continue
                if not self._closed:
                    log.exception("%s: %s failed", task, type(order).__name__)
                errors[task] = InternalError(f"{task}: {type(order).__name__}: {type(error).__name__}: {error}")
        return CommandResult(values=values, errors=errors)

    def _one(self, task: str, control: PsControl, order: Order) -> Any:
        match order:
            case Lead():
                return control.lead()
            case Configure():
                return control.configure(_configuration(task, order))
            case Members():
                return control.set_membership(order.timeline, order.members, keys=order.keys)
            case Promote():
                return _promote(task, control, order)
            case Restore():
                return self._restore(task, control, order)
            case Activate():
                return control.activate(order.timeline)
            case Cut():
                return control.cut(order.timeline, order.step, stop=order.stop)
            case Release():
                return control.release(order.timeline, order.step, noted=order.noted)
            case AskStatus():
                return control.status()

    def _restore(self, task: str, control: PsControl, order: Restore) -> None:
        if self.resume is None:
            raise InternalError("there is no checkpoint to restore")
        for shard in _shards(task, order.placement):
            if order.plan.shards[shard].buckets and shard not in order.keep:
                restore(control, self.resume, order.plan, shard, order.timeline)

    def stop_all(self, reason: str) -> None:
        """Send every ps the order to end, without waiting for answers: one that is already gone can't give one."""
        for control in list(self._controls.values()):
            self._pool.submit(_stop, control, reason)

    def close(self) -> None:
        """Drop queued commands and close the connections, which ends running calls."""
        self._closed = True
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for control in self._controls.values():
            control.close()


def _stop(control: PsControl, reason: str) -> None:
    try:
        control.stop(reason)
    except (ShardlineError, ValueError) as error:
        # gRPC raises ValueError if a channel is closed during a retry.
        log.debug("%s", error)


def _shards(task: str, placement: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(place.shard for place in placement if place.task == task)


def _standbys(task: str, placement: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(place.shard for place in placement if place.standby_task == task)


def _promote(task: str, control: PsControl, order: Promote) -> None:
    for shard, promotion in sorted(order.shards.items()):
        if promotion.task == task and (reason := control.promote(order.timeline, shard, promotion.appointment)):
            raise ProtocolError(f"{task} does not take over shard {shard}: {reason}")


def _configuration(task: str, order: Configure) -> Configuration:
    job = order.job
    return Configuration(
        job=job.name,
        timeline=order.timeline,
        plan=order.plan,
        shards=_shards(task, order.placement),
        rule=job.rule,
        schedule=job.schedule,
        consistency=job.consistency,
        **job.settings(),
        cut_every=consistency.of(job.consistency).cuts.interval(job.checkpoint_every),
        placement=order.placement,
        keep=tuple(shard for shard in _shards(task, order.placement) if shard in order.keep),
        standbys=_standbys(task, order.placement),
        keep_standbys=tuple(shard for shard in _standbys(task, order.placement) if shard in order.keep_standbys),
        replayed=order.replayed,
    )
