"""`shardline page`: the page of a run without its chief, served from the run's files until Ctrl-C."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardline.checkpoint import committed_steps
from shardline.checkpoint.manifest import step_folder
from shardline.core.status import Awaited, ChiefStatus, ShardStatus, Standstill, TaskStatus
from shardline.errors import UsageError
from shardline.host import files
from shardline.host.run_lock import ever_begun
from shardline.security import Security
from shardline_chief.io.journal import read_entries
from shardline_chief.io.reporter import TRACE, Shelf, mean
from shardline_chief.io.summary import facts, scores
from shardline_chief.page.board import Passes
from shardline_chief.page.history import History
from shardline_chief.page.past import Past
from shardline_chief.page.server import PageServer
from shardline_chief.rules.replay import Remembered, replay
from shardline_chief.rules.state.membership import Member

SILENT_S = 10.0
"""Seconds without a line after which the chief counts as gone: while it trains, it writes one every two seconds."""
FILE_BYTES = 64 << 20
"""Most bytes of the trace."""
REST = 10.0
"""A file that grows is read again after this many times as long as reading it took."""
MOST_NAMED = 4
"""Most runs in a folder that an error names."""


class RunFiles:
    def __init__(self, out: Path, history: History, passes: Passes) -> None:
        """history, passes: filled with what the files have. Raises UsageError if the folder has no run."""
        check_run(out)
        self._out = out
        self._past = Past(history, out / "logs")
        self._passes = passes
        self._shelf = Shelf()
        self._known = Remembered()
        self._seen: dict[Path, tuple[int, int]] = {}
        """Time in ns and bytes of each file when it was last read."""
        self._rests: dict[Path, float] = {}
        """Until when each file is not read again, as Unix time."""

    def status(self, now: float) -> ChiefStatus:
        """The run's status at a Unix time. Raises UsageError if the journal can't be read."""
        self._past.read()
        journals = (self._out / "chief").glob("journal-*.jsonl")
        if newest := max(journals, key=lambda path: (len(path.name), path.name), default=None):
            self._read_if_new(newest, now, self._read_journal)
        self._read_if_new(self._out / TRACE, now, self._read_trace)
        for step in set(committed_steps(self._out / "checkpoints")) - {one.step for one in self._shelf.list(now)}:
            self._shelf.put(step, self._out / "checkpoints" / step_folder(step))
        known, past = self._known, self._past
        summary = known.summary
        still = self._standstill(now)
        moves = still is None and known.ended is None
        rates = past.rates if moves else {}
        exit_code, reason = known.ended or (0, "")
        seconds = float(past.rates.get("time", 0.0)) - known.began_s if known.began_s and past.rates else 0.0
        return ChiefStatus(
            **facts(known.job),
            **scores(known.metrics, known.best),
            phase=self._phase(),
            step=self._step(),
            done=known.leases.done if known.leases is not None else self._step(),
            first_step=known.first_step,
            loss=past.loss,
            steps_per_s=float(rates.get("steps_per_s", 0.0)),
            push_bytes_per_s=float(rates.get("push_bytes_per_s", 0.0)),
            pull_bytes_per_s=float(rates.get("pull_bytes_per_s", 0.0)),
            seconds=float(summary.get("seconds", max(0.0, seconds))),
            tasks=self._rows(),
            checkpoint_step=known.checkpoint_step,
            checkpoint_path=known.checkpoint_path,
            checkpoints=self._shelf.list(now),
            said=tuple(past.said),
            exit_code=exit_code,
            reason=reason,
            out_dir=str(self._out),
            time=now,
            staleness=mean(past.staleness),
            staleness_max=int(summary.get("staleness", {}).get("max", 0)),
            shard_bytes=self._known.shard_bytes,
            stages=self._passes.figures(),
            standstill=still,
        )

    def written(self) -> float | None:
        """Unix time of the last change; None if it is not known."""
        times = [time_ns / 1e9 for time_ns, _ in self._seen.values()]
        return max(*times, self._past.written(), 0.0) or None

    # Files

    def _read_if_new(self, path: Path, now: float, read: Callable[[Path], None]) -> None:
        try:
            found = path.stat()
        except OSError:
            return
        seen = (found.st_mtime_ns, found.st_size)
        if self._seen.get(path) == seen or now < self._rests.get(path, 0.0):
            return
        began_s = time.monotonic()
        read(path)
        self._seen[path] = seen
        self._rests[path] = now + REST * (time.monotonic() - began_s)

    def _read_journal(self, path: Path) -> None:
        self._known = replay(read_entries(path.parent))

    def _read_trace(self, path: Path) -> None:
        if self._known.job is not None:
            self._passes.read(self._known.job, _json(path))

    # What follows from them

    def _phase(self) -> str:
        known = self._known
        if known.ended is not None:
            return "ended"
        if known.stopping is not None:
            return "stopping"
        if known.active and known.began_s is not None:
            return "running"
        return "init" if known.timeline else "waiting"

    def _step(self) -> int:
        told = self._known.summary.get("steps", self._past.rates.get("step", 0))
        # A job that ended between two lines of the log.
        return max(int(told), self._known.checkpoint_step if self._known.ended is not None else self._known.base_step)

    def _standstill(self, now: float) -> Standstill | None:
        """By the times of the lines; where none was written for a while, the chief itself is awaited."""
        if self._phase() not in ("running", "stopping") or not self._past.rates:
            return None
        told = float(self._past.rates["time"])
        # The later one: a file may be away, and the last line may be of another kind.
        silent_s = now - max(told, self._past.written())
        if silent_s >= SILENT_S:
            why = f"has written nothing to {self._out / 'logs'} since"
            return Standstill(seconds=silent_s, awaited=(Awaited(task="chief/0", why=why),))
        seconds = self._past.motion.still_s(told)
        lost = [row for row in self._rows() if row.state in ("suspect", "dead")]
        if seconds is None:
            return None
        return Standstill(seconds=seconds, awaited=tuple(Awaited(task=row.task, why=row.state) for row in lost))

    def _rows(self) -> tuple[TaskStatus, ...]:
        return tuple(
            TaskStatus(
                task=name,
                state=self._state(name, task),
                incarnation=task.incarnation,
                address=task.address,
                metrics_address=task.metrics_address,
                device=task.device,
                last_heard_s=math.nan,
                step=self._step() if name in self._known.finished else -1,
                shards=self._shards(name),
            )
            for name, task in {**self._known.gone, **self._known.members}.items()
        )

    def _state(self, name: str, task: Member) -> str:
        said_at, said = self._past.lives.get(name, (0.0, ""))
        state = said if said_at >= task.joined else "alive"
        over = name in self._known.gone or self._known.closed
        return "left" if over and state != "dead" else state

    def _shards(self, name: str) -> tuple[ShardStatus, ...]:
        versions = self._known.summary.get("versions", ())
        return tuple(
            ShardStatus(
                shard=place.shard,
                step_min=self._step(),
                version=int(versions[place.shard]) if place.shard < len(versions) else self._step(),
            )
            for place in self._known.placement
            if place.task == name
        )


def check_run(out: Path) -> Path:
    """The folder. Raises UsageError if it has no run."""
    if not out.is_dir():
        raise UsageError(f"{out} is not a folder; give the folder of a run, its --out")
    if ever_begun(out) and any((out / "chief").glob("journal-*.jsonl")):
        return out
    runs = [path for path in sorted(out.iterdir()) if path.is_dir() and ever_begun(path)]
    which = f"such as {', '.join(str(path) for path in runs[-MOST_NAMED:])}" if runs else "its --out"
    raise UsageError(f"{out} contains no run; give the folder of a run, {which}")


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    try:
        found = json.loads(files.read_text(path, FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


log = logging.getLogger("shardline_chief.page")

LOOK_S = 1.0
"""Seconds between two looks at the files."""
MOST_RUNS = 8
"""Most runs of a page: it has as many colours."""


def serve(folders: Sequence[Path], port: int, security: Security) -> int:
    """Serve the page of the run in the first folder, with the curves of those in the others beside its own.

    On this machine, at a port (0 = a free one); returns the exit code. With a token in `security`, only to those who
    have it.

    Raises UsageError if a folder has no run, or the port is taken.
    """
    runs = _named(folders)
    histories = {name: History() for name in runs}
    history, *_ = histories.values()
    several = histories if len(histories) > 1 else None
    remedy = "use another --port (0 = a free one)"
    page = PageServer(f"127.0.0.1:{port}", security, history, runs=several, remedy=remedy)
    try:
        (_, run), *others = runs.items()
        found = RunFiles(run, history, page.passes)
        beside = [Past(histories[name], check_run(folder) / "logs") for name, folder in others]
        _look(found, beside, page)
        print(f"page: {page.start()}", flush=True)
        look = threading.Event()
        while not look.wait(LOOK_S):
            try:
                _look(found, beside, page)
            except UsageError as error:
                # The folder may be on a disk that is away for a while.
                log.warning("%s", error)
    except KeyboardInterrupt:
        return 0
    finally:
        page.close()
    return 0


def _look(run: RunFiles, beside: Sequence[Past], page: PageServer) -> None:
    for past in beside:
        past.read()
    page.show(run.status(time.time()), written=run.written())


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders by the shortest names that tell them apart. Raises UsageError if they are too many."""
    found = list(dict.fromkeys(folder.absolute() for folder in folders))
    if len(found) > MOST_RUNS:
        raise UsageError(f"{len(found)} runs are more than the {MOST_RUNS} that a page shows; leave some out")
    names = [folder.name for folder in found]
    return {folder.name if names.count(folder.name) == 1 else str(folder): folder for folder in found}
