"""The evaluator's process: join, score every checkpoint once it is committed, exit when the job ends."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardline.config import RoleConfig
from shardline.core.orders import Orders, Phase
from shardline.errors import (
    FencedError,
    JobExitError,
    ProtocolError,
    ShardlineError,
    UnreachableError,
    UsageError,
    telling,
)
from shardline.host.process import Termination, resolve_device, tell_ready
from shardline.job import Job, load_job
from shardline.model import load_values
from shardline.nn import FetchRows
from shardline.observability.metrics import Metrics
from shardline.rpc.joining import Applicant
from shardline.rpc.limits import MAX_SENTENCE
from shardline.rpc.link import BeatFacts, ChiefLink
from shardline.rpc.server import RpcServer
from shardline.rpc.usage import UsageMeter


@dataclass(frozen=True, kw_only=True)
class Score:
    """Outcome of scoring one checkpoint. failure: why it could not be scored; empty on success."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""


def next_step(orders: Orders, scored: int) -> int | None:
    """The checkpoint to score now, or None if there is none beyond `scored`.

    Orders name only committed checkpoints. Those that are overtaken while an earlier one is being scored are skipped,
    the newest never is, so the last one of the job is always scored.
    """
    if orders.phase is Phase.ENDED or orders.checkpoint_step <= scored:
        return None
    return orders.checkpoint_step


def score(job: Job, model: nn.Module, step: int, tensors: Mapping[str, torch.Tensor], rows: FetchRows) -> Score:
    """Score one checkpoint. An exception in `evaluate` becomes a message: it must not end the training.

    Raises JobExitError if `evaluate` exits the process, which ends this task only.
    """
    start_s = time.monotonic()
    try:
        load_values(model, tensors, rows)
        metrics = job.score(model)
    except JobExitError:
        raise
    except ShardlineError as error:
        return Score(step=step, failure=str(error), seconds=time.monotonic() - start_s)
    except Exception as error:
        return Score(
            step=step,
            failure=f"evaluate(model) raised {type(error).__name__}: {error}",
            seconds=time.monotonic() - start_s,
        )
    return Score(step=step, metrics=metrics, seconds=time.monotonic() - start_s)


log = logging.getLogger("shardline_evaluator")


def run(config: RoleConfig) -> int:
    """Score checkpoints until the chief ends the job; returns the exit code."""
    termination = Termination()
    termination.install()
    if config.job is None:
        raise UsageError("an evaluator needs --job JOB.py, which defines the model and `evaluate`")
    job = load_job(config.job, config.overrides, workers=config.cluster.num("worker"), mirrored=config.with_ps)
    device = resolve_device(config.device, config.gpu_memory_fraction, neighbours=config.neighbours)
    torch.set_num_threads(job.threads)
    model = job.build_model()
    spec = job.spec(model)
    if job.evaluate is None:
        log.warning("the job has no `evaluate`, so there is nothing to score")
    metrics = Metrics("evaluator", config.task)
    metrics_address = metrics.serve(config.host, config.metrics_port, config.security, device=str(device))
    # No task calls an evaluator; it serves health and reflection, as every task does.
    server = RpcServer(
        config.cluster.address(config.task), name=config.task, security=config.security, bind=config.bind
    )
    address = server.start()
    tell_ready(config.ready_fd, address)
    link = ChiefLink(
        config.cluster.chief,
        config.timeouts,
        Applicant(
            role="evaluator",
            index=config.index,
            address=address,
            metrics_address=metrics_address,
            device=str(device),
            job=spec,
        ),
        facts=BeatFacts(usage=UsageMeter(str(device)).read),
        security=config.security,
    )
    try:
        termination.call(link.cancel_join)
        if not link.join():
            log.info("asked to end before the chief admitted this evaluator")
            return 0
        log.info("joined as %s, metrics at %s", link.task, metrics.url)
        with telling(functools.partial(_tell, link)):
            code = Evaluator(link, job, model.to(device), metrics, termination).run()
        return (code or link.orders.exit_code) if config.exit_with_job else code
    finally:
        link.close()
        server.close(grace_s=0.5)
        metrics.close()


def _tell(link: ChiefLink, error: ShardlineError) -> None:
    """Report an error to the chief that would end a restarted evaluator too."""
    if isinstance(error, UsageError):
        link.fail(str(error), error.exit_code)


class Evaluator:
    def __init__(self, link: ChiefLink, job: Job, model: nn.Module, metrics: Metrics, termination: Termination) -> None:
        self._link = link
        self._job = job
        self._model = model
        self._metrics = metrics
        self._termination = termination
        self._scored = -1

    def run(self) -> int:
        """Run until the job ends, or this task is asked to end; returns the exit code."""
        # Wakes the wait below; a running evaluation is finished first.
        self._termination.call(self._link.leave)
        while True:
            self._link.wait(self._has_work)
            orders = self._link.orders
            if orders.phase is Phase.ENDED:
                log.info("the job has ended: %s", orders.reason or "done")
                return 0
            if self._termination.event.is_set():
                log.info("asked to end: the job continues without this evaluator")
                # Leaving before the chief has agreed would look like a death, and delay the end of the job.
                self._link.wait(lambda o: o.fenced or o.phase is Phase.ENDED, self._link.timeouts.suspect_s)
                return 0
            step = next_step(orders, self._scored)
            if step is not None:
                self._one(step)

    def _has_work(self, orders: Orders) -> bool:
        ended = orders.phase is Phase.ENDED or self._termination.event.is_set()
        return ended or next_step(orders, self._scored) is not None

    def _one(self, step: int) -> None:
        result = self._fetch_and_score(step)
        if result is None:
            return
        self._scored = step
        self._link.set_step(step)
        outcome = "failed" if result.failure else "scored"
        self._metrics.counter("shardline_evaluations_total", outcome=outcome).inc()
        self._metrics.histogram("shardline_evaluation_seconds").observe(result.seconds)
        self._metrics.gauge("shardline_step").set(step)
        for name, value in result.metrics.items():
            self._metrics.gauge("shardline_evaluation_metric", metric=name).set(value)
        if result.failure:
            log.error("step %d: %s", step, result.failure)
        best = self._report(result)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        log.info("step %d: %s%s", step, shown or "not scored", " (best so far)" if best else "")

    def _report(self, result: Score) -> bool:
        """Report a score; returns whether it is the best so far. One that the chief refuses ends nothing."""
        link, step, failure = self._link, result.step, result.failure[:MAX_SENTENCE]
        try:
            return link.ask(lambda: link.client.report(link.identity, step, result.metrics, result.seconds, failure))
        except ProtocolError as error:
            log.error("step %d: %s", step, error)
            if failure:
                return False
            # The chief may be waiting for this one.
            return self._report(Score(step=step, failure=str(error), seconds=result.seconds))

    def _fetch_and_score(self, step: int) -> Score | None:
        """None if a newer checkpoint replaced this one meanwhile."""
        if self._job.evaluate is None:
            return Score(step=step)
        try:
            found = self._link.ask(lambda: self._link.client.fetch_parameters(step))
        except (FencedError, UnreachableError):
            raise
        except ProtocolError as error:
            if self._link.orders.checkpoint_step > step:
                log.info("step %d was deleted, continuing with a newer one: %s", step, error)
                self._scored = step
                return None
            return Score(step=step, failure=str(error))
        except ShardlineError as error:
            return Score(step=step, failure=str(error))

        def rows(table: str, ids: torch.Tensor) -> torch.Tensor:
            return self._link.ask(lambda: self._link.client.fetch_rows(step, table, ids))

        return score(self._job, self._model, step, found.tensors, rows)
