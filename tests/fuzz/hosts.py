"""Real servers of each service on loopback, in this process, and what must stay as it is while strangers call them."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import xxhash
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from shardline.checkpoint import CheckpointStore
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.image import BucketImage
from shardline.core.orders import LOST, Phase, StepReport
from shardline.core.tensor_bytes import tensor_bytes
from shardline.core.timeouts import Timeouts
from shardline.host.process import Termination
from shardline.rpc.joining import Applicant
from shardline.rpc.link import BeatFacts, ChiefLink
from shardline.rpc.messages.convert import job_to_proto
from shardline.rpc.server import RpcServer
from shardline.rpc.v1 import (
    chief_pb2,
    chief_pb2_grpc,
    common_pb2,
    data_pb2,
    parameter_server_pb2,
    parameter_server_pb2_grpc as ps_grpc,
    places_pb2,
    plan_pb2,
)
from shardline_chief import service
from shardline_chief.io.journal import Journal
from shardline_ps.service import PsProcess
from tests.support.builders import make_job_spec
from tests.support.checkpoints import cut_of
from tests.support.plain_client import PlainClient

TIMEOUTS = Timeouts(total_s=3.0)
"""Of the parameter servers: what is waited for by their clocks is over soon."""
CHIEF_TIMEOUTS = Timeouts(total_s=60.0)
"""Of the chief: its tasks must not count as dead because this machine is busy."""
PATIENCE_S = 20.0
REPLICAS = 3
"""Of the fuzzed job. The last one never contributes (see calls.py), so no step closes and no value changes."""
ADMITTED = {"worker/0": 1}
STANDBY = "ps/1"

Templates = dict[str, list[list[Message]]]
State = dict[str, Any]


class Host:
    """Servers, the calls that they know as right, and their state. close() ends everything."""

    services: Sequence[str] = ()
    address: str
    server: RpcServer

    def templates(self) -> Templates:
        """Right calls by method path: alternatives, each a list of messages."""
        raise NotImplementedError

    def state(self) -> State:
        """What a call that was refused must leave as it was."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """Whether the state is still one in which right calls would be taken."""
        raise NotImplementedError

    def status(self) -> None:
        """Ask its Status; raises where it does not answer."""

    def series(self) -> int:
        """Samples on the metrics page: names that strangers send must not become labels without end."""
        return 0

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def check(self) -> None:
        """It answers the health service and Status."""
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", *self.services):
                reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING, name
        self.status()

    def tasks(self) -> int:
        """Tasks on the server's loop."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        return self.server.run(count(), timeout_s=PATIENCE_S)


def _ps(index: int) -> PsProcess:
    spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",) * 2})
    process = PsProcess(RoleConfig(role="ps", index=index, cluster=spec, timeouts=TIMEOUTS, lane="auto"))
    process.start()
    return process


def digest(image: BucketImage) -> str:
    """Of all that a bucket holds."""
    found = xxhash.xxh3_128()
    for name in sorted(image.tensors):
        found.update(name.encode() + bytes(tensor_bytes(image.tensors[name])))
    return f"{found.hexdigest()} {sorted(image.scalars.items())} {image.initialized}"


def shard_state(process: PsProcess) -> State:
    """Whom a ps obeys and admits, and what its shards hold."""
    authority, store = process.store.authority, process.store
    state: State = {field.name: getattr(authority, field.name) for field in dataclasses.fields(authority)}
    state["members"] = dict(authority.members) if authority.members is not None else None
    state["placement"], state["ended"] = store.placement, process.ended.is_set()
    state["standbys"] = sorted(store.standbys)
    for number, shard in store.shards.items():
        for bucket in shard.buckets:
            with bucket.lock:
                image = bucket.image()
            state[f"shard {number}, bucket {bucket.number}"] = (bucket.step, bucket.version, digest(image))
        state[f"shard {number}, cuts"] = list(shard.cuts.status())
    return state


class PsHost(Host):
    """A ps of a synchronous or asynchronous job, obeying a chief of term 1, with first values and one worker."""

    services = ("shardline.rpc.v1.ParameterServer", "shardline.rpc.v1.Coordinator")

    def __init__(self, mode: str = "sync") -> None:
        self._async = mode == "async"
        self.process = _ps(0)
        self.server, self.address = self.process.server, self.process.server.address
        self.client = PlainClient(self.address)
        place = parameter_server_pb2.Placement(shard=0, task="ps/0", address=self.address)
        consistency = plan_pb2.ConsistencySpec(mode=mode)
        self.configuration: dict[str, Any] = {
            "replicas": 1 if self._async else REPLICAS,
            "consistency": consistency,
            "placement": [place],
        }
        self.client.start(**self.configuration)
        self.client.call("SetMembership", self._members())
        self._cut_a_step()
        self._began = shard_state(self.process)

    def _members(self) -> parameter_server_pb2.SetMembershipRequest:
        members = [parameter_server_pb2.Member(task=task, incarnation=life) for task, life in ADMITTED.items()]
        request: parameter_server_pb2.SetMembershipRequest = self.client.command("SetMembership", members=members)
        return request

    def _cut_a_step(self) -> None:
        """Something for GetCut to give."""
        self.client.call("Cut", self.client.command("Cut", step=0))

    def templates(self) -> Templates:
        client, path = self.client, "/shardline.rpc.v1.ParameterServer/"
        lanes = [common_pb2.LANE_TCP, common_pb2.LANE_SHM]
        opened = [
            client.call("OpenLane", parameter_server_pb2.OpenLaneRequest(data=client.data(lane=lane))) for lane in lanes
        ]
        pushes = self._pushes([(lane, reply.attachment) for lane, reply in zip(lanes, opened, strict=True)])
        pull = client.pull_request(wait_s=0.05)
        exact = client.pull_request(exact_step=0, wait_s=0.05, buckets=[0, 2], have_step=0)
        command = client.command
        found: Templates = {
            "OpenLane": [[parameter_server_pb2.OpenLaneRequest(data=client.data(lane=lane))] for lane in lanes],
            "Push": [[parameter_server_pb2.PushRequest(frame=frame) for frame in push] for push in pushes],
            "Pull": [[pull], [exact]],
            "PushPull": [
                [data_pb2.PushPullRequest(pull=pull), *(data_pb2.PushPullRequest(push=frame) for frame in push)]
                for push in pushes
            ],
            "Progress": [[data_pb2.ProgressRequest(data=client.data(), replicas=[0])]],
            "Lead": [[parameter_server_pb2.LeadRequest(term=client.term)]],
            "Configure": [[client.configuration(**self.configuration)]],
            "SetMembership": [[self._members()]],
            "Restore": [self.restore_frames()],
            "Activate": [[command("Activate")]],
            "Promote": [[command("Promote", shard=0)]],
            "Cut": [[command("Cut", step=5)]],
            "GetCut": [[command("GetCut", step=0, shard=0)]],
            "Release": [[command("Release", step=3)]],
            "Stop": [[parameter_server_pb2.StopRequest(term=client.term, reason="over")]],
            "Status": [[parameter_server_pb2.PsStatusRequest()]],
        }
        vote = parameter_server_pb2.VoteRequest(
            job="plain", timeline=client.timeline, step=0, shard=0, quantum=[0], square_sum=[1.0]
        )
        told = parameter_server_pb2.VoteRequest(
            job="plain",
            timeline=client.timeline,
            decided=parameter_server_pb2.ReplicaVerdict(step=0, scale=1.0),
        )
        return {
            **{path + name: calls for name, calls in found.items()},
            "/shardline.rpc.v1.Coordinator/Vote": [[vote], [told]],
            **standard_templates(),
        }

    def _pushes(self, attachments: Sequence[tuple[int, int]]) -> list[list[data_pb2.PushFrame]]:
        client = self.client
        header: dict[str, Any] = {"seq": 1} if self._async else {}
        found = [client.gradient(**header), client.frames({}, kind=data_pb2.PUSH_KIND_INIT)]
        found.append(client.gradient(**header, nonfinite_tensors=["w"]))
        bucket = found[0][1].bucket
        for lane, number in attachments:
            data = {"lane": lane, "attachment": number}
            whole = client.frames({}, data=data, **header, empty_buckets=[1, 2])
            whole[-1].refs.append(data_pb2.BucketRef(bucket=bucket))
            found.append(whole)
        return found

    def restore_frames(self) -> list[Message]:
        """What GetCut gives, as Restore takes it."""
        frames = self.client.stub.GetCut(self.client.command("GetCut", step=0, shard=0), timeout=PATIENCE_S)
        head = parameter_server_pb2.RestoreHead(term=self.client.term, timeline=self.client.timeline, shard=0)
        found: list[Message] = [parameter_server_pb2.RestoreFrame(head=head)]
        for frame in frames:
            part = parameter_server_pb2.RestoreFrame()
            for name in ("header", "chunk", "end"):
                if frame.HasField(name):
                    getattr(part, name).CopyFrom(getattr(frame, name))
            found.append(part)
        return found

    def state(self) -> State:
        return shard_state(self.process)

    def healthy(self) -> bool:
        now, began = self.state(), self._began
        same = ("term", "timeline", "active", "configured", "job", "plan_id", "members", "ended", "placement")
        steps = [(value[0], now[key][0]) for key, value in began.items() if "bucket" in key and key in now]
        cut = any(step == 0 for step, *_ in now.get("shard 0, cuts", ()))
        return all(now[key] == began[key] for key in same) and len(steps) == 3 and self._async | cut

    def status(self) -> None:
        self.client.status()

    def series(self) -> int:
        return samples(self.process.metrics)

    def close(self) -> None:
        self.client.close()
        self.process.close()


def samples(metrics: Any) -> int:
    """Lines of a metrics page."""
    return sum(len(family.samples) for family in metrics.registry.collect())


class StandbyHost(Host):
    """A ps that is to hold a standby of shard 0, whose primary is nowhere."""

    services = ("shardline.rpc.v1.Replication",)

    def __init__(self) -> None:
        self.process = _ps(1)
        self.server, self.address = self.process.server, self.process.server.address
        self.client = PlainClient(self.address)
        place = parameter_server_pb2.Placement(
            shard=0, task="ps/0", address="127.0.0.1:1", standby_task=STANDBY, standby_address=self.address
        )
        self.client.lead()
        self.client.call("Configure", self.client.configuration(shards=[], standbys=[0], placement=[place]))
        self._source = PsHost()
        self._frames = self._recorded()
        self._source.close()
        self._began = self.state()

    def _recorded(self) -> list[Message]:
        """A copy of shard 0, its mark, and one record, as its primary would send them."""
        frame, client = parameter_server_pb2.ReplicaFrame, self.client
        head = parameter_server_pb2.ReplicaHead(
            job="plain", timeline=client.timeline, plan_id=client.plan_id, shard=0, task="ps/0"
        )
        found: list[Message] = [frame(head=head), frame(begin=parameter_server_pb2.ReplicaBegin(copy=7))]
        number = 0
        for message in self._source.restore_frames():
            restore: Any = message
            if restore.HasField("header"):
                number += 1
                found.append(frame(image=parameter_server_pb2.ReplicaImage(number=number, header=restore.header)))
            if restore.HasField("chunk"):
                found.append(frame(image_chunk=restore.chunk))
        found.append(frame(mark=parameter_server_pb2.ReplicaMark(number=number + 1)))
        part = parameter_server_pb2.ReplicaPart(
            bucket=0, dtype=common_pb2.DTYPE_FLOAT32, elements=64, present=b"\x01", hyper={"lr": 0.5}
        )
        record = parameter_server_pb2.ReplicaRecord(number=number + 2, parts=[part], scale=1.0)
        chunk = parameter_server_pb2.ReplicaChunk(payload=bytes(256))
        found.append(frame(record=record, chunk=chunk))
        found.append(frame(digest=parameter_server_pb2.ReplicaDigest(number=number + 2, bucket=0, digest=5)))
        return found

    def templates(self) -> Templates:
        return {"/shardline.rpc.v1.Replication/Replicate": [self._frames, self._frames[:-2], self._frames[:2]]}

    def state(self) -> State:
        return shard_state(self.process)

    def healthy(self) -> bool:
        # It holds a standby or not, as the streams said; that is what they are for.
        return all(self.state()[key] == self._began[key] for key in ("term", "timeline", "configured", "placement"))

    def status(self) -> None:
        self.client.status()

    def series(self) -> int:
        return samples(self.process.metrics)

    def close(self) -> None:
        self.client.close()
        self.process.close()


class ChiefHost(Host):
    """A chief whose job is under way, with one ps, one worker and a checkpoint."""

    services = ("shardline.rpc.v1.Chief", "shardline.rpc.v1.Places")

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardline-fuzz-")
        self.out = out = Path(self._folder.name)
        cluster = ClusterSpec({"chief": ("127.0.0.1:0",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})
        config = RoleConfig(role="chief", index=0, cluster=cluster, out=out, timeouts=CHIEF_TIMEOUTS)
        CheckpointStore(out / "checkpoints", keep=2).commit(cut_of(make_job_spec(), step=4, shards=1))
        self._journal = Journal(out / "chief")
        settings = dataclasses.replace(service.settings_of(config), term=self._journal.begin_term(), chief_uuid="u")
        self.process = service.ChiefProcess(config, out, self._journal, make_job_spec(), None, settings)
        self.server, self._control = self.process.server, self.process.control
        self._thread = threading.Thread(target=lambda: self.process.run(Termination()), name="chief", daemon=True)
        self._thread.start()
        wait_until(lambda: bool(self.server.address) or not self._thread.is_alive(), "the chief serves")
        self.address = self.server.address
        self._ps = _ps(0)
        self._ps_link = self._join("ps", address=self._ps.server.address, facts=BeatFacts(ps=self._ps.servicer.status))
        self._worker_link = self._join("worker", job=make_job_spec())
        wait_until(lambda: self._worker_link.orders.init, "the worker is told to send the first values")
        self._initialize()
        wait_until(lambda: self._phase() is Phase.RUNNING, "training begins")
        self._channel = grpc.insecure_channel(self.address)
        self._began = self.state()

    def _join(self, role: str, **fields: Any) -> ChiefLink:
        link = ChiefLink(
            self.address,
            CHIEF_TIMEOUTS,
            Applicant(role=role, index=0, job=fields.pop("job", None), address=fields.pop("address", "")),
            **fields,
        )
        assert link.join()
        return link

    def _initialize(self) -> None:
        link = self._worker_link
        with grpc.insecure_channel(self.address) as channel:
            view = chief_pb2_grpc.ChiefStub(channel).GetJob(
                chief_pb2.GetJobRequest(task=link.task, incarnation=link.incarnation), timeout=PATIENCE_S
            )
        (bucket,) = view.plan.shards[0].buckets
        data = common_pb2.DataHeader(
            job=view.job.name,
            timeline=view.timeline,
            plan_id=view.plan.plan_id,
            task=link.task,
            incarnation=link.incarnation,
            secret=link.secret,
        )
        payload = bytes(bucket.elements * 4)
        frame = data_pb2.PushFrame(
            header=data_pb2.PushHeader(data=data, kind=data_pb2.PUSH_KIND_INIT),
            bucket=data_pb2.BucketHeader(dtype=bucket.dtype, elements=bucket.elements, payload_bytes=len(payload)),
            chunk=data_pb2.Chunk(payload=payload),
            bucket_commit=data_pb2.BucketCommit(bytes=len(payload), chunks=1),
            commit=data_pb2.Commit(buckets=1, bytes=len(payload)),
        )
        with grpc.insecure_channel(self._ps.server.address) as channel:
            stub = ps_grpc.ParameterServerStub(channel)
            reply = stub.Push(iter([parameter_server_pb2.PushRequest(frame=frame)]), timeout=PATIENCE_S)
        assert reply.ack.outcome == common_pb2.OUTCOME_COUNTED, reply.ack

    def tell(self, steps: Sequence[StepReport], lost: float) -> None:
        """Have the worker report steps, and lost updates."""
        self._worker_link.figures = {LOST: lost}
        for step in steps:
            self._worker_link.report(step)
        self._worker_link.beat_now()
        wait_until(lambda: self._control.call(lambda now_s: self._told(lost)).result(PATIENCE_S), "them to be heard")

    def end(self) -> None:
        """End the job where it is: nobody makes its steps."""
        self._control.call(lambda now_s: self._control.program.fatal(0, "enough", now_s)).result(PATIENCE_S)

    def _told(self, lost: float) -> bool:
        return self._control.program.state.figures.total(LOST) == lost

    def living(self) -> dict[str, int]:
        """Tasks that are alive, as the chief knows, and their lives."""

        def look(now_s: float) -> dict[str, int]:
            members = self._control.program.state.tasks.members
            return {member.task: member.incarnation for member in members if member.living}

        return self._control.call(look).result(PATIENCE_S)

    def _phase(self) -> Phase:
        found: Phase = self._control.program.state.phase
        return found

    def lives(self) -> dict[str, int]:
        """Tasks and lives of the tests' own links."""
        return {link.task: link.incarnation for link in (self._ps_link, self._worker_link)}

    def templates(self) -> Templates:
        task = {"task": "worker/0", "incarnation": self._worker_link.incarnation}
        secret = {"secret": self._worker_link.secret}
        hello = common_pb2.Hello(protocol_minor=1, machine={"torch": "2"}, lanes=[common_pb2.LANE_GRPC])
        job = job_to_proto(make_job_spec())
        report = chief_pb2.StepReport(step=1, loss=0.5, samples=4, compute_s=0.1)
        beat = chief_pb2.Beat(
            **task, **secret, step=0, steps=[report], figures={"examples_total": 4.0}, suspects=["ps/0"]
        )
        server = {"task": "ps/0", "incarnation": self._ps_link.incarnation, "secret": self._ps_link.secret}
        told = chief_pb2.Beat(**server, ps=self._ps.servicer.status())
        found: Templates = {
            "Join": [
                [chief_pb2.JoinRequest(hello=hello, role="evaluator", stable_id="e", address="127.0.0.1:1", job=job)],
                [chief_pb2.JoinRequest(hello=hello, role="worker", index=0, stable_id="w", job=job)],
                [chief_pb2.JoinRequest(role="ps", index=7, stable_id="p", address="127.0.0.1:1")],
            ],
            "Heartbeat": [[beat, beat], [told]],
            "GetJob": [[chief_pb2.GetJobRequest(**task)]],
            "Lease": [[chief_pb2.LeaseRequest(**task, **secret, done=[1, 2])]],
            "Report": [[chief_pb2.ReportRequest(**task, **secret, step=4, metrics={"acc": 0.5}, metric_order=["acc"])]],
            "FetchCut": [[chief_pb2.FetchCutRequest(step=4, params_only=True)]],
            "Status": [[chief_pb2.ChiefStatusRequest()]],
            "Stop": [[chief_pb2.StopJobRequest(reason="enough")]],
            "Move": [[chief_pb2.MoveRequest(drain="ps/0")], [chief_pb2.MoveRequest(number=1)]],
        }
        return {
            **{f"/shardline.rpc.v1.Chief/{name}": calls for name, calls in found.items()},
            "/shardline.rpc.v1.Places/Take": [[places_pb2.PlaceRequest(role="worker", address="127.0.0.1:9")]],
        }

    def state(self) -> State:
        def look(now_s: float) -> State:
            state = self._control.program.state
            return {
                "phase": state.phase,
                "timeline": state.layout.timeline,
                "stop_step": state.progress.stop_step,
                "exit_code": state.exit_code,
                "checkpoint_step": state.saves.checkpoint_step,
                "first_step": state.progress.first_step,
                "assignment": dict(state.work.assignment),
                "members": {member.task: member.incarnation for member in state.tasks.members},
                "metrics": dict(state.figures.metrics),
                "finished": set(state.tasks.finished),
            }

        return self._control.call(look).result(PATIENCE_S)

    def healthy(self) -> bool:
        if not self._thread.is_alive():
            return False
        now = self.state()
        steady = all(now[key] == self._began[key] for key in ("phase", "timeline", "stop_step", "exit_code"))
        return steady and all(now["members"].get(task) == life for task, life in self.lives().items())

    @property
    def verdict(self) -> str:
        """Why the job ended, where it has."""
        state = self._control.program.state
        return f"{state.reason} (exit {state.exit_code})" if state.phase is Phase.ENDED else ""

    def status(self) -> None:
        chief_pb2_grpc.ChiefStub(self._channel).Status(chief_pb2.ChiefStatusRequest(), timeout=PATIENCE_S)

    def series(self) -> int:
        return samples(self.process.metrics)

    def close(self) -> None:
        for link in (self._worker_link, self._ps_link):
            link.close()
        self._channel.close()
        if self._thread.is_alive():
            # A chief that ends properly waits for a checkpoint and for those who watch it.
            self._control.post(lambda now_s: setattr(self._control, "resigned", True))
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.process.close()
        self._ps.close()
        self._journal.close()
        self._folder.cleanup()


def standard_templates() -> Templates:
    """gRPC's own services, which every task offers."""
    ask = reflection_pb2.ServerReflectionRequest
    return {
        "/grpc.health.v1.Health/Check": [[health_pb2.HealthCheckRequest(service="shardline.rpc.v1.ParameterServer")]],
        "/grpc.health.v1.Health/Watch": [[health_pb2.HealthCheckRequest(service="")]],
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [
            [ask(list_services=""), ask(file_containing_symbol="shardline.rpc.v1.Chief")]
        ],
    }


def wait_until(there: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again until something holds. Raises AssertionError naming it where it never does."""
    end_s = time.monotonic() + patience_s
    while not there():
        assert time.monotonic() < end_s, f"not within {patience_s} s: {what}"
        time.sleep(0.005)
