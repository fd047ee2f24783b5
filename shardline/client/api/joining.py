"""A session joins its job: link to the chief, initial values, first step."""

from __future__ import annotations

import logging
import threading

import torch

from shardline.client.api.step_loop import StepLoop
from shardline.client.exchange.shard_exchange import Interrupted, Restart
from shardline.config import RoleConfig
from shardline.core.orders import Orders, Phase
from shardline.core.spec import JobSpec
from shardline.errors import TaskLostError
from shardline.host.fingerprint import machine_fingerprint
from shardline.rpc.beat_facts import BeatFacts
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")


def link_of(
    config: RoleConfig,
    spec: JobSpec,
    *,
    address: str,
    metrics_address: str,
    device: torch.device,
    loop: StepLoop,
    cancelled: threading.Event,
) -> ChiefLink:
    """A worker's link to its chief, not joined yet."""
    return ChiefLink(
        config.cluster.chief,
        config.timeouts,
        Applicant(
            role=config.role,
            index=config.index,
            address=address,
            metrics_address=metrics_address,
            device=str(device),
            job=spec,
            machine=machine_fingerprint(spec.threads, str(device)),
        ),
        on_orders=loop.runner.now.ordered,
        facts=BeatFacts(traffic=loop.place.traffic, passes=loop.place.partners.passes, figures=loop.place.figures),
        cancelled=cancelled,
        security=config.security,
    )


def begin(link: ChiefLink, loop: StepLoop) -> None:
    """After admission: send initial values if ordered to, wait for the start, find the step and pull its parameters."""
    place = loop.place
    initialized: set[int] = set()

    def ready(orders: Orders) -> bool:
        begun = orders.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDED)
        return begun or (orders.phase is Phase.INIT and orders.init and orders.timeline not in initialized)

    while True:
        link.wait(ready)
        orders = link.orders
        if orders.phase is Phase.ENDED:
            if orders.exit_code:
                raise TaskLostError(f"{link.task}: the job ended before training began: {orders.reason}")
            place.renew(link)
            return
        place.renew(link)
        if orders.phase is not Phase.INIT:
            break
        try:
            loop.trainer.initialize()
        except (Restart, Interrupted) as error:
            log.info("initial values: %s; asking again", error)
        else:
            initialized.add(orders.timeline)
    if place.view is not None and place.view.job.script:
        found = loop.runner.find_again(loop.trainer.exchange.timeouts.total_s)
        if found and not loop.runner.now.assigned:
            loop.runner.stepper.todo = {0}
        loop.barrier.begin(loop.trainer.step, begun=False)
