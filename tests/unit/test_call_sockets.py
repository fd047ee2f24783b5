"""Calls over a lane's own socket: frames in any pieces, and both halves over a pair of sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import grpc
import pytest
from hypothesis import given, strategies as st

from shardline.errors import ProtocolError, UnreachableError
from shardline.lanes import call_server
from shardline.lanes.call_frames import HEADER, CallError, CallFrameReader, Kind, failure, frame, read_failure
from shardline.lanes.call_server import Answered, CallServer, ReplyWriter
from shardline.lanes.call_socket import CallSocket, Item
from shardline.lanes.tls_socket import TlsSocket
from shardline.rpc.v1 import data_pb2
from tests.support.lanes import Handled, Handler, contexts
from tests.support.waiting import wait_for

PATIENCE_S = 20.0
FRAMES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_frames_are_the_same_in_whatever_pieces_they_come(frames: list[tuple[Kind, bytes]], sizes: list[int]) -> None:
    data = b"".join(frame(kind, body) for kind, body in frames)
    reader, found, at = CallFrameReader(1 << 20), [], 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        found += reader.feed(data[at : at + size])
        at += size
    assert found == frames


@pytest.mark.parametrize("kind", [0, 6, 255])
def test_a_frame_of_another_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"kind {kind}"):
        list(CallFrameReader(10).feed(HEADER.pack(kind, 0)))


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        list(CallFrameReader(10).feed(HEADER.pack(Kind.REQUEST, 11)))


@pytest.mark.parametrize("body", [b"", b"\xff\xff", b"\x0edown"])
def test_a_failure_is_read_whatever_its_body(body: bytes) -> None:
    error = read_failure(body)
    assert (error.code is grpc.StatusCode.UNAVAILABLE) == (body == b"\x0edown")


def pull(step: int) -> data_pb2.PushPullRequest:
    return data_pb2.PushPullRequest(pull=data_pb2.PullRequest(exact_step=step))


def reply(step: int, padding: int = 0) -> bytes:
    return data_pb2.PushPullReply(ack=data_pb2.PushAck(step=step, reason="x" * padding))


class Caller:
    """What ShardCalls gives to a call."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.ended = threading.Event()

    def began(self, call: CallSocket) -> None:
        self.running = call

    def sending(self, requests: Iterable[Item]) -> Iterator[Item]:
        try:
            yield from requests
        except ValueError as error:
            self.error = error
            self.running.cancel()

    def follow(self, requests: Iterator[Item]) -> None:
        assert next(requests, None) is None

    def over(self, call: CallSocket) -> None:
        self.ended.set()


class Waits:
    """A handler that never ends by itself."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    async def __call__(self, requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


def secured(worker: socket.socket, server: socket.socket, tls: Contexts) -> tuple[TlsSocket, TlsSocket]:
    """Both ends after their handshake."""
    theirs, ours = TlsSocket(worker, tls[1], name="127.0.0.1"), TlsSocket(server, tls[0], name=None)
    with ThreadPoolExecutor(1) as pool:
        shaken = pool.submit(theirs.do_handshake)
        ours.do_handshake()
        shaken.result(PATIENCE_S)
    return theirs, ours


class Pair:
    """Both halves of a socket, the server's with a handler."""

    def __init__(self, handler: Handler | Handled, tls: Contexts | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.reasons: list[str] = []
        self.worker, there = socket.socketpair()
        if tls is not None:
            self.worker, there = secured(self.worker, there, tls)
        there.setblocking(False)
        answers = handler if isinstance(handler, Handled) else Handled(handler)
        self.server = CallServer(self.loop, answers, who="worker/0", broke=self.reasons.append)
        self.server.attach(there)
        self.client = CallSocket(self.worker)

    def call(
        self, *requests: data_pb2.PushPullRequest, timeout_s: float = PATIENCE_S, single: bool = False
    ) -> list[int]:
        """Steps in the replies."""
        views = self.client.call(Caller(), requests, timeout_s, single=single)
        return [view.ack.step for view in views if view.ack is not None]

    def bare(self, timeout_s: float = PATIENCE_S) -> socket.socket:
        """The worker's end, for what no CallSocket sends."""
        self.worker.settimeout(timeout_s)
        return self.worker

    def settle(self) -> None:
        """Return when the loop has run what was due."""
        for _ in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.client.close()
        self.server.close()

        async def settle() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(settle(), self.loop).result(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


Make = Callable[[Handler | Handled], Pair]


@pytest.fixture(scope="module")
def tls() -> Contexts:
    return contexts()


@pytest.fixture(params=["plain", "tls"])
def made(request: pytest.FixtureRequest, tls: Contexts) -> Iterator[Make]:
    pairs: list[Pair] = []
    plain = request.param == "plain"

    def make(handler: Handler | Handled) -> Pair:
        pairs.append(Pair(handler, None if plain else tls))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def at_once(request: data_pb2.PushPullRequest) -> Answered | None:
    """Step 1: all that there is to say. 2: the rest comes from a task. 3: an error. Else: not small."""
    assert request.pull is not None
    step = request.pull.exact_step

    async def rest(writer: ReplyWriter) -> None:
        await asyncio.sleep(0)
        await writer.write(reply(20))

    if step == 3:
        raise UnreachableError("the ps is ending")
    return {1: Answered([reply(1), reply(10)], None), 2: Answered([reply(2)], rest)}.get(step)


def test_a_call_that_is_answered_at_once_ends_like_others_and_others_follow(made: Make) -> None:
    pair = made(Handled(echo, at_once))
    assert pair.call(pull(1), single=True) == [1, 10]
    assert pair.call(pull(2), single=True) == [2, 20]
    assert pair.call(pull(4), single=True) == [4], "one that is not small has a handler of its own"
    assert pair.call(pull(1), pull(2)) == [1, 2], "only a call that is one request is answered at once"
    with pytest.raises(CallError, match="the ps is ending") as raised:
        pair.call(pull(3), single=True)
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    assert pair.call(pull(1), single=True) == [1, 10]
    assert not pair.reasons


async def echo(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
    async for request in requests:
        assert request.pull is not None
        await writer.write(reply(request.pull.exact_step))


@pytest.mark.parametrize("single", [True, False])
def test_one_call_follows_another(made: Make, single: bool) -> None:
    pair = made(echo)
    for step in range(50):
        assert pair.call(pull(step), single=single) == [step]


def test_a_call_has_many_requests_and_many_replies(made: Make) -> None:
    pair = made(echo)
    assert pair.call(*map(pull, range(500))) == list(range(500))
    assert pair.call() == []


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ProtocolError("too many"), grpc.StatusCode.INVALID_ARGUMENT, "too many"),
        (UnreachableError("fenced"), grpc.StatusCode.UNAVAILABLE, "fenced"),
        (
            OSError("a secret"),
            grpc.StatusCode.INTERNAL,
            "OSError in this call; see the log of the task called",
        ),
    ],
)
def test_an_error_of_the_handler_is_its_status_and_the_next_call_goes_on(
    made: Make, error: Exception, code: grpc.StatusCode, sentence: str
) -> None:
    errors = [error]

    async def once(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        if errors:
            raise errors.pop()
        await echo(requests, writer)

    # As code of the library: that of a plugin is told to the caller.
    pair = made(FunctionType(once.__code__, {**globals(), "__name__": "shardline.server"}, closure=once.__closure__))
    with pytest.raises(CallError) as raised:
        # What was still to be sent of this call is skipped.
        pair.call(*map(pull, range(3)))
    assert (raised.value.code, str(raised.value)) == (code, sentence)
    # The thread that sends may still be at it.
    wait_for(lambda: threading.active_count() <= 2 or all(t.name != "calls" for t in threading.enumerate()), "its end")
    assert pair.call(pull(4)) == [4]


@pytest.mark.parametrize(("count", "padding", "most"), [(5_000, 0, call_server.MAX_REQUESTS + 64), (30, 300_000, 5)])
def test_a_handler_that_takes_no_requests_has_few_of_them_in_memory(
    made: Make, monkeypatch: pytest.MonkeyPatch, count: int, padding: int, most: int
) -> None:
    monkeypatch.setattr(call_server, "RECEIVE_BYTES", 64 if not padding else 64 << 10)
    held: list[int] = []
    go_on = threading.Event()

    async def late(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        await asyncio.get_running_loop().run_in_executor(None, go_on.wait, PATIENCE_S)
        held.append(requests.waiting)  # type: ignore[attr-defined]
        await echo(requests, writer)

    pair = made(late)
    sent = threading.Event()

    def requests() -> Iterator[data_pb2.PushPullRequest]:
        for step in range(count):
            request = pull(step)
            assert request.pull is not None
            request.pull.data.task = "x" * padding
            yield request
            if step == min(1_000, most - 1):
                sent.set()

    result: list[int] = []
    caller = threading.Thread(target=lambda: result.extend(pair.call(*requests())))
    caller.start()
    sent.wait(1.0)
    # What the socket takes is soon there.
    threading.Event().wait(0.3)
    go_on.set()
    caller.join(PATIENCE_S)
    assert result == list(range(count))
    assert 0 < held[0] <= most


def test_a_worker_that_reads_no_failures_can_make_no_more_calls(made: Make) -> None:
    calls: list[int] = []

    async def refuses(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        calls.append(len(calls))
        raise ProtocolError("x" * 4000)

    pair = made(refuses)
    worker = pair.bare(1.0)

    def flood() -> None:
        for number in range(10_000):
            worker.sendall(frame(Kind.LAST, b"\x12\x00" * 5000))
            # One call at a time: the next one when this has been answered, as far as it can be.
            deadline_s = time.monotonic() + 0.1
            while len(calls) <= number and time.monotonic() < deadline_s:
                threading.Event().wait(0.001)
            pair.settle()

    with pytest.raises(TimeoutError):
        flood()
    assert len(calls) < 500
    assert pair.reasons == []


def test_a_call_that_does_not_end_is_not_waited_for_when_its_socket_is_closed(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_server, "LAST_WORD_S", 0.1)
    waits = Waits()
    pair = made(waits)
    worker = pair.bare()
    worker.sendall(frame(Kind.REQUEST))
    assert waits.begun.wait(PATIENCE_S)
    pair.server.close()
    assert waits.ended.wait(PATIENCE_S)
    assert worker.recv(1) == b""


def test_what_a_call_holds_goes_with_its_socket(made: Make) -> None:
    class Held:
        """Something large."""

    found: list[weakref.ref[Held]] = []

    async def waits(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        held = Held()
        found.append(weakref.ref(held))
        await asyncio.Event().wait()

    pair = made(waits)
    pair.worker.sendall(frame(Kind.REQUEST))
    wait_for(lambda: bool(found), "the call")
    gc.disable()
    try:
        pair.client.cancel()
        wait_for(lambda: found[0]() is None, "it to be freed without a collection")
    finally:
        gc.enable()


def test_a_socket_that_was_cancelled_after_the_last_reply_is_not_used_again(made: Make) -> None:
    pair = made(echo)
    views = pair.client.call(Caller(), [pull(1)], PATIENCE_S, single=True)
    assert next(views).ack is not None
    assert pair.client.usable
    pair.client.cancel()
    assert not pair.client.usable


def test_a_caller_that_reads_nothing_blocks_its_handler_and_no_other_memory(
    made: Make,
) -> None:
    written: list[int] = []

    async def much(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        for step in range(100):
            await writer.write(reply(step, padding=1 << 20))
            written.append(step)

    pair = made(much)
    views = pair.client.call(Caller(), [pull(0)], PATIENCE_S, single=True)
    assert next(views).ack is not None
    wait_for(lambda: bool(written), "the first replies")
    before = -1
    while before != len(written):
        before = len(written)
        threading.Event().wait(0.1)
    assert len(written) < 20
    assert len([view for view in views if view.ack is not None]) == 99


def test_a_caller_that_goes_away_cancels_its_handler(made: Make) -> None:
    waits = Waits()
    pair = made(waits)
    pair.worker.sendall(frame(Kind.REQUEST))
    assert waits.begun.wait(PATIENCE_S)
    pair.client.cancel()
    assert waits.ended.wait(PATIENCE_S)
    wait_for(lambda: bool(pair.reasons), "the reason")
    assert pair.reasons == ["the worker closed the socket of its calls"]


@pytest.mark.parametrize(
    "data",
    [
        frame(Kind.REPLY, b"x"),
        b"\xff" * 20,
        HEADER.pack(Kind.REQUEST, 1 << 31),
        frame(Kind.LAST) + frame(Kind.REQUEST),
    ],
)
def test_a_worker_that_sends_something_else_loses_its_socket(made: Make, data: bytes) -> None:
    pair = made(Waits())
    worker = pair.bare()
    worker.sendall(data)
    assert worker.recv(1) == b""
    wait_for(lambda: len(pair.reasons) == 1, "the reason")


def test_a_call_that_is_cancelled_says_so_and_one_whose_server_is_gone_too(made: Make) -> None:
    for end, code in (
        (lambda pair: pair.client.cancel(), grpc.StatusCode.CANCELLED),
        (lambda pair: pair.loop.call_soon_threadsafe(pair.server._end), grpc.StatusCode.UNAVAILABLE),
    ):
        waits = Waits()
        pair = made(waits)
        ender = threading.Thread(target=lambda end=end, pair=pair, it=waits: it.begun.wait(PATIENCE_S) and end(pair))
        ender.start()
        with pytest.raises(CallError) as raised:
            pair.call(pull(0), single=True)
        ender.join(PATIENCE_S)
        assert raised.value.code is code


def test_a_request_that_can_not_be_made_ends_its_call_at_once(made: Make) -> None:
    def fails() -> Iterator[data_pb2.PushPullRequest]:
        yield pull(0)
        raise ValueError("too large")

    caller = Caller()
    with pytest.raises(CallError) as raised:
        list(made(Waits()).client.call(caller, fails(), PATIENCE_S, single=False))
    assert raised.value.code is grpc.StatusCode.CANCELLED
    assert str(caller.error) == "too large"


def test_a_call_without_an_answer_ends_at_its_deadline(made: Make) -> None:
    with pytest.raises(CallError) as raised:
        made(Waits()).call(pull(0), single=True, timeout_s=0.1)
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_server_that_closes_lets_the_running_call_end(made: Make) -> None:
    async def closes(requests: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        pair.server.close()
        await asyncio.sleep(0)
        raise ProtocolError("the last word")

    pair = made(closes)
    with pytest.raises(CallError, match="the last word"):
        pair.call(pull(0), single=True)
    with pytest.raises(CallError):
        pair.call(pull(1), single=True)
    assert pair.reasons == []


def test_the_sentence_of_a_failure_is_what_was_sent() -> None:
    ((kind, body),) = CallFrameReader(1 << 20).feed(failure(grpc.StatusCode.NOT_FOUND, "gone: \u00e9"))
    error = read_failure(body)
    assert (kind, error.code, str(error)) == (Kind.FAILED, grpc.StatusCode.NOT_FOUND, "gone: \u00e9")
