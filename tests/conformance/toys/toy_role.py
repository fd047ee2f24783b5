"""A role of a plugin: the aggregator of toy_aggregator as a process. Every task of the cluster needs this file."""

from __future__ import annotations

from shardline.config import RoleConfig
from shardline.core.orders import Orders, Phase
from shardline.host.process import Termination
from shardline.observability.metrics import Metrics
from shardline.roles import ROLES, Role
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.rpc.messages.convert import plan_from_proto
from tests.conformance.toys.toy_aggregator import Aggregator
from tests.support.plain_client import TIMELINE, plan

MEMBERS = {"worker/0": 1, "worker/1": 1}
PUSHED = "shardline_push_raw_bytes_total"


class Counted(Aggregator):
    metrics: Metrics

    def count(self, *, push_raw: int = 0, **more: int) -> None:
        super().count(push_raw=push_raw, **more)
        self.metrics.counter(PUSHED, peer="all", codec="raw", lane="all").inc(push_raw)


def run(config: RoleConfig) -> int:
    termination = Termination()
    termination.install()
    sums = Counted(config, "plain", TIMELINE, plan_from_proto(plan()), MEMBERS, replicas=2)
    sums.metrics = Metrics(config.role, config.task)
    applicant = Applicant(
        role=config.role,
        index=config.index,
        address=sums.address,
        metrics_address=sums.metrics.serve(config.host, config.metrics_port, config.security),
    )
    link = ChiefLink(
        config.cluster.chief, config.timeouts, applicant, cancelled=termination.event, security=config.security
    )

    def over(orders: Orders) -> bool:
        return orders.phase is Phase.ENDED or orders.fenced or termination.event.is_set()

    try:
        termination.call(link.cancel_join)
        if link.join():
            termination.call(link.leave)
            link.wait(over)
        return 0
    finally:
        link.close()
        sums.close()
        sums.metrics.close()


ROLES.add(Role(name="aggregator", about="Sum the pushes of a rack.", sends=True, metrics=(PUSHED,), run=run))
