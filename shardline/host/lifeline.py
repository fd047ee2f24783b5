"""Ends a task when its launcher dies, which closes an inherited pipe, or when only the user's threads are left."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time

log = logging.getLogger("shardline.host.lifeline")

GRACE_S = 10.0
EXIT_CODE = 128 + signal.SIGTERM
LEFT_S = 2.0
"""Time that threads of the user's code have to end after the task has."""


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


def leave(code: int) -> None:
    """End this process with an exit code if threads of the user's code are still running; returns if there are none.

    Python would wait for them: those of a library that the job file started would keep a task that is done for ever.
    """
    deadline_s = time.monotonic() + LEFT_S
    for thread in left():
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if not (still := left()):
        return
    log.warning("ended without waiting for threads that are not ours: %s", ", ".join(thread.name for thread in still))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def left() -> list[threading.Thread]:
    """Threads that Python would wait for, without those of executors, which end as Python asks them to."""
    pools = sys.modules.get("concurrent.futures.thread")
    pooled = set(pools._threads_queues) if pools is not None else set()
    others = set(threading.enumerate()) - {threading.current_thread(), threading.main_thread()} - pooled
    return sorted((thread for thread in others if not thread.daemon), key=lambda thread: thread.name)
