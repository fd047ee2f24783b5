"""The parameter server's process: serve, join, send heartbeats, end with the job."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence

import torch

from shardline import consistency
from shardline.config import RoleConfig
from shardline.consistency import Gives
from shardline.core.orders import Orders, Phase
from shardline.core.plan import ShardSpec
from shardline.errors import InternalError, ShardlineError, UnreachableError, as_error
from shardline.host.process import Termination, free_memory, memory_limit, resolve_device, tell_ready
from shardline.lanes import offered
from shardline.lanes.attachments import Attachments, LaneOffer
from shardline.lanes.kind import ServerSide
from shardline.observability.line_rate import links, meter_line
from shardline.observability.metrics import Metrics
from shardline.rpc.joining import Applicant
from shardline.rpc.link import BeatFacts, ChiefLink
from shardline.rpc.messages.configuration import PsConfiguration
from shardline.rpc.server import RpcServer
from shardline.rpc.usage import UsageMeter
from shardline.server.pace import PATIENCE_S
from shardline.storage.publication import Publication
from shardline.update.torch_optim.eager import leave_compiler_out
from shardline_ps.control.votes import Voters
from shardline_ps.memory.metering import Meter
from shardline_ps.servicer import ParameterServer, register
from shardline_ps.standby.sender import StandbySender
from shardline_ps.store import ParameterStore

log = logging.getLogger("shardline.ps")
SERVICES = ("shardline.rpc.v1.ParameterServer", "shardline.rpc.v1.Coordinator", "shardline.rpc.v1.Replication")


class PsProcess:
    """A ps with its server; a chief is optional (tests and benchmarks run without one)."""

    def __init__(self, config: RoleConfig) -> None:
        self._config = config
        # Parallel over buckets, one thread each, rather than within a bucket.
        torch.set_num_threads(1)
        # Importing it would take longer than a call may.
        leave_compiler_out()
        device = resolve_device(config.device, config.gpu_memory_fraction, neighbours=config.neighbours)
        self.store = ParameterStore(
            device=device,
            pool_threads=max(2, os.cpu_count() or 1),
            memory_limit_bytes=memory_limit(device, config.gpu_memory_fraction),
        )
        if folder := config.cold_dir or config.out:
            self.store.cold_dir = folder
        if device.type == "cpu":
            self.store.free_memory = free_memory
        # The answer must arrive before the sender's own deadline, which is rpc_s plus time for the bytes.
        self.store.staging_wait_s = config.timeouts.rpc_s / 2
        self.store.pace.patience_s = min(PATIENCE_S, config.timeouts.rpc_s / 4)
        # Within the deadline of Configure, with time left to create the new shards.
        self.store.let_go_s = config.timeouts.rpc_s / 2
        self.ended = threading.Event()
        self.end_reason = ""
        self.metrics = Metrics("ps", config.task)
        self.meter = Meter(self.metrics, self.store)
        self.voters = Voters(self.store, config.timeouts, config.security)
        self.attachments = Attachments()
        self.standbys = StandbySender(config.task, self.store, config.timeouts, config.security)
        self.store.lane_attachments = self.attachments.count
        self.servicer = ParameterServer(
            config.task,
            self.store,
            self.voters,
            self.attachments,
            self.standbys,
            on_stop=self._stop,
            on_push=self.meter.pushed,
            on_refused=self.meter.refused,
        )
        self.servicer.calls.reader_s = config.timeouts.rpc_s
        self.server = RpcServer(
            config.cluster.address(config.task),
            register=[register(self.servicer)],
            service_names=SERVICES,
            name=config.task,
            security=config.security,
            bind=config.bind,
        )

    def _stop(self, reason: str) -> None:
        self.end_reason = reason
        self.ended.set()

    def start(self) -> str:
        """Bind and serve; returns the address, "host:port"."""
        self.voters.bind(self.server.loop)
        for offer in offers(self._config, self.store, self.meter.refused):
            self.attachments.offer(offer)
        return self.server.start()

    def run(self, termination: Termination) -> int:
        """Serve until the chief ends the job; returns the exit code."""
        config = self._config
        try:
            address = self.start()
            tell_ready(config.ready_fd, address)
            device = str(self.store.device)
            metrics_address = self.metrics.serve(config.host, config.metrics_port, config.security, device=device)
            meter_line(self.metrics, address)
            log.info("serving at %s on %s, metrics at %s", address, device, self.metrics.url)
            return _serve(config, self, termination, address, metrics_address)
        finally:
            self.close()

    def close(self) -> None:
        async def close_parts() -> None:
            self.attachments.close()
            await self.voters.close()
            await self.standbys.close()

        if self.server.address:
            self.server.run(close_parts(), timeout_s=5.0)
        self.server.close(grace_s=0.5)
        self.store.close()
        self.metrics.close()


def offers(config: RoleConfig, store: ParameterStore, on_refused: Callable[[str, Exception], None]) -> list[LaneOffer]:
    """Lanes that workers may open here, as chosen by --lane; the store publishes values where the lanes need them."""
    side = ServerSide(config, store.device, store.buffers.take, on_refused)
    made = [kind.offer(side) for kind in offered(config.lane)]
    found = [offer for offer in made if offer is not None]
    if found:
        store.make_publication = functools.partial(_publish, found, store.make_publication)
    store.lane_bytes = reply_bytes if any(offer.keeps_replies for offer in found) else sent_bytes
    return found


def _publish(
    offers: Sequence[LaneOffer],
    otherwise: Callable[[ShardSpec, bool], Publication],
    spec: ShardSpec,
    keeps_previous: bool,
) -> Publication:
    """Memory for a shard's values, from the first lane with a preference."""
    for offer in offers:
        publication = offer.publish(spec, keeps_previous=keeps_previous)
        if publication is not None:
            return publication
    return otherwise(spec, keeps_previous)


def reply_bytes(configuration: PsConfiguration) -> int:
    """Bytes of shared-memory replies made for one worker each: in asynchronous mode, with spares, or with a codec.

    One per replica; a ps doesn't know how many workers an asynchronous job has, so there it counts one.
    """
    lends = Gives.LASTING_VALUES in consistency.of(configuration.consistency).gives
    if lends and configuration.coding.pull.is_view:
        return 0
    return configuration.replicas * sum(configuration.plan.shards[number].nbytes for number in configuration.shards)


def sent_bytes(configuration: PsConfiguration) -> int:
    """Bytes of whole replies made for one worker each, to be sent; as in reply_bytes()."""
    replies, shards = consistency.of(configuration.consistency).intake.replies, configuration.plan.shards
    return configuration.replicas * sum(replies(shards[number].nbytes) for number in configuration.shards)


def run(config: RoleConfig) -> int:
    termination = Termination()
    termination.install()
    return PsProcess(config).run(termination)


def _serve(config: RoleConfig, process: PsProcess, termination: Termination, address: str, metrics_address: str) -> int:
    failure: list[ShardlineError] = []

    def obey(orders: Orders) -> None:
        if orders.phase is Phase.ENDED:
            process.end_reason = orders.reason
            process.ended.set()
        elif orders.fenced or link.lost is not None:
            try:
                link.check()
            except ShardlineError as error:
                failure.append(error)
            process.ended.set()

    link = ChiefLink(
        config.cluster.chief,
        config.timeouts,
        Applicant(
            role="ps",
            index=config.index,
            address=address,
            metrics_address=metrics_address,
            device=str(process.store.device),
        ),
        on_orders=obey,
        cancelled=termination.event,
        facts=BeatFacts(
            ps=process.meter.observed(process.servicer.status),
            usage=UsageMeter(str(process.store.device)).read,
            links=lambda: links(process.metrics),
        ),
        security=config.security,
    )
    try:
        termination.call(process.ended.set)
        termination.call(link.cancel_join)
        process.store.on_failure = lambda error: _report(link, error)
        if not link.join():
            log.info("asked to end before the chief admitted this ps")
            return 0
        log.info("joined as %s, incarnation %#x", link.task, link.incarnation)
        process.ended.wait()
        if termination.event.is_set() and not process.end_reason and not failure:
            return _leave(config, link, process)
        if failure:
            raise failure[0]
        log.info("the job has ended: %s", process.end_reason or "done")
        return exit_code_of(link) if config.exit_with_job else 0
    finally:
        link.close()


def exit_code_of(link: ChiefLink) -> int:
    """The job's exit code. The command to stop may arrive before the orders that contain it."""
    if not link.wait(lambda orders: orders.phase is Phase.ENDED, link.timeouts.suspect_s):
        log.warning("told to stop without the result of the job; ending as if it had failed")
        return UnreachableError.exit_code
    return link.orders.exit_code


def _report(link: ChiefLink, error: Exception) -> None:
    """Report to the chief that a step can't be applied; on a separate thread, since the caller holds locks."""
    found = as_error(error) or InternalError(f"{type(error).__name__}: {error}")
    threading.Thread(target=link.fail, args=(str(found), found.exit_code), name="failure", daemon=True).start()


def _leave(config: RoleConfig, link: ChiefLink, process: PsProcess) -> int:
    """On SIGTERM: shards can't leave by themselves, so ask the chief to end the job with a checkpoint, then exit."""
    log.info("asked to end: the chief ends the job with a checkpoint first")
    process.ended.clear()
    link.leave()
    if not process.ended.wait(config.timeouts.total_s):
        log.error("the chief did not end the job within %.0f s; leaving anyway", config.timeouts.total_s)
        return 1
    return 0
