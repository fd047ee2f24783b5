"""One worker or one ps of push_pull.py: the library as sessions use it, without a chief."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.process import ContenderError
from shardline.client.api.workplace import Ties, Wishes, make_trainer
from shardline.client.exchange.shard_exchange import Observer, Restart
from shardline.client.step.trainer import Trainer, WorkerMethods
from shardline.cluster import ClusterSpec
from shardline.codecs import keep_whole, of
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import JobView
from shardline.core.placement import Placement
from shardline.core.plan import Plan, make_plan
from shardline.core.settings import Settings
from shardline.core.spec import ConsistencySpec, JobSpec, ScheduleSpec, TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError
from shardline.lanes.base import Lane
from shardline.lanes.negotiated import open_lane
from shardline.rpc.channel import Peers
from shardline.rpc.client import PsControl
from shardline.rpc.messages.configuration import Configuration
from shardline.security import Security
from shardline.update import rule

if TYPE_CHECKING:
    from benchmarks.push_pull import Work

ROW = 1024
LOCATE_S = 60.0
TIMEOUTS = Timeouts(total_s=120.0)


def security_of(tls: Path | None) -> Security:
    """TLS with the certificate of a folder as its own CA, or none."""
    if tls is None:
        return Security()
    return Security(tls_cert=tls / "cert.pem", tls_key=tls / "key.pem", tls_ca=tls / "cert.pem")


def open_lanes(work: Work, view: JobView, peers: Peers, index: int, fallbacks: list[str]) -> dict[int, Lane]:
    """The lanes of one worker, by shard: the one place here that makes lanes."""
    spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": tuple(place.address for place in view.placement)})
    config = RoleConfig(
        role="worker", index=index, cluster=spec, timeouts=TIMEOUTS, security=security_of(work.tls), lane=work.lane
    )
    return {
        place.shard: open_lane(
            config,
            peers.get(place.task, place.address),
            place.shard,
            view.plan.shards[place.shard],
            on_fallback=lambda lane, reason: fallbacks.append(f"{lane}: {reason}"),
        )
        for place in view.placement
    }


def tensor_specs(work: Work) -> tuple[TensorSpec, ...]:
    """The tensors of a run: all alike, or of sizes spread evenly over a range."""
    if work.kilobytes is not None:
        low, high = work.kilobytes
        last = max(1, work.tensors - 1)
        sizes = [low + (high - low) * number / last for number in range(work.tensors)]
        return tuple(
            TensorSpec(name=f"t{number}", shape=(max(1, int(size * 1e3 / 4)),), dtype="float32")
            for number, size in enumerate(sizes)
        )
    rows = max(1, int(work.megabytes * 1e6 / 4 / ROW / work.tensors))
    return tuple(TensorSpec(name=f"t{i}", shape=(rows, ROW), dtype="float32") for i in range(work.tensors))


def configuration(work: Work, plan: Plan, placement: tuple[Placement, ...], shards: tuple[int, ...]) -> Configuration:
    """What one ps is told."""
    return Configuration(
        job="bench",
        timeline=1,
        plan=plan,
        shards=shards,
        rule=rule(work.optimizer, groups=({"lr": 0.1},)),
        schedule=ScheduleSpec(),
        consistency=ConsistencySpec(),
        replicas=work.workers,
        cut_every=0,
        placement=placement,
        codec=work.codec,
        codec_down=work.codec_down,
        activate=True,
    )


def worker(work: Work, addresses: list[str], index: int) -> dict[str, Any]:
    """Be worker `index`: worker/0 configures the servers and sends first values. Returns its figures."""
    torch.set_num_threads(1)
    codecs = of(Settings(codec=work.codec, codec_down=work.codec_down))
    specs = keep_whole(codecs, tensor_specs(work))
    plan = make_plan(specs, work.ps, shares=work.shares or None)
    placement = tuple(Placement(shard=s, task=f"ps/{s}", address=address) for s, address in enumerate(addresses))
    job = JobSpec(
        name="bench",
        tensors=specs,
        rule=rule(work.optimizer, groups=({"lr": 0.1},)),
        codec=work.codec,
        codec_down=work.codec_down,
        replicas=work.workers,
    )
    view = JobView(job=job, plan=plan, placement=placement, timeline=1)
    generator = torch.Generator().manual_seed(index)
    values = {spec.name: torch.zeros(spec.shape) for spec in specs}
    gradients = {spec.name: torch.randn(spec.shape, generator=generator) * 1e-3 for spec in specs}
    idle = idle_mb()
    security = security_of(work.tls)
    controls = [
        PsControl(place.task, place.address, TIMEOUTS, term=0, chief_uuid="", security=security) for place in placement
    ]
    peers = Peers(TIMEOUTS, security)
    fallbacks: list[str] = []
    lanes = open_lanes(work, view, peers, index, fallbacks)
    trainer = make(view, values, lanes, index, zero_copy=work.zero_copy)
    try:
        # Idempotent, so every worker says it, and none has to wait for worker/0's word that it was said.
        for control, place in zip(controls, placement, strict=True):
            control.configure(configuration(work, plan, placement, (place.shard,)))
        if index == 0:
            trainer.initialize()
        _locate(trainer, index)
        if work.zero_copy:
            gradients = in_shared_memory(trainer, gradients)
        seconds, cpu_s = measure(trainer, work, index, gradients)
        check(trainer.step, work)
        return {
            "seconds": seconds,
            "cpu_s_per_step": cpu_s,
            "bytes": sum(shard.nbytes for shard in plan.shards),
            "lane": ", ".join(sorted({lane.name for lane in lanes.values()})),
            "fallbacks": fallbacks,
            "idle_mb": idle,
            **usage(),
        }
    finally:
        trainer.close()
        for control in controls:
            control.close()
        peers.close()


def paced_worker(work: Work, address: str, index: int, *, seconds: float, pace: float) -> dict[str, Any]:
    """Be worker `index` of an asynchronous job on one server: push at a pace, in pushes a second, and pull."""
    torch.set_num_threads(1)
    specs = tensor_specs(work)
    plan = make_plan(specs, 1)
    placement = (Placement(shard=0, task="ps/0", address=address),)
    terms = ConsistencySpec(mode="async")
    job = JobSpec(name="bench", tensors=specs, rule=rule("SGD", groups=({"lr": 0.1},)), consistency=terms)
    view = JobView(job=job, plan=plan, placement=placement, timeline=1)
    values = {spec.name: torch.zeros(spec.shape) for spec in specs}
    gradients = {spec.name: torch.full(spec.shape, 1e-3) for spec in specs}
    control = PsControl("ps/0", address, TIMEOUTS, term=0, chief_uuid="")
    peers = Peers(TIMEOUTS)
    fallbacks: list[str] = []
    lanes = open_lanes(work, view, peers, index, fallbacks)
    trainer = make(view, values, lanes, index)
    pause = threading.Event()
    try:
        control.configure(replace(configuration(work, plan, placement, (0,)), consistency=terms, replicas=1))
        if index == 0:
            trainer.initialize()
        _locate(trainer, index)
        pushes, staleness, slowest_s = 0, 0, 0.0
        began_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + seconds:
            trainer.contribute(0, gradients, keep=True)
            figures = trainer.finish()
            pushes += 1
            staleness = max(staleness, figures.staleness)
            slowest_s = max(slowest_s, time.monotonic() - now_s)
            pause.wait(max(0.0, now_s + 1 / pace - time.monotonic()))
        if fallbacks:
            raise ContenderError("; ".join(fallbacks))
        return {
            "pushes": pushes,
            "staleness_max": staleness,
            "slowest_s": slowest_s,
            "lane": trainer.exchange.lanes[0].name,
        }
    finally:
        trainer.close()
        control.close()
        peers.close()


def make(
    view: JobView, values: Mapping[str, torch.Tensor], lanes: Mapping[int, Lane], index: int, *, zero_copy: bool = False
) -> Trainer:
    """A trainer straight to the servers."""
    ties = Ties(
        who=Identity(f"worker/{index}"),
        index=index,
        lanes=lanes,
        timeouts=TIMEOUTS,
        observer=Observer(),
    )
    return make_trainer(view, WorkerMethods(view.job, values), ties, Wishes(zero_copy=zero_copy))


def in_shared_memory(trainer: Trainer, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and gradients in the segments, as a session has them that was asked for zero copies.

    Raises ContenderError where one of them can't lie there: a copy is not what this run is about.
    """
    views = {name: trainer.gradient_view(name) for name in gradients}
    missing = [name for name, view in views.items() if view is None]
    if missing:
        raise ContenderError(
            f"{len(missing)} of {len(views)} tensors can't lie in shared memory, such as {missing[0]!r}"
        )
    found = {name: view for name, view in views.items() if view is not None}
    for name, view in found.items():
        view.copy_(gradients[name])
    return found


def measure(
    trainer: Trainer, work: Work, index: int, gradients: Mapping[str, torch.Tensor]
) -> tuple[list[float], float]:
    """Seconds of each step after the warm-up, and processor seconds of one."""
    seconds = []
    cpu_s = time.process_time()
    for number in range(work.warmup + work.steps):
        if number == work.warmup:
            cpu_s = time.process_time()
        start_s = time.perf_counter()
        # Kept as they are, as a session does: the step returns when they are acknowledged.
        trainer.contribute(index, gradients, keep=True)
        trainer.finish()
        if number >= work.warmup:
            seconds.append(time.perf_counter() - start_s)
    return seconds, (time.process_time() - cpu_s) / work.steps


def check(step: int, work: Work) -> None:
    """Fail unless the servers closed as many steps as were asked for."""
    if step != work.warmup + work.steps:
        raise ContenderError(f"the servers are at step {step} after {work.warmup + work.steps} steps")


def _locate(trainer: Trainer, index: int) -> None:
    """Find the servers' step; worker/0 may still be sending first values."""
    end_s = time.monotonic() + LOCATE_S
    pause = threading.Event()
    while True:
        # An exchange that failed has interrupted the rest of itself.
        trainer.exchange.arm()
        try:
            trainer.locate([index], 1)
            return
        except (Restart, ShardlineError) as error:
            if time.monotonic() > end_s:
                raise ContenderError(f"worker/{index}: the servers were not ready in {LOCATE_S} s: {error}") from error
            pause.wait(0.05)


class Server:
    """A ps of its own, serving."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.address: str = process.start()

    def planned_mb(self) -> float:
        """The sum that it printed at start, but for cuts, which nobody asks for here; in MB."""
        store = self._process.store
        if store.configuration is None:
            return 0.0
        plan = store.memory_plan(store.configuration)
        return round(sum(size for kind, size in plan.items() if kind != "cuts") / 1e6, 3)

    def close(self) -> None:
        """Stop serving."""
        self._process.close()


def start_server(address: str, index: int, tls: Path | None) -> Server:
    """Serve at an address."""
    from shardline_ps.service import PsProcess

    spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",) * index + (address,)})
    # A benchmark's network is its own.
    config = RoleConfig(role="ps", index=index, cluster=spec, security=security_of(tls), insecure_bind=True)
    return Server(PsProcess(config))


def idle_mb() -> float:
    """Resident memory at this moment, in MB."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
    return round(int(line.split()[1]) / 1024, 1)


def usage() -> dict[str, float]:
    """Processor seconds and highest resident memory of this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": own.ru_utime + own.ru_stime, "peak_mb": round(own.ru_maxrss / 1024, 1)}
