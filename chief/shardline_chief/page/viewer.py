"""`shardline page`: the page of a run without its chief, served from the run's files until Ctrl-C."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shardline.errors import UsageError
from shardline.security import Security
from shardline_chief.page.history import History
from shardline_chief.page.past import Past
from shardline_chief.page.run_files import RunFiles, check_run
from shardline_chief.page.server import PageServer

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
