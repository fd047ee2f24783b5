"""A role of a plugin: a task that pulls the parameters once and counts their bytes. Every task needs this file."""

from __future__ import annotations

from shardline.config import RoleConfig
from shardline.core.orders import Orders, Phase
from shardline.host.process import Termination
from shardline.lanes import LANES
from shardline.observability.metrics import Metrics
from shardline.roles import ROLES, Role
from shardline.rpc.channel import Peer
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.rpc.server import RpcServer
from shardline.waist import Sender, Want
from tests.support.lanes import Mapping

PULLED = "shardline_pull_raw_bytes_total"


def pulled(config: RoleConfig, link: ChiefLink) -> int:
    """The bytes of the newest parameters of shard 0."""
    view, sink = link.client.get_job(link.identity), Mapping()
    place = view.placement[0]
    peer = Peer(place.task, place.address, config.timeouts, config.security)
    lane = LANES.parse("grpc").connect(config, peer, 0, view.plan.shards[0])
    sender = Sender(job=view.job.name, timeline=view.timeline, plan_id=view.plan.plan_id, who=link.identity)
    lane.exchange(sender, (), Want(step=None), sink, timeout_s=config.timeouts.rpc_s)
    lane.close()
    peer.close()
    return sum(map(len, sink.memory.values()))


def run(config: RoleConfig) -> int:
    termination = Termination()
    termination.install()
    server, metrics = (
        RpcServer(config.cluster.address(config.task), name=config.task),
        Metrics(config.role, config.task),
    )
    applicant = Applicant(
        role=config.role,
        index=config.index,
        address=server.start(),
        metrics_address=metrics.serve(config.host, config.metrics_port, config.security),
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
            link.wait(lambda orders: orders.phase is Phase.RUNNING or over(orders))
            if not over(link.orders):
                metrics.counter(PULLED, peer="ps/0", codec="raw", lane="all").inc(pulled(config, link))
            link.wait(over)
        return 0
    finally:
        link.close()
        server.close(grace_s=0.0)
        metrics.close()


ROLES.add(Role(name="probe", about="Pull the parameters once.", sends=True, metrics=(PULLED,), run=run))
