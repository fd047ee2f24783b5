"""Ends a task when its launcher dies, which closes an inherited pipe."""

from __future__ import annotations

import logging
import os
import signal
import threading

log = logging.getLogger("shardline.host.lifeline")

GRACE_S = 10.0
EXIT_CODE = 128 + signal.SIGTERM


def watch(fd: int, *, grace_s: float = GRACE_S) -> threading.Thread:
    """End this process when the other end of the pipe `fd` closes.

    It first sends itself SIGTERM, and exits with code 143 if it is still running grace_s seconds later. The launcher
    never writes to the pipe.
    """
    os.set_inheritable(fd, False)

    def wait() -> None:
        try:
            while os.read(fd, 1):
                pass
        except OSError as error:
            # Without a readable pipe the launcher's death can't be noticed; ending because of that would kill a healthy
            # task.
            log.warning(
                "the launcher's pipe %d can't be read (%s): this task will not end with the launcher",
                fd,
                error.strerror,
            )
            return
        log.warning("the launcher has ended: ending too")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(grace_s)
        os._exit(EXIT_CODE)

    thread = threading.Thread(target=wait, name="lifeline", daemon=True)
    thread.start()
    return thread
