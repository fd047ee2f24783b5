"""Tasks that die: what they leave half done ends in the same bits."""

from __future__ import annotations

import inspect
import queue
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from shardline import plugins
from shardline.cli.launcher import LocalCluster
from shardline.cli.process_exits import Ended
from tests.e2e.support import (
    DEVICE_MEMORY,
    PATIENCE_S,
    TABLED,
    events,
    expected_sha256,
    in_a_fork,
    json_lines,
    mortal_cluster,
    summary_of,
    train,
    wait_for_event,
    wait_until,
    write_job,
)
from tests.support.jobs import Lion

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]

# In mid-step, to the message: shard 0 has everybody's gradients and is one step ahead, shard 1 waits for this worker's.
# worker/1 kills itself there, once; worker/0 stands still there for whoever comes to kill it.
MID_STEP = """
import os, signal, sys, threading
from pathlib import Path
from shardline.lanes.{lane}.client import {Lane}

folder = Path(__file__).parent
plain = {Lane}.exchange
shard_0_done = threading.Event()

def exchange(lane, sender, contributions, want, sink, *, timeout_s):
    def at(task, step):
        return task in sys.argv and bool(contributions) and contributions[0].step == step

    if lane._shard == 1 and (at("worker/1", 12) or at("worker/0", 24)):
        assert shard_0_done.wait(60.0)
        if at("worker/0", 24):
            (folder / "stands").touch()
            threading.Event().wait(600.0)
        try:
            os.close(os.open(folder / "died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        return plain(lane, sender, contributions, want, sink, timeout_s=timeout_s)
    finally:
        if lane._shard == 0 and (at("worker/1", 12) or at("worker/0", 24)):
            shard_0_done.set()

{Lane}.exchange = exchange
"""


SGD = """optimizer="SGD",
    optimizer_args={"lr": 0.05, "momentum": 0.9},"""
LION = "optimizer=Lion, optimizer_args={'lr': 0.005, 'weight_decay': 0.1},"


def mid_step(lane: str) -> str:
    return MID_STEP.replace("{lane}", lane).replace("{Lane}", f"{lane.capitalize()}Lane")


def ended_tasks(cluster: LocalCluster) -> list[Ended]:
    """Ends of processes that nobody has read yet."""
    found = []
    while True:
        try:
            event = cluster.events.get_nowait()
        except queue.Empty:
            return found
        assert isinstance(event, Ended)
        found.append(event)


def train_and_die(folder: str, lane: str) -> list[tuple[str, int, bool]]:
    """Run the job of a folder there; what ended with which code, and whether it was started again."""
    stands, died, out = Path(folder, "stands"), Path(folder, "died"), Path(folder, "run")
    plugins.add([DEVICE_MEMORY] if lane == "cuda" else [])
    with mortal_cluster(Path(folder, "job.py"), out, lane=lane) as cluster:
        wait_until(stands.exists, "worker/0 stands in mid-step")
        assert died.exists()
        # Or nobody would be there to take over.
        wait_for_event(out, "joined", "^worker/1 ", more_than=1)
        cluster.kill("worker/0", restart=False)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
        assert cluster.wait_all(timeout_s=30.0) == ()
        return [(end.task, end.code, end.restarted) for end in ended_tasks(cluster)]


@pytest.mark.parametrize(
    ("settings", "lane"),
    [
        ({}, "grpc"),
        # In memory of a device, which the host plays: the dead worker's is still mapped by the servers.
        ({}, "cuda"),
        pytest.param({"clip_norm": 0.5}, "grpc", marks=pytest.mark.long),
        pytest.param({"clip_norm": 0.5}, "cuda", marks=pytest.mark.long),
        ({"apply": "worker", "checkpoint_every": 5}, "grpc"),  # and with an optimizer from outside torch
        pytest.param({"tables": TABLED}, "grpc", marks=pytest.mark.long),
    ],
    ids=["eager", "eager-cuda", "voted", "voted-cuda", "workers-apply", "tables"],
)
def test_workers_killed_between_two_shards_of_a_step_change_no_bit(
    tmp_path: Path, settings: dict[str, Any], lane: str
) -> None:
    settings = dict(settings)
    after = mid_step(lane) + settings.pop("tables", "")
    job = write_job(tmp_path / "job.py", replicas=3, steps=36, **settings, after=after)
    out = tmp_path / "run"
    if "apply" in settings:
        text = job.read_text()
        assert text.count(SGD) == 1
        job.write_text(text.replace(SGD, LION).replace("class Points", inspect.getsource(Lion) + "\nclass Points"))
    ends = in_a_fork(train_and_die, folder=str(tmp_path), lane=lane)
    assert ends[:2] == [["worker/1", -signal.SIGKILL, True], ["worker/0", -signal.SIGKILL, False]]
    assert sorted(ends[2:]) == [[task, 0, False] for task in ("chief/0", "ps/0", "ps/1", "worker/1")]
    found = summary_of(out)
    assert found["sha256"] == expected_sha256(job)
    assert (found["steps"], found["versions"], found["duplicate_mismatches"]) == (36, [36, 36], 0)
    told = events(out)
    # On a busy machine the new process may take longer than a silent one is waited for.
    noticed = r"worker/1(: a new process replaces a silent one| is dead: last heard)"
    assert any(re.search(noticed, text) for text in told), told
    assert any(re.search(r"worker/0 is dead: last heard .* replicas? .* to worker/1", text) for text in told), told
    if "apply" in settings:
        finished = train(job, out, "--workers", "1", "--steps", "40", "--resume")
        assert finished.code == 0, finished
        assert summary_of(out)["sha256"] == expected_sha256(job, steps=40)


def test_with_exact_error_memory_lossy_jobs_end_in_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    lossy = {"replicas": 3, "steps": 36, "width": 400, "checkpoint_every": 5}
    lossy |= {"codec": "onebit", "error_memory": "exact"}
    write_job(tmp_path / "job.py", **lossy, after=mid_step("grpc"))
    ends = in_a_fork(train_and_die, folder=str(tmp_path), lane="grpc")
    assert ends[:2] == [["worker/1", -signal.SIGKILL, True], ["worker/0", -signal.SIGKILL, False]]
    alone = train(write_job(tmp_path / "alone.py", **lossy), tmp_path / "alone", "--workers", "1", "--ps", "2")
    assert alone.code == 0, alone
    found, other = summary_of(tmp_path / "run"), summary_of(tmp_path / "alone")
    assert (found["sha256"], found["steps"]) == (other["sha256"], 36)
    assert len(found["recoveries"]) >= 2 and not other["recoveries"]
    gone = (
        r"the error memory of replicas? .* is lost \(error_memory is 'exact'\); rolling back all shards to the newest "
        r"checkpoint \(step 2?[05] or later\)"
    )
    assert any(re.search(gone, text) for text in events(tmp_path / "run")), events(tmp_path / "run")
    # Otherwise all of it would prove nothing.
    plain = write_job(tmp_path / "plain.py", **{**lossy, "codec": "raw"})
    assert found["sha256"] != expected_sha256(plain)


# In a pass that goes on while the exchange of step 12 runs, once.
IN_THE_OVERLAP = """
import os, signal, sys
from pathlib import Path
from shardline.client.step.trainer import Trainer

plain = Trainer.begin

def begin(trainer, replica=0):
    if "worker/1" in sys.argv and trainer.step == 13 and trainer.open.sent:
        try:
            os.close(os.open(Path(__file__).parent / "died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    plain(trainer, replica)

Trainer.begin = begin
"""


def test_a_worker_killed_while_its_exchange_runs_costs_what_its_replicas_had_of_their_own(tmp_path: Path) -> None:
    settings = {"replicas": 4, "steps": 24, "cadence": "streaming-diloco:every=6,fragments=2,alpha=0.5,overlap=2"}
    found = {}
    for name, workers, after in (("one", 1, ""), ("two", 2, ""), ("dies", 2, IN_THE_OVERLAP)):
        (tmp_path / name).mkdir()
        job, out = write_job(tmp_path / name / "job.py", after=after, **settings), tmp_path / name / "run"
        finished = train(job, out, "--workers", str(workers), "--ps", "2")
        assert finished.code == 0, finished.err
        found[name] = summary_of(out)
        assert (found[name]["steps"], found[name]["versions"]) == (24, [24, 24])
    assert (tmp_path / "dies" / "died").exists()
    assert found["one"]["sha256"] == found["two"]["sha256"] != found["dies"]["sha256"]


def test_mirrored_workers_go_back_after_a_death_and_their_job_goes_on_with_servers_and_back(tmp_path: Path) -> None:
    dies = IN_THE_OVERLAP.replace(" and trainer.open.sent", "")
    job, out = write_job(tmp_path / "job.py", replicas=2, checkpoint_every=5, after=dies), tmp_path / "run"
    for steps, flags in ((18, ["--mirrored", "2"]), (22, ["--workers", "1", "--resume"]), (26, ["--mirrored", "2"])):
        finished = train(job, out, *flags, "--steps", str(steps), *(["--resume"] if steps > 22 else []))
        assert finished.code == 0, finished.err
        assert summary_of(out)["sha256"] == expected_sha256(job, steps=steps)
        if steps == 18:
            assert not list((out / "logs").glob("ps-*.log")), "no server has a process"
            assert len(summary_of(out)["recoveries"]) == 1, events(out)


# When the job stops, before it has brought anything for the last checkpoint.
AT_THE_END = """
import os, signal, sys
from shardline.client.applied.worker_optimizer import WorkerOptimizer

plain = WorkerOptimizer._bring

def _bring(applied, **whom):
    if "worker/0" in sys.argv and applied.step == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(applied, **whom)

WorkerOptimizer._bring = _bring
"""


def test_where_workers_apply_another_one_brings_the_last_state_if_the_first_is_killed(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=2, steps=12, apply="worker", after=AT_THE_END)
    out = tmp_path / "run"
    finished = train(job, out, "--workers", "2", "--ps", "2", "--no-restart")
    assert finished.code == 0, finished.err
    found = summary_of(out)
    assert (found["checkpoint_step"], found["sha256"]) == (12, expected_sha256(job)), events(out)


PLATEAU = """import time
from torch.optim.lr_scheduler import ReduceLROnPlateau

def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, threshold=0.2, factor=0.3)
"""


def test_a_learning_rate_that_follows_scores_is_the_same_after_deaths_and_when_resumed(tmp_path: Path) -> None:
    fields = {"replicas": 2, "checkpoint_every": 10, "best_metric": "loss", "after_loss": "time.sleep(0.01)"}
    job, out = write_job(tmp_path / "job.py", imports=PLATEAU, **fields, steps=50), tmp_path / "run"
    job.write_text(job.read_text().replace('optimizer="SGD",', 'optimizer="SGD", scheduler=plateau,'))
    with mortal_cluster(job, out, evaluators=1) as cluster:
        wait_for_event(out, "evaluation", "^step 20: ")
        for task in ("chief/0", "evaluator/0", "worker/0"):
            cluster.kill(task)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, cluster.log_tail("chief/0", 30)
    assert summary_of(out)["sha256"] == expected_sha256(job)
    finished = train(job, out, "--workers", "1", "--evaluators", "1", "--steps", "70", "--resume")
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == expected_sha256(job, steps=70)
    rates = {line["logged"]["learning_rate"] for line in json_lines(out / "logs" / "steps.jsonl")}
    assert len(rates) >= 3, rates
