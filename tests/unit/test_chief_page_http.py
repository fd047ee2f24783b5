"""The page over real HTTP on loopback: what it answers, what it refuses, and who may see it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from shardline.core.status import ChiefStatus, TaskStatus
from shardline.errors import ClusterSpecError, UsageError
from shardline.security import PLAIN, Security, is_loopback, names_loopback
from shardline_chief.page import server as page_server
from shardline_chief.page.access import PageAccess, check_exposure
from shardline_chief.page.app import CURSOR_CHARACTERS, SECURITY_HEADERS, STREAMS, read_static
from shardline_chief.page.board import Board
from shardline_chief.page.history import History
from shardline_chief.page.server import PageServer
from shardline_chief.page.viewer import MOST_RUNS

TOKEN = "correct-horse-battery"
STATUS = ChiefStatus(job="digits", phase="running", step=40, steps=100, tasks=(TaskStatus(task="ps/0", state="alive"),))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(page: PageServer, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
    host, _, port = page.address.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body or None, named)
        reply = connection.getresponse()
        return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())


Make = Callable[..., PageServer]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PageServer] = []

    def page(security: Security = PLAIN, address: str = "127.0.0.1:0", history: History | None = None) -> PageServer:
        found = PageServer(address, security, history or History())
        made.append(found)
        found.start()
        found.show(STATUS)
        return found

    yield page
    for page_made in made:
        page_made.close()


@pytest.fixture
def locked(make: Make, tmp_path: Path) -> PageServer:
    return make(with_token(tmp_path))


def with_token(folder: Path) -> Security:
    file = folder / "token"
    file.write_text(TOKEN)
    return Security(token_file=file)


# What it answers


def test_the_page_its_files_and_its_data_are_there(make: Make) -> None:
    history = History()
    history.add("loss", 3, 0.5)
    page = make(history=history)
    without = ask(page, "/pipeline-trace.json")
    assert (without.status, without.text) == (404, "this job has no pipeline, so there is no trace of one\n")
    page.passes.begin("digits", "flush", stages=2, replicas=1, microbatches=1)
    assert json.loads(ask(page, "/pipeline-trace.json").body)["otherData"] == {"job": "digits", "pipeline": "flush"}
    assert json.loads(ask(page, "/api/passes").body) == {"rows": [], "passes": []}
    index = ask(page, "/")
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in re.findall(r'(?:src|href)="([^"]+)"', index.text):
        assert ask(page, f"/{path}").status == 200, path
    view = json.loads(ask(page, "/api/view").body)
    assert (view["job"], view["step"], view["progress"], view["tasks"][0]["name"]) == ("digits", 40, 0.4, "ps/0")
    news = json.loads(ask(page, "/api/history").body)
    assert news["curves"]["loss"]["points"] == [[3, 3, 0.5]]
    again = json.loads(ask(page, f"/api/history?since={news['cursor']}").body)
    assert (again["reset"], again["curves"]) == (False, {})


def test_the_curves_of_other_runs_come_beside_its_own_and_with_its_cursor() -> None:
    own, other = History(), History()
    own.add("loss", 3, 0.5)
    board = Board(own, {"today": own, "before": other})
    board.show(STATUS)
    first = board.changes("")
    assert first["run"] == "today"
    assert first["curves"]["loss"]["points"] == [[3, 3, 0.5]]
    assert first["beside"] == {"before": {"reset": True, "curves": {}}}
    other.add("loss", 7, 0.25)
    board.show(STATUS)
    second = board.changes(first["cursor"])
    assert (second["reset"], second["curves"]) == (False, {})
    assert second["beside"]["before"]["reset"] is False
    assert second["beside"]["before"]["curves"]["loss"]["points"] == [[7, 7, 0.25]]
    board.show(STATUS)
    assert board.changes(second["cursor"])["beside"] == {"before": {"reset": False, "curves": {}}}
    # Of as many runs as a page shows, within what a request may say.
    many = Board(own, {str(number): own for number in range(MOST_RUNS)})
    assert len(many.changes("")["cursor"]) < CURSOR_CHARACTERS - 15 * MOST_RUNS


def test_a_stream_tells_every_status_and_that_the_chief_ends(make: Make) -> None:
    page = make()
    host, _, port = page.address.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        connection.request("GET", "/api/stream?since=")
        reply = connection.getresponse()
        assert reply.headers["content-type"].startswith("text/event-stream")

        def events(name: str) -> dict[str, object]:
            while reply.readline().decode().strip() != f"event: {name}":
                pass
            found: dict[str, object] = json.loads(reply.readline().decode().removeprefix("data: "))
            return found

        assert events("view")["step"] == 40
        assert events("history")["reset"] is True
        page.show(ChiefStatus(phase="running", step=41))
        assert events("view")["step"] == 41
        page.show(ChiefStatus(phase="ended", step=42))
        page.close()
        while (last := events("view"))["step"] != 42:
            pass
        assert last["phase"] == "ended"
        assert events("end") == {}


def test_every_answer_has_the_headers_that_keep_a_browser_from_harm(make: Make) -> None:
    page = make()
    for path in ("/", "/app.js", "/api/view", "/nothing"):
        answer = ask(page, path)
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name.lower()] == value, (path, name)
        assert "server" not in answer.headers
    assert ask(page, "/api/view").headers["cache-control"] == "no-store"


def test_a_file_that_did_not_change_is_not_sent_again(make: Make) -> None:
    page = make()
    first = ask(page, "/app.js")
    second = ask(page, "/app.js", If_None_Match=first.headers["etag"])
    assert (second.status, second.body) == (304, b"")


# What it refuses


@pytest.mark.parametrize("path", ["/nothing", "/../etc/passwd", "/%2e%2e/app.js", "/api/view/", "/static/app.js", "//"])
def test_an_unknown_path_is_refused_with_a_sentence(make: Make, path: str) -> None:
    answer = ask(make(), path)
    assert answer.status == 404
    assert "the page is at /, its data at /api/view" in answer.text


def test_an_unknown_path_is_repeated_as_text_and_in_part_only(make: Make) -> None:
    answer = ask(make(), "/" + "<script>" * 100)
    assert answer.headers["content-type"].startswith("text/plain")
    assert len(answer.text) < 300


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "/", "GET"), ("DELETE", "/api/view", "GET"), ("PUT", "/app.js", "GET"), ("GET", "/login", "POST")],
)
def test_another_method_is_refused_and_the_right_one_named(make: Make, method: str, path: str, allowed: str) -> None:
    answer = ask(make(), path, method)
    assert answer.status == 405
    assert allowed in answer.headers["allow"]
    said = json.loads(answer.text)["error"] if path.startswith("/api/") else answer.text
    assert re.match(rf"{path} allows .*{allowed}.*, not {method}", said)


def test_a_head_that_does_not_end_is_refused(make: Make) -> None:
    page = make()
    host, _, port = page.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(b"GET /?" + b"x" * (page_server.HEAD_BYTES + 1))
        assert link.recv(12) == b"HTTP/1.1 400"
    assert ask(page, "/").status == 200


def test_a_page_on_loopback_answers_to_its_own_names_only(make: Make) -> None:
    page = make()
    assert ask(page, "/api/view", Host="evil.example").status == 421
    assert "127.0.0.1 and localhost" in json.loads(ask(page, "/api/view", Host="evil.example:80").body)["error"]
    for host in ("localhost:1", "127.0.0.1", "[::1]:8400", "LOCALHOST"):
        assert ask(page, "/api/view", Host=host).status == 200, host


def test_more_streams_than_the_limit_are_told_to_ask_instead(make: Make) -> None:
    page = make()
    host, _, port = page.address.rpartition(":")
    held = [http.client.HTTPConnection(host, int(port), timeout=10) for _ in range(STREAMS)]
    try:
        for connection in held:
            connection.request("GET", "/api/stream")
            assert connection.getresponse().status == 200
        answer = ask(page, "/api/stream")
        assert (answer.status, "poll /api/view instead" in answer.text) == (503, True)
        assert ask(page, "/api/view").status == 200
    finally:
        for connection in held:
            connection.close()


def test_a_connection_that_asks_nothing_is_closed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "IDLE_S", 0.1)
    page = make()
    host, _, port = page.address.rpartition(":")
    for begun in (b"", b"GET / HTTP/1.1\r\nHost: localh"):
        with socket.create_connection((host, int(port)), timeout=10) as link:
            link.sendall(begun)
            assert link.recv(1) == b""


def test_a_connection_that_goes_on_asking_is_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "IDLE_S", 0.2)
    page = make()
    host, _, port = page.address.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        before_s = time.monotonic()
        end_s = before_s + 1.0
        while (asked_s := time.monotonic()) < end_s:
            try:
                connection.request("GET", "/api/view")
                assert connection.getresponse().read()
            except (http.client.RemoteDisconnected, ConnectionError):
                # On a busy machine this side was silent for as long.
                assert asked_s - before_s > 0.1
                connection.close()
            before_s = asked_s


@pytest.mark.parametrize(
    "head",
    [
        pytest.param("GET /api/view HTTP/1.1\r\nContent-Length: 1000000", id="a body that nobody reads"),
        pytest.param("POST /login HTTP/1.1\r\nContent-Length: 1000000", id="a body that is waited for"),
        pytest.param("GET /api/stream HTTP/1.1\r\nContent-Length: 1000000", id="a body beside an answer that goes on"),
        pytest.param("GET /api/view HTTP/1.1\r\nX-Header: ", id="a header"),
    ],
)
def test_a_request_that_does_not_end_is_closed_although_bytes_keep_coming(
    make: Make, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.setattr(page_server, "IDLE_S", 0.2)
    page = make()
    host, _, port = page.address.rpartition(":")
    end = "" if head.endswith(": ") else "\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(head.replace("\r\n", "\r\nHost: 127.0.0.1\r\n", 1).encode() + end.encode())
        assert trickles_until_closed(link)
    assert ask(page, "/api/view").status == 200


def trickles_until_closed(link: socket.socket) -> bool:
    """Send a byte now and then; False if the other side still takes them after long."""
    link.settimeout(0.02)
    end_s = time.monotonic() + 15.0
    while time.monotonic() < end_s:
        try:
            link.sendall(b"x")
            if not link.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


# The token


def test_without_the_token_only_the_form_is_shown(locked: PageServer) -> None:
    for path in ("/api/view", "/api/history", "/api/stream", "/app.js", "/nothing"):
        answer = ask(locked, path)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
    form = ask(locked, "/")
    assert form.status == 401
    assert 'type="password"' in form.text
    assert "digits" not in form.text
    assert ask(locked, "/style.css").status == 200


@pytest.mark.parametrize(
    "given", ["Bearer wrong", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer " + "x" * 9000]
)
def test_a_wrong_token_is_refused(locked: PageServer, given: str) -> None:
    assert ask(locked, "/api/view", Authorization=given).status == 401


def test_the_token_opens_the_page_to_programs(locked: PageServer) -> None:
    assert ask(locked, "/api/view", Authorization=f"Bearer {TOKEN}").status == 200
    # With a token the name does not matter: a foreign page can't know it.
    assert ask(locked, "/api/view", Authorization=f"Bearer {TOKEN}", Host="trainer.example").status == 200


@pytest.mark.parametrize("way", ["address", "form"])
def test_a_browser_brings_the_token_once_and_keeps_a_cookie_that_is_not_the_token(locked: PageServer, way: str) -> None:
    if way == "address":
        answer = ask(locked, f"/?token={TOKEN}")
    else:
        answer = ask(locked, "/login", "POST", f"token={TOKEN}", Content_Type="application/x-www-form-urlencoded")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    pair = cookie.partition(";")[0]
    assert ask(locked, "/", Cookie=pair).status == 200
    assert ask(locked, "/api/view", Cookie=f"other=1; {pair}").status == 200
    assert ask(locked, "/api/view", Cookie=pair[:-1]).status == 401
    assert ask(locked, "/api/view", Cookie="x" * 5000 + pair).status == 401


@pytest.mark.parametrize("way", ["address", "form"])
def test_a_wrong_token_of_a_browser_gets_the_form_again_with_a_word(locked: PageServer, way: str) -> None:
    if way == "address":
        answer = ask(locked, "/?token=guess")
    else:
        answer = ask(locked, "/login", "POST", "token=guess")
    assert answer.status == 401
    assert "not the token of this job" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_token_in_the_address_opens_nothing_but_the_page(locked: PageServer) -> None:
    assert ask(locked, f"/api/view?token={TOKEN}").status == 401


def test_a_form_that_is_too_long_is_refused(locked: PageServer) -> None:
    answer = ask(locked, "/login", "POST", "token=" + "x" * 20_000)
    assert (answer.status, "longer than" in answer.text) == (413, True)


def test_chiefs_with_different_tokens_have_cookies_of_different_names(tmp_path: Path) -> None:
    access = PageAccess(with_token(tmp_path))
    (tmp_path / "other").write_text(TOKEN + "2")
    other = PageAccess(Security(token_file=tmp_path / "other"))
    assert access.cookie_name != other.cookie_name
    assert "Secure" in access.cookie(secure=True)


# Where it may be


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "trainer.example:8400", "10.0.0.7:8400"])
def test_a_page_that_others_reach_needs_a_token(address: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--page .* is open to other machines, so it needs the job's token"):
        check_exposure(address, PLAIN)
    assert check_exposure(address, with_token(tmp_path))


def test_an_exposed_page_with_a_token_answers_under_any_name(make: Make, tmp_path: Path) -> None:
    page = make(with_token(tmp_path), "0.0.0.0:0")
    assert ask(page, "/api/view", Host="trainer.example", Authorization=f"Bearer {TOKEN}").status == 200
    assert ask(page, "/api/view", Host="trainer.example").status == 401


def test_an_exposed_page_of_a_cluster_with_tls_wears_it_and_needs_no_certificate_of_the_browser(
    make: Make, tmp_path: Path
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("trainer.example")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    security = Security(
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        tls_ca=tmp_path / "ca.pem",
        token_file=with_token(tmp_path).token_file,
    )
    page = make(security, "0.0.0.0:0")
    assert page.url.startswith("https://")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    port = int(page.address.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="trainer.example") as link,
    ):
        link.sendall(f"GET /?token={TOKEN} HTTP/1.1\r\nHost: trainer.example\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: link.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 303")
    assert "Secure" in answer
    # On loopback a certificate that names other hosts would only be in the way.
    assert make(security).url.startswith("http://127.0.0.1:")


def test_a_port_that_is_taken_is_said_with_a_remedy(make: Make) -> None:
    page = make()
    with pytest.raises(UsageError, match=rf"can't be served at {page.address}: .*use another --page"):
        PageServer(page.address, PLAIN, History())


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ClusterSpecError, match="--page is '8400'"):
        PageServer("8400", PLAIN, History())


def test_requests_that_are_none_leave_no_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    page = make()
    host, _, port = page.address.rpartition(":")
    for _ in range(100):
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(b"\x16\x03\x01 is no HTTP\r\n\r\n")
            assert b" 400 " in stranger.recv(4096)
    assert caplog.records == []


def test_who_asks_for_news_and_reads_nothing_is_let_go(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "IDLE_S", 0.1)
    page = make()
    host, _, port = page.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(STREAMS):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            held.append(reader)
        deadline_s = time.monotonic() + 20.0
        # News of a megabyte: more than all buffers on the way together, again and again.
        while ask(page, "/api/stream", "HEAD").status == 200 and page.streams < STREAMS:
            assert time.monotonic() < deadline_s, "the streams did not begin"
        number = 0
        while page.streams:
            assert time.monotonic() < deadline_s, f"{page.streams} streams are still there"
            number += 1
            page.show(dataclasses.replace(STATUS, step=number, reason="x" * 1_000_000))
            # Another reader is answered meanwhile.
            assert ask(page, "/api/view").status == 200
        for reader in held:
            reader.settimeout(5.0)
            with contextlib.suppress(ConnectionError):
                while reader.recv(1 << 20):
                    pass


def test_closing_frees_the_port_and_may_be_done_twice(make: Make) -> None:
    page = make()
    page.close()
    page.close()
    PageServer(page.address, PLAIN, History()).close()


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("", False)]
)
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("header", "loopback"),
    [("a.example:80", False), ("[::1]:80", True), ("[::1]", True), ("localhost:80", True), ("", False)],
)
def test_the_host_is_read_from_its_header(header: str, loopback: bool) -> None:
    assert names_loopback(header) is loopback


# The files


def test_the_page_needs_nothing_from_outside() -> None:
    for path, file in read_static().items():
        text = file.content.decode()
        # The plotting library's banner and the svg name space are names, not addresses that are asked for.
        text = text.replace("/*! https://github.com/leeoniya/uPlot", "").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text), path
        assert not re.search(r"\bon[a-z]+=\"|style=\"|javascript:", text), path


def test_the_plotting_library_comes_with_its_licence() -> None:
    licence = read_static()["/uPlot-LICENSE.txt"].content.decode()
    assert "MIT License" in licence
    assert "Leon Sorokin" in licence
