"""Host names that don't resolve yet: in a cluster manager a name often appears only once its container runs.

gRPC's resolver retries a name less and less often, and may find it half a minute late. So a task waits for a name here,
before gRPC first resolves it.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import socket
import threading
from collections.abc import Callable

from shardline.core.waiting import Waiting
from shardline.errors import UnreachableError
from shardline.host.awake import awake_s

log = logging.getLogger("shardline.rpc")

ASK_EVERY_S = 1.0
"""Longest pause between two queries for an unresolved name, in seconds."""

Resolve = Callable[[str], str]
"""Returns why a name doesn't resolve, or "" if it does. May block for as long as the system's resolver does."""


def unknown_name(host: str) -> str:
    """Why a host name doesn't resolve, such as "Name or service not known"; empty if it does."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        return "it is not a host name"
    except OSError as error:
        # Not only the resolver's own errors: there may be no file descriptor left for the query.
        return error.strerror or str(error) or type(error).__name__
    return ""


def no_address(host: str, cause: str) -> str:
    """The error message for a name that doesn't resolve."""
    return f"the name {host!r} has no address ({cause}); is it right in the cluster spec, and is that host up?"


def is_literal(host: str) -> bool:
    """Whether a host is an IP address, which needs no resolver."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class HostName:
    """A host name that may not resolve yet. Thread-safe.

    whose: owner of that host, such as "ps/0 at ps-0.ps:2222", for messages.
    """

    def __init__(self, host: str, whose: str, *, resolve: Resolve = unknown_name) -> None:
        self.host = host
        self._whose = whose
        self._resolve = resolve
        self._changed = threading.Condition()
        self._found = is_literal(host)
        self._cause: str | None = None
        self._waiting = 0
        self._asking = False
        self._told = False
        self._cancelled = threading.Event()

    def wait(self, wait_s: float) -> bool:
        """Wait until the name resolves, and log meanwhile that it doesn't yet.

        Returns False after cancel(). Raises UnreachableError, which names the host, after wait_s seconds.
        """
        if self._found:
            return True
        start_s = awake_s()
        waiting = Waiting(start_s, start_s + wait_s)
        with self._changed:
            self._waiting += 1
            try:
                while not self._found and not self._cancelled.is_set():
                    now_s = awake_s()
                    if now_s >= waiting.deadline_s:
                        cause = self._cause or "the resolver did not answer"
                        reason = no_address(self.host, cause)
                        raise UnreachableError(f"{self._whose} was not found within {wait_s:.0f} s: {reason}")
                    self._ask()
                    why = f"the name {self.host!r} has no address yet ({self._cause})" if self._cause else ""
                    if sentence := waiting.sentence(now_s, self._whose, why):
                        self._told = True
                        log.warning("%s", sentence)
                    self._changed.wait(waiting.pause_s(now_s))
                return self._found
            finally:
                self._waiting -= 1

    def cancel(self) -> None:
        """End all present and future calls of wait()."""
        self._cancelled.set()
        with self._changed:
            self._changed.notify_all()

    def _ask(self) -> None:
        """Resolve on a thread, since a resolver may take longer than callers wait; the lock is held."""
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask_until_found, name=f"name-{self.host}", daemon=True).start()

    def _ask_until_found(self) -> None:
        while True:
            cause = self._resolve(self.host)
            with self._changed:
                self._found = cause == ""
                self._cause = cause or None
                self._changed.notify_all()
                if self._found and self._told:
                    log.info("the name %r now has an address", self.host)
                if self._found or self._waiting == 0 or self._cancelled.is_set():
                    self._asking = False
                    return
            # Jitter, so that a whole cluster does not query its resolver at the same instant.
            self._cancelled.wait(ASK_EVERY_S * (0.5 + 0.5 * random.random()))


def wait_for_own_name(task: str, host: str, wait_s: float) -> None:
    """Wait until the host that a task listens on has an address. Raises UnreachableError after wait_s seconds."""
    HostName(host, f"the host that {task} should listen at").wait(wait_s)
