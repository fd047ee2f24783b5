"""Calls of every RPC with right, changed and senseless messages, and what has to hold after each of them."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.rpc.v1 import (
    chief_pb2,
    common_pb2,
    data_pb2,
    parameter_server_pb2,
    places_pb2,
)
from tests.fuzz import resources
from tests.fuzz.hosts import REPLICAS, ChiefHost, Host, PsHost, StandbyHost, Templates
from tests.fuzz.messages import Draw, any_message, wire_form

FILES = (chief_pb2, places_pb2, parameter_server_pb2, health_pb2, reflection_pb2)
"""All files with services in them; a test compares this with proto/."""
HOSTS: Mapping[str, Callable[[], Host]] = {
    "ps": PsHost,
    "async ps": lambda: PsHost("async"),
    "standby": StandbyHost,
    "chief": ChiefHost,
}
SERVED_BY: Mapping[str, tuple[str, ...]] = {
    "shardline.rpc.v1.ParameterServer": ("ps", "async ps"),
    "shardline.rpc.v1.Coordinator": ("ps",),
    "shardline.rpc.v1.Replication": ("standby",),
    "shardline.rpc.v1.Chief": ("chief",),
    "shardline.rpc.v1.Places": ("chief",),
    "grpc.health.v1.Health": ("ps",),
    "grpc.reflection.v1alpha.ServerReflection": ("ps",),
}

STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
"""With which a call may end that was neither cut nor left open."""
STANDARD_STATUSES = {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}
"""Besides, of gRPC's own services."""
WAITING = ("/Pull", "/PushPull", "/Watch")
"""Calls that may wait as long as they are asked to."""
WAIT_S = 0.4
"""Deadline of those, and of calls that are left open."""
DEADLINE_S = 15.0
"""Of all others, which end by themselves long before."""
OPEN_ENDS = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
DEFECT = "see the log of the task called"
"""What rpc.errors says of an error that nobody foresaw."""


def methods() -> dict[str, MethodDescriptor]:
    """Every method of every service, by path."""
    return {
        f"/{service.full_name}/{method.name}": method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


class Finding(AssertionError):
    """A call broke a rule; the sentence ends with what repeats it."""


@dataclass(frozen=True)
class Case:
    """One call: what is sent, and how it ends on the caller's side."""

    host: str
    method: str
    messages: tuple[bytes, ...]
    cut: int | None = None
    """The caller goes away after so many messages; None = it stays."""
    left_open: bool = False
    """The caller says no more, and does not say that it has ended."""

    @property
    def waits(self) -> bool:
        """Whether it may last until its deadline."""
        # gRPC answers a call of one message only when that has come, so that nothing is an answer to none.
        empty = not self.messages and not methods()[self.method].client_streaming
        return self.left_open or self.cut is not None or empty or self.method.endswith(WAITING)

    def to_json(self) -> str:
        """Text for --replay."""
        return json.dumps({**asdict(self), "messages": [data.hex() for data in self.messages]})

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Back again."""
        fields = json.loads(text)
        return cls(**{**fields, "messages": tuple(bytes.fromhex(data) for data in fields["messages"])})


@dataclass
class Ended:
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    replies: list[bytes]


def call(channel: grpc.Channel, case: Case) -> Ended:
    """Make one call with the bytes as they are. Every call ends by its deadline."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from case.messages[: case.cut]
        if case.left_open or case.cut is not None:
            over.wait(DEADLINE_S)

    # Streams for all kinds of calls: on the wire they are the same.
    running: Any = channel.stream_stream(case.method, None, None)(
        requests(), timeout=WAIT_S if case.waits else DEADLINE_S
    )
    replies: list[bytes] = []
    try:
        if case.cut is not None:
            # Let what was sent arrive: each of these calls waits for a reply, or for nothing.
            threading.Event().wait(0.002)
            running.cancel()
        replies.extend(running)
    except grpc.RpcError as error:
        found: Any = error
        return Ended(found.code(), found.details() or "", replies)
    finally:
        over.set()
    return Ended(running.code(), running.details() or "", replies)


def draw_case(draw: Draw, host: str, method: MethodDescriptor, templates: Templates) -> Case:
    """A call of one method."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    alternatives = templates.get(path) or [[]]
    messages = draw(st.sampled_from(alternatives))
    if not messages:
        # A call that is newer than the templates.
        messages = [any_message(draw, method.input_type)]
    data = tuple(_guarded(path, item) for item in wire_form(draw, messages, method.input_type))
    ending = draw(st.sampled_from(("whole",) * 14 + ("cut", "open")))
    cut = draw(st.integers(0, len(data))) if ending == "cut" else None
    return Case(host, path, data, cut, left_open=ending == "open")


def _guarded(path: str, data: bytes) -> bytes:
    """The same bytes, but never a contribution of the last replica: else right pushes would close a step."""
    if not path.endswith(("/Push", "/PushPull")):
        return data
    request = data_pb2.PushPullRequest if path.endswith("PushPull") else parameter_server_pb2.PushRequest
    try:
        message: Any = request.FromString(data)
    except DecodeError:
        return data
    frame = message.push if path.endswith("PushPull") else message.frame
    block = frame.header.block
    if not block.first <= REPLICAS - 1 < block.first + block.count <= REPLICAS:
        return data
    block.first, block.count = 0, 1
    found: bytes = message.SerializeToString()
    return found


# What a call may have changed


def may_change(host: Host, case: Case, ended: Ended) -> bool:
    """Whether the state may differ after a call, given what it was answered."""
    service, _, name = case.method.lstrip("/").rpartition("/")
    if service.endswith(".ParameterServer"):
        if name in ("Push", "PushPull"):
            return _pushed(host, case, ended)
        # What is told in the end of a call that was cut may have been done.
        done = ended.code is grpc.StatusCode.OK or ended.code in OPEN_ENDS
        return done and name not in ("OpenLane", "Pull", "Progress", "GetCut", "Status")
    if service.endswith(".Replication"):
        return bool(ended.replies) or case.cut is not None
    if service.endswith((".Chief", ".Places")):
        return _told_the_chief(host, case, ended, name)
    return False


def _pushed(host: Host, case: Case, ended: Ended) -> bool:
    """Asynchronous pushes change values when they are acknowledged, or may have been when nobody listened."""
    if case.host != "async ps":
        return False
    if ended.code in OPEN_ENDS:
        return True
    kind: Any = data_pb2.PushPullReply if case.method.endswith("PushPull") else data_pb2.PushReply
    outcomes = {kind.FromString(reply).ack.outcome for reply in ended.replies}
    return bool(outcomes & {common_pb2.OUTCOME_APPLIED, common_pb2.OUTCOME_SKIPPED})


def _told_the_chief(host: Host, case: Case, ended: Ended, name: str) -> bool:
    if name in ("Status", "GetJob", "FetchCut"):
        return False
    if name == "Join":
        accepted = any(chief_pb2.JoinReply.FromString(reply).accepted for reply in ended.replies)
        return accepted or ended.code in OPEN_ENDS
    if name in ("Heartbeat", "Lease", "Report"):
        return any(_of_a_member(host, name, data) for data in case.messages)
    return ended.code is grpc.StatusCode.OK or ended.code in OPEN_ENDS


def _of_a_member(host: Host, name: str, data: bytes) -> bool:
    kinds: dict[str, Any] = {
        "Heartbeat": chief_pb2.Beat,
        "Lease": chief_pb2.LeaseRequest,
        "Report": chief_pb2.ReportRequest,
    }
    try:
        message = kinds[name].FromString(data)
    except DecodeError:
        return False
    members: Mapping[str, int] = host.state()["members"]
    return members.get(message.task) == message.incarnation


# Watching


class LogWatch(logging.Handler):
    """Errors that nobody foresaw, wherever they are told of: a traceback of anything but a ShardlineError."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, ShardlineError):
            self.found.append(
                f"{record.name}: {record.getMessage()}: {logging.Formatter().formatException(record.exc_info)}"
            )  # type: ignore[arg-type]

    def __enter__(self) -> LogWatch:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger().removeHandler(self)


@dataclass
class Caller:
    """Makes calls to one kind of host, and holds the rules after each of them and after a batch."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    renewed: int = 0
    """Hosts that right calls had led elsewhere, and that others took the place of."""

    def __post_init__(self) -> None:
        self._watch = LogWatch()
        self._watch.__enter__()
        self._open()

    def _open(self) -> None:
        self.host = HOSTS[self.kind]()
        self.channel = grpc.insecure_channel(self.host.address)
        self.templates = self.host.templates()
        self._state = self.host.state()
        self._series = self.host.series()
        self._rest: resources.Level | None = None

    def _close(self) -> None:
        self.channel.close()
        self.host.close()

    def close(self) -> None:
        """End host and watch."""
        self._close()
        self._watch.__exit__()

    def methods(self) -> list[MethodDescriptor]:
        """Those that this kind of host serves."""
        return [
            method for path, method in methods().items() if self.kind in SERVED_BY[path.lstrip("/").rpartition("/")[0]]
        ]

    def make(self, case: Case) -> Ended:
        """Make one call. Raises Finding."""
        ended = call(self.channel, case)
        self.counts[case.method] += 1
        self.codes[ended.code.name] += 1
        problem = self._problem(case, ended)
        if problem:
            raise Finding(f"{case.method} at {self.kind}: {problem}\nrepeat: --replay '{case.to_json()}'")
        return ended

    def _problem(self, case: Case, ended: Ended) -> str:
        allowed = set(STATUSES)
        if case.waits:
            allowed |= OPEN_ENDS
        standard = STANDARD_STATUSES if case.method.startswith("/grpc.") else set()
        allowed |= standard
        if ended.code not in allowed or DEFECT in ended.details or "Traceback" in ended.details:
            told = "".join(f"\n{text}" for text in self._watch.found)
            return f"ended with {ended.code.name}: {ended.details!r}{told}"
        if ended.code is not grpc.StatusCode.OK and len(ended.details) < 10 and ended.code not in OPEN_ENDS | standard:
            return f"was refused with {ended.code.name} and no sentence: {ended.details!r}"
        if self._watch.found:
            return f"left a traceback in the log: {self._watch.found.pop()}"
        return self._changed(case, ended)

    def _changed(self, case: Case, ended: Ended) -> str:
        now = self.host.state()
        if now == self._state:
            return ""
        if not may_change(self.host, case, ended):
            differing = {key: (self._state.get(key), now.get(key)) for key in {*now, *self._state}}
            shown = {key: pair for key, pair in differing.items() if pair[0] != pair[1]}
            return f"ended with {ended.code.name} ({ended.details}) and changed the state: {shown}"
        self._state = now
        if not self.host.healthy():
            verdict = getattr(self.host, "verdict", "")
            if "the chief failed" in verdict:
                return f"ended the job by a defect: {verdict}"
            self.renew()
        return ""

    def renew(self) -> None:
        """Another host in the place of this one."""
        self._close()
        self.renewed += 1
        self._open()

    def settle(self) -> None:
        """After a batch: it answers, and holds no more threads, descriptors and tasks than at rest. Raises Finding."""
        self.host.check()
        gc.collect()
        if self._rest is None:
            self._rest = resources.at_rest(self.host.tasks)
        problem = resources.settles(self._rest, self.host.tasks)
        series = self.host.series()
        if series > 2 * self._series + 200:
            problem += f" the metrics page grew from {self._series} to {series} samples"
        if self._watch.found:
            problem += f" a traceback in the log: {self._watch.found.pop()}"
        if problem:
            raise Finding(f"after a batch of calls at {self.kind}: {problem}")


def decoded(method: MethodDescriptor, replies: list[bytes]) -> list[Any]:
    """Replies as messages, for people who look at a finding."""
    return [message_factory.GetMessageClass(method.output_type).FromString(reply) for reply in replies]
