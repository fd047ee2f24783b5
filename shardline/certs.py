"""A private CA and certificates for a cluster's tasks, in files; for trials, and for networks without a CA."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardline.errors import UsageError
from shardline.host import files
from shardline.rpc.auth.rights import ROLE_URI
from shardline.tls import FILE_LIMIT_BYTES

HERE = ("localhost", "127.0.0.1", "::1")
"""Names in every certificate, so that tasks can be reached from their own machine."""
CLOCK_SKEW = datetime.timedelta(hours=1)
"""Certificates are valid from this long before now: clocks of two machines differ."""
CA_LIFE = datetime.timedelta(days=3650)
"""A CA's own validity; longer than that of what it signs, so that this can be renewed."""
LONGEST_NAME = 253
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True, kw_only=True)
class WrittenCertificates:
    ca: Path
    pairs: Mapping[str, tuple[Path, Path]]
    """Certificate and private key by name."""
    until: datetime.datetime
    new_ca: bool


def make_certificates(
    folder: Path, hosts: Mapping[str, str], *, days: int, roles: Mapping[str, str] | None = None
) -> WrittenCertificates:
    """Write NAME.pem and NAME.key for each name's host, signed by the folder's CA, which is made if there is none.

    roles: by name, the role that a certificate is limited to (see rpc.auth.rights); without one it is valid for all.
    Existing files are never overwritten. Private keys are readable only by their owner. A name is used for the files; a
    host is an IP address or a DNS name. Raises UsageError; then nothing was written.
    """
    for host in hosts.values():
        alternative_name(host)
    ca_files = _ca_files(folder)
    pairs = {name: _pair(folder, name) for name in hosts}
    found = [path for path in ca_files if path.exists()]
    if len(found) == 1:
        raise UsageError(
            f"{found[0]} exists, but only one of {ca_files[0]} and {ca_files[1]} does; nothing was written"
        )
    there = [path for pair in pairs.values() for path in pair if path.exists()]
    if there or "ca" in hosts:
        raise UsageError(f"{there[0] if there else ca_files[0]} already exists; nothing was written")
    now = datetime.datetime.now(datetime.UTC)
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not found:
            _write(ca_files, *_make_ca(now, now + max(CA_LIFE, datetime.timedelta(days=days))))
        ca = _Ca.read(folder, days)
        for name, host in hosts.items():
            role = (roles or {}).get(name, "")
            names = [alternative_name(name) for name in dict.fromkeys((host, *HERE))]
            if role:
                names.append(x509.UniformResourceIdentifier(f"{ROLE_URI}{role}"))
            # Longer names are not allowed here; nobody relies on this one.
            subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
            _write(pairs[name], *ca.sign(subject, x509.SubjectAlternativeName(names)))
    return WrittenCertificates(ca=ca_files[0], pairs=pairs, until=ca.until, new_ca=not found)


def renew_certificates(folder: Path, *, days: int) -> WrittenCertificates:
    """Replace each NAME.pem and NAME.key in the folder by a new pair of the same names and role, signed by its CA.

    Tasks that run use new files without a restart. Raises UsageError.
    """
    ca_files = _ca_files(folder)
    names = sorted(path.stem for path in folder.glob("*.pem") if path != ca_files[0])
    pairs = {name: _pair(folder, name) for name in names}
    lacking = [path for pair in (ca_files, *pairs.values()) for path in pair if not path.exists()]
    if lacking or not pairs:
        raise UsageError(
            f"{lacking[0] if lacking else folder / 'NAME.pem'} does not exist; only what shardline certs made can be "
            "renewed, in its folder with ca.key; nothing was changed"
        )
    with _told(folder):
        ca = _Ca.read(folder, days)
        made = {}
        for name, (path, _) in pairs.items():
            before = x509.load_pem_x509_certificate(files.read_bytes(path, FILE_LIMIT_BYTES))
            hosts = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            made[name] = ca.sign(before.subject, hosts)
        for name, pair in pairs.items():
            _write(pair, *made[name], over=True)
    return WrittenCertificates(ca=ca_files[0], pairs=pairs, until=ca.until, new_ca=False)


def _ca_files(folder: Path) -> tuple[Path, Path]:
    return _pair(folder, "ca")


def _pair(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raise errors as UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or folder} can't be read or written: {error.strerror}") from None
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise UsageError(f"the certificates and keys in {folder} are not usable: {error}") from None


def alternative_name(host: str) -> x509.GeneralName:
    """A host as an alternative name in a certificate. Raises UsageError for an invalid host."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or len(host) > LONGEST_NAME:
            raise UsageError(f"{host!r} is neither a host name nor an IP address; give one of these") from None
        return x509.DNSName(host.rstrip("."))


def _make_ca(now: datetime.datetime, until: datetime.datetime) -> tuple[x509.Certificate, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shardline test CA {now:%Y-%m-%d %H:%M}")])
    usage = _usage(digital_signature=False, key_cert_sign=True)
    certificate = (
        _builder(name, name, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


class _Ca(NamedTuple):
    """The CA of a folder; what it signs now is valid until then."""

    certificate: x509.Certificate
    key: Any
    now: datetime.datetime
    until: datetime.datetime

    @classmethod
    def read(cls, folder: Path, days: int) -> _Ca:
        certificate, key = (files.read_bytes(path, FILE_LIMIT_BYTES) for path in _ca_files(folder))
        ca, now = x509.load_pem_x509_certificate(certificate), datetime.datetime.now(datetime.UTC)
        until = min(now + datetime.timedelta(days=days), ca.not_valid_after_utc)
        return cls(ca, serialization.load_pem_private_key(key, None), now, until)

    def sign(self, subject: x509.Name, names: x509.SubjectAlternativeName) -> tuple[x509.Certificate, Any]:
        """A certificate for a task, and its new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key(), self.now, self.until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True, key_cert_sign=False), critical=True)
            # A task is a server and a client.
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(names, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Any, now: datetime.datetime, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(*, digital_signature: bool, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(paths: tuple[Path, Path], certificate: x509.Certificate, key: Any, *, over: bool = False) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, data, mode in (
        (paths[1], pem, 0o600),
        (paths[0], certificate.public_bytes(serialization.Encoding.PEM), 0o644),
    ):
        if over:
            files.replace(path, data, mode=mode)
            continue
        # Never write to an existing file or link.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
