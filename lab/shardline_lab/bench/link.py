"""Throughput of a link with plain TCP: one way, the other way, and a round trip. For `shardline bench net` and `mesh`.

One request per connection: a JSON line, answered by a JSON line; then bytes flow for some seconds, and the receiver
reports how many arrived in what time. Both sides have deadlines, and the server serves nothing else. With the job token
both prove it first, without sending it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import selectors
import socket
import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardline.cluster import format_address, parse_address
from shardline.errors import ForbiddenError, ProtocolError, UnreachableError, UsageError
from shardline.rpc.auth.proof import check_caller, mac, prove

log = logging.getLogger("shardline.bench")

MAGIC = "shardline-bench-1"
LINE_BYTES = 4096
"""Most bytes of a request or answer, so that strangers can't fill a server's memory."""
BLOCK_BYTES = 1 << 20
MAX_SECONDS = 60.0
MAX_BYTES = 1 << 40
"""Of one direction, unless the request says fewer."""
CONNECT_S = 10.0
STALL_S = 10.0
"""Seconds without a byte after which the peer counts as gone."""
ROUND_TRIPS = 50


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """Results of plain TCP. Rates in bytes per second, by the receiver's clock."""

    up_bytes_per_s: float
    """From client to server: the direction of a push."""
    down_bytes_per_s: float
    """The direction of a pull."""
    round_trip_s: float
    """Median time of one byte there and back, in seconds."""


class LinkClient:
    """Client of a LinkServer. `where` names the server in errors, such as "ps/0 at 10.0.0.7:2222"."""

    def __init__(
        self, address: str, *, where: str, hint: str = "", token: bytes = b"", command: str = "bench net"
    ) -> None:
        self._host, self._port = parse_address(address)
        self._token = token
        self._command = command
        self.where = where
        self._hint = hint

    def measure(self, seconds: float, most: int = MAX_BYTES) -> LinkFigures:
        """Measure both directions, one after the other, `seconds` or `most` bytes each.

        Raises UnreachableError, ProtocolError.
        """
        round_trip_s = self._echo()
        up, _ = self._transfer("send", seconds, most)
        down, _ = self._transfer("receive", seconds, most)
        return LinkFigures(up_bytes_per_s=up, down_bytes_per_s=down, round_trip_s=round_trip_s)

    def towards(self, address: str, seconds: float, most: int) -> LinkFigures:
        """Have the server measure its link to another one, as measure() would there."""
        with self._connect() as sock:
            self._request(sock, "measure", to=address, seconds=seconds, bytes=most)
            try:
                answer = read_line(sock, 2 * seconds + 4 * (CONNECT_S + STALL_S))
            except (OSError, ProtocolError) as error:
                raise UnreachableError(f"{self.where} did not say what it measured to {address}: {error}") from error
        if "error" in answer:
            raise UnreachableError(f"from {self.where}: {answer['error']}")
        return LinkFigures(**{field: float(answer[field]) for field in LinkFigures.__annotations__})

    def ask(self, what: str, **more: object) -> dict[str, Any]:
        with self._connect() as sock:
            return self._request(sock, what, **more)

    def _connect(self) -> socket.socket:
        try:
            sock = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
        except OSError as error:
            raise UnreachableError(self._why(error)) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(STALL_S)
        try:
            if self._token:
                prove(sock, _key(self._token), STALL_S)
                sock.settimeout(STALL_S)
        except (OSError, ForbiddenError) as error:
            sock.close()
            raise self._stranger(error) from error
        return sock

    def _stranger(self, error: Exception) -> ProtocolError:
        return ProtocolError(
            f"{self.where} is not `shardline {self._command} --serve` of this cluster ({error}): a task of a running "
            "job may be listening there, or one side has another --token-file; end the job, set another --port on both "
            "sides, or give both the same token"
        )

    def _why(self, error: OSError) -> str:
        if isinstance(error, socket.gaierror):
            return (
                f"the host of {self.where} can't be resolved ({error.strerror}): is {self._host!r} in DNS or in "
                "/etc/hosts on this machine?"
            )
        if isinstance(error, TimeoutError):
            return (
                f"{self.where} did not answer within {CONNECT_S:.0f} s: is the host up, and is port {self._port} "
                "blocked between the two machines?"
            )
        if error.errno == errno.ECONNREFUSED:
            return f"nothing is listening at {self.where}" + (f"; {self._hint}" if self._hint else "")
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return f"there is no route to {self.where} ({error.strerror}): is the host up, and the address right?"
        return f"{self.where} can't be reached: {error}"

    def _request(self, sock: socket.socket, what: str, **more: object) -> dict[str, Any]:
        try:
            sock.sendall(_line({"is": MAGIC, "do": what, **more}))
            answer = read_line(sock, STALL_S)
        except (OSError, ProtocolError) as error:
            raise self._stranger(error) from error
        if answer.get("is") != MAGIC:
            raise ProtocolError(f"the answer from {self.where} is not that of `shardline {self._command} --serve`")
        if "error" in answer:
            raise ProtocolError(f"{self.where}: {answer['error']}")
        return answer

    def _echo(self) -> float:
        with self._connect() as sock:
            self._request(sock, "echo", count=ROUND_TRIPS)
            seconds = []
            try:
                for _ in range(ROUND_TRIPS):
                    start_s = time.perf_counter()
                    sock.sendall(b"x")
                    if not sock.recv(1):
                        raise ConnectionResetError("it closed the connection")
                    seconds.append(time.perf_counter() - start_s)
            except OSError as error:
                raise UnreachableError(f"{self.where} stopped answering: {error}") from error
        return statistics.median(seconds)

    def _transfer(self, what: str, seconds: float, most: int) -> tuple[float, int]:
        """(bytes per second, bytes) of one direction."""
        with self._connect() as sock:
            self._request(sock, what, seconds=seconds, bytes=most)
            try:
                if what == "receive":
                    return receive_all(sock)
                send_for(sock, seconds, most)
                answer = read_line(sock, STALL_S + seconds)
            except (OSError, ProtocolError) as error:
                raise UnreachableError(
                    f"{self.where}: the connection was lost during the measurement: {error}"
                ) from error
        return float(answer["bytes_per_s"]), int(answer["bytes"])


class LinkServer:
    """Serves one client's requests at one address, one at a time. Used by one thread.

    token: the job's, or empty. peers: addresses to which it measures on request, and no others.
    """

    def __init__(self, address: str, token: bytes = b"", peers: Collection[str] = ()) -> None:
        host, port = parse_address(address)
        self._token, self._peers = token, peers
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._listener = socket.socket(found[0], found[1])
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(found[4])
            self._listener.listen(8)
        except OSError as error:
            raise UsageError(
                f"can't listen on {address} ({error.strerror or error}): is another process using port {port} (a task "
                f"of a running job?), and does {host} belong to this machine?"
            ) from error
        self.address = format_address(host, self._listener.getsockname()[1])

    def serve(self, *, wait_s: float) -> dict[str, Any]:
        """Answer requests until one asks for a lane, or to end; returns it, answered, with the port free again.

        Raises UnreachableError if no request comes for `wait_s` seconds.
        """
        try:
            while True:
                with self._accept(wait_s) as sock:
                    found = self._one(sock)
                if found is not None:
                    return found
        finally:
            self._listener.close()

    def _accept(self, wait_s: float) -> socket.socket:
        self._listener.settimeout(wait_s)
        try:
            sock, peer = self._listener.accept()
        except TimeoutError:
            raise UnreachableError(
                f"no measurement against {self.address} started within {wait_s:.0f} s; run the same command without "
                "--serve on the other machine"
            ) from None
        log.debug("connection from %s", peer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(STALL_S)
        return sock

    def _one(self, sock: socket.socket) -> dict[str, Any] | None:
        try:
            if self._token:
                check_caller(sock, _key(self._token), STALL_S)
                sock.settimeout(STALL_S)
            request = check_request(read_line(sock, STALL_S))
        except ForbiddenError as error:
            log.warning("dropped a connection: %s; give both sides the same --token-file", error)
            return None
        except (OSError, ProtocolError) as error:
            # A stranger; a port scan must not end the measurement.
            log.warning("dropped a connection that is not `shardline bench`: %s", error)
            with contextlib.suppress(OSError):
                sock.sendall(_line({"is": MAGIC, "error": str(error)}))
            return None
        try:
            sock.sendall(_line({"is": MAGIC}))
            if request["do"] in ("lane", "end"):
                return request
            if request["do"] == "echo":
                for _ in range(int(request["count"])):
                    sock.sendall(sock.recv(1))
            elif request["do"] == "receive":
                send_for(sock, float(request["seconds"]), int(request["bytes"]))
            elif request["do"] == "measure":
                sock.sendall(_line({"is": MAGIC, **self._towards(request)}))
            else:
                rate, nbytes = receive_all(sock)
                sock.sendall(_line({"is": MAGIC, "bytes": nbytes, "bytes_per_s": rate}))
        except (OSError, UnreachableError) as error:
            log.warning("the other side disconnected during the measurement: %s", error)
        return None

    def _towards(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The figures of this machine's link to another one, or why there are none."""
        to = request["to"]
        if to not in self._peers:
            return {"error": f"{to} is no machine of its cluster.json; give all machines the same one"}
        try:
            client = LinkClient(to, where=to, token=self._token, command="bench mesh")
            return asdict(client.measure(float(request["seconds"]), int(request["bytes"])))
        except (ProtocolError, UnreachableError) as error:
            return {"error": str(error)}


def check_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request. Raises ProtocolError unless every field is in its range."""
    if request.get("is") != MAGIC:
        raise ProtocolError(f"the request is not {MAGIC}; use the same version on both machines")
    request = {"bytes": MAX_BYTES, **request}
    what = request.get("do")
    if what in ("send", "receive", "measure"):
        _in_range(request, "seconds", 0.0, MAX_SECONDS)
        _in_range(request, "bytes", 1, MAX_BYTES)
    elif what == "echo":
        _in_range(request, "count", 1, 10_000)
    elif what == "lane":
        _in_range(request, "budget_s", 1.0, 3600.0)
    elif what != "end":
        raise ProtocolError(f"the request {what!r} is unknown; use the same version on both machines")
    return request


def _in_range(request: Mapping[str, Any], field: str, low: float, high: float) -> None:
    value = request.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ProtocolError(f"the request's {field} is {value!r}; it must be a number from {low:g} to {high:g}")


def send_for(sock: socket.socket, seconds: float, most: int = MAX_BYTES) -> None:
    """Send for some seconds, or so many bytes, then close this direction. Raises OSError."""
    block = memoryview(bytearray(BLOCK_BYTES))
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and most > 0:
        sock.sendall(block[:most])
        most -= BLOCK_BYTES
    sock.shutdown(socket.SHUT_WR)


def receive_all(sock: socket.socket) -> tuple[float, int]:
    """(bytes per second, bytes) until the peer closes. Raises OSError; UnreachableError if nothing came."""
    block = bytearray(4 * BLOCK_BYTES)
    total = sock.recv_into(block)
    first = total
    start_s = end_s = time.perf_counter()
    while count := sock.recv_into(block):
        total += count
        end_s = time.perf_counter()
    if end_s <= start_s:
        raise UnreachableError(f"only {total} bytes arrived; measure longer with --seconds")
    # The clock starts with the first bytes.
    return (total - first) / (end_s - start_s), total


def read_line(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    """One JSON object, ended by a newline; reads nothing beyond it. Raises OSError, ProtocolError."""
    end_s = time.monotonic() + timeout_s
    line = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0.0 or not selector.select(left_s):
                raise ProtocolError(f"no answer within {timeout_s:.0f} s")
            byte = sock.recv(1)
            if not byte:
                raise ProtocolError("the other side closed the connection")
            line += byte
            if len(line) > LINE_BYTES:
                raise ProtocolError(f"its first line is longer than {LINE_BYTES} bytes")
    try:
        found = json.loads(line)
    except ValueError:
        raise ProtocolError("its message is not JSON") from None
    if not isinstance(found, dict):
        raise ProtocolError("its message is not a JSON object")
    return found


def _key(token: bytes) -> bytes:
    return mac(token, b"shardline bench net 1")


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"
