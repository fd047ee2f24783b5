"""The chief's process: take the folder, begin a term, serve, run the job, write a summary."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import signal
import time
import uuid
from pathlib import Path

from shardline.checkpoint import Checkpoint, CheckpointStore, committed_steps
from shardline.checkpoint.manifest import step_folder
from shardline.cluster import ANY_HOST, ClusterSpec, parse_address
from shardline.config import DEFAULT_OUT, RoleConfig, check_standbys
from shardline.core.shares import uneven_shares
from shardline.core.spec import JobSpec
from shardline.errors import UsageError
from shardline.host.awake import awake_s
from shardline.host.process import Termination, tell_ready
from shardline.host.run_lock import RunLock, unwritable
from shardline.job import load_job
from shardline.observability.metrics import Metrics
from shardline.roles import ROLES
from shardline.rpc.auth.access import CHIEF_AUDIENCE, Access
from shardline.rpc.server import RpcServer
from shardline_chief.io.checkpointer import KEEP_ALL, Checkpointer
from shardline_chief.io.commands import Commander
from shardline_chief.io.control import Control
from shardline_chief.io.journal import Journal, run_to_replay
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.servicer import PLACES, SERVICES, ChiefServicer, register, register_places
from shardline_chief.io.training_process import TrainingProcess
from shardline_chief.page.access import check_exposure
from shardline_chief.page.history import History
from shardline_chief.page.server import PageServer
from shardline_chief.rules.program import Program
from shardline_chief.rules.replay import Remembered, obstacle, replay
from shardline_chief.rules.state.checkpoints import Resume
from shardline_chief.rules.state.settings import ChiefSettings

log = logging.getLogger("shardline_chief")
JOB_SECRET_BYTES = 32


def run(config: RoleConfig) -> int:
    """Run one job to its end; returns the exit code."""
    termination = Termination()
    termination.install()
    spec = _job_spec(config)
    out = (config.out or DEFAULT_OUT).absolute()
    if config.page is not None:
        # Before anything is written.
        check_exposure(config.page, config.security)
    held = RunLock(config.lock_fd) if config.lock_fd is not None else None
    with Journal(out / "chief", held) as journal:
        settings = settings_of(config)
        if settings.replayed is not None and spec is not None:
            # Before the other tasks have joined.
            settings.replayed.check(spec)
        known = replay(journal.read())
        remembered = unfinished_job(config, out, known, spec, settings)
        if done := done_already(known, spec, settings):
            config = dataclasses.replace(config, resume=True)
        resume = checkpoint_to_resume(config, out) if remembered is None else None
        nothing_left = remembered is not None or (done and resume is not None and resume.step == known.checkpoint_step)
        # Before the term begins: a page that can't be served must not turn an earlier run into this one.
        page = open_page(config, known.page if remembered is not None else "")
        if resume is not None and spec is not None:
            # Refuse another job's checkpoint here, before the other tasks have joined.
            resume.compatible(spec)
        settings = dataclasses.replace(
            settings,
            term=journal.begin_term(),
            chief_uuid=uuid.uuid4().hex,
            job_secret=secrets.token_bytes(JOB_SECRET_BYTES),
            before=known.summary if nothing_left else {},
            scores=known.scores_until(resume.step) if resume is not None else {},
        )
        try:
            journal.write(
                "chief",
                uuid=settings.chief_uuid,
                resume=resume.step if resume is not None else None,
                takes_over=remembered.term if remembered is not None else None,
                page=page.address if page is not None else "",
            )
        except OSError as error:
            raise unwritable(out, error) from error
        process = ChiefProcess(config, out, journal, spec, resume, settings, remembered=remembered, page=page)
        try:
            code = process.run(termination)
        finally:
            process.close()
        if not process.resigned:
            # The last action: if killed before it, the next chief announces the end again and returns the same code.
            try:
                journal.write("closed")
            except OSError as error:
                log.warning("the journal in %s can't be closed: %s", journal.folder, error.strerror)
        return code


def open_page(config: RoleConfig, before: str) -> PageServer | None:
    """The page, or None if there is to be none. before: address of the last chief's page; "" = none."""
    if config.page is None:
        return None
    host, port = parse_address(config.page, "--page")
    if port == 0 and before and parse_address(before)[0] == host:
        # Browsers that have it open keep looking there.
        try:
            return PageServer(before, config.security, History())
        except UsageError as error:
            log.info("%s; taking a free port instead", error)
    return PageServer(config.page, config.security, History())


def done_already(known: Remembered, spec: JobSpec | None, settings: ChiefSettings) -> bool:
    """Whether the folder's last job is this one, and finished all its steps: then report that again, as with --resume.

    A chief may die when all is done but its exit; after a restart it should still report how the job went. Another job
    in the same folder, or one that was stopped before its end, is refused as usual.
    """
    if not known.closed or known.ended is None or spec is None or obstacle(known, spec, settings):
        return False
    saved = known.leases.all_done if known.leases is not None else 0 < spec.steps <= known.checkpoint_step
    exit_code, _ = known.ended
    return saved and exit_code == 0 and known.stopping is None


def _job_spec(config: RoleConfig) -> JobSpec | None:
    """The job file's spec; None for a script, whose job comes with its first worker."""
    if config.job is None:
        if config.chief_trains:
            raise UsageError("--chief-trains needs --job: the chief builds the model itself")
        return None
    workers = config.cluster.num("worker")
    job = load_job(config.job, config.overrides, workers=workers, mirrored=config.with_ps)
    return job.spec(job.build_model())


def shares_in(cluster: ClusterSpec, *, chief_trains: bool) -> tuple[float, ...]:
    """The share of each ps by its machine, if cluster.json names the machines; empty if all shares are equal."""
    servers, workers = (cluster.machines(role) for role in ("ps", "worker"))
    workers += [cluster.machine(cluster.chief)] * chief_trains
    return () if ANY_HOST in {*servers, *workers} else uneven_shares(servers, workers)


def settings_of(config: RoleConfig) -> ChiefSettings:
    """Settings from the command line; term, UUID and secret are set later."""
    check_standbys(config.standbys, config.cluster.num("ps"))
    return ChiefSettings(
        term=0,
        chief_uuid="",
        chief_address=config.cluster.chief,
        ps=config.cluster.addresses("ps"),
        workers=config.cluster.num("worker"),
        evaluators=config.cluster.num("evaluator"),
        others={role: config.cluster.num(role) for role in config.cluster.tasks if ROLES[role].optional},
        chief_trains=config.chief_trains,
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        inexact=config.inexact,
        bucket_bytes=config.bucket_mb << 20,
        shards=config.shards,
        shares=shares_in(config.cluster, chief_trains=config.chief_trains),
        own_ps=config.own_ps,
        standbys=config.standbys,
        replayed=run_to_replay(config.replay) if config.replay is not None else None,
        timeouts=config.timeouts,
    )


def unfinished_job(
    config: RoleConfig, out: Path, remembered: Remembered, spec: JobSpec | None, settings: ChiefSettings
) -> Remembered | None:
    """The job that the last chief in this folder left unfinished; None if there is none to continue.

    Raises UsageError if it is not the job being started.
    """
    if not remembered.unfinished:
        return None
    reason = obstacle(remembered, spec, settings)
    if not reason:
        return remembered
    if config.resume or not remembered.timeline:
        log.warning("the unfinished job in %s differs from this one (%s) and is not continued", out, reason)
        return None
    raise UsageError(
        f"{out} contains a job that has not ended, and this one differs ({reason}); start it as before to continue "
        "it, use --resume to continue from its newest checkpoint with the new settings, or choose another --out"
    )


def checkpoint_to_resume(config: RoleConfig, out: Path) -> Checkpoint | None:
    """The checkpoint to resume from; None for a fresh start. Raises UsageError if that would mix two runs."""
    folder = out / "checkpoints"
    steps = committed_steps(folder)
    if not config.resume:
        if steps:
            raise UsageError(
                f"{folder} contains checkpoints of an earlier run, up to step {steps[-1]}; continue with --resume, or "
                "choose another --out"
            )
        return None
    if not steps:
        log.warning("--resume: %s contains no checkpoint yet, so the job starts from the beginning", folder)
        return None
    checkpoint = CheckpointStore(folder, 1).newest_valid()
    for warning in checkpoint.warnings:
        log.error("%s", warning)
    return checkpoint


class ChiefProcess:
    """Everything that the chief runs, wired together."""

    def __init__(
        self,
        config: RoleConfig,
        out: Path,
        journal: Journal,
        spec: JobSpec | None,
        resume: Checkpoint | None,
        settings: ChiefSettings,
        *,
        remembered: Remembered | None = None,
        page: PageServer | None = None,
    ) -> None:
        """remembered: the job to take over from the last chief."""
        self._config = config
        term, chief_uuid = settings.term, settings.chief_uuid
        timeouts = config.timeouts
        self.metrics = Metrics("chief", config.task)
        self._page = page
        shown = (page.history, page.passes) if page is not None else (None, None)
        self._reporter = Reporter(out / "logs", self.metrics, *shown, trackers=config.trackers)
        # With each save comes the job, and how many it keeps: a script's is not known yet.
        store = CheckpointStore(out / "checkpoints", KEEP_ALL)
        for step in store.list():
            self._reporter.shelf.put(step, store.dir / step_folder(step))
        self._commander = Commander(timeouts, term=term, chief_uuid=chief_uuid, resume=resume, security=config.security)
        self._checkpointer = Checkpointer(store, self._commander.connect, term=term)
        point = Resume(resume) if resume is not None else None
        began_s = remembered.began_s if remembered is not None else None
        program = Program(
            settings,
            awake_s(),
            job=spec,
            resume=point,
            remembered=remembered,
            trained_s=max(0.0, time.time() - began_s) if began_s is not None else 0.0,
        )
        self.control = Control(
            program,
            journal=journal,
            commander=self._commander,
            checkpointer=self._checkpointer,
            reporter=self._reporter,
            metrics=self.metrics,
            out=out,
            on_status=page.show if page is not None else None,
        )
        access = Access(config.security, CHIEF_AUDIENCE)
        hosts = {parse_address(text)[0] for texts in config.cluster.tasks.values() for text in texts}
        servicer = ChiefServicer(self.control, store, access, term=term, timeouts=timeouts, hosts=hosts)
        self.server = RpcServer(
            config.cluster.chief,
            register=[register(servicer), register_places(self.control, access)],
            service_names=(*SERVICES, PLACES),
            name="chief",
            security=config.security,
            access=access,
            bind=config.bind,
        )
        self._trainer: TrainingProcess | None = None

    def run(self, termination: Termination) -> int:
        """Serve until the job has ended; returns its exit code."""
        address = self.server.start()
        # Importing torch and the job took time; the tasks' time to join begins now.
        self.control.program.state.begin_to_serve(address, awake_s())
        if self._page is not None:
            self.control.page = self._page.start()
            log.info("page at %s", self.control.page)
        tell_ready(self._config.ready_fd, address)
        self.metrics.serve(self._config.host, self._config.metrics_port, self._config.security)
        log.info("serving at %s, metrics at %s", address, self.metrics.url)
        termination.call(lambda: self._asked_to_end(termination))
        if self._config.chief_trains:
            self._trainer = TrainingProcess(self._config, address, on_exit=self.control.trainer_ended)
        return self.control.run()

    @property
    def resigned(self) -> bool:
        """Whether another chief leads, and the job was left to it."""
        return self.control.resigned

    def _asked_to_end(self, termination: Termination) -> None:
        name = signal.Signals(termination.signal).name if termination.signal is not None else "a signal"
        self.control.request_stop(f"the chief received {name}")

    def close(self) -> None:
        """Close everything, in an order that lets each part finish."""
        if self._trainer is not None:
            self._trainer.close(self._config.timeouts.dead_s)
        self.server.close(grace_s=0.5)
        self._checkpointer.close()
        self._commander.close()
        if self._page is not None:
            self._page.close()
        self._reporter.close()
        self.metrics.close()
