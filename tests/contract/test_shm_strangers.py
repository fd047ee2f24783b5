"""Who comes to the shm lane from elsewhere: other users, other namespaces, crowds, neighbours, processes that die."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import gc
import mmap
import os
import platform
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block
from shardline.errors import ProtocolError, UnreachableError
from shardline.host import segments
from shardline.lanes import token_acceptor
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.grpc.client import GrpcLane
from shardline.lanes.negotiated import NegotiatedLane
from shardline.lanes.shm import server as shared
from shardline.lanes.shm.client import ShmLane
from shardline.lanes.shm.server import SegmentPublication, ShmOffer, publish
from shardline.rpc.messages.data import Attached, referred_requests
from shardline.waist import Push, Sender, Want, Whole
from shardline_ps.service import offers
from tests.support.cluster import Ps
from tests.support.lanes import GRADIENTS, SENDER, TIMEOUTS, Mapping, ShmBench, gradient, on_loop, payload, spec
from tests.support.plain_client import DEADLINE_S, ELEMENTS, FIRST_W, FROZEN, RATE, STATS, PlainClient, floats
from tests.support.refusals import unchanged
from tests.support.segments import descriptors, knock_message, mappings, unsealed
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds are Linux's")
T = TypeVar("T")
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
SETRESUID = {"x86_64": 117, "aarch64": 147}.get(platform.machine())
STEPPED = tuple(value - RATE for value in FIRST_W)


@pytest.fixture
def ps(ps: Ps) -> Ps:
    ps.store.make_publication = publish
    return ps


@pytest.fixture
def bench(ps: Ps, ready: PlainClient) -> Iterator[ShmBench]:
    made = ShmBench(ps)
    yield made
    made.close()


def all_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def elsewhere(enter: Callable[[], None], act: Callable[[], T]) -> T:
    """Run in a thread that is of another user or namespace: the kernel keeps both per thread. It ends with the call."""

    def run() -> T:
        enter()
        return act()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(DEADLINE_S)


def become_nobody() -> None:
    if os.geteuid() != 0 or SETRESUID is None or LIBC.syscall(SETRESUID, -1, NOBODY, -1) != 0:
        pytest.skip("only root can become another user, by a system call whose number is known here")


def leave_network() -> None:
    if LIBC.unshare(CLONE_NEWNET) != 0:
        pytest.skip(f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}")


class Negotiated:
    """The lanes of one pair, and what was told of those that were left."""

    def __init__(self, bench: ShmBench) -> None:
        self.told: list[tuple[str, str]] = []
        self.bench = bench
        self.lane = NegotiatedLane(
            [bench.lane, GrpcLane(bench.peer, 0, [ELEMENTS] * 3)],
            peer=str(bench.peer),
            expected=("shm", "grpc"),
            on_fallback=lambda name, reason: self.told.append((name, reason)),
        )

    def step(self, number: int) -> Mapping:
        sink = Mapping()
        want = Want(step=number + 1, wait_s=5.0)
        done = self.lane.exchange(SENDER, [gradient(step=number)], want, sink, timeout_s=DEADLINE_S)
        assert done.end is not None and done.end.outcome is Outcome.SERVED
        return sink


# What is published


def test_nothing_makes_what_is_published_writable_or_shorter_for_a_worker(bench: ShmBench, ready: PlainClient) -> None:
    bench.pull(0)
    published = bench.ps.store.shards[0].publication
    assert isinstance(published, SegmentPublication) and bench.lane.mapped is not None
    for number in range(len(published.areas)):
        area, theirs = bench.lane.mapped.area(number), published.areas[number]
        before = bytes(theirs.memory)
        # What the worker writes to its mapping stays its own.
        area[:] = bytes(byte ^ 0xFF for byte in area)
        assert bytes(theirs.memory) == before
        # The worker gets this very descriptor, and has closed it after mapping.
        held, nbytes = theirs.fd, area.nbytes
        again = os.open(f"/proc/self/fd/{held}", os.O_RDWR)
        for fd in (held, again):
            view = np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
            start = ctypes.c_void_p(view.ctypes.data)
            assert LIBC.mprotect(start, ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE) == -1
            assert ctypes.get_errno() == errno.EACCES
            for act in (
                functools.partial(mmap.mmap, fd, nbytes, mmap.MAP_SHARED),
                functools.partial(os.pwrite, fd, b"x", 0),
                functools.partial(os.ftruncate, fd, 0),
                functools.partial(os.ftruncate, fd, 1 << 20),
                functools.partial(os.posix_fallocate, fd, 0, 1 << 20),
            ):
                with pytest.raises(PermissionError):
                    act()
            # Keeps the length and makes zeros: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE.
            assert LIBC.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(nbytes)) == -1
            assert ctypes.get_errno() == errno.EPERM
        os.close(again)
    unchanged(ready)
    ready.complete()


# What is passed


def odd_files(nbytes: int) -> dict[str, int]:
    """Descriptors of what is no segment that can be read, by kind."""
    kinds: dict[str, int] = {}
    with tempfile.TemporaryFile() as plain:
        plain.truncate(nbytes)
        kinds["a file"] = os.dup(plain.fileno())
    if os.path.isdir("/dev/shm"):
        with tempfile.TemporaryFile(dir="/dev/shm") as plain:
            plain.truncate(nbytes)
            kinds["a file in shared memory"] = os.dup(plain.fileno())
    kinds["a folder"] = os.open("/", os.O_RDONLY)
    kinds["a device"] = os.open("/dev/zero", os.O_RDWR)
    kinds["a pipe"], other = os.pipe()
    os.close(other)
    whole = unsealed(nbytes, segments.FIXED)
    kinds["a path"] = os.open(f"/proc/self/fd/{whole}", os.O_PATH)
    kinds["for writing only"] = os.open(f"/proc/self/fd/{whole}", os.O_WRONLY)
    os.close(whole)
    return kinds


def test_what_is_no_readable_segment_is_refused_whatever_it_is(bench: ShmBench) -> None:
    bench.pull(0)
    on_loop(bench.ps, lambda: bench.ps.attachments.drop_all("a test"))
    before = all_descriptors()
    kinds = odd_files(bench.length)
    for count, (kind, fd) in enumerate(kinds.items(), 1):
        message = knock_message(bench.token(), bench.length)
        assert bench.knock(message, [fd]) == 0, kind
        assert bench.offer.acceptor.refused == count
    assert len(kinds) >= 6
    wait_for(lambda: all_descriptors() == before, "all descriptors to be closed")
    with pytest.raises(UnreachableError):
        bench.pull(0)
    assert bench.pull(0).heads


@pytest.mark.parametrize("count", [0, 2, 3, 40])
def test_one_descriptor_comes_with_a_token_neither_none_nor_more(bench: ShmBench, count: int) -> None:
    bench.pull(0)
    before = all_descriptors()
    whole = unsealed(bench.length, segments.FIXED)
    message = knock_message(bench.token(), bench.length)
    # OpenLane took the segments of before back: the ps's descriptor of them is closed too.
    assert bench.knock(message, [os.dup(whole) for _ in range(count)]) == 0
    os.close(whole)
    gc.collect()
    wait_for(lambda: all_descriptors() <= before, "all descriptors to be closed")
    assert bench.offer.acceptor.refused == 1 and mappings("shardline-test") == set()


# References


def test_bytes_are_referred_to_only_by_who_passed_them(bench: ShmBench, ready: PlainClient) -> None:
    bench.pull(0)
    mapped = bench.lane.mapped
    assert mapped is not None
    ours = mapped.attached
    other = dataclasses.replace(SENDER, who=Identity("worker/1", 1))
    later = dataclasses.replace(SENDER, who=Identity("worker/0", 2))

    def refer(sender: Sender, attached: Attached) -> None:
        requests = referred_requests(sender, 0, [gradient()], None, attached, place=lambda item: 0)
        bench.lane.converse(requests, [gradient()], None, Mapping(), timeout_s=DEADLINE_S)

    for sender, attached in (
        (other, ours),
        (later, ours),
        (SENDER, Attached("shm", 0)),
        (SENDER, Attached("shm", ours.number + 1)),
        (SENDER, Attached("tcp", ours.number)),
    ):
        with pytest.raises(UnreachableError, match=rf"attachment {attached.number:#x} .* is not open; open it"):
            refer(sender, attached)
    with pytest.raises(ProtocolError, match="refers to bytes in an attachment, but its header names none"):
        refer(SENDER, Attached())
    unchanged(ready)
    # None of this cost the worker its segments.
    assert bench.open == 1
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert bench.lane.mapped is mapped and ready.weights() == STEPPED


def test_a_reference_before_any_segment_was_passed_is_refused(bench: ShmBench, ready: PlainClient) -> None:
    opened = bench.lane.open_attachment(SENDER, timeout_s=DEADLINE_S)
    requests = referred_requests(
        SENDER, 0, [gradient()], None, Attached("shm", opened.attachment), place=lambda item: 0
    )
    with pytest.raises(UnreachableError, match="shard 0 has no segment of worker/0"):
        bench.lane.converse(requests, [gradient()], None, Mapping(), timeout_s=DEADLINE_S)
    unchanged(ready)
    ready.complete()


def test_more_bytes_than_the_bucket_has_are_not_read(bench: ShmBench, ready: PlainClient) -> None:
    bench.pull(0)
    mapped = bench.lane.mapped
    assert mapped is not None
    push = gradient(items=[payload(bytes(512))])
    requests = referred_requests(SENDER, 0, [push], None, mapped.attached, place=lambda item: 0)
    with pytest.raises(ProtocolError, match="payload of 512 bytes announced, codec raw makes 256"):
        bench.lane.converse(requests, [push], None, Mapping(), timeout_s=DEADLINE_S)
    unchanged(ready)
    ready.complete()


def test_a_worker_with_a_plan_of_another_size_shares_no_memory(bench: ShmBench, ready: PlainClient) -> None:
    # Tests before this one, in the same process, may have left some.
    before = mappings(GRADIENTS)
    for buckets in (spec().buckets * 2, spec().buckets[:1]):
        lane = ShmLane(bench.peer, 0, dataclasses.replace(spec(), buckets=buckets), timeout_s=DEADLINE_S)
        with pytest.raises(LaneUnavailable, match="the server refused the token or the segment"):
            lane.exchange(SENDER, [], Want(step=0), Mapping(), timeout_s=DEADLINE_S)
        del lane
    gc.collect()
    assert bench.offer.acceptor.refused == 2 and mappings(GRADIENTS) <= before
    another = dataclasses.replace(SENDER, plan_id="feed")
    end = bench.exchange(want=Want(step=0), sender=another).end
    assert end is not None and re.search("the plan is [0-9a-f]{32}; the message follows plan feed", end.reason)
    unchanged(ready)


# Other users, other namespaces


def test_another_users_process_is_sent_away_and_sends_itself_away(bench: ShmBench) -> None:
    bench.pull(0)
    token = bench.token()
    message = knock_message(token, bench.length)
    assert elsewhere(become_nobody, lambda: bench.knock(message, [unsealed(bench.length, segments.FIXED)])) == 0
    assert bench.offer.acceptor.refused == 1 and len(bench.offer.acceptor.tokens) == 1
    bench.lane.close()
    with pytest.raises(LaneUnavailable, match=rf"belongs to user {os.geteuid()}, this one to user {NOBODY}"):
        elsewhere(become_nobody, lambda: bench.pull(0))
    assert bench.pull(0).heads


def test_another_user_can_not_use_a_socket_in_a_folder(ps: Ps, ready: PlainClient, folder: Path) -> None:
    bench = ShmBench(ps, folder)
    bench.token()
    with pytest.raises(LaneUnavailable, match="Permission denied"):
        elsewhere(become_nobody, lambda: bench.pull(0))
    assert bench.pull(0).heads
    bench.close()


def test_without_a_common_network_the_abstract_name_is_out_of_reach_and_the_next_lane_is_taken(
    bench: ShmBench, caplog: pytest.LogCaptureFixture
) -> None:
    before = mappings(GRADIENTS), descriptors(GRADIENTS)
    pair = Negotiated(bench)
    bench.token()
    sinks = elsewhere(leave_network, lambda: [pair.step(0), pair.step(1)])
    assert sinks[0].weights() == STEPPED and pair.lane.name == "grpc"
    # What was made for a lane that could not be is given back at once.
    assert mappings(GRADIENTS) <= before[0] and descriptors(GRADIENTS) <= before[1]
    assert [name for name, _ in pair.told] == ["shm"]
    assert "in one network namespace (otherwise set the same --run-dir for both)" in pair.told[0][1]
    assert sum("lane shm can't be used" in record.getMessage() for record in caplog.records) == 1


def test_without_a_common_network_a_socket_in_a_folder_is_within_reach(
    ps: Ps, ready: PlainClient, folder: Path
) -> None:
    bench = ShmBench(ps, folder)
    pair = Negotiated(bench)
    bench.token()
    sink = elsewhere(leave_network, lambda: pair.step(0))
    assert sink.weights() == STEPPED and pair.lane.name == "shm" and pair.told == []
    bench.close()


# Crowds


def test_a_crowd_that_says_nothing_keeps_a_worker_waiting_and_no_longer(
    bench: ShmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.lanes.token_acceptor.Guest.limit_s", 0.1)
    bench.token()
    before = all_descriptors()
    crowd: list[socket.socket] = []
    # Those that are let in, those that the kernel keeps before the door, and no room for one more.
    for _ in range(2 * token_acceptor.MAX_GUESTS + 1):
        crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        crowd[-1].connect(segments.to_kernel(bench.offer.address))
    assert bench.pull(0).heads and bench.lane.name == "shm"
    assert bench.offer.acceptor.refused >= token_acceptor.MAX_GUESTS
    for one in crowd:
        one.close()
    wait_for(lambda: bench.offer.acceptor.guests == 0, "the crowd to be gone")
    bench.lane.close()
    on_loop(bench.ps, lambda: bench.ps.attachments.drop_all("a test"))
    gc.collect()
    wait_for(lambda: all_descriptors() <= before, "all descriptors to be closed")


def test_a_door_that_stays_shut_is_left_within_its_time(bench: ShmBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.lanes.shm.client.KNOCK_S", 0.3)
    bench.token()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as shut, contextlib.ExitStack() as crowd:
        bench.offer.address = segments.new_address(None)
        shut.bind(segments.to_kernel(bench.offer.address))
        shut.listen(0)
        first = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        first.connect(segments.to_kernel(bench.offer.address))
        with pytest.raises(LaneUnavailable, match=r"the server's socket did not accept a connection within 0\.3 s"):
            bench.pull(0)


def test_sixty_four_workers_cost_no_thread_each_and_leave_nothing(ps: Ps, client: PlainClient) -> None:
    client.start(replicas=64)
    bench = ShmBench(ps)
    bench.pull(0)
    gc.collect()
    before = all_descriptors(), threading.active_count(), mappings("shardline")
    native = len(os.listdir("/proc/self/task"))
    lanes = [ShmLane(bench.peer, 0, spec(), timeout_s=TIMEOUTS.rpc_s) for _ in range(64)]
    for number, lane in enumerate(lanes):
        sender = dataclasses.replace(SENDER, who=Identity(f"worker/{number + 1}", 1))
        push = Push(
            payloads=Whole([payload(floats([float(number)] * 12))], (FROZEN, STATS)), step=0, block=Block(number, 1)
        )
        done = lane.exchange(sender, [push], None, Mapping(), timeout_s=DEADLINE_S)
        assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
    assert bench.open == 65
    # Two ends of the calls' socket. Gradients there; here gradients, two descriptors of them since they are passed on.
    assert all_descriptors() - before[0] == 64 * 5
    assert threading.active_count() - before[1] <= 2 and len(os.listdir("/proc/self/task")) - native < 16
    assert bench.pull(1).weights() == tuple(value - 31.5 * RATE for value in FIRST_W)
    for lane in lanes:
        lane.close()
    on_loop(ps, lambda: ps.attachments.keep_only({"worker/0": 1}))
    assert bench.open == 1 and len(bench.offer.acceptor.tokens) == 0

    def free() -> bool:
        gc.collect()
        return (all_descriptors(), mappings("shardline")) == (before[0], before[2])

    wait_for(free, "the segments of 64 workers to be freed")
    bench.close()


# Neighbours in a folder


def offer_in(folder: Path) -> ShmOffer:
    return ShmOffer(run_dir=folder, timeout_s=1.0)


def test_sockets_of_living_neighbours_are_left_alone_and_dead_ones_removed(folder: Path) -> None:
    for name in ("shardline-0.sock", "other.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(folder / name))
    (folder / "shardline-notes.txt").write_text("mine")
    first = offer_in(folder)
    with contextlib.ExitStack() as sockets:
        # Lives, but has no time for anybody.
        busy, caller = (sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2))
        busy.bind(str(folder / "shardline-1.sock"))
        busy.listen(0)
        caller.connect(str(folder / "shardline-1.sock"))
        second = offer_in(folder)
    living = {Path(first.address).name, Path(second.address).name}
    assert (folder / "shardline-1.sock").exists()
    shared.sweep(folder)
    assert {path.name for path in folder.iterdir()} == {*living, "other.sock", "shardline-notes.txt"}
    second.close()
    # Who only looks whether somebody lives there is no stranger.
    assert first.acceptor.refused == 0
    first.close()
    assert {path.name for path in folder.iterdir()} == {"other.sock", "shardline-notes.txt"}


def test_a_neighbour_that_starts_at_the_same_time_removes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            shared.sweep(folder)
            super().listen(backlog)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Slow)
        offer = offer_in(folder)
    assert [path.name for path in folder.iterdir()] == [Path(offer.address).name]
    assert stat.S_IMODE(Path(offer.address).stat().st_mode) == 0o600
    offer.close()


def test_files_that_others_make_meanwhile_keep_their_modes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mask: int) -> int:
        raise AssertionError("the mask belongs to all threads of the process")

    monkeypatch.setattr(os, "umask", refuse)
    offer = offer_in(folder)
    assert stat.S_IMODE(Path(offer.address).stat().st_mode) == 0o600
    offer.close()


# Where memory or the system doesn't allow it


def no_memory(patch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "posix_fallocate", full)


def another_system(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (no_memory, "can't make a shared segment of 2,816 bytes: .* No space left on device"),
        (another_system, "shared segments need Linux; this is darwin"),
    ],
)
def test_a_worker_without_shared_memory_says_so_once_and_takes_the_next_lane(
    bench: ShmBench, caplog: pytest.LogCaptureFixture, happens: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    pair = Negotiated(bench)
    bench.token()
    before = all_descriptors()
    with pytest.MonkeyPatch.context() as patch:
        happens(patch)
        assert pair.step(0).weights() == STEPPED
        pair.step(1)
    assert pair.lane.name == "grpc" and [name for name, _ in pair.told] == ["shm"]
    with pytest.raises(LaneUnavailable, match=says):
        raise LaneUnavailable(pair.told[0][1])
    assert sum("lane shm can't be used" in record.getMessage() for record in caplog.records) == 1
    wait_for(lambda: all_descriptors() <= before, "all descriptors to be closed")


@pytest.mark.parametrize("happens", [no_memory, another_system])
def test_a_server_without_shared_memory_publishes_in_its_own_and_says_so_once(
    ps: Ps,
    client: PlainClient,
    caplog: pytest.LogCaptureFixture,
    happens: Callable[[pytest.MonkeyPatch], None],
) -> None:
    gc.collect()
    before = descriptors("shardline-published")
    with pytest.MonkeyPatch.context() as patch:
        happens(patch)
        client.start()
    assert sum("can't be published in shared memory" in record.getMessage() for record in caplog.records) == 1
    assert descriptors("shardline-published") <= before
    client.complete()


def test_a_server_on_another_system_offers_no_shared_memory(ps: Ps, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",)})
    config = RoleConfig(role="ps", index=0, cluster=cluster, timeouts=TIMEOUTS, lane="shm")
    another_system(monkeypatch)
    assert offers(config, ps.store, lambda method, error: None) == []


# Deaths, and new beginnings


def test_a_server_that_is_configured_anew_keeps_nothing_of_before(ps: Ps, client: PlainClient) -> None:
    gc.collect()
    before = descriptors("shardline"), len(mappings("shardline"))
    bench = ShmBench(ps)
    gc.disable()
    try:
        for life in range(3):
            client.timeline = SENDER.timeline + life
            client.start()
            sender = dataclasses.replace(SENDER, timeline=client.timeline)
            bench.lane.close()
            done = bench.exchange(gradient(), Want(step=1, wait_s=5.0), sender=sender)
            assert done.end is not None and done.end.outcome is Outcome.SERVED
            # One shard's two areas at both ends, and gradients, with one descriptor to pass on, and one for each
            # mapping but the worker's of the areas.
            wait_for(
                lambda: (descriptors("shardline"), len(mappings("shardline"))) == (before[0] + 7, before[1] + 3),
                "the shard of before to be freed without the cycle collector",
            )
    finally:
        gc.enable()
    bench.close()


IDLE_WORKER = """
import array, fcntl, os, socket, struct, sys, threading
address, token, nbytes = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
fd = os.memfd_create("shardline-child", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, nbytes)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + address[1:])
socket.send_fds(sock, [struct.pack("<8s32sQ", b"shardln1", token, nbytes)], [fd])
print(sock.recv(64)[0], flush=True)
threading.Event().wait(60.0)
"""


def test_an_idle_worker_that_is_killed_leaves_no_memory_and_no_attachment_once_it_is_fenced(
    bench: ShmBench, ready: PlainClient
) -> None:
    bench.pull(0)
    opened = bench.lane.open_attachment(SENDER, timeout_s=DEADLINE_S)
    gc.collect()
    before = all_descriptors()
    arguments = [bench.offer.address, opened.token.hex(), str(bench.length)]
    with subprocess.Popen([sys.executable, "-ISc", IDLE_WORKER, *arguments], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"1\n"
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(DEADLINE_S) == -signal.SIGKILL
    # The ps has noticed the end of its socket, and only the chief can tell whose life is over.
    wait_for(lambda: mappings("shardline-child") == set(), "the ps to let go of the memory")
    assert bench.open == 1
    on_loop(bench.ps, lambda: bench.ps.attachments.keep_only({"worker/0": 2}))
    gc.collect()
    assert bench.open == 0 and mappings("shardline-child") == set() and descriptors("shardline-child") == 0
    wait_for(lambda: all_descriptors() <= before, "all descriptors to be closed")
    later = dataclasses.replace(SENDER, who=Identity("worker/0", 2))
    sink = Mapping()
    bench.exchange(gradient(), Want(step=1, wait_s=5.0), sender=later, sink=sink)
    assert sink.weights() == STEPPED == ready.weights() and bench.open == 1


def test_a_token_that_nobody_used_goes_with_its_worker(bench: ShmBench) -> None:
    token = bench.token()
    assert bench.open == 1 and len(bench.offer.acceptor.tokens) == 1
    on_loop(bench.ps, lambda: bench.ps.attachments.keep_only({"worker/0": 2}))
    assert bench.open == 0 and len(bench.offer.acceptor.tokens) == 0
    message = knock_message(token, bench.length)
    assert bench.knock(message, [unsealed(bench.length, segments.FIXED)]) == 0
    wait_for(lambda: mappings("shardline-test") == set() and descriptors("shardline-test") == 0, "the ps to let go")
