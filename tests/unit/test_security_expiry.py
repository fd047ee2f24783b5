"""A certificate that its owner shows too late, or too early: said at the start, and not by whoever refuses it."""

from __future__ import annotations

import datetime
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from shardline.cli.main import main
from shardline.errors import UsageError
from shardline.security import Security

PAST = datetime.datetime(2021, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
FUTURE = datetime.datetime(2199, 1, 1, tzinfo=datetime.UTC)


def write(folder: Path, **dates: datetime.datetime) -> tuple[Path, Path, Path]:
    """CA, certificate and key, valid between these dates."""
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1", **dates)
    paths = folder / "ca.pem", folder / "own.pem", folder / "own.key"
    ca.cert_pem.write_to_path(str(paths[0]))
    leaf.private_key_pem.write_to_path(str(paths[2]))
    paths[1].write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    return paths


def test_a_task_whose_certificate_has_expired_says_so_at_its_start_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, cert, key = write(tmp_path, not_after=PAST)
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}))
    place = ["--cluster", str(cluster), "--task", "ps/0", "--timeout", "2"]
    files = ["--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(key)]
    assert main(["ps", *place, *files]) == UsageError.exit_code
    (said,) = capsys.readouterr().err.splitlines()
    assert f"--tls-cert {cert} expired on 2021-03-04 05:06:07 UTC, and by this machine's clock it is 2" in said
    assert "use a newer one with its --tls-key" in said


def test_a_certificate_of_tomorrow_is_refused_with_its_date(tmp_path: Path) -> None:
    ca, cert, key = write(tmp_path, not_before=FUTURE, not_after=FUTURE.replace(year=2200))
    with pytest.raises(UsageError, match=r"own.pem is only valid from 2199-01-01 00:00:00 UTC, and by .* is the clock"):
        Security(tls_ca=ca, tls_cert=cert, tls_key=key)


def test_an_expired_certificate_further_up_in_the_file_is_only_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca, cert, key = write(tmp_path)
    old = tmp_path / "old"
    old.mkdir()
    _, expired, _ = write(old, not_after=PAST)
    cert.write_bytes(cert.read_bytes() + expired.read_bytes())
    with caplog.at_level("WARNING"):
        Security(tls_ca=ca, tls_cert=cert, tls_key=key)
    # Peers may have another way from the first one to their CA.
    assert re.search(rf"{cert}: certificate 2 in it \(.*\) expired on 2021-03-04 05:06:07 UTC; others", caplog.text)


def test_a_certificate_that_expires_within_a_week_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=6)
    ca, cert, key = write(tmp_path, not_after=soon)
    with caplog.at_level("WARNING"):
        Security(tls_ca=ca, tls_cert=cert, tls_key=key)
    (said,) = caplog.messages
    assert f") expires on {soon:%Y-%m-%d %H:%M:%S} UTC; after that, others refuse new connections" in said
    caplog.clear()
    ca, cert, key = write(tmp_path, not_after=soon + datetime.timedelta(days=2))
    Security(tls_ca=ca, tls_cert=cert, tls_key=key)
    assert caplog.text == ""


@contextmanager
def serving(security: Security) -> Iterator[int]:
    """A task that shakes hands and then waits for the other side; its port."""
    context = security.server_context()
    assert context is not None
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.settimeout(5.0)
            try:
                with context.wrap_socket(connection, server_side=True) as secured:
                    secured.sendall(b"h2")
            except OSError:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(5.0)


@pytest.mark.parametrize(
    ("whose", "says"),
    [
        ("its own", r"it refused this side's certificate.*--tls-cert .*mine.pem expired on \d{4}-.* UTC, and by"),
        ("the other's", r"its certificate is not valid now \(certificate has expired\) by this machine's clock"),
    ],
)
def test_a_new_connection_with_a_certificate_that_has_expired_meanwhile_is_told_whose(
    tmp_path: Path, whose: str, says: str
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)).replace(microsecond=0)

    def security(name: str, **dates: datetime.datetime) -> Security:
        leaf = ca.issue_cert("127.0.0.1", **dates)
        leaf.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
        return Security(tls_ca=tmp_path / "ca.pem", tls_cert=tmp_path / f"{name}.pem", tls_key=tmp_path / f"{name}.key")

    brief, long = {"not_after": end}, dict[str, datetime.datetime]()
    mine = security("mine", **(brief if whose == "its own" else long))
    theirs = security("theirs", **(long if whose == "its own" else brief))
    # X.509 counts the whole second in which it ends.
    time.sleep((end - datetime.datetime.now(datetime.UTC)).total_seconds() + 1.0)
    with serving(theirs) as port:
        assert re.search(says, mine.diagnose("127.0.0.1", port))
