"""The TLS files of a process, read again once they have changed, so that certificates are renewed without a restart.

New connections take what is in use at that moment; open ones keep theirs. There is no thread for it: whoever connects,
accepts or watches looks at the files.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time

from shardline.errors import UsageError
from shardline.tls.content import TlsInUse, TlsPaths, look, moment, read

log = logging.getLogger("shardline.security")

LOOK_S = 1.0
"""Seconds; the files are looked at this often at most."""
WARN_AT = (datetime.timedelta(days=7), datetime.timedelta(days=1), datetime.timedelta(0))
"""Times left to a certificate at which a warning is logged."""


class TlsFiles:
    """Which content of a process's TLS files is in use. Thread-safe.

    Raises UsageError naming the flag and the file if one can't be read or is invalid, or if the certificate is out of
    date. If that happens later, it is logged, and what was in use stays so.
    """

    def __init__(self, paths: TlsPaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._in_use = read(paths)
        self._broken = False
        self._warned: dict[int, int] = {}
        """Warnings that were due at the last one, by a certificate's serial number."""
        self._warn()

    def now(self) -> TlsInUse:
        """What new connections use; the same object until the files have changed."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._looked_s = time.monotonic()
                self._look()
            return self._in_use

    def watch(self) -> None:
        """Log which files have changed or can't be used, and which certificate ends soon; call it every few seconds."""
        self.now()
        with self._lock:
            self._warn()

    def _look(self) -> None:
        try:
            new = self._in_use if look(self._paths) == self._in_use.seen else read(self._paths)
        except UsageError as error:
            if not self._broken:
                log.warning("%s; until that is set right, new connections use the files as they were before", error)
            self._broken = True
            return
        if self._broken or new is not self._in_use:
            until = f", valid until {moment(new.chain[0].not_valid_after_utc)}" if new.chain else ""
            log.info("new connections use %s as read now%s", self._paths.cert or self._paths.ca, until)
        self._in_use, self._broken = new, False

    def _warn(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        for number, certificate in enumerate(self._in_use.chain, 1):
            end = certificate.not_valid_after_utc
            due = warnings_due(end, now)
            if due <= self._warned.get(certificate.serial_number, 0):
                continue
            self._warned[certificate.serial_number] = due
            log.warning(
                "--tls-cert %s: certificate %d in it (%s) %s others refuse new connections: no task can rejoin and no "
                "checkpoint is written; replace it and its --tls-key (shardline certs --renew makes them), and this "
                "task uses the new ones without a restart",
                self._paths.cert,
                number,
                certificate.subject.rfc4514_string(),
                f"expired on {moment(end)};" if now >= end else f"expires on {moment(end)}; after that,",
            )


def warnings_due(end: datetime.datetime, now: datetime.datetime) -> int:
    """How many of the warnings of a certificate's end should have been logged by now."""
    return sum(end - now <= left for left in WARN_AT)
