"""The native engine: what is posted is received and sent whole and in order, and nothing else is said to be done."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shardline.core.tensor_bytes import digest
from shardline.native.engine import (
    CHANGED,
    CLOSED,
    DIGEST,
    DIGEST_NOW,
    DONE,
    DONE_NOW,
    LINE,
    REFUSED,
    STALLED,
    Engine,
    available,
)
from shardline.storage.bucket import WriteCounts

pytestmark = pytest.mark.skipif(not available(), reason="there is no native engine in this process")
PATIENCE_S = 10.0


class Bench:
    """An engine on a running loop, and socket pairs on it."""

    def __init__(self) -> None:
        self.engine = Engine("tried")
        self.loop = asyncio.get_running_loop()
        self.reports: dict[int, list[tuple[int, int]]] = {}
        self._heard = asyncio.Event()

    def line(self, *, mark: bytes = b"", limit_s: float = PATIENCE_S) -> tuple[int, socket.socket]:
        """A line over TCP, and its peer."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
        peer.settimeout(PATIENCE_S)
        said: list[tuple[int, int]] = []

        def report(item: int, status: int) -> None:
            said.append((item, status))
            self._heard.set()

        number = self.engine.open(ours, self.loop, report, tls=None, mark=mark, limit_s=limit_s)
        self.reports[number] = said
        return number, peer

    async def said(self, line: int, count: int) -> list[tuple[int, int]]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.reports[line]) < count:
                self._heard.clear()
                await self._heard.wait()
        return self.reports[line]


def on_a_bench(work: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a coroutine on a bench; nothing is left of it."""
    # What other tests have left to the collector must not go while this one counts.
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))

    async def main() -> None:
        bench = Bench()
        try:
            await work(bench)
        finally:
            bench.engine.close()

    asyncio.run(main())
    assert "tried" not in {thread.name for thread in threading.enumerate()}
    assert set(os.listdir("/proc/self/fd")) <= before


def test_what_is_posted_comes_whole_and_in_order_and_a_wrong_digest_is_told() -> None:
    async def work(bench: Bench) -> None:
        line, peer = bench.line()
        data = [os.urandom(size) for size in (1, 70_000, 3, 2_000_000)]
        memory = [bytearray(len(one)) for one in data]
        for number, (into, one) in enumerate(zip(memory, data, strict=True), start=1):
            wrong = 1 if number == 3 else 0
            assert bench.engine.post(line, number, memoryview(into), digest=digest(one) ^ wrong) == 0
        await bench.loop.run_in_executor(None, peer.sendall, b"".join(data))
        assert await bench.said(line, 4) == [(1, DONE), (2, DONE), (3, DIGEST), (4, DONE)]
        assert [bytes(into) for into in memory] == data
        peer.close()

    on_a_bench(work)


@pytest.mark.parametrize("size", [1, 5, 300])
def test_a_stream_that_is_cut_anywhere_leaves_nothing(size: int) -> None:
    async def work(bench: Bench) -> None:
        data = os.urandom(2 * size)
        for cut in range(2 * size):
            line, peer = bench.line()
            memory = [bytearray(size) for _ in range(2)]
            for number, into in enumerate(memory, start=1):
                assert bench.engine.post(line, number, memoryview(into)) == 0
            peer.sendall(data[:cut])
            peer.close()
            whole = cut // size
            said = await bench.said(line, whole + 1)
            assert said == [*((number, DONE) for number in range(1, whole + 1)), (LINE, CLOSED)]
            assert all(bytes(memory[n]) == data[n * size : (n + 1) * size] for n in range(whole))
            assert bench.engine.post(line, 9, memoryview(bytearray(1))) == REFUSED
            bench.engine.close_line(line)

    on_a_bench(work)


@pytest.mark.parametrize("size", [3, 200_000])
def test_each_payload_is_followed_by_its_mark_unless_it_was_written_to(size: int) -> None:
    async def work(bench: Bench) -> None:
        line, peer = bench.line(mark=b".")
        counts = WriteCounts()
        before = counts.intact(0)
        first, last = b"a" * size, b"d" * size
        arriving = bench.loop.run_in_executor(None, exactly, peer, 2 * size + 2)
        answers = [
            bench.engine.post(line, number, memoryview(first), guard=before.address, value=before.count)
            for number in (1, 2)
        ]
        assert answers == [DONE_NOW, DONE_NOW] if size == 3 else answers == [0, 0]
        assert await arriving == (first + b".") * 2
        assert await bench.said(line, answers.count(0)) == [(1, DONE), (2, DONE)][2 - answers.count(0) :]
        counts.begin(0)
        bench.engine.post(line, 3, memoryview(last), guard=before.address, value=before.count)
        left = await bench.loop.run_in_executor(None, all_of, peer)
        assert left == last
        assert (await bench.said(line, answers.count(0) + 1))[-1] == (LINE, CHANGED)
        peer.close()

    on_a_bench(work)


def exactly(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := peer.recv(size - len(found))):
        found += piece
    return found


def all_of(peer: socket.socket) -> bytes:
    found = b""
    while piece := peer.recv(1 << 16):
        found += piece
    return found


def test_a_little_that_is_there_already_is_received_at_once() -> None:
    async def work(bench: Bench) -> None:
        line, peer = bench.line()
        data = os.urandom(1000)
        peer.sendall(data * 2 + data[:1])
        memory = [bytearray(1000) for _ in range(3)]
        arrived = memoryview(memory[0])
        assert bench.engine.post(line, 1, arrived, digest=digest(data)) in (0, DONE_NOW)
        assert bench.engine.post(line, 2, memoryview(memory[1]), digest=1) in (0, DIGEST_NOW)
        assert bench.engine.post(line, 3, memoryview(memory[2])) == 0
        peer.close()
        said = await bench.said(line, 1)
        while said[-1] != (LINE, CLOSED):
            said = await bench.said(line, len(said) + 1)
        assert memory[0] == memory[1] == data and 3 not in {item for item, _ in said}

    on_a_bench(work)


@pytest.mark.parametrize("mark", [b"", b"."])
def test_a_line_that_moves_nothing_is_given_up_and_one_that_waits_for_nothing_is_not(mark: bytes) -> None:
    async def work(bench: Bench) -> None:
        idle, idle_peer = bench.line(mark=mark, limit_s=0.05)
        line, peer = bench.line(mark=mark, limit_s=0.3)
        # More than the kernels hold of what nobody reads.
        held = bytearray(64 << 20)
        assert bench.engine.post(line, 1, memoryview(held)) == 0
        assert (await bench.said(line, 1))[-1] == (LINE, STALLED)
        assert bench.reports[idle] == []
        idle_peer.close()
        peer.close()

    on_a_bench(work)


def test_a_closed_line_lets_go_of_its_memory_while_bytes_come() -> None:
    async def work(bench: Bench) -> None:
        for _ in range(50):
            line, peer = bench.line()
            memory = bytearray(1 << 20)
            assert bench.engine.post(line, 1, memoryview(memory)) == 0
            sending = threading.Thread(target=send_until_closed, args=(peer,), daemon=True)
            sending.start()
            bench.engine.close_line(line)
            was = bytes(memory)
            await bench.loop.run_in_executor(None, sending.join, PATIENCE_S)
            assert memory == was and not sending.is_alive()
            bench.engine.close_line(line)

    def send_until_closed(peer: socket.socket) -> None:
        try:
            while True:
                peer.sendall(b"x" * 100_000)
        except OSError:
            peer.close()

    on_a_bench(work)


def test_bytes_that_nobody_expects_are_not_read_and_cost_no_processor() -> None:
    async def work(bench: Bench) -> None:
        line, peer = bench.line()
        memory = bytearray(3)
        assert bench.engine.post(line, 1, memoryview(memory)) == 0
        peer.sendall(b"abcdef")
        await bench.said(line, 1)
        thread = next(thread for thread in threading.enumerate() if thread.name == "tried")
        spent = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        before = int(spent.read_text().split()[0])
        await asyncio.sleep(0.2)
        # A loop that turns would have taken most of it.
        assert int(spent.read_text().split()[0]) - before < 100_000_000
        assert bench.engine.post(line, 2, memoryview(memory)) == DONE_NOW
        assert bytes(memory) == b"def"
        peer.close()

    on_a_bench(work)


def test_a_peer_that_is_slow_but_moves_is_not_given_up() -> None:
    async def work(bench: Bench) -> None:
        line, peer = bench.line(limit_s=0.8)
        memory = bytearray(1_000_000)
        assert bench.engine.post(line, 1, memoryview(memory)) == 0
        for _ in range(10):
            peer.sendall(b"x" * 100_000)
            # A socket's low-water mark alone would hide these bytes for longer than the limit.
            await asyncio.sleep(0.2)
        assert await bench.said(line, 1) == [(1, DONE)]
        peer.close()

    on_a_bench(work)
