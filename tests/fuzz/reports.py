"""Joins, heartbeats and scores of tasks that lie, at a chief whose job goes on: its summary says what the honest told.

Each field gets values that suit its type: huge, negative, no numbers, far, long, many. What a worker may do is left
out: to fail, to leave, to have finished.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shardline.core.orders import StepReport
from shardline.rpc.v1 import chief_pb2, chief_pb2_grpc, common_pb2
from tests.fuzz.calls import Finding
from tests.fuzz.hosts import PATIENCE_S, ChiefHost, wait_until

LOST, STEPS = 3.0, 10
"""What the honest worker tells: updates that were lost, and steps."""
LOOK_EVERY = 500
MANY = 5000
INTEGERS = (
    0,
    1,
    2,
    64,
    255,
    256,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
    (1 << 53) + 1,
    1 << 63,
    (1 << 63) + 5,
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, 2.0**53, 2.0**64, math.inf, -math.inf, math.nan)
TEXTS = (
    "",
    "ps/0",
    "ps/7",
    "worker/0",
    "evaluator/0",
    "lost_updates",
    "127.0.0.1:1",
    "10.9.8.7:9100",
    "\x00\x1b[31m",
    "../../etc/passwd",
    "x" * 300,
    "y" * 70_000,
)
CPP = FieldDescriptor
MAY_DO = ("failure", "failure_code", "leaving", "finished")
OURS = ("task", "incarnation", "secret", "hello")


class Liar:
    """Draws messages from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def change(self, message: Any, *, sparing: tuple[str, ...] = ()) -> None:
        """Give one to three fields other values, at any depth."""
        for _ in range(self.rng.randint(1, 3)):
            fields = [field for field in message.DESCRIPTOR.fields if field.name not in sparing]
            self._set(message, self.rng.choice(fields))

    def _set(self, message: Any, field: FieldDescriptor) -> None:
        if field.is_repeated:
            self._extend(getattr(message, field.name), field)
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            if part.DESCRIPTOR.fields:
                self.change(part)
        else:
            setattr(message, field.name, self._value(field))

    def _extend(self, target: Any, field: FieldDescriptor) -> None:
        count = self.rng.choice((1, 1, 2, MANY))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for number in range(count):
                name = self._value(key) if count < MANY else f"name {number}"
                target[name] = self._value(value)
        elif field.message_type is not None:
            item = target.add()
            self.change(item)
            target.extend([item] * (count - 1 if item.ByteSize() < 100 else 0))
        else:
            text = self._value(field)
            target.extend([text] * (count if len(str(text)) < 100 else 1))

    def _value(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind in (CPP.CPPTYPE_DOUBLE, CPP.CPPTYPE_FLOAT):
            return self.rng.choice(FLOATS)
        if kind == CPP.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == CPP.CPPTYPE_ENUM:
            return self.rng.choice((0, 1, 2, 99))
        if kind == CPP.CPPTYPE_STRING:
            text = self.rng.choice(TEXTS)
            return text.encode() if field.type == CPP.TYPE_BYTES else text
        limit = {CPP.CPPTYPE_UINT32: 32, CPP.CPPTYPE_INT32: 31, CPP.CPPTYPE_INT64: 63}.get(kind, 64)
        found = min(self.rng.choice(INTEGERS), (1 << limit) - 1)
        return -found if limit in (31, 63) and self.rng.random() < 0.5 else found


class Lies:
    """A chief, an honest worker and an evaluator, and others that lie."""

    def __init__(self, seed: int) -> None:
        self.liar, self.codes = Liar(seed), Counter[str]()
        self.host = ChiefHost()
        self._channel = grpc.insecure_channel(self.host.address)
        self._stub = chief_pb2_grpc.ChiefStub(self._channel)
        self._lives: dict[str, dict[str, Any]] = {}
        honest = self._join("evaluator", 0)
        wait_until(lambda: self.host.state()["checkpoint_step"] == 0, "the first checkpoint")
        self._stub.Report(chief_pb2.ReportRequest(**honest, step=0, metrics={"acc": 0.25}), timeout=PATIENCE_S)
        self.host.tell([StepReport(step=step, replica=0, loss=0.5, samples=4) for step in range(STEPS)], LOST)

    def _join(self, role: str, index: int) -> dict[str, Any]:
        """One life of a task."""
        request = chief_pb2.JoinRequest(role=role, index=index, stable_id=f"{role}{index}")
        reply = self._stub.Join(request, timeout=PATIENCE_S)
        assert reply.accepted, reply.reason
        return {"task": reply.task, "incarnation": reply.incarnation, "secret": reply.secret}

    def _life(self, role: str) -> dict[str, Any]:
        """The life of a liar, renewed where the chief knows it no more."""
        life = self._lives.get(role)
        if life is None or self.host.living().get(life["task"]) != life["incarnation"]:
            life = self._lives[role] = self._join(role, 1)
        return life

    def run(self, count: int) -> None:
        """So many messages. Raises Finding."""
        for number in range(count):
            if number % LOOK_EVERY == 0:
                self._look()
            getattr(self, self.liar.rng.choice(("_beat", "_beat", "_report", "_ask")))()
        self._look()

    def _look(self) -> None:
        """The chief is well, and both liars are its tasks."""
        if not self.host.healthy() or self.host.verdict:
            raise Finding(f"the job has ended, or is another: {self.host.verdict or self.host.state()}")
        self.host.status()
        self._send("Heartbeat", chief_pb2.Beat(**self._life("worker")), chief_pb2.Beat(**self._life("evaluator")))

    def _beat(self) -> None:
        role = self.liar.rng.choice(("worker", "worker", "evaluator"))
        report = chief_pb2.StepReport(step=1, loss=0.5, samples=4)
        beat = chief_pb2.Beat(**self._lives[role], step=1, steps=[report], figures={"lost_updates": 1e6})
        self.liar.change(beat, sparing=(*OURS, *MAY_DO) if role == "worker" else OURS)
        self._send("Heartbeat", beat)

    def _report(self) -> None:
        found = chief_pb2.ReportRequest(**self._lives["evaluator"], step=0, metrics={"acc": 0.5}, metric_order=["acc"])
        self.liar.change(found, sparing=OURS)
        self._send("Report", found)

    def _ask(self) -> None:
        hello = common_pb2.Hello(protocol_minor=1, machine={"torch": "2"})
        role = self.liar.rng.choice(("evaluator", "worker"))
        join = chief_pb2.JoinRequest(hello=hello, role=role, index=2, stable_id="s", metrics_address="10.9.8.7:9100")
        self.liar.change(join, sparing=("role", "index", "job"))
        self._send("Join", join)

    def _send(self, method: str, *messages: Message) -> None:
        for message in messages:
            try:
                if method == "Heartbeat":
                    next(iter(self._stub.Heartbeat(iter([message]), timeout=PATIENCE_S)), None)
                else:
                    getattr(self._stub, method)(message, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                found: Any = error
                if found.code() in (
                    grpc.StatusCode.INTERNAL,
                    grpc.StatusCode.UNKNOWN,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    shown = str(message)[:2000]
                    raise Finding(f"{method} ended with {found.code()}: {found.details()}: {shown}") from error
                self.codes[found.code().name] += 1
            else:
                self.codes["OK"] += 1

    def summary(self) -> dict[str, Any]:
        """End the job; returns its summary, once it is what the honest told. Raises Finding."""
        self.host.end()
        path = self.host.out / "summary.json"
        wait_until(path.exists, "the summary")
        found: dict[str, Any] = json.loads(path.read_text(), parse_constant=_no_number)
        best = found["evaluation"]["best"]
        lines = [json.loads(line) for line in (self.host.out / "logs" / "steps.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if line.get("task") == "worker/0"]
        right = (
            found["exit_code"] == 0
            and found["lost_updates"] == LOST
            and best["step"] == 0
            # The metric that decides; the others of a score may be NaN.
            and next(iter(best["metrics"].values())) is not None
            and steps == list(range(STEPS)) == [line["step"] for line in lines]
        )
        targets = (self.host.out / "prometheus-targets.json").read_text()
        if not right or "10.9.8.7" in targets:
            raise Finding(f"the summary is not what the honest told: {found}, steps {steps}, targets {targets}")
        return found

    def size_mb(self) -> float:
        """Megabytes of all that the chief has written."""
        return sum(path.stat().st_size for path in Path(self.host.out).rglob("*") if path.is_file()) / 1e6

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self.host.close()


def _no_number(text: str) -> None:
    raise Finding(f"summary.json has {text} in it, which is no JSON")


def lies(count: int, seed: int) -> dict[str, Any]:
    """So many messages, and what the chief says at the end."""
    began_s, made = time.monotonic(), Lies(seed)
    try:
        made.run(count)
        made.summary()
        return {
            "messages": count,
            "codes": dict(made.codes.most_common()),
            "written_mb": round(made.size_mb(), 1),
            "seconds": round(time.monotonic() - began_s, 1),
        }
    finally:
        made.close()
