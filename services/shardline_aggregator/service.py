"""The aggregator's process: serve, join, follow the chief's orders, end with the job."""

from __future__ import annotations

import logging
import threading

import torch

from shardline import topology
from shardline.config import RoleConfig
from shardline.core.orders import Phase
from shardline.errors import ShardlineError
from shardline.host.process import Termination, tell_ready
from shardline.observability.line_rate import links, meter_line
from shardline.observability.metrics import Metrics
from shardline.rpc.joining import Applicant
from shardline.rpc.link import BeatFacts, ChiefLink
from shardline.rpc.usage import UsageMeter
from shardline_aggregator.aggregator import Aggregator

log = logging.getLogger("shardline.aggregator")
OPEN = (Phase.RUNNING, Phase.STOPPING)


def run(config: RoleConfig) -> int:
    """Serve until the job ends or this task is asked to end; returns the exit code."""
    termination = Termination()
    termination.install()
    torch.set_num_threads(1)
    metrics = Metrics(config.role, config.task)

    def count(peer: str, kind: str, codec: str, nbytes: int) -> None:
        labels = {"peer": peer, "codec": codec, "lane": "sum"}
        metrics.counter(f"shardline_{kind}_wire_bytes_total", **labels).inc(nbytes)

    aggregator = Aggregator(config, config.cluster.address(config.task), count=count)
    try:
        address = aggregator.start()
        tell_ready(config.ready_fd, address)
        metrics_address = metrics.serve(config.host, config.metrics_port, config.security)
        meter_line(metrics, address)
        log.info("serving at %s, metrics at %s", address, metrics.url)
        applicant = Applicant(role=config.role, index=config.index, address=address, metrics_address=metrics_address)
        return _serve(config, aggregator, applicant, termination, metrics)
    finally:
        aggregator.close()
        metrics.close()


def _serve(
    config: RoleConfig, aggregator: Aggregator, applicant: Applicant, termination: Termination, metrics: Metrics
) -> int:
    link = ChiefLink(
        config.cluster.chief,
        config.timeouts,
        applicant,
        cancelled=termination.event,
        facts=BeatFacts(usage=UsageMeter("cpu").read, links=lambda: links(metrics)),
        security=config.security,
    )
    try:
        termination.call(link.cancel_join)
        if not link.join():
            return 0
        termination.call(link.leave)
        log.info("joined as %s, incarnation %#x", link.task, link.incarnation)
        follow(link, aggregator, termination.event)
        return link.orders.exit_code if config.exit_with_job else 0
    finally:
        link.close()


def follow(link: ChiefLink, aggregator: Aggregator, ending: threading.Event) -> None:
    """Do what the orders say until the job ends. Raises the error of a lost or replaced task."""
    while True:
        seen = link.orders
        if seen.phase is Phase.ENDED or ending.is_set():
            return
        link.check()
        try:
            if seen.phase in OPEN and seen.timeline != aggregator.timeline:
                view = link.ask(lambda: link.client.get_job(link.identity))
                chosen = topology.of(view.job)
                if chosen.meets and not chosen.speaks:
                    aggregator.renew(view, link.identity, seen.peers)
            else:
                aggregator.admit_members(seen.peers)
        except ShardlineError as error:
            # A server's name can't be resolved, or the job goes on to another timeline.
            log.info("trying again: %s", error)
        link.wait(lambda orders: orders is not seen or ending.is_set(), timeout_s=link.timeouts.heartbeat_s * 4)  # noqa: B023 - used at once
