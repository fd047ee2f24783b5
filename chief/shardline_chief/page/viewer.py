"""`shardline page`: the page of a run without its chief, served from the run's files until Ctrl-C."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from shardline.errors import UsageError
from shardline.security import Security
from shardline_chief.page.history import History
from shardline_chief.page.run_files import RunFiles
from shardline_chief.page.server import PageServer

log = logging.getLogger("shardline_chief.page")

LOOK_S = 1.0
"""Seconds between two looks at the files."""


def serve(run: Path, port: int, security: Security) -> int:
    """Serve the page of the run in a folder on this machine, at a port (0 = a free one); returns the exit code.

    With a token in `security`, only to those who have it.

    Raises UsageError if the folder has no run, or the port is taken.
    """
    history = History()
    page = PageServer(f"127.0.0.1:{port}", security, history, remedy="use another --port (0 = a free one)")
    try:
        found = RunFiles(run.absolute(), history, page.passes)
        page.show(found.status(time.time()), written=found.written())
        print(f"page: {page.start()}", flush=True)
        look = threading.Event()
        while not look.wait(LOOK_S):
            _look(found, page)
    except KeyboardInterrupt:
        return 0
    finally:
        page.close()
    return 0


def _look(found: RunFiles, page: PageServer) -> None:
    try:
        page.show(found.status(time.time()), written=found.written())
    except UsageError as error:
        # The folder may be on a disk that is away for a while.
        log.warning("%s", error)
