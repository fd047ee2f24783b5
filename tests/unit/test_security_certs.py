"""shardline certs: files that tasks can use, keys for their owner alone, nothing written over."""

from __future__ import annotations

import json
import stat
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509

from shardline.certs import make_certificates
from shardline.cli.main import main
from shardline.errors import UnreachableError, UsageError
from shardline.rpc.health import check
from shardline.rpc.server import RpcServer
from shardline.security import Security

CLUSTER = json.dumps({"chief": ["10.0.0.1:2222"], "ps": ["ps-0.example:2222", "[fd00::7]:2222"]})


def security(folder: Path, name: str, ca: Path | None = None) -> Security:
    return Security(tls_ca=(ca or folder) / "ca.pem", tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key")


def names_in(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_two_tasks_with_their_files_talk_and_a_stranger_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    assert main(["certs", str(own), "--host", "one", "--host", "two.example"]) == 0
    said = capsys.readouterr().out
    assert f"--tls-ca {own}/ca.pem --tls-cert {own}/one.pem --tls-key {own}/one.key" in said
    assert main(["certs", str(foreign), "--host", "one"]) == 0
    server = RpcServer("127.0.0.1:0", security=security(own, "one"))
    address = server.start()
    try:
        assert check(address, timeout_s=5.0, security=security(own, "two.example")) == "SERVING"
        for stranger in (security(foreign, "one"), security(foreign, "one", ca=own), Security(tls_ca=own / "ca.pem")):
            with pytest.raises(UnreachableError, match=r"reported healthy within .* s \(unavailable"):
                check(address, timeout_s=2.0, security=stranger)
    finally:
        server.close(grace_s=0.0)


def test_bulk_sockets_take_them_too_and_check_the_name(tmp_path: Path) -> None:
    import socket
    import ssl

    make_certificates(tmp_path, {"one": "one.example", "two": "two.example"}, days=1)
    server, client = security(tmp_path, "one").server_context(), security(tmp_path, "two").client_context()
    assert server is not None and client is not None
    for host, error in (("one.example", None), ("two.example", ssl.SSLCertVerificationError)):
        here, there = socket.socketpair()
        for end in (here, there):
            end.settimeout(5.0)

        def serve(end: socket.socket = there) -> None:
            try:
                server.wrap_socket(end, server_side=True).close()
            except OSError:
                end.close()

        thread = threading.Thread(target=serve)
        thread.start()
        if error is None:
            client.wrap_socket(here, server_hostname=host).close()
        else:
            with pytest.raises(error):
                client.wrap_socket(here, server_hostname=host)
        here.close()
        thread.join(5.0)
        assert not thread.is_alive()


def test_every_task_of_a_cluster_gets_a_certificate_with_its_host(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--cluster", CLUSTER]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("ca", "chief-0", "ps-0", "ps-1") for kind in ("pem", "key")
    }
    here = ["localhost", "127.0.0.1", "::1"]
    as_ps = "urn:shardline:role:ps"
    assert names_in(tmp_path / "chief-0.pem") == ["10.0.0.1", *here, "urn:shardline:role:chief"]
    assert names_in(tmp_path / "ps-0.pem") == ["ps-0.example", *here, as_ps]
    assert names_in(tmp_path / "ps-1.pem") == ["fd00::7", *here, as_ps]
    for path in tmp_path.iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == 0o600 if path.suffix == ".key" else mode & 0o133 == 0


def test_the_role_of_a_machines_certificate_is_asked_for(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--host", "a", "--role", "worker"]) == 0
    assert main(["certs", str(tmp_path), "--host", "b"]) == 0
    assert names_in(tmp_path / "a.pem")[-1] == "urn:shardline:role:worker"
    assert names_in(tmp_path / "b.pem")[-1] == "::1"
    assert main(["certs", str(tmp_path), "--host", "c", "--role", "root"]) == 2


def test_without_a_host_there_is_one_for_this_machine(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path / "new" / "folder")]) == 0
    assert names_in(tmp_path / "new" / "folder" / "localhost.pem") == ["localhost", "127.0.0.1", "::1"]


def test_ca_that_is_there_signs_more_and_nothing_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_certificates(tmp_path, {"one": "one"}, days=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["certs", str(tmp_path), "--host", "two", "--host", "one"]) == UsageError.exit_code
    assert f"{tmp_path}/one.pem already exists; nothing was written" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before

    second = make_certificates(tmp_path, {"two": "two"}, days=3700)
    assert first.new_ca and not second.new_ca
    # No certificate outlives its CA.
    assert abs((second.until - first.until).days - (3650 - 1)) <= 1
    assert all(path.read_bytes() == data for path, data in before.items())
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    x509.load_pem_x509_certificate((tmp_path / "two.pem").read_bytes()).verify_directly_issued_by(ca)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "a/../b"], "'a/../b' is neither a host name nor an IP address"),
        (["--host", ""], "'' is neither a host name"),
        (["--host", "two words"], "'two words' is neither a host name"),
        (["--host", "*"], "'*' is neither a host name"),
        (["--host", "ca"], "ca.pem already exists"),
        (["--cluster", '{"chief": ["a:1"], "ps": 2}'], "ps/0 has no address in the cluster spec; list the machines"),
    ],
)
def test_what_no_certificate_can_have_is_refused_before_anything_is_written(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path / "out"), *arguments]) == UsageError.exit_code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_half_a_ca_and_a_folder_that_can_not_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("junk")
    with pytest.raises(UsageError, match=r"ca\.pem exists, but only one of"):
        make_certificates(tmp_path, {"one": "one"}, days=1)
    (tmp_path / "ca.key").write_text("junk")
    with pytest.raises(UsageError, match="are not usable"):
        make_certificates(tmp_path, {"one": "one"}, days=1)
    with pytest.raises(UsageError, match=r"ca\.pem.* can't be read or written: Not a directory|can't be read or"):
        make_certificates(tmp_path / "ca.pem" / "below", {"one": "one"}, days=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem"]


def test_renewed_certificates_have_new_keys_and_dates_and_all_else_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path), "--cluster", CLUSTER, "--days", "2"]) == 0
    assert main(["certs", str(tmp_path), "--host", "a", "--role", "worker"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(["certs", str(tmp_path), "--renew", "--days", "30"]) == 0
    said = capsys.readouterr().out
    for name in ("a", "chief-0", "ps-0", "ps-1"):
        pem, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        assert f"{pem}, {key}: renewed, valid until " in said
        old, new = x509.load_pem_x509_certificate(before[pem]), x509.load_pem_x509_certificate(pem.read_bytes())
        assert key.read_bytes() != before[key] and stat.S_IMODE(key.stat().st_mode) == 0o600
        assert new.subject == old.subject and new.serial_number != old.serial_number
        assert [item.value for item in new.extensions][2:5] == [item.value for item in old.extensions][2:5]
        assert names_in(pem)[-1].startswith("urn:shardline:role:")
        assert security(tmp_path, name).expires() == pytest.approx(time.time() + 30 * 86400, abs=60)
    assert all(path.read_bytes() == before[path] for path in (tmp_path / "ca.pem", tmp_path / "ca.key"))
    assert set(tmp_path.iterdir()) == set(before)


@pytest.mark.parametrize(
    ("arguments", "remove", "says"),
    [
        (["--host", "b"], "", "leave out --host, --cluster and --role"),
        ([], "ca.key", "ca.key does not exist; only what shardline certs made can be renewed"),
        ([], "one.key", "one.key does not exist"),
    ],
)
def test_what_can_not_be_renewed_stays_as_it_was(
    tmp_path: Path, arguments: list[str], remove: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path, {"one": "one"}, days=1)
    if remove:
        (tmp_path / remove).unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["certs", str(tmp_path), "--renew", *arguments]) == UsageError.exit_code
    assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
