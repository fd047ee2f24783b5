"""Access control: TLS from files, the job token, and the admin token.

The default, Security(), is plain: no TLS and no token. ssl and grpc are imported here only when they are needed.

With a CA both sides show a certificate and check the other's (mutual TLS). With a certificate and no CA only the server
shows one, and clients check it against the system's own CAs. All tasks have the job token: whoever knows it may call.
Only the chief and the parameter servers have the admin token: calls that change the cluster itself
(rpc/auth/rights.py) need proof of it as well; it is never sent (rpc/auth/access.py). Without an admin token, the job
token grants every right.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.errors import UsageError
from shardline.tls import TlsFiles, TlsInUse, TlsPaths, read_file

if TYPE_CHECKING:
    import ssl

    import grpc

TOKEN_LIMITS = (16, 4096)
"""Characters. A shorter token could be guessed; a longer one doesn't fit into a call's metadata."""
TOKEN_KEY = "authorization"
"""Metadata key of a call for the token, as `Bearer TOKEN`."""
ADMIN_KEY = "shardline-admin"
"""Metadata key of a call for the proof of the admin token, in addition to the job's; see rpc/auth/access.py."""
LOOPBACK_NAMES = ("localhost",)
PROBE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Security:
    """TLS files and tokens of one process. Files are read and checked here; TLS files again when they have changed.

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
    _files: TlsFiles | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise UsageError(f"{given} is set without {lacking}; a certificate needs its private key")
        if self.tls:
            object.__setattr__(self, "_files", TlsFiles(TlsPaths(self.tls_cert, self.tls_key, self.tls_ca)))
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
        return self.tls_cert is not None or self.tls_ca is not None

    # Certificates in use

    def watch(self) -> None:
        """Log which TLS files have changed or can't be used, and which certificate ends soon; see TlsFiles.watch()."""
        if self._files is not None:
            self._files.watch()

    def expires(self) -> float:
        """Unix time at which this task's certificate ends; 0 without one."""
        chain = self._files.now().chain if self._files is not None else ()
        return chain[0].not_valid_after_utc.timestamp() if chain else 0.0

    # gRPC

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a gRPC server; None = plain. With a CA, clients must show a certificate signed by it."""
        if self._files is None:
            return None
        import grpc

        files = self._serving_files()
        given = files.now()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at each handshake, on a thread of its own; None = no change."""
            nonlocal given
            before, given = given, files.now()
            return given.server_configuration if given is not before else None

        return grpc.dynamic_ssl_server_credentials(
            given.server_configuration,
            newer,  # type: ignore[arg-type]  # its stub doesn't allow None
            self.tls_ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a gRPC channel, others once the files have changed; None = plain.

        gRPC checks the server's name against the host dialled.
        """
        return self._files.now().channel_credentials if self._files is not None else None

    # Sockets

    def server_context(self) -> ssl.SSLContext | None:
        """TLS 1.3 for the accepting side of a bulk socket; None = plain. With a CA, the client must show a certificate.

        In TLS 1.3 the client's handshake ends before the server has checked its certificate: the client sees a refusal
        at its first read.
        """
        if self._files is None:
            return None
        import ssl

        files = self._serving_files()

        def use_newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = files.now().server_context

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Called in each handshake, whatever name the client gives, before a certificate is chosen.
        context.sni_callback = use_newest
        # A client that only sends never reads tickets; closing with unread bytes resets the connection and may lose its
        # last bytes. Bulk sockets are long-lived and resume nothing.
        context.num_tickets = 0
        if self.tls_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """TLS 1.3 for one connection of the dialling side of a bulk socket; None = plain. Others share it.

        Wrap with server_hostname = the host dialled, a name or an IP address, which the server's certificate must have
        among its alternative names.
        """
        return self._files.now().client_context if self._files is not None else None

    def _serving_files(self) -> TlsFiles:
        if self._files is None or self.tls_cert is None:
            raise UsageError(
                "--tls-ca is set without --tls-cert and --tls-key; that is enough for a command, but a task needs a "
                "certificate of its own"
            )
        return self._files

    # Tokens

    def check(self, token: bytes | str | None) -> bool:
        """Whether this is the job token, compared in constant time. True if no token is set."""
        if not self.token:
            return True
        return hmac.compare_digest(
            token.encode(errors="replace") if isinstance(token, str) else token or b"", self.token
        )

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

        used = self._files.now() if self._files is not None else None
        context = used.new_client_context() if used is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if used is None:
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
            if used is None:
                return _SPEAKS_TLS if "ALERT" in reason else ""
            if met:
                return _refused(used, reason.lower())
            return f"TLS with it fails ({reason.lower()}); were both sides started with TLS?"
        except ConnectionError:
            answered = False
        except OSError:
            return ""
        if used is None:
            return _SPEAKS_TLS if met else ""
        return _refused(used, "it closed the connection after the handshake") if met and not answered else ""


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


def names_loopback(header: str) -> bool:
    """Whether the Host header of a request to a page names this machine's loopback.

    A page that is open to everyone on its own machine answers only to such names. Otherwise a web site that points its
    own name at 127.0.0.1 (DNS rebinding) could read the page through a browser on this machine.
    """
    text = header.strip()
    return is_loopback(text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0])


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


def _refused(used: TlsInUse, how: str) -> str:
    wrong = used.wrong_dates()
    cause = f"--tls-cert {used.paths.cert} {wrong}" if wrong else "is --tls-cert signed by its --tls-ca?"
    return f"it refused this side's certificate, or that there is none ({how}); {cause}"


def _read_token(path: Path, flag: str) -> bytes:
    # Errors about a token never show any of it.
    token = read_file(path, flag).strip()
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
