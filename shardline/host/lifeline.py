"""A task ends when the launcher that started it dies: the end of an inherited pipe says so."""

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

    It is asked first, by SIGTERM to itself, and ended with exit code 143 when it is still there grace_s seconds later.
    The launcher never writes into the pipe.
    """
    os.set_inheritable(fd, False)

    def wait() -> None:
        try:
            while os.read(fd, 1):
                pass
        except OSError as error:
            # Without a readable pipe the launcher's death can't be seen; ending for that would kill a healthy task.
            log.warning("the launcher's pipe %d can't be read (%s): this task won't end with it", fd, error.strerror)
            return
        log.warning("the launcher is gone: ending")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(grace_s)
        os._exit(EXIT_CODE)

    thread = threading.Thread(target=wait, name="lifeline", daemon=True)
    thread.start()
    return thread
