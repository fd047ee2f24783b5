"""Host names that come to have an address only after the task that needs them has started."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.rpc import channel, names
from shardline.rpc.channel import Peer
from shardline.rpc.index_request import take_place
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.rpc.names import HostName

UNKNOWN = "Name or service not known"
NOWHERE = "no-such-host.invalid"
"""RFC 6761: no resolver ever has an address of such a name."""


class Resolver:
    """Knows a name from a given question on."""

    def __init__(self, found_at: int = 1_000_000) -> None:
        self.found_at = found_at
        self.asked: list[str] = []
        self.asked_once = threading.Event()

    def __call__(self, host: str) -> str:
        self.asked.append(host)
        self.asked_once.set()
        return "" if len(self.asked) >= self.found_at else UNKNOWN


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "ASK_EVERY_S", 0.01)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%lo", "0.0.0.0"])
def test_ip_address_is_there_without_asking(host: str) -> None:
    resolver = Resolver()
    assert HostName(host, "ps/0", resolve=resolver).wait(0.0)
    assert resolver.asked == []


def test_name_is_asked_for_until_it_has_an_address_and_never_again(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver(found_at=4)
    name = HostName("ps-0.ps", "ps/0 at ps-0.ps:2222", resolve=resolver)
    with caplog.at_level(logging.INFO, logger="shardline.rpc"):
        assert name.wait(30.0)
        assert name.wait(0.0)
    assert resolver.asked == ["ps-0.ps"] * 4
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert told[0].startswith("waiting for ps/0 at ps-0.ps:2222, 30 s left: the name 'ps-0.ps' has no address yet")
    assert told[1] == "the name 'ps-0.ps' now has an address"


def test_name_without_an_address_is_named_with_the_deadline_and_the_cause() -> None:
    name = HostName("ps-0.ps", "ps/0 at ps-0.ps:2222", resolve=Resolver())
    with pytest.raises(UnreachableError) as caught:
        name.wait(0.05)
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        "ps/0 at ps-0.ps:2222 was not found within 0 s: the name 'ps-0.ps' has no address (Name or service not known); "
        "is it right in the cluster spec, and is that host up?"
    )


def test_name_may_come_after_a_first_wait_has_given_up() -> None:
    resolver = Resolver()
    name = HostName("ps-0.ps", "ps/0", resolve=resolver)
    with pytest.raises(UnreachableError):
        name.wait(0.02)
    resolver.found_at = 0
    assert name.wait(30.0)


def test_a_resolver_that_can_not_be_asked_for_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[OSError] = [OSError(errno.EMFILE, "Too many open files"), socket.gaierror(-2, UNKNOWN)]

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        assert host == "ps-0.ps"
        if answers:
            raise answers.pop(0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert names.unknown_name("ps-0.ps") == "Too many open files"
    assert HostName("ps-0.ps", "ps/0").wait(30.0)
    assert answers == []


def test_resolver_that_hangs_keeps_nobody_beyond_the_deadline() -> None:
    hang = threading.Event()

    def never(_host: str) -> str:
        hang.wait(30.0)
        return UNKNOWN

    try:
        with pytest.raises(UnreachableError, match="the resolver did not answer"):
            HostName("ps-0.ps", "ps/0", resolve=never).wait(0.05)
    finally:
        hang.set()


def test_several_who_wait_for_one_name_ask_for_it_once() -> None:
    asked, answer = threading.Event(), threading.Event()
    questions: list[str] = []

    def resolve(host: str) -> str:
        questions.append(host)
        asked.set()
        answer.wait(30.0)
        return ""

    name = HostName("ps-0.ps", "ps/0", resolve=resolve)
    found: list[bool] = []
    waiting = [threading.Thread(target=lambda: found.append(name.wait(30.0))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    assert asked.wait(30.0)
    answer.set()
    for thread in waiting:
        thread.join(30.0)
    assert (found, questions) == ([True] * 4, ["ps-0.ps"])


def ended_by(cancel: Callable[[], None], waiting: Callable[[], bool], resolver: Resolver) -> bool:
    """What a wait returns that is cancelled once its name was asked for."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(waiting()), daemon=True)
    thread.start()
    assert resolver.asked_once.wait(30.0)
    cancel()
    thread.join(30.0)
    return found[0]


def test_cancel_ends_a_wait_at_once() -> None:
    resolver = Resolver()
    name = HostName("ps-0.ps", "ps/0", resolve=resolver)
    assert not ended_by(name.cancel, lambda: name.wait(600.0), resolver)


def use(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have peers ask this resolver."""
    monkeypatch.setattr(channel, "HostName", lambda host, whose: HostName(host, whose, resolve=resolver))


def test_sigterm_ends_a_task_that_waits_for_the_name_of_its_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver()
    use(resolver, monkeypatch)
    link = ChiefLink("chief.chief:2222", Timeouts(total_s=600.0), Applicant(role="ps", index=0))
    try:
        assert not ended_by(link.cancel_join, link.join, resolver)
    finally:
        link.close()


def test_closed_peer_says_why_it_was_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Resolver(), monkeypatch)
    peer = Peer("ps/0", "ps-0.ps:2222", Timeouts())
    peer.close()
    with pytest.raises(
        UnreachableError, match=r"ps/0 at ps-0\.ps:2222 was not called \(Lead\): this process is shutting down"
    ):
        peer.call(None, None, what="Lead")


def test_first_call_waits_for_the_name_and_a_later_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(found_at=3)
    use(resolver, monkeypatch)
    peer = Peer("ps/0", "ps-0.ps:2222", Timeouts())

    def method(request: str, **_: object) -> str:
        return f"{request} after {len(resolver.asked)}"

    try:
        assert [peer.call(method, "answer", what="Lead") for _ in range(2)] == ["answer after 3"] * 2
    finally:
        peer.close()


def test_task_without_an_index_names_the_host_that_is_not_there() -> None:
    with pytest.raises(UnreachableError, match=rf"chief at {NOWHERE}:2222 was not found within 1 s: the name"):
        take_place(f"{NOWHERE}:2222", "worker", "127.0.0.1:0", Timeouts(join_s=1.0))


def spec(tmp_path: Path, **addresses: str) -> str:
    tasks = {"chief": "127.0.0.1:2222", "ps": "127.0.0.1:0"} | addresses
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({role: [address] for role, address in tasks.items()}))
    return str(path)


@pytest.mark.parametrize(
    ("command", "addresses", "who"),
    [
        (["ps"], {"chief": f"{NOWHERE}:2222"}, f"chief at {NOWHERE}:2222"),
        (["ps"], {"ps": f"{NOWHERE}:2223"}, "the host that ps/0 should listen at"),
        (["chief", "--job", "{job}"], {"chief": f"{NOWHERE}:2222"}, "the host that chief/0 should listen at"),
        (["status"], {"chief": f"{NOWHERE}:2222"}, f"chief at {NOWHERE}:2222"),
    ],
    ids=["the chief's host", "a server's own host", "the chief's own host", "status"],
)
def test_host_that_never_comes_ends_the_command_with_code_three_at_its_deadline(
    command: list[str],
    addresses: dict[str, str],
    who: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = tmp_path / "job.py"
    job.write_text("job = None")
    # Both are the main thread's and this process's own: a test keeps them as they were.
    monkeypatch.setattr("shardline.host.process.Termination.install", lambda _: None)
    monkeypatch.setattr("shardline.observability.log.setup", lambda *_, **__: None)
    # Without it a task that is to listen there, without TLS, ends before it asks for the name.
    monkeypatch.setenv("SHARDLINE_INSECURE_BIND", "true")
    start_s = time.monotonic()
    arguments = [text.format(job=job) for text in command]
    limit = ["--timeout" if command == ["status"] else "--join-timeout", "2"]
    assert main([*arguments, "--cluster", spec(tmp_path, **addresses), *limit]) == 3
    waited_s = time.monotonic() - start_s
    assert waited_s >= 2.0
    told = [record.getMessage() for record in caplog.records if "no address" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"waiting for {who}, 2 s left: the name '{NOWHERE}' has no address yet (")
    ended = capsys.readouterr().err.splitlines()[-1]
    assert ended.startswith(f"shardline: {who} was not found within 2 s: the name '{NOWHERE}' has no address (")
