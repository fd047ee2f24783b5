"""Access control: TLS from files, the job token, and the admin token.

The default, Security(), is plain: no TLS and no token. ssl and grpc are imported here only when they are needed.

With a CA both sides show a certificate and check the other's (mutual TLS). With a certificate and no CA only the server
shows one, and clients check it against the system's own CAs. All tasks have the job token: whoever knows it may call.
Only the chief and the parameter servers have the admin token: calls that change the cluster itself
(rpc/auth/rights.py) need proof of it as well; it is never sent (rpc/auth/access.py). Without an admin token, the job
token grants every right.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.errors import UsageError
from shardline.host import files

if TYPE_CHECKING:
    import ssl

    import grpc
    from cryptography import x509

log = logging.getLogger("shardline.security")

FILE_LIMIT_BYTES = 4 << 20
"""Certificates are smaller; a wrong path (a checkpoint) is refused before it fills the memory."""
TOKEN_LIMITS = (16, 4096)
"""Characters. A shorter token could be guessed; a longer one doesn't fit into a call's metadata."""
TOKEN_KEY = "authorization"
"""Metadata key of a call for the token, as `Bearer TOKEN`."""
ADMIN_KEY = "shardline-admin"
"""Metadata key of a call for the proof of the admin token, in addition to the job's; see rpc/auth/access.py."""
LOOPBACK_NAMES = ("localhost",)
PROBE_S = 1.0
SOON = datetime.timedelta(days=7)
"""Warn at startup of a certificate that expires within this time."""


@dataclass(frozen=True, kw_only=True)
class Security:
    """TLS files and tokens of one process. Files are read and checked here.

    Raises UsageError naming the flag and the file if a file can't be read or is invalid.
    """

    tls_cert: Path | None = None
    """PEM file: this task's certificate, then the rest of its chain."""
    tls_key: Path | None = None
    """PEM file: the private key of tls_cert, without a passphrase."""
    tls_ca: Path | None = None
    """PEM file: the CAs that sign the cluster's certificates."""
    token_file: Path | None = None
    """File with the job token in one line."""
    admin_token_file: Path | None = None
    """File with the admin token in one line."""
    token: bytes = field(init=False, repr=False, compare=False, default=b"")
    admin_token: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise UsageError(f"{given} is set without {lacking}; a certificate needs its private key")
        if self.tls:
            # Report invalid files now, not in the middle of the first handshake.
            self._client_context()
        if self.tls_cert is not None:
            _check_dates(self.tls_cert)
        for name in ("token", "admin_token"):
            path: Path | None = getattr(self, f"{name}_file")
            if path is not None:
                object.__setattr__(self, name, _read_token(path, f"--{name.replace('_', '-')}-file"))
        if self.admin_token and hmac.compare_digest(self.admin_token, self.token):
            raise UsageError(
                f"--admin-token-file {self.admin_token_file} and --token-file {self.token_file} contain the same "
                "token, so anyone with the job token would have every right; use two different tokens"
            )

    @property
    def tls(self) -> bool:
        """Whether connections use TLS."""
        return self.tls_cert is not None or self.tls_ca is not None

    # gRPC

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a gRPC server; None = plain. With a CA, clients must show a certificate signed by it."""
        if not self.tls:
            return None
        import grpc

        cert, key = self._own_files()
        roots = _read(self.tls_ca, "--tls-ca") if self.tls_ca is not None else None
        chain = [(_read(key, "--tls-key"), _read(cert, "--tls-cert"))]
        return grpc.ssl_server_credentials(chain, root_certificates=roots, require_client_auth=roots is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a gRPC channel; None = plain. gRPC checks the server's name against the host dialled."""
        if not self.tls:
            return None
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls_ca, "--tls-ca") if self.tls_ca is not None else _system_roots(),
            private_key=_read(self.tls_key, "--tls-key") if self.tls_key is not None else None,
            certificate_chain=_read(self.tls_cert, "--tls-cert") if self.tls_cert is not None else None,
        )

    # Sockets

    def server_context(self) -> ssl.SSLContext | None:
        """TLS 1.3 for the accepting side of a bulk socket; None = plain. With a CA, the client must show a certificate.

        In TLS 1.3 the client's handshake ends before the server has checked its certificate: the client sees a refusal
        at its first read.
        """
        if not self.tls:
            return None
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        cert, key = self._own_files()
        _load_chain(context, cert, key)
        # A client that only sends never reads tickets; closing with unread bytes resets the connection and may lose its
        # last bytes. Bulk sockets are long-lived and resume nothing.
        context.num_tickets = 0
        if self.tls_ca is not None:
            _trust(context, self.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """TLS 1.3 for the dialling side of a bulk socket; None = plain.

        Wrap with server_hostname = the host dialled, a name or an IP address, which the server's certificate must have
        among its alternative names.
        """
        return self._client_context() if self.tls else None

    def _client_context(self) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.tls_ca is not None:
            _trust(context, self.tls_ca)
        else:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if self.tls_cert is not None and self.tls_key is not None:
            _load_chain(context, self.tls_cert, self.tls_key)
        return context

    def _own_files(self) -> tuple[Path, Path]:
        if self.tls_cert is None or self.tls_key is None:
            raise UsageError(
                "--tls-ca is set without --tls-cert and --tls-key; that is enough for a command, but a task needs a "
                "certificate of its own"
            )
        return self.tls_cert, self.tls_key

    # Tokens

    def check(self, token: bytes | str | None) -> bool:
        """Whether this is the job token, compared in constant time. True if no token is set."""
        return _same(token, self.token)

    def check_metadata(self, metadata: Metadata) -> bool:
        """Whether a call's metadata contain the job token."""
        return self.check(_bearer(metadata, TOKEN_KEY))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for every call; empty if there is no token."""
        return ((TOKEN_KEY, f"Bearer {self.token.decode()}"),) if self.token else ()

    # If nobody answers

    def diagnose(self, host: str, port: int, *, timeout_s: float = PROBE_S) -> str:
        """Why TLS keeps this task from talking to a reachable server; empty if TLS isn't the reason.

        gRPC reports just "Socket closed" or "Deadline Exceeded" in most of these cases. Connects once, does a
        handshake, and waits at most timeout_s for each of the three steps.
        """
        import ssl

        context = self._client_context() if self.tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not self.tls:
            # Only to find out whether it uses TLS at all; nothing is sent to it, and nothing it sends is used.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # A gRPC server closes the connection to a client that doesn't offer HTTP/2.
        context.set_alpn_protocols(["h2"])
        met = False
        try:
            with (
                socket.create_connection((host, port), timeout=timeout_s) as plain,
                context.wrap_socket(plain, server_hostname=host) as connection,
            ):
                met = True
                # A server checks our certificate after our side of the handshake. If it accepts, it speaks first, as in
                # HTTP/2; if not, gRPC's server closes the connection, others give a reason.
                answered = bool(connection.recv(1))
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _OUT_OF_DATE:
                return (
                    f"its certificate is not valid now ({error.verify_message.rstrip('.')}) by this machine's clock; "
                    "start it with a newer one, or set the clock"
                )
            return (
                f"its certificate is not trusted ({error.verify_message.rstrip('.')}); is it signed by --tls-ca, and "
                f"does it name {host}?"
            )
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            if not self.tls:
                return _SPEAKS_TLS if "ALERT" in reason else ""
            if met:
                return self._refused(reason.lower())
            return f"TLS with it fails ({reason.lower()}); were both sides started with TLS?"
        except ConnectionError:
            answered = False
        except OSError:
            return ""
        if not self.tls:
            return _SPEAKS_TLS if met else ""
        return self._refused("it closed the connection after the handshake") if met and not answered else ""

    def _refused(self, how: str) -> str:
        wrong = _out_of_date(self.tls_cert) if self.tls_cert is not None else ""
        cause = f"--tls-cert {self.tls_cert} {wrong}" if wrong else "is --tls-cert signed by its --tls-ca?"
        return f"it refused this side's certificate, or that there is none ({how}); {cause}"


PLAIN = Security()
"""No TLS and no token."""

Metadata = Iterable[tuple[str, str | bytes]] | None


def _bearer(metadata: Metadata, wanted: str) -> str | None:
    """The token in the metadata under a key; None if there is none."""
    prefix = "Bearer "
    for key, value in metadata or ():
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        if key == wanted and text.startswith(prefix):
            return text[len(prefix) :]
    return None


def _same(given: bytes | str | None, token: bytes) -> bool:
    """Whether it is the token, compared in constant time; True if no token is set."""
    if not token:
        return True
    return hmac.compare_digest(given.encode(errors="replace") if isinstance(given, str) else given or b"", token)


def key_of(secret: bytes) -> bytes:
    """The hash (32 bytes) by which others can verify a secret of 32 random bytes without being able to use it."""
    return hashlib.sha256(secret).digest()


def holds(secret: bytes, key: bytes) -> bool:
    """Whether this is the secret of a key (see key_of); True if there is no key."""
    return not key or hmac.compare_digest(key_of(secret), key)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host. A name other than localhost counts as reachable by others."""
    try:
        address = ipaddress.ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def check_bind(what: str, host: str, flag: str, security: Security, *, insecure: bool) -> None:
    """Raise UsageError if something would listen without TLS where other machines can reach it.

    what: "the services of ps/0". flag: the flag that sets the host, such as "--bind". insecure: explicitly allowed.
    """
    if security.tls_cert is None and not insecure and not is_loopback(host):
        raise UsageError(
            f"{what} would listen at {host} without TLS, where others can read and change the traffic; set "
            f"--tls-cert, --tls-key and --tls-ca, or stay on this machine with {flag} 127.0.0.1, or set "
            "--insecure-bind (SHARDLINE_INSECURE_BIND) if nobody else uses that network"
        )


_OUT_OF_DATE = (9, 10)
"""OpenSSL's error numbers for a certificate that is not valid yet, or has expired."""
_SPEAKS_TLS = "it uses TLS and this side does not; set the --tls-ca, --tls-cert and --tls-key of this cluster"


def _read(path: Path, flag: str) -> bytes:
    try:
        return files.read_bytes(path, FILE_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"{flag} {path} can't be read: {error.strerror}") from None


def _read_token(path: Path, flag: str) -> bytes:
    # Errors about a token never show any of it.
    token = _read(path, flag).strip()
    shortest, longest = TOKEN_LIMITS
    if not shortest <= len(token) <= longest:
        raise UsageError(
            f"{flag} {path} has {len(token)} characters; a token has {shortest} to {longest} (openssl rand -hex 32 "
            "makes one)"
        )
    if not re.fullmatch(rb"[!-~]+", token):
        raise UsageError(
            f"{flag} {path} must contain one line of ASCII letters, digits and punctuation, without spaces"
        )
    return token


def _trust(context: ssl.SSLContext, path: Path, flag: str = "--tls-ca") -> None:
    import ssl

    data = _read(path, flag)
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise UsageError(f"{flag} {path} contains no PEM certificate") from None


class _Encrypted(Exception):
    """A private key requires a passphrase."""


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    import ssl

    def passphrase() -> str:
        # OpenSSL would ask at the terminal, and gRPC does not support passphrases.
        raise _Encrypted

    # OpenSSL has one error for both files: check them separately first.
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), cert, "--tls-cert")
    _read(key, "--tls-key")
    try:
        # OpenSSL opens them by name again.
        with files.pinned(cert) as pinned_cert, files.pinned(key) as pinned_key:
            context.load_cert_chain(pinned_cert, pinned_key, password=passphrase)
    except _Encrypted:
        raise UsageError(
            f"--tls-key {key} is encrypted; use a key without a passphrase, in a file that only you can read"
        ) from None
    except (ssl.SSLError, OSError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--tls-key {key} is not the private key of --tls-cert {cert}") from None
        raise UsageError(f"--tls-key {key} contains no PEM private key") from None


def _check_dates(path: Path) -> None:
    """Raise UsageError if this task's own certificate is not valid now; warn about those above it in the file.

    Peers that reject it at most log the reason; this side would only see that the connection is closed. A certificate
    above it may be there for older peers, and the others may have another path to their CA.
    """
    for number, certificate in enumerate(_chain(path), 1):
        wrong = _wrong_dates(certificate)
        if wrong and number == 1:
            raise UsageError(f"--tls-cert {path} {wrong}")
        if wrong:
            log.warning("--tls-cert %s: certificate %d in it %s", path, number, wrong)
        elif certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < SOON:
            log.warning(
                "--tls-cert %s: certificate %d in it expires on %s; after that, this task can't open connections: no "
                "task can rejoin and no checkpoint is written. Before then, stop the job and resume it with newer "
                "certificates",
                path,
                number,
                _moment(certificate.not_valid_after_utc),
            )


def _chain(path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_read(path, "--tls-cert"))
    except ValueError:
        # OpenSSL has read it and decides about its form.
        return []


def _out_of_date(path: Path) -> str:
    """What is wrong with the dates of this task's own certificate; empty if nothing is."""
    chain = _chain(path)
    return _wrong_dates(chain[0]) if chain else ""


def _wrong_dates(certificate: x509.Certificate) -> str:
    """What is wrong with the dates of a certificate, and what to do; empty if nothing is."""
    now = datetime.datetime.now(datetime.UTC)
    clock = f"by this machine's clock it is {_moment(now)}"
    if now > certificate.not_valid_after_utc:
        return (
            f"expired on {_moment(certificate.not_valid_after_utc)}, and {clock}; use a newer one with its --tls-key "
            "(shardline certs makes them), or set the clock"
        )
    if now < certificate.not_valid_before_utc:
        return f"is only valid from {_moment(certificate.not_valid_before_utc)}, and {clock}; is the clock right?"
    return ""


def _moment(at: datetime.datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _system_roots() -> bytes | None:
    """The system's CAs as PEM: gRPC has its own, and both kinds of connection should trust the same ones."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode() or None
