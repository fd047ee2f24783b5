"""A worker's membership in a job: it joins the cluster, begins, says why it can't go on, and leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from shardline import cadence as cadences, plugins
from shardline.client.api.stateful import HasState, Stateful
from shardline.client.api.step_loop import StepLoop
from shardline.client.exchange.shard_exchange import Interrupted, Restart
from shardline.config import RoleConfig
from shardline.core.orders import Orders, Phase
from shardline.core.spec import JobSpec
from shardline.errors import (
    FencedError,
    InternalError,
    JobError,
    JobExitError,
    ProtocolError,
    ShardlineError,
    TaskLostError,
    UnreachableError,
    UsageError,
    as_error,
    job_error,
    where_raised,
)
from shardline.host.process import Termination, resolve_device, torch_threads
from shardline.observability.line_rate import links, meter_line
from shardline.observability.metrics import Metrics
from shardline.rpc.joining import Applicant
from shardline.rpc.link import BeatFacts, ChiefLink
from shardline.rpc.usage import UsageMeter

log = logging.getLogger("shardline.client")


class JobMember:
    """One process in a job, from its start to its end; the base of Session, which trains. Used by one thread."""

    def __init__(self, config: RoleConfig, termination: Termination) -> None:
        self.config = config
        self.device = resolve_device(config.device, config.gpu_memory_fraction, neighbours=config.neighbours)
        self._termination = termination
        self.metrics = Metrics("worker", config.task)
        self._leaves = threading.Event()
        self._loop = StepLoop(config, self.metrics, self._leaves.is_set)
        self.owner = self._loop.owner
        self._link: ChiefLink | None = None
        self.attached = False
        """True once the worker has joined with a model."""
        self.beside = contextlib.ExitStack()
        """Closed with the session: the servers of a script that trains alone, or this worker's own."""

    @property
    def link(self) -> ChiefLink:
        """Link to the chief. Raises UsageError before attach()."""
        return self._loop.runner.now.link

    def stateful(self, loader: HasState) -> Stateful:
        """Keep a loader's state by step; next() of what this returns is the open step's batch, epoch after epoch.

        loader: torchdata's StatefulDataLoader, or anything with state_dict and load_state_dict. Call it after attach(),
        before a loop over steps(), and draw before optimizer.step(). After a restart, --resume or a rollback the loader
        stands where it stood before that step. Its states are in the job's checkpoints; the newest ones are files in
        the run's folder (SHARDLINE_OUT).

        Raises UsageError for what has no state and for jobs in which steps can't be made again.
        """
        job = self._loop.trainer.job
        if not isinstance(loader, HasState):
            raise UsageError(
                f"stateful() takes a loader with state_dict() and load_state_dict(), such as torchdata's "
                f"StatefulDataLoader; {type(loader).__name__} has none"
            )
        if not self._loop.runner.now.assigned or self._loop.place.wishes.overlap or cadences.of(job).rounds.ticks > 1:
            raise UsageError(
                "stateful() needs consistency 'sync', cadence 'every-step' and no overlap: elsewhere a step may have "
                "left before the state of the next one is kept"
            )
        number, out = len(self._loop.stateful), self.config.out
        folder = out.absolute() / "stateful" / f"{self.config.task.replace('/', '-')}-{number}" if out else None

        def chief(step: int, state: str) -> str:
            link = self.link
            try:
                if state:
                    return link.client.loader(link.identity, number, step, state)
                return link.ask(lambda: link.client.loader(link.identity, number, step))
            except (ProtocolError, UsageError) as error:
                # A chief of the version before keeps none.
                log.warning("the loader's state before step %d is in the run's folder alone: %s", step, error)
                return ""

        self._loop.stateful.append(Stateful(loader, folder, chief))
        return self._loop.stateful[-1]

    def _join(self, spec: JobSpec) -> None:
        """Get admitted by the chief, and begin. Raises SystemExit if this process is asked to end first."""
        own = OwnPs(self.config, self._termination) if self.config.is_ps_too else None
        address = self._loop.place.serve()
        metrics_address = self.metrics.serve(
            self.config.host, self.config.metrics_port, self.config.security, device=str(self.device)
        )
        meter_line(self.metrics, address)
        applicant = Applicant(
            role=self.config.role,
            index=self.config.index,
            address=address,
            metrics_address=metrics_address,
            device=str(self.device),
            job=spec,
            machine=machine_fingerprint(spec.threads, str(self.device)),
        )
        place = self._loop.place
        link = self._link = ChiefLink(
            self.config.cluster.chief,
            self.config.timeouts,
            applicant,
            on_orders=self._loop.runner.now.ordered,
            facts=BeatFacts(
                traffic=place.traffic,
                usage=UsageMeter(str(self.device)).read,
                links=lambda: links(self.metrics),
                passes=place.partners.passes if place.partners else None,
                figures=place.figures,
            ),
            cancelled=self._termination.event,
            security=self.config.security,
        )
        self._loop.runner.now.joined = link
        link.client.peer.on_retry = self.metrics.counter("shardline_rpc_retries_total", peer="chief").inc
        for callback in (self._asked_to_end, link.cancel_join):
            self._termination.call(callback)
        if not link.join():
            log.info("asked to end before the chief admitted this worker")
            self.shutdown()
            raise SystemExit(0)
        log.info("joined as %s, incarnation %#x, metrics at %s", link.task, link.incarnation, self.metrics.url)
        if own is not None:
            self.beside.callback(lambda: own.close(ended=link.orders.phase is Phase.ENDED))
        self._begin()

    def _begin(self) -> None:
        """After admission: send initial values if ordered to, wait for the start, find the step and pull its values."""
        link, place = self.link, self._loop.place
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
                self._loop.trainer.initialize()
            except (Restart, Interrupted) as error:
                log.info("initial values: %s; asking again", error)
            else:
                initialized.add(orders.timeline)
        if place.view is not None and place.view.job.script:
            found = self._loop.runner.find_again(self._loop.trainer.exchange.timeouts.total_s)
            if found and not self._loop.runner.now.assigned:
                self._loop.runner.stepper.todo = {0}
            self._loop.barrier.begin(self._loop.trainer.step, begun=False)

    def _asked_to_end(self) -> None:
        if (
            self.config.is_ps_too
            and self._link is not None
            and self._link.orders.phase in (Phase.RUNNING, Phase.STOPPING)
        ):
            # Its ps asks the chief to end the job, whose last step needs this worker.
            return
        log.info("asked to end: returning the replicas of this worker to the chief")
        self._leaves.set()
        self._loop.place.keep_values()
        if self._link is not None:
            self._link.leave()

    def fail(self, error: ShardlineError) -> None:
        """Report to the chief why this worker can't continue."""
        if self._link is not None and not self.owner.elsewhere and not isinstance(error, FencedError):
            self._loop.place.fail(self._link, error)

    def close(self) -> None:
        """Report to the chief that this worker has done its part, wait for the job's end, free everything.

        Raises JobError if a backward pass sent gradients and no step() followed; the job ends with this error.
        """
        if self._loop.closed or self.owner.elsewhere:
            return
        self._loop.closed = True
        try:
            if self._link is not None and self.attached and not self._link.orders.fenced:
                self._loop.trainer.check_stepped()
                self._loop.runner.settle()
                self._loop.runner.finish_part()
                # A script's job ends when all its workers have finished; this process is not needed after that, unless
                # it has a share of the parameters.
                limit_s = None if self.config.is_ps_too else self.config.timeouts.total_s
                self._link.wait(lambda o: o.phase is Phase.ENDED or o.fenced, timeout_s=limit_s)
                if code := self._link.orders.exit_code:
                    log.error("the job has ended with exit code %d: %s", code, self._link.orders.reason)
        except JobError as error:
            self.fail(error)
            raise
        except (UnreachableError, FencedError) as error:
            log.warning("%s", error)
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Free sockets and threads without reporting to the chief."""
        if self.owner.elsewhere:
            return
        self.owner.ended = self._loop.closed = True
        if self._loop.profile is not None:
            self._loop.profile.end()
        if self._loop.runner.lent is not None:
            self._loop.runner.lent.close()
        if self._link is not None:
            self._link.close()
        self._loop.place.tables.close()
        self._loop.place.close()
        self.metrics.close()
        self.beside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        if isinstance(error, SystemExit):
            self.fail(JobExitError(f"the script called sys.exit({error.code!r}){where_raised(error)}"))
        elif isinstance(error, ShardlineError):
            self.fail(error)
        elif isinstance(error, Exception):
            self.fail(job_error("the script", error))
        self.shutdown()


class OwnPs:
    """The ps in a worker's own process (--with-ps), which has the worker's share of parameters and optimizer state.

    Serves on threads of this process until the chief ends the job. Its failure ends the process, as a ps's does.
    """

    def __init__(self, config: RoleConfig, termination: Termination) -> None:
        self._config, self._termination = replace(config, role="ps", metrics_port=0, ready_fd=None), termination
        # A ps sets the number of threads with which torch computes.
        with torch_threads(torch.get_num_threads()):
            self._ps: Any = plugins.installed("shardline.servers", "ps", "a ps in a worker's process")(self._config)
        self._thread = threading.Thread(target=self._run, name=self._config.task, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            code = self._ps.run(self._termination)
            if code and self._termination.event.is_set():
                # The chief did not end the job in time.
                os._exit(code)
        except Exception as error:
            found = as_error(error) or InternalError(f"{type(error).__name__}: {error}")
            log.error("%s: %s", self._config.task, found)
            os._exit(found.exit_code)

    def close(self, *, ended: bool) -> None:
        """Wait until it has heard of the job's end. Where the worker failed before that, it ends with the process."""
        if ended:
            self._thread.join(self._config.timeouts.total_s)
            if self._thread.is_alive():
                log.warning("%s has not heard of the job's end, and ends with this process", self._config.task)


def machine_fingerprint(threads: int, device: str) -> dict[str, str]:
    """Facts about this machine that affect the last bits of a gradient (PROTOCOL 1.10, E)."""
    facts = {
        "torch": torch.__version__,
        "cpu_vendor": cpu_vendor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
        "device": device.split(":")[0],
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name(torch.device(device))
    return facts


def cpu_vendor() -> str:
    """Vendor of the processor according to Linux, else what Python reports."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("vendor_id", "CPU implementer")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
