"""The chief over real gRPC on loopback, without parameter servers: what a task sees of it."""

from __future__ import annotations

import dataclasses
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import prometheus_client
import pytest
import torch

from shardline.checkpoint import Checkpoint, CheckpointContents, CheckpointStore
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.image import VALUE, BucketImage
from shardline.core.orders import Orders, Phase, StepReport
from shardline.core.plan import make_plan
from shardline.core.rows import PARTS, part_of
from shardline.core.spec import TensorKind, TensorSpec
from shardline.core.spec_json import job_to_json
from shardline.errors import FencedError, MismatchError, ProtocolError, UsageError
from shardline.host.process import Termination
from shardline.rpc.limits import MAX_IDS
from shardline.rpc.report_queue import ReportQueue
from shardline.rpc.v1 import chief_pb2
from shardline.security import Security
from shardline.storage.table import IDS
from shardline_chief import service
from shardline_chief.io import control, training_process
from shardline_chief.io.journal import Journal
from shardline_chief.rules.messages import Beat
from shardline_chief.rules.replay import Remembered, replay
from tests.support.builders import make_job_spec
from tests.support.chief_process import TIMEOUTS, Chief


@pytest.fixture
def chief(tmp_path: Path) -> Iterator[Chief]:
    chief = Chief(tmp_path)
    yield chief
    chief.close()


@pytest.mark.parametrize("command", [["status"], ["stop"], ["top", "--once"]], ids=" ".join)
def test_a_command_that_only_asks_the_chief_does_not_import_torch(chief: Chief, command: list[str]) -> None:
    spec = json.dumps({"chief": [chief.address], "ps": 1, "worker": 1})
    code = (
        f"import sys; from shardline.cli.main import main; assert main({[*command, '--cluster', spec]!r}) == 0; "
        "heavy = {'torch', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_task_joins_gets_orders_and_is_told_the_end(chief: Chief, tmp_path: Path) -> None:
    link = chief.link("evaluator")
    link.join()
    assert link.task == "evaluator/0"
    assert link.incarnation >> 32 == 1
    assert link.wait(lambda orders: orders.version > 0, timeout_s=5.0)
    chief.client.stop("enough")
    assert link.wait(lambda orders: orders.phase is Phase.ENDED, timeout_s=5.0)
    assert link.orders.reason == "stopped: enough"
    link.close()
    assert chief.wait() == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reason"] == "stopped: enough"
    (ended,) = (entry for entry in chief.journal.read() if entry["kind"] == "ended")
    assert ended["summary"] == summary


def test_status_names_tasks_with_their_state_and_the_last_events(chief: Chief) -> None:
    link = chief.link("evaluator")
    link.join()
    status = chief.client.status()
    assert status.phase == "waiting"
    assert [(row.task, row.state) for row in status.tasks] == [("evaluator/0", "alive")]
    assert any("evaluator/0 joined" in event.sentence for event in status.said)
    link.close()


def test_who_watches_hears_of_the_end_before_the_chief_goes(chief: Chief, tmp_path: Path) -> None:
    assert chief.client.status().phase == "waiting"
    chief.client.stop("enough")
    # No task is there to be waited for, so that only who watches keeps the chief.
    assert chief.wait(0.5) is None
    ended = chief.client.status()
    assert (ended.phase, ended.reason) == ("ended", "stopped: enough")
    assert chief.wait() == 0


def test_chief_goes_at_once_where_nobody_watches(chief: Chief, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "WATCHER_S", 600.0)
    chief.client.stop("enough")
    assert chief.wait() == 0


def beats(*items: chief_pb2.Beat) -> tuple[queue.SimpleQueue[chief_pb2.Beat | None], Iterator[chief_pb2.Beat]]:
    """A stream of heartbeats that a test feeds; None ends it."""
    fed: queue.SimpleQueue[chief_pb2.Beat | None] = queue.SimpleQueue()
    for item in items:
        fed.put(item)
    return fed, iter(fed.get, None)


def test_every_heartbeat_is_answered_with_the_orders_whether_they_changed_or_not(chief: Chief) -> None:
    stub = chief.client.stub
    reply = stub.Join(chief_pb2.JoinRequest(role="evaluator", stable_id="s", address="h:1"), timeout=5.0)
    beat = chief_pb2.Beat(task=reply.task, incarnation=reply.incarnation, secret=reply.secret)
    fed, stream = beats(beat)
    answers = stub.Heartbeat(stream, timeout=10.0)
    versions = [next(answers).version]
    for _ in range(3):
        fed.put(beat)
        versions.append(next(answers).version)
    fed.put(None)
    assert versions == [1 << 32 | 1] * 4  # grows over terms


def test_chief_waits_for_the_stream_of_a_task_that_it_has_just_admitted(chief: Chief) -> None:
    stub = chief.client.stub
    reply = stub.Join(chief_pb2.JoinRequest(role="evaluator", stable_id="s", address="h:1"), timeout=5.0)
    chief.client.stop("enough")
    assert chief.wait(0.5) is None
    fed, stream = beats(chief_pb2.Beat(task=reply.task, incarnation=reply.incarnation, secret=reply.secret))
    assert next(stub.Heartbeat(stream, timeout=5.0)).phase == chief_pb2.PHASE_ENDED
    fed.put(None)
    # It goes because the task has heard of the end, not because the time for that is over.
    assert chief.wait(control.GOODBYE_S / 10) == 0


def test_a_second_stream_of_the_same_life_is_answered_at_once(chief: Chief) -> None:
    stub = chief.client.stub
    reply = stub.Join(chief_pb2.JoinRequest(role="evaluator", stable_id="s", address="h:1"), timeout=5.0)
    for _ in range(2):
        fed, stream = beats(chief_pb2.Beat(task=reply.task, incarnation=reply.incarnation, secret=reply.secret))
        assert next(stub.Heartbeat(stream, timeout=10.0)).version == 1 << 32 | 1
        fed.put(None)


def test_names_that_were_never_admitted_become_no_labels_of_the_figures(chief: Chief) -> None:
    for name in ("worker/77", "nobody"):
        fed, stream = beats(chief_pb2.Beat(task=name, incarnation=1))
        assert next(chief.client.stub.Heartbeat(stream, timeout=5.0)).fenced
        fed.put(None)
    text = prometheus_client.generate_latest(chief.process.metrics.registry).decode()
    assert 'peer="unknown"' in text
    assert "worker/77" not in text
    assert "nobody" not in text


def test_tasks_hear_of_the_end_before_the_parameters_are_hashed(
    chief: Chief, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = chief.link("evaluator")
    link.join()
    assert link.wait(lambda orders: orders.version > 0, timeout_s=5.0)
    told: list[bool] = []

    def digest(checkpoint: object) -> str:
        told.append(link.wait(lambda orders: orders.phase is Phase.ENDED, timeout_s=5.0))
        return "abc"

    state = chief.process.control.program.state
    monkeypatch.setattr(state.saves, "checkpoint_step", 4)
    monkeypatch.setattr(CheckpointStore, "open", lambda store, step, verify: None)
    monkeypatch.setattr(control, "parameters_digest", digest)
    chief.client.stop("enough")
    assert chief.wait() == 0
    assert told == [True]
    assert json.loads((tmp_path / "summary.json").read_text())["sha256"] == "abc"
    link.close()


def test_a_process_that_was_replaced_is_told_that_it_is_fenced(chief: Chief) -> None:
    old = chief.link("worker", job=make_job_spec(), stable_id="one process")
    old.join()
    assert old.wait(lambda orders: orders.version > 0, timeout_s=5.0)
    # The same process joins once more, as after a long pause: its first life is over.
    new = chief.link("worker", job=make_job_spec(), stable_id="one process")
    new.join()
    with pytest.raises(FencedError):
        old.wait(lambda orders: False, timeout_s=5.0)
    assert new.wait(lambda orders: orders.version > 0, timeout_s=5.0)
    assert not new.orders.fenced
    old.close()
    new.close()


def test_a_broken_stream_makes_the_task_suspect_at_once(chief: Chief) -> None:
    link = chief.link("worker", job=make_job_spec())
    link.join()
    assert link.wait(lambda orders: orders.version > 0, timeout_s=5.0)
    link.close()
    deadline_s = time.monotonic() + 5.0
    while chief.client.status().tasks[0].state != "suspect":
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.05)


def test_steps_that_ended_just_before_the_farewell_are_told_with_it(
    chief: Chief, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def reported(beat: Beat) -> tuple[StepReport, ...]:
        told.extend(report.step for report in beat.steps)
        return ()

    monkeypatch.setattr(chief.process.control.program.heartbeats, "reported", reported)
    link = chief.link("worker", job=make_job_spec())
    link.join()
    assert link.wait(lambda orders: orders.version > 0, timeout_s=5.0)
    for step in range(3):
        link.report(StepReport(step=step, replica=0, loss=0.5, samples=1))
    link.close()
    chief.close()
    assert told == [0, 1, 2]


def test_another_job_is_refused_over_the_wire_with_the_difference(chief: Chief) -> None:
    link = chief.link("worker", job=dataclasses.replace(make_job_spec(), seed=9))
    with pytest.raises(MismatchError, match="seed: 9 here, 0 in the job"):
        link.join()
    link.close()


def test_questions_before_the_job_is_set_up_are_refused_with_a_status(chief: Chief) -> None:
    with pytest.raises(ProtocolError, match="not known yet"):
        chief.client.get_job(Identity("worker/0", 1))
    with pytest.raises(ProtocolError, match="no checkpoint yet"):
        chief.client.fetch_parameters()
    with pytest.raises(FencedError, match="worker/7"):
        chief.client.lease(Identity("worker/7", 1), [])


def test_parameters_of_a_committed_checkpoint_come_whole_and_exact(chief: Chief, tmp_path: Path) -> None:
    job = make_job_spec()
    plan = make_plan(job.tensors, 1)
    (bucket,) = plan.shards[0].buckets
    value = torch.arange(bucket.elements, dtype=torch.float32)
    image = BucketImage(shard=0, bucket=0, step=4, version=4, tensors={VALUE: value}, initialized=(False,))
    CheckpointStore(tmp_path / "checkpoints", 9).commit(
        CheckpointContents(
            job=job, plan=plan, step=4, timeline=1, term=1, consistent=True, versions=[4], images={0: [image]}
        )
    )
    found = chief.client.fetch_parameters(4)
    assert found.step == 4
    assert torch.equal(found.tensors["weight"], torch.arange(6, dtype=torch.float32).reshape(3, 2))
    with pytest.raises(ProtocolError, match="no checkpoint of step 5"):
        chief.client.fetch_parameters(5)


def test_rows_of_a_checkpoint_come_by_id_even_when_it_was_deleted(chief: Chief, tmp_path: Path) -> None:
    table = TensorSpec(
        name="users", shape=(PARTS, 2), dtype="float32", kind=TensorKind.TABLE, rule="sgd", init="uniform"
    )
    job = make_job_spec(tensors=(table,))
    ids = torch.arange(-3, MAX_IDS + 3)
    stored = ids[torch.argsort(part_of(ids), stable=True)][::2]
    tensors = {IDS: stored, VALUE: torch.arange(2.0 * len(stored))}
    path = CheckpointStore(tmp_path / "checkpoints", 9).commit(
        CheckpointContents(
            job=job,
            plan=make_plan(job.tensors, 1),
            step=4,
            timeline=1,
            term=1,
            consistent=True,
            versions=[4],
            images={0: [BucketImage(shard=0, bucket=0, step=4, version=4, tensors=tensors)]},
        )
    )
    expected = Checkpoint(path).rows("users", ids)
    assert torch.equal(chief.client.fetch_rows(4, "users", ids), expected)
    shutil.rmtree(path)
    assert torch.equal(chief.client.fetch_rows(4, "users", ids[:5]), expected[:5])
    assert chief.client.fetch_rows(4, "users", ids[:0]).shape == (0, 2)
    with pytest.raises(ProtocolError, match="has no table 'items'; its tables: users"):
        chief.client.fetch_rows(4, "items", ids[:5])
    with pytest.raises(ProtocolError, match="no checkpoint of step 4"):
        chief.client.fetch_parameters(4)


def test_health_is_served(chief: Chief) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(chief.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service="shardline.rpc.v1.Chief"), timeout=5.0)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_an_earlier_run_is_not_overwritten_without_resume(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    cluster = ClusterSpec({"chief": ("127.0.0.1:0",), "ps": ("127.0.0.1:0",)})
    config = RoleConfig(role="chief", index=0, cluster=cluster, out=tmp_path)
    with pytest.raises(UsageError, match=r"up to step 10.*--resume"):
        service.checkpoint_to_resume(config, tmp_path)


def test_settings_of_the_trainer_process_survive_the_way_there(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("not-to-be-passed-on\n")
    cluster = ClusterSpec({"chief": ("127.0.0.1:4000",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})
    config = RoleConfig(
        role="chief",
        index=0,
        cluster=cluster,
        job=Path("job.py"),
        out=Path("/out"),
        timeouts=TIMEOUTS,
        overrides=(("steps", "7"),),
        chief_trains=True,
        security=Security(token_file=token),
        lane="tcp",
        overlap=False,
        run_dir=tmp_path,
    )
    text = training_process.to_json(config)
    assert "not-to-be-passed-on" not in text
    back = training_process.from_json(text)
    assert back.security.check("not-to-be-passed-on")
    assert (back.security, back.lane, back.overlap, back.run_dir) == (config.security, "tcp", False, tmp_path)
    assert (back.job, back.out, back.timeouts, back.overrides) == (
        config.job,
        config.out,
        config.timeouts,
        config.overrides,
    )
    assert back.cluster.chief == "127.0.0.1:4000"
    # It calls the chief there, and serves at a port of its own.
    assert back.cluster.address("chief/0") == "127.0.0.1:0"
    assert back.cluster.address("worker/0") == cluster.address("worker/0")


def test_orders_start_at_version_zero_so_that_the_first_ones_count() -> None:
    assert Orders().version == 0


def test_steps_that_a_chief_may_not_have_heard_of_are_told_again() -> None:
    queue = ReportQueue()
    reports = [StepReport(step=step, replica=0, loss=0.5, samples=8) for step in range(3)]
    broken, open_ = threading.Event(), threading.Event()
    for report in reports:
        queue.add(report)
        assert queue.take(broken) == [report]
    queue.answered()
    broken.set()
    queue.take_back()
    # The stream that broke must not take what the next one can still send.
    assert queue.take(broken) == []
    # The answer may be to the beat before the last, so the last one is told again; then nothing is left.
    assert queue.take(open_) == reports[2:]
    queue.add(reports[0])
    queue.take_back()
    assert queue.take(open_) == [reports[2], reports[0]]
    queue.answered()
    assert queue.take(open_) == []


def test_a_chief_that_was_killed_before_it_had_closed_says_good_bye_once_more(tmp_path: Path) -> None:
    cluster = ClusterSpec({"chief": ("127.0.0.1:0",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})
    config = RoleConfig(role="chief", index=0, cluster=cluster, out=tmp_path, timeouts=TIMEOUTS)
    with Journal(tmp_path / "chief") as journal:
        journal.begin_term()
        journal.write("chief", uuid="u", resume=None, takes_over=None)
        journal.write("job", spec=job_to_json(make_job_spec()))
        told = {"exit_code": 4, "versions": [7, 8], "trainers": {"worker/0": {"steps": 9}}, "chief_restarts": 0}
        journal.write("ended", exit_code=4, reason="ps/0 is gone", summary=told)
    assert run_in_thread(config) == 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_code"], summary["reason"]) == (4, "ps/0 is gone")
    # What servers and workers had told the first chief.
    assert summary == {**summary, **told, "chief_restarts": 1}
    with Journal(tmp_path / "chief") as journal:
        remembered = replay(journal.read())
    assert remembered.closed
    assert not remembered.unfinished


def test_another_job_than_the_one_that_has_not_ended_is_refused_with_the_difference(tmp_path: Path) -> None:
    cluster = ClusterSpec({"chief": ("127.0.0.1:0",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})
    config = RoleConfig(role="chief", index=0, cluster=cluster, out=tmp_path, timeouts=TIMEOUTS)
    settings = service.settings_of(config)
    known = Remembered(term=1, job=dataclasses.replace(make_job_spec(), steps=20), timeline=1 << 32 | 1)
    with pytest.raises(UsageError, match=r"has not ended, and this one differs \(steps: 10 here, 20 in the job\)"):
        service.unfinished_job(config, tmp_path, known, make_job_spec(), settings)
    assert service.unfinished_job(config, tmp_path, known, None, settings) is known
    again = dataclasses.replace(config, resume=True)
    assert service.unfinished_job(again, tmp_path, known, make_job_spec(), settings) is None


def run_in_thread(config: RoleConfig) -> int:
    """The whole process of a chief, but for its signal handlers, which are the main thread's."""
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Termination, "install", lambda self: None)
        thread = threading.Thread(target=lambda: found.append(service.run(config)), daemon=True)
        thread.start()
        thread.join(20.0)
    assert found, "the chief has not ended"
    return found[0]
