"""The TLS files of a process, read again once they have changed, so that certificates are renewed without a restart.

New connections take what is in use at that moment; open ones keep theirs. There is no thread for it: whoever connects,
accepts or watches looks at the files.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.errors import UsageError
from shardline.host import files

if TYPE_CHECKING:
    import ssl

    import grpc
    from cryptography import x509

FILE_LIMIT_BYTES = 4 << 20
"""Certificates are smaller; a wrong path (a checkpoint) is refused before it fills the memory."""

Seen = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class TlsPaths:
    """PEM files, each by its flag; None = not given. A certificate has its key."""

    cert: Path | None
    key: Path | None
    ca: Path | None

    def __iter__(self) -> Iterator[Path]:
        return (path for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True, kw_only=True)
class TlsInUse:
    """What TLS files contained when they were read; b"" for those that are not given."""

    paths: TlsPaths
    seen: Seen
    cert: bytes
    key: bytes
    ca: bytes

    def new_client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for a dialling side, with the certificate if there is one. Raises UsageError for invalid files."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.paths.ca is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return self._load(context)

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        """The same for everybody who doesn't change it."""
        return self.new_client_context()

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        """Certificate and CA of an accepting side; the rest is up to Security.server_context()."""
        import ssl

        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    @functools.cached_property
    def channel_credentials(self) -> grpc.ChannelCredentials:
        import grpc

        return grpc.ssl_channel_credentials(self.ca or _system_roots(), self.key or None, self.cert or None)

    @functools.cached_property
    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Certificate and CA of a gRPC server."""
        import grpc

        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca or None)

    @functools.cached_property
    def chain(self) -> Sequence[x509.Certificate]:
        """Certificates in the file, the task's own first."""
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificates(self.cert) if self.cert else ()
        except ValueError:
            # OpenSSL has read it and decides about its form.
            return ()

    def wrong_dates(self) -> str:
        """Why the task's own certificate is not valid now, and what to do; empty if it is."""
        if not self.chain:
            return ""
        now, own = datetime.datetime.now(datetime.UTC), self.chain[0]
        clock = f"by this machine's clock it is {moment(now)}"
        if now > own.not_valid_after_utc:
            return (
                f"expired on {moment(own.not_valid_after_utc)}, and {clock}; use a newer one with its --tls-key "
                "(shardline certs makes them), or set the clock"
            )
        if now < own.not_valid_before_utc:
            return f"is only valid from {moment(own.not_valid_before_utc)}, and {clock}; is the clock right?"
        return ""

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        import ssl

        if self.paths.ca is not None:
            _trust(context, self.ca, f"--tls-ca {self.paths.ca}")
        if self.paths.cert is not None:
            # OpenSSL has one error for both files: check them separately first.
            _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.cert, f"--tls-cert {self.paths.cert}")
            _load_chain(context, self)
        return context


def look(paths: Iterable[Path]) -> Seen:
    """Tells files from those that were there before they were changed or replaced, also by a link; None = no file."""

    def stat(path: Path) -> tuple[int, ...] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    return [stat(path) for path in paths]


def read(paths: TlsPaths) -> TlsInUse:
    """Read and check the files. Raises UsageError naming the flag and the file."""
    # Before they are read: a change meanwhile is found at the next look.
    seen = look(paths)
    found = TlsInUse(
        paths=paths,
        seen=seen,
        cert=read_file(paths.cert, "--tls-cert") if paths.cert is not None else b"",
        key=read_file(paths.key, "--tls-key") if paths.key is not None else b"",
        ca=read_file(paths.ca, "--tls-ca") if paths.ca is not None else b"",
    )
    # Report invalid files now, not in the middle of the first handshake.
    _ = found.client_context
    wrong = found.wrong_dates()
    if wrong:
        # Peers that reject it at most log the reason; this side would only see that the connection is closed.
        raise UsageError(f"--tls-cert {paths.cert} {wrong}")
    return found


def read_file(path: Path, flag: str) -> bytes:
    """All bytes of a small file. Raises UsageError naming flag and file."""
    try:
        return files.read_bytes(path, FILE_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"{flag} {path} can't be read: {error.strerror}") from None


def _trust(context: ssl.SSLContext, pem: bytes, what: str) -> None:
    import ssl

    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise UsageError(f"{what} contains no PEM certificate") from None


class _Encrypted(Exception):
    """A private key requires a passphrase."""


def _load_chain(context: ssl.SSLContext, found: TlsInUse) -> None:
    import ssl

    def passphrase() -> str:
        # OpenSSL would ask at the terminal, and gRPC does not support passphrases.
        raise _Encrypted

    key = f"--tls-key {found.paths.key}"
    try:
        with files.in_memory(found.cert) as cert_path, files.in_memory(found.key) as key_path:
            context.load_cert_chain(cert_path, key_path, password=passphrase)
    except _Encrypted:
        raise UsageError(
            f"{key} is encrypted; use a key without a passphrase, in a file that only you can read"
        ) from None
    except (ssl.SSLError, OSError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{key} is not the private key of --tls-cert {found.paths.cert}") from None
        raise UsageError(f"{key} contains no PEM private key") from None


def moment(at: datetime.datetime) -> str:
    """A time for people."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _system_roots() -> bytes | None:
    """The system's CAs as PEM: gRPC has its own, and both kinds of connection should trust the same ones."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode() or None


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
