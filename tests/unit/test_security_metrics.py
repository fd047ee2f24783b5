"""The metrics page: open on this machine, with the job's token or a certificate from outside, never held up."""

from __future__ import annotations

import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from shardline.observability import metrics_page
from shardline.observability.metrics import Metrics
from shardline.observability.metrics_page import PageAnswer, decide
from shardline.security import PLAIN, Security

TOKEN = "the-job-token-of-this-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Files:
    def __init__(self, folder: Path) -> None:
        ca, cert = trustme.CA(), None
        cert = ca.issue_cert("127.0.0.1")
        self.ca, self.cert, self.key, self.token = (folder / name for name in ("ca", "cert", "key", "token"))
        ca.cert_pem.write_to_path(str(self.ca))
        cert.cert_chain_pems[0].write_to_path(str(self.cert))
        cert.private_key_pem.write_to_path(str(self.key))
        self.token.write_text(TOKEN)

    def mutual(self, token: bool) -> Security:
        return Security(tls_cert=self.cert, tls_key=self.key, tls_ca=self.ca, token_file=self.token if token else None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("metrics"))


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    found = Metrics("ps", "ps/0")
    yield found
    found.close()


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is on this machine, as far as the page can tell."""
    monkeypatch.setattr(metrics_page, "is_loopback", lambda host: False)


def read(url: str, headers: dict[str, str] | None = None, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers or {}), timeout=10, context=context
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def test_on_this_machine_the_page_needs_no_token(metrics: Metrics, files: Files) -> None:
    metrics.serve("127.0.0.1", 0, files.mutual(token=True))
    assert metrics.url == f"http://{metrics.address}/metrics"
    status, text = read(metrics.url)
    assert status == 200 and 'shardline_cuts_skipped_total{task="ps/0"}' in text


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_page_closes_at_once(metrics: Metrics, files: Files, tls: bool, request: pytest.FixtureRequest) -> None:
    if tls:
        request.getfixturevalue("outside")
    for _ in range(5):
        metrics.serve("127.0.0.1", 0, files.mutual(token=True) if tls else PLAIN)
        assert metrics.url.startswith("https:" if tls else "http:")
        began_s = time.monotonic()
        metrics.close()
        # Without a reader nothing is waited for; a look at the clock every half second would be.
        if time.monotonic() - began_s < 0.1:
            return
    pytest.fail("five times it took more than 0.1 s")


@pytest.mark.usefixtures("outside")
def test_from_outside_the_page_needs_the_jobs_token(metrics: Metrics, files: Files) -> None:
    metrics.serve("127.0.0.1", 0, Security(token_file=files.token))
    for wrong in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"}, {"Cookie": TOKEN}):
        status, text = read(metrics.url, wrong)
        assert (status, text) == (401, "these metrics need the job's token: Authorization: Bearer TOKEN\n")
    assert read(metrics.url, BEARER)[0] == 200


@pytest.mark.usefixtures("outside")
def test_beyond_loopback_the_page_wears_the_tasks_tls(metrics: Metrics, files: Files) -> None:
    metrics.serve("127.0.0.1", 0, files.mutual(token=True))
    trusting = ssl.create_default_context(cafile=str(files.ca))
    assert metrics.url.startswith("https://")
    assert read(metrics.url, context=trusting)[0] == 401
    assert read(metrics.url, BEARER, trusting)[0] == 200
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        read(metrics.url, BEARER, ssl.create_default_context())


@pytest.mark.usefixtures("outside")
def test_without_a_token_a_ca_asks_readers_for_a_certificate(metrics: Metrics, files: Files) -> None:
    metrics.serve("127.0.0.1", 0, files.mutual(token=False))
    context = ssl.create_default_context(cafile=str(files.ca))
    with pytest.raises((urllib.error.URLError, OSError)):
        read(metrics.url, context=context)
    context.load_cert_chain(files.cert, files.key)
    assert read(metrics.url, context=context)[0] == 200


@pytest.mark.usefixtures("outside")
def test_silent_readers_hold_nobody_up_and_are_not_any_number(
    metrics: Metrics, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page._Handler, "timeout", 0.3)
    metrics.serve("127.0.0.1", 0, files.mutual(token=True))
    host, _, port = metrics.address.rpartition(":")
    # None of them shakes hands.
    silent = [socket.create_connection((host, int(port)), timeout=5.0) for _ in range(metrics_page.CONNECTIONS + 8)]
    began_s = time.monotonic()
    closed = [one.recv(1) for one in silent]
    assert closed == [b""] * len(silent) and time.monotonic() - began_s < 5.0
    trusting = ssl.create_default_context(cafile=str(files.ca))
    assert read(metrics.url, BEARER, trusting)[0] == 200
    for one in silent:
        one.close()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("begun", [b"", b"GET /metrics HTTP/1.1\r\nX-Header: "])
def test_readers_whose_request_does_not_end_are_let_go_although_bytes_keep_coming(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(metrics_page, "REQUEST_S", 0.3)
    metrics.serve("127.0.0.1", 0, PLAIN)
    host, _, port = metrics.address.rpartition(":")
    slow = [socket.create_connection((host, int(port)), timeout=5.0) for _ in range(metrics_page.CONNECTIONS)]
    for one in slow:
        one.sendall(begun)
        one.settimeout(0.001)
    end_s = time.monotonic() + 15.0
    left = slow
    while left and time.monotonic() < end_s:
        left = [one for one in left if not is_closed(one)]
    assert not left
    for one in slow:
        one.close()
    assert read(metrics.url)[0] == 200


def is_closed(link: socket.socket) -> bool:
    """Whether the other side takes no more, after another byte."""
    try:
        link.sendall(b"x")
        return not link.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("peer", "authorization", "expected"),
    [
        ("127.0.0.1", "", True),
        ("::1", "", True),
        ("::ffff:127.0.0.1", "", True),
        ("10.0.0.7", "", False),
        ("::ffff:10.0.0.7", "", False),
        ("fd00::7", f"Bearer {TOKEN}", True),
        ("10.0.0.7", f"bearer  {TOKEN} ", True),
        ("10.0.0.7", f"Basic {TOKEN}", False),
        ("10.0.0.7", TOKEN, False),
        ("10.0.0.7", "Bearer ", False),
        ("10.0.0.7", "Bearer \udcff", False),
        ("not an address", "", False),
    ],
)
def test_rule_of_who_may_read(peer: str, authorization: str, expected: bool, files: Files) -> None:
    def asked(security: Security) -> PageAnswer:
        return decide(security, exposed=True, peer=peer, host="127.0.0.1:9464", authorization=authorization)

    assert asked(Security(token_file=files.token)) is (PageAnswer.PAGE if expected else PageAnswer.NEEDS_TOKEN)
    assert asked(PLAIN) is PageAnswer.PAGE


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:9464", True),
        ("localhost", True),
        ("LocalHost:9464", True),
        ("[::1]:9464", True),
        ("evil.example:9464", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.7:9464", False),
        ("[::1", True),
        ("", False),
        ("@127.0.0.1", False),
        ("\xff", False),
    ],
)
def test_rule_of_the_names_under_which_the_page_may_be_read_here(host: str, own: bool, files: Files) -> None:
    def asked(security: Security, *, exposed: bool, authorization: str = "") -> PageAnswer:
        return decide(security, exposed=exposed, peer="127.0.0.1", host=host, authorization=authorization)

    # Whoever reads without the token because they are here: a web site in somebody's browser is here, too.
    here = PageAnswer.PAGE if own else PageAnswer.WRONG_HOST
    token = Security(token_file=files.token)
    assert asked(PLAIN, exposed=False) is asked(token, exposed=False) is asked(token, exposed=True) is here
    # No web site knows the token; and what anybody on the network may read needs no protection here.
    assert asked(token, exposed=False, authorization=BEARER["Authorization"]) is PageAnswer.PAGE
    assert asked(PLAIN, exposed=True) is PageAnswer.PAGE


@pytest.mark.parametrize("token", [False, True], ids=["no token", "token"])
def test_a_web_site_that_names_itself_as_this_machine_reads_nothing(
    metrics: Metrics, files: Files, token: bool
) -> None:
    metrics.serve("127.0.0.1", 0, Security(token_file=files.token) if token else PLAIN)
    port = metrics.address.rpartition(":")[2]
    for good in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert read(metrics.url, {"Host": good})[0] == 200
    status, text = read(metrics.url, {"Host": f"evil.example:{port}"})
    assert status == 421 and "shardline_" not in text
    remedy = "use 127.0.0.1 or localhost" + (", or send the job's token" if token else "")
    assert text == f"these metrics were requested from host 'evil.example:{port}'; {remedy}\n"
    assert len(read(metrics.url, {"Host": "x" * 60_000})[1]) < 300
    assert read(metrics.url, {"Host": "evil.example", **BEARER})[0] == (200 if token else 421)
