"""Workers of a pipeline that hand each other parcels: real post offices and services, no chief."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from shardline.client.partners import Hooks, server_of
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import Orders
from shardline.core.parcel import Parcel, ParcelKey
from shardline.core.placement import Post
from shardline.core.spec import JobSpec, TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.observability.metrics import Metrics
from shardline.security import PLAIN, Security, key_of
from shardline.update import rule
from shardline_pipeline.activations.post import PostOffice

TIMEOUTS = Timeouts(total_s=15.0)
STAGES = 3
JOB = JobSpec(
    name="j",
    tensors=tuple(
        TensorSpec(name=f"{stage}.weight", shape=(4,), dtype="float32", fragment=stage) for stage in range(STAGES)
    ),
    rule=rule("SGD", ({"lr": 0.5},)),
    pipeline="flush",
    accumulate=4,
)
CLUSTER = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",), "worker": ("127.0.0.1:0",) * STAGES})


def secret_of(index: int, incarnation: int) -> bytes:
    """The secret of a life."""
    return f"{index} {incarnation}".encode().ljust(32, b".")


def identity(index: int, incarnation: int = 1) -> Identity:
    """One life of a worker."""
    return Identity(f"worker/{index}", incarnation, secret_of(index, incarnation))


def orders(*addresses: str, timeline: int = 1, incarnation: int = 1) -> Orders:
    """Worker n computes stage n, at an address."""
    posts = [
        Post(task=f"worker/{n}", address=address, incarnation=incarnation, key=key_of(secret_of(n, incarnation)))
        for n, address in enumerate(addresses)
    ]
    return Orders(timeline=timeline, posts=tuple(posts))


def key(step: int = 3, replica: int = 0, stage: int = 1, microbatch: int = 2, back: bool = False) -> ParcelKey:
    """A key; by default of an activation from worker 0 to worker 1."""
    return ParcelKey(step, replica, stage, microbatch, back)


def parcel(key: ParcelKey, value: float = 1.0) -> Parcel:
    """A small parcel."""
    return Parcel(key, (torch.full((4,), value),), places=(0,) if key.back else ())


def make_config(index: int, lane: str = "grpc", security: Security = PLAIN) -> RoleConfig:
    """The settings of a worker."""
    return RoleConfig(role="worker", index=index, cluster=CLUSTER, timeouts=TIMEOUTS, lane=lane, security=security)


def make_office(
    index: int,
    lane: str = "grpc",
    security: Security = PLAIN,
    metrics: Metrics | None = None,
    still_open: Callable[[int], bool] = lambda step: True,
    settled: Callable[[], bool] = lambda: True,
) -> PostOffice:
    """The post office of a worker."""
    config = make_config(index, lane, security)
    metrics = metrics or Metrics("worker", config.task)
    hooks = Hooks(still_ordered=lambda: True, still_open=still_open, settle=lambda: None, settled=settled)
    return PostOffice(config, metrics, hooks)


class Workers:
    """Three workers that serve, with a stage each."""

    def __init__(self, lane: str, security: Security = PLAIN) -> None:
        self.metrics = [Metrics("worker", f"worker/{index}") for index in range(STAGES)]
        self.offices = [make_office(index, lane, security, metrics) for index, metrics in enumerate(self.metrics)]
        self.servers = [server_of(make_config(index, lane, security), one) for index, one in enumerate(self.offices)]
        for server in self.servers:
            server.start()
        self.addresses = tuple(server.address for server in self.servers)

    def begin(self, index: int, step: int = 3, *, timeline: int = 1, incarnation: int = 1) -> None:
        """Have a worker begin a step, as everyone's incarnation."""
        self.offices[index].begin(
            JOB,
            orders(*self.addresses, timeline=timeline, incarnation=incarnation),
            step,
            identity(index, incarnation),
        )

    def count(self, index: int, name: str, **labels: str) -> float:
        """A counter of a worker."""
        samples = [one for family in self.metrics[index].registry.collect() for one in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    def sent(self, index: int, to: int, lane: str) -> float:
        """Bytes that a worker has sent to another on a lane."""
        return self.count(index, "shardline_parcel_wire_bytes_total", peer=f"worker/{to}", lane=lane)

    def close(self) -> None:
        """End all of them."""
        for office in self.offices:
            office.close()
        for server in self.servers:
            server.close(grace_s=0.0)


@contextlib.contextmanager
def workers(lane: str, security: Security = PLAIN) -> Iterator[Workers]:
    """Three workers, which have all begun step 3."""
    found = Workers(lane, security)
    try:
        for index in range(STAGES):
            found.begin(index)
        yield found
    finally:
        found.close()
