"""Shared segments: seals, sizes and users are looked at before anything is mapped; nothing outlives its last view."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.errors import ProtocolError
from shardline.host import segments
from shardline.host.segments import Segment, SegmentError
from tests.support.segments import descriptors, knock_message, mappings, unsealed, welcome_message

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds are Linux's")
NBYTES = 3 * mmap.PAGESIZE
TOKEN = bytes(range(32))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(5.0)
    theirs.settimeout(5.0)
    yield ours, theirs
    ours.close()
    theirs.close()


# Layout


def test_pieces_start_at_cache_lines_and_never_overlap() -> None:
    sizes = (1, 64, 0, 65, 4096, 3)
    offsets = segments.layout(sizes)
    begun = segments.FIRST_BYTES
    assert offsets == tuple(begun + n for n in (0, 64, 128, 128, 256, 4352, 4416))
    # A payload that begins with its page would be copied slowly into a socket.
    assert begun % 4096 >= 1024
    for size, start, end in zip(sizes, offsets, offsets[1:], strict=False):
        assert start % segments.ALIGNMENT_BYTES == 0 and start + size <= end
    assert segments.layout(()) == (segments.FIRST_BYTES,)


# Making and mapping


def test_what_one_side_writes_the_other_reads_without_a_copy() -> None:
    made = Segment.create(NBYTES, name="shardline-test")
    adopted = Segment.adopt(os.dup(made.fd), NBYTES)
    assert bytes(made.memory) == bytes(NBYTES)
    made.memory[5000:5003] = b"abc"
    assert bytes(adopted.memory[5000:5003]) == b"abc"
    assert not made.memory.readonly and adopted.memory.readonly


def test_a_segment_lives_as_long_as_a_view_of_it_and_no_longer() -> None:
    made = Segment.create(NBYTES, name="shardline-alive")
    view = made.memory[64:128]
    view[:3] = b"abc"
    del made
    gc.collect()
    assert len(mappings("shardline-alive")) == 1
    assert bytes(view[:3]) == b"abc"
    del view
    gc.collect()
    assert mappings("shardline-alive") == set() and descriptors("shardline-alive") == 0


def test_nobody_can_cut_off_or_extend_a_segment() -> None:
    made = Segment.create(NBYTES, name="shardline-test")
    for length in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_is_published_can_be_written_through_the_first_mapping_alone() -> None:
    made = Segment.create(NBYTES, name="shardline-test", read_only=True)
    made.memory[0] = 7
    for fd in (made.fd, os.open(f"/proc/self/fd/{made.fd}", os.O_RDWR)):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, NBYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        if fd != made.fd:
            os.close(fd)
    adopted = Segment.adopt(os.dup(made.fd), NBYTES)
    with pytest.raises(TypeError):
        adopted.memory[0] = 1
    assert adopted.memory[0] == made.memory[0] == 7


@pytest.mark.parametrize(
    ("seals", "size", "says"),
    [
        (0, NBYTES, "it could still be truncated"),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, NBYTES, "it could still be truncated"),
        (segments.FIXED, NBYTES - mmap.PAGESIZE, f"has {NBYTES - mmap.PAGESIZE:,} bytes; {NBYTES:,} were agreed"),
        (segments.FIXED, NBYTES + 1, f"has {NBYTES + 1:,} bytes; {NBYTES:,} were agreed"),
    ],
)
def test_a_segment_without_seals_or_of_another_size_is_not_mapped(seals: int, size: int, says: str) -> None:
    with pytest.raises(SegmentError, match=says):
        Segment.adopt(unsealed(size, seals), NBYTES)
    assert mappings("shardline-test") == set() and descriptors("shardline-test") == 0


def test_a_plain_file_is_no_segment(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(SegmentError, match="not sealable memory"):
        Segment.adopt(fd, NBYTES)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_segment_of_no_bytes_is_refused() -> None:
    with pytest.raises(SegmentError, match="a segment of 0 bytes"):
        Segment.create(0, name="shardline-test")
    with pytest.raises(SegmentError):
        Segment.adopt(unsealed(0, segments.FIXED), 0)


def test_an_adopted_segment_costs_one_descriptor_and_a_made_one_two() -> None:
    made = Segment.create(NBYTES, name="shardline-count")
    assert descriptors("shardline-count") == 2
    adopted = Segment.adopt(os.dup(made.fd), NBYTES)
    assert descriptors("shardline-count") == 3
    del made
    gc.collect()
    assert descriptors("shardline-count") == 1 and bytes(adopted.memory) == bytes(NBYTES)


# Memory that is left


def test_more_than_the_memory_that_is_left_is_an_error_and_no_signal() -> None:
    with pytest.raises(SegmentError, match=r"1,125,899,906,842,624 bytes doesn't fit: [\d,]+ bytes of memory are left"):
        Segment.create(1 << 50, name="shardline-test")
    assert descriptors("shardline-test") == 0


def test_a_limit_on_the_length_of_files_is_an_error_and_no_signal() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, before[1]))
    try:
        with pytest.raises(SegmentError, match=r"can't make a shared segment of [\d,]+ bytes: .*File too large"):
            Segment.create(NBYTES, name="shardline-limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert descriptors("shardline-limit") == 0


def test_memory_that_is_gone_when_it_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SegmentError, match=r"can't make a shared segment of [\d,]+ bytes: .*Cannot allocate memory"):
        Segment.create(NBYTES, name="shardline-full")
    assert descriptors("shardline-full") == 0


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SegmentError, match="shared segments need Linux; this is darwin"):
        Segment.create(NBYTES, name="shardline-test")


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  9000 kB\nMemAvailable:   1000 kB\nSwapFree: 5 kB\n"


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 1_024_000),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "500000\n",
                "sys/fs/cgroup/a/b/memory.current": "400000\n",
                "sys/fs/cgroup/a/b/memory.stat": "anon 1\ninactive_file 10000\nactive_file 20000\nfile 77\n",
            },
            130_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.current": "400000\n",
            },
            1_024_000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/outside\n1:cpu:/outside\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000\n",
            },
            0,
        ),
    ],
)
def test_the_least_of_the_machines_and_the_groups_memory_counts(
    tmp_path: Path, files: dict[str, str], room: int | None
) -> None:
    assert segments.available_bytes(machine(tmp_path, files)) == room


# Passing segments


def test_a_knock_brings_token_and_segment(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    made = Segment.create(NBYTES, name="shardline-test")
    made.memory[0] = 9
    segments.knock(ours, TOKEN, made)
    token, nbytes, fds = segments.hear_knock(theirs)
    assert (token, nbytes, len(fds)) == (TOKEN, NBYTES, 1)
    assert not os.get_inheritable(fds[0])
    assert Segment.adopt(fds[0], nbytes).memory[0] == 9


def test_what_is_no_knock_is_refused_and_its_descriptors_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    made = Segment.create(NBYTES, name="shardline-test")
    whole = knock_message(TOKEN, NBYTES)
    before = descriptors("shardline-test")
    for message, fds in (
        (b"shardline?", [made.fd]),
        (knock_message(TOKEN, NBYTES, magic=b"shardln9"), [made.fd]),
        (whole, []),
        (whole, [made.fd] * 2),
        (whole, [made.fd] * 9),
    ):
        socket.send_fds(ours, [message], fds)
        with pytest.raises(ProtocolError):
            segments.hear_knock(theirs)
        assert descriptors("shardline-test") == before


def test_a_welcome_brings_what_is_published_and_the_replies(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    areas = [Segment.create(NBYTES, name="shardline-test", read_only=True) for _ in range(2)]
    replies = Segment.create(mmap.PAGESIZE, name="shardline-test", read_only=True)
    areas[1].memory[0], replies.memory[0] = 1, 2
    segments.welcome(ours, areas, replies)
    got, reply = segments.hear_welcome(theirs)
    assert [area.memory[0] for area in got] == [0, 1]
    assert reply is not None and (reply.memory[0], reply.nbytes) == (2, mmap.PAGESIZE)
    segments.welcome(ours, areas, None)
    assert segments.hear_welcome(theirs)[1] is None


def test_who_hangs_up_without_a_word_said_nothing_wrong(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    with pytest.raises(ConnectionError):
        segments.hear_knock(theirs)


def test_a_refusal_and_a_server_that_hangs_up_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    segments.refuse(ours)
    with pytest.raises(SegmentError, match="refused"):
        segments.hear_welcome(theirs)
    ours.close()
    with pytest.raises(SegmentError, match="disconnected"):
        segments.hear_welcome(theirs)


def test_an_area_that_could_be_cut_off_is_not_mapped_by_the_worker(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    good = Segment.create(NBYTES, name="shardline-test", read_only=True)
    before = descriptors("shardline-test")
    fd = unsealed(NBYTES)
    socket.send_fds(ours, [welcome_message(2, NBYTES, 0)], [good.fd, fd])
    os.close(fd)
    with pytest.raises(SegmentError, match="truncated"):
        segments.hear_welcome(theirs)
    gc.collect()
    assert descriptors("shardline-test") == before
    socket.send_fds(ours, [welcome_message(2, NBYTES, 0)], [good.fd])
    with pytest.raises(SegmentError, match="passed 1 segments; 2 were announced"):
        segments.hear_welcome(theirs)
    assert descriptors("shardline-test") == before


def test_another_users_process_is_recognised(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair
    segments.check_user(ours)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(SegmentError, match=f"belongs to user {uid}, this one to user {uid + 1}"):
        segments.check_user(ours)


def test_addresses_are_in_the_abstract_namespace_or_in_a_folder(tmp_path: Path) -> None:
    assert segments.new_address(None) != segments.new_address(None)
    assert segments.to_kernel(segments.new_address(None)).startswith("\0shardline-")
    inside = segments.new_address(tmp_path)
    assert Path(inside).parent == tmp_path
    with pytest.raises(SegmentError, match="at most 100 bytes"):
        segments.to_kernel(segments.new_address(tmp_path / ("x" * 100)))


def test_writes_to_a_segment_adopted_privately_stay_here_until_they_are_forgotten() -> None:
    size = 40 * mmap.PAGESIZE + 17
    made = Segment.create(size, name="test", read_only=True)
    adopted = Segment.adopt(os.dup(made.fd), size, private=True)
    assert adopted.forget_writes() == 0
    made.memory[:] = b"a" * size
    written = {3, 4, 5, 20, 40}
    for page in written:
        adopted.memory[page * mmap.PAGESIZE] = ord("x")
    assert bytes(made.memory) == b"a" * size
    made.memory[:] = b"b" * size
    # A page that was written to no longer follows.
    assert {page for page in range(41) if adopted.memory[page * mmap.PAGESIZE + 1] == ord("a")} == written
    assert adopted.forget_writes() == len(written)
    assert bytes(adopted.memory) == b"b" * size
    assert adopted.forget_writes() == 0


def test_without_a_view_of_the_pages_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Segment.create(3 * mmap.PAGESIZE, name="test", read_only=True)
    adopted = Segment.adopt(os.dup(made.fd), made.nbytes, private=True)
    adopted.memory[0] = 1

    def no_proc(fd: int, count: int, offset: int) -> bytes:
        raise PermissionError

    monkeypatch.setattr(segments.os, "pread", no_proc)
    assert adopted.forget_writes() == 3
    assert adopted.memory[0] == 0
