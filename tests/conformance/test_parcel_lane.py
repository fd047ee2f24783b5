"""What applies to parcels on every lane: bits, order, and whole parcels or none, whatever happens to the line."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.certs import make_certificates
from shardline.client.partners import server_of
from shardline.core.identity import Identity
from shardline.core.parcel import Parcel
from shardline.errors import UsageError
from shardline.lanes import LANES
from shardline.lanes.call_frames import HEADER, Kind, frame, read_failure
from shardline.lanes.parcels import ask_for_lane
from shardline.rpc.channel import Peer
from shardline.rpc.messages.parcels import Packed, ParcelReader, packed
from shardline.security import PLAIN, Security
from tests.support.lanes import usable
from tests.support.parcel_workers import TIMEOUTS, Workers, identity, key, make_config, make_office, parcel, workers
from tests.support.waiting import wait_for

OPENED = [kind.name for kind in LANES if kind.parcels]
"""Those that carry parcels."""
DEADLINE_S = 10.0
TENSORS = (
    torch.randn(3, 4, 5).permute(2, 0, 1),
    torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    torch.randn(7, dtype=torch.float64),
    torch.randn(3, 2).to(torch.bfloat16),
    torch.tensor(2.5),
    torch.empty(0, 4),
    torch.randn(1 << 20),
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Security:
    folder: Path = tmp_path_factory.mktemp("certs")
    made = make_certificates(folder, {"any": "127.0.0.1"}, days=2)
    cert, private = made.pairs["any"]
    return Security(tls_ca=made.ca, tls_cert=cert, tls_key=private)


@pytest.mark.parametrize("protected", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("lane", usable(["grpc", *OPENED]))
def test_parcels_arrive_with_their_bits_and_layout_in_order(lane: str, protected: bool, tls: Security) -> None:
    with workers(lane, tls if protected else PLAIN) as group:
        for turn, values in enumerate(TENSORS):
            # Up and down: to the next stage, and back; alone, and with all others.
            there, back = key(step=4 + turn % 3, microbatch=turn % 4), key(4, 0, 0, turn % 4, back=True)
            every = (values, *TENSORS)
            for sender, receiver, sent in (
                (0, 1, Parcel(there, (values,), needs_grad=(True,), random_state=b"abc")),
                (1, 0, Parcel(back, every, places=tuple(range(len(every))))),
            ):
                group.offices[sender].send(sent)
                group.offices[receiver].wait([sent.key])
                found = group.offices[receiver].take(sent.key)
                assert found == dataclasses.replace(sent, values=found.values)
                assert [one.dtype for one in found.values] == [one.dtype for one in sent.values]
                assert all(map(torch.equal, found.values, sent.values))
                assert list(map(layout, found.values)) == list(map(layout, sent.values))
        wait_for(lambda: group.sent(0, 1, lane) == sum(values.nbytes for values in TENSORS), "all is counted")


def layout(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("lane", OPENED)
def test_a_burst_that_the_kernel_has_no_room_for_arrives_while_the_sender_goes_on(lane: str) -> None:
    values = torch.randn(1 << 20)
    with workers(lane) as group:
        for number in range(4):
            group.offices[0].send(Parcel(key(microbatch=number), (values + number,), needs_grad=(True,)))
        for number in range(4):
            group.offices[1].wait([key(microbatch=number)])
            assert torch.equal(group.offices[1].take(key(microbatch=number)).values[0], values + number)


@pytest.mark.parametrize("lane", OPENED)
def test_a_line_that_breaks_loses_no_parcel(lane: str) -> None:
    with workers(lane) as group:
        for number in range(4):
            group.offices[0].send(parcel(key(microbatch=number), number))
            if number != 2:
                # 2 and 3 leave at once: the line may break with neither, one or both.
                group.offices[1].wait([key(microbatch=number)])
            group.offices[1].ports.keep_only(())
        group.offices[1].wait([key(microbatch=2)])
        assert [float(group.offices[1].take(key(microbatch=n)).values[0][0]) for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("lane", usable(["grpc", *OPENED]))
def test_a_line_that_waits_for_the_next_parcel_does_not_keep_the_last_one(lane: str) -> None:
    with workers(lane) as group:
        group.offices[0].send(parcel(key()))
        group.offices[1].wait([key()])
        wait_for(lambda: not any(type(one) is ParcelReader for one in gc.get_objects()), "it is let go")


def test_a_lane_that_one_side_does_not_offer_is_left_for_another() -> None:
    group = Workers("shm")
    try:
        group.offices[1].close()
        group.offices[1] = make_office(1, "grpc")
        server = server_of(make_config(1), group.offices[1])
        server.start()
        group.servers.append(server)
        group.addresses = (group.addresses[0], server.address, group.addresses[2])
        for index in (0, 1):
            group.begin(index)
        group.offices[0].send(parcel(key()))
        group.offices[1].wait([key()])
        wait_for(lambda: group.sent(0, 1, "grpc") == 16, "the call has ended")
        assert group.sent(0, 1, "shm") == group.sent(0, 1, "tcp") == 0
    finally:
        group.close()


# Strangers, and senders with faults


@contextlib.contextmanager
def opened(group: Workers, lane: str, who: Identity) -> Iterator[socket.socket]:
    """A socket to worker 1 that has been accepted from this life."""
    peer = Peer("worker/1", group.addresses[1], TIMEOUTS)
    try:
        reply = ask_for_lane(peer, lane, who, timeout_s=DEADLINE_S)
        assert reply.offered, reply.reason
        with LANES.parse(lane).dial(make_config(0), peer.address, reply, timeout_s=DEADLINE_S) as sock:
            sock.settimeout(DEADLINE_S)
            yield sock
    finally:
        peer.close()


def wire(message: Packed) -> bytes:
    return frame(Kind.REQUEST, message.header.SerializeToString()) + b"".join(message.payloads)


def answer(sock: socket.socket) -> tuple[Kind, bytes]:
    data = b""
    while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[1]:
        more = sock.recv(4096)
        assert more, "the socket ended without an answer"
        data += more
    return Kind(data[0]), data[HEADER.size :]


@pytest.mark.parametrize("lane", OPENED)
def test_a_parcel_cut_anywhere_leaves_nothing(lane: str) -> None:
    data = wire(packed("j", 1, parcel(key())))
    with workers(lane) as group:
        for cut in range(len(data)):
            with opened(group, lane, identity(0)) as sock:
                sock.sendall(data[:cut])
            assert not group.offices[1].here(key())
        with opened(group, lane, identity(0)) as sock:
            sock.sendall(data)
            assert answer(sock) == (Kind.DONE, b"")
        assert group.offices[1].here(key())


def forged(**changes: object) -> bytes:
    made = packed("j", 1, parcel(key()))
    for name, value in changes.items():
        target: Any = made.header if hasattr(made.header, name) else made.header.tensors[0]
        if name == "shape":
            del target.shape[:]
            target.shape.extend(value)
        else:
            setattr(target, name, value)
    return wire(made)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (forged(payload_bytes=1 << 40), "1099511627776 bytes announced"),
        (forged(shape=[1 << 40], payload_bytes=4 << 40), "the limit is 4294967296"),
        (forged(dtype=2), "16 bytes announced for shapes"),
        (forged(shape=[5]), "16 bytes announced for shapes"),
        (forged(digest=1), "the digest does not match"),
        (forged(stage=7), "is for no pass of job"),
        (forged(job="another"), "is for no pass of job"),
        (forged(task="worker/2"), "names a sender"),
        (HEADER.pack(Kind.LAST, 0), "a frame of kind 2"),
        (HEADER.pack(Kind.REQUEST, 1 << 31), "2147483648 bytes"),
        (frame(Kind.REQUEST, b"\xff" * 9), "can't be parsed"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of kind 71"),
    ],
    ids=range(12),
)
def test_a_bad_parcel_is_refused_with_the_reason_and_leaves_nothing(data: bytes, sentence: str) -> None:
    with workers("tcp") as group, opened(group, "tcp", identity(0)) as sock:
        sock.sendall(data)
        kind, body = answer(sock)
        assert kind is Kind.FAILED
        error = read_failure(body)
        with pytest.raises(Exception, match=sentence):
            raise error
        with contextlib.suppress(ConnectionResetError):
            assert not sock.recv(1)
        assert not len(group.offices[1].mailbox)
        assert group.count(1, "shardline_refused_messages_total", method="parcels") == 1


def test_a_parcel_of_an_older_timeline_is_answered_and_dropped() -> None:
    with workers("tcp") as group, opened(group, "tcp", identity(0)) as sock:
        sock.sendall(wire(packed("j", 0, parcel(key()))))
        assert answer(sock) == (Kind.DONE, b"")
        assert not len(group.offices[1].mailbox)


@pytest.mark.parametrize("lane", OPENED)
def test_a_life_without_its_secret_opens_no_lane(lane: str) -> None:
    with (
        workers(lane) as group,
        pytest.raises(UsageError, match="lacks the secret"),
        opened(group, lane, Identity("worker/0", 1, b"guessed")),
    ):
        pass


@pytest.mark.parametrize("lane", OPENED)
def test_the_socket_of_a_replaced_life_ends(lane: str) -> None:
    with workers(lane) as group, opened(group, lane, identity(0)) as sock:
        sock.sendall(wire(packed("j", 1, parcel(key()))))
        assert answer(sock) == (Kind.DONE, b"")
        group.begin(1, incarnation=2)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
