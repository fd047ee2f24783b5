"""The cluster of a script that names none: a chief and a server on threads of its process."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from concurrent.futures import wait
from pathlib import Path

from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.roles import ROLES
from shardline.rpc.watch import ChiefWatch
from shardline_lab.comparison.served import InProcessCluster, start_tasks

log = logging.getLogger("shardline_lab")


class Alone:
    """A chief and a server in this process. Their folder is a temporary one, which close() removes."""

    def __init__(self) -> None:
        self._timeouts = timeouts = Timeouts()
        self._folder = tempfile.TemporaryDirectory(prefix="shardline-")
        cluster = InProcessCluster(
            role=lambda name: ROLES[name].runner(), out=Path(self._folder.name) / "out", ps=1, timeouts=timeouts
        )
        try:
            self._spec, self._tasks = start_tasks(cluster)
        except BaseException:
            self._folder.cleanup()
            raise
        self.cluster = self._spec.to_json()
        """Text of its cluster.json."""

    def close(self) -> None:
        """End the job, if the session has not, and remove the folder when the chief has written its last file."""
        ended = self._tasks["chief/0"]
        if not ended.done():
            chief = ChiefWatch(self._spec.chief, self._timeouts)
            with contextlib.closing(chief), contextlib.suppress(UnreachableError):
                chief.stop("its script has ended")
        # The server has no files, and ends when the chief says so.
        if wait([ended], self._timeouts.total_s).not_done:
            log.warning("the chief did not end within %g s; its last files are lost", self._timeouts.total_s)
        self._folder.cleanup()
