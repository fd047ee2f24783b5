"""Jobs in stages on a real cluster: the bits of one process, also when a stage, a server or the chief is killed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardline.job import load_job
from shardline.testing import reference
from shardline_pipeline import schedule_named
from shardline_pipeline.base import StageLayout
from tests.e2e.support import (
    DEATH_TIMEOUT_S,
    PATIENCE_S,
    assert_refused,
    events,
    mortal_cluster,
    summary_of,
    train,
    wait_for_event,
    wait_for_step,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline" / "job.py"
JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline


def data():
    return TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))


def model():
    layers = [
        nn.Linear(16, {width}), nn.BatchNorm1d({width}), nn.ReLU(), nn.Dropout(0.2), nn.Linear({width}, {width}),
        nn.ReLU(), nn.Linear({width}, 4),
    ]
    return {model}


def evaluate(model):
    return {{"score": 1.0}}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = shardline.Job(
    model=model, loss=loss, dataset=data, optimizer="Adam", optimizer_args={{"lr": 0.01}}, batch_size=4,
    accumulate={accumulate}, steps={steps}, replicas={replicas}, checkpoint_every=10, pipeline="{pipeline}",
    apply="{apply}", consistency="{consistency}", codec_parcels="{codec}", evaluate=evaluate, scheduler={scheduler},
)
"""


CYCLE = "lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=24)"
LAYERS = "shardline.Pipeline(layers, stages={stages}, workers={workers})"
SPLIT = "shardline.Pipeline.split(nn.Sequential(*layers), torch.zeros(4, 16), cuts={stages}, workers={workers})"


def write_job(
    folder: Path,
    *,
    pipeline: str = "flush",
    stages: str = "[1, 4]",
    workers: str = "()",
    steps: int = 60,
    replicas: int = 1,
    apply: str = "server",
    consistency: str = "sync",
    codec: str = "",
    width: int = 32,
    scheduler: str = "None",
    model: str = LAYERS,
) -> Path:
    path = folder / "job.py"
    made = model.format(stages=stages, workers=workers)
    fields = {"pipeline": pipeline, "model": made, "steps": steps, "replicas": replicas}
    fields |= {"apply": apply, "consistency": consistency, "codec": codec, "width": width, "scheduler": scheduler}
    text = JOB.format(**fields, accumulate=4)
    path.write_text(text, encoding="utf-8")
    return path


def same_bits(out: Path, job: Path) -> bool:
    return bool(summary_of(out)["sha256"] == reference(load_job(job)).sha256)


def assert_seen(out: Path, pipeline: str, *, stages: int, replicas: int) -> None:
    """The trace has every pass of every step, in the schedule's order, on its worker's row and after its sender's."""
    events_of = json.loads((out / "pipeline-trace.json").read_text(encoding="utf-8"))["traceEvents"]
    passes = sorted((one for one in events_of if one["ph"] == "X"), key=lambda one: one["ts"])
    schedule, found = schedule_named(pipeline), summary_of(out)
    for replica in range(replicas):
        for stage in range(stages):
            rows = [one for one in passes if (one["args"]["replica"], one["args"]["stage"]) == (replica, stage)]
            assert len({(one["pid"], one["tid"]) for one in rows}) == 1
            expected = [
                (step, one.microbatch, "backward" if one.back else "forward")
                for step in range(found["steps"])
                for one in schedule.passes(stage, stages, 4)
            ]
            assert [(one["args"]["step"], one["args"]["microbatch"], one["cat"]) for one in rows] == expected
    arrows = {(one["id"], one["ph"]): one["ts"] for one in events_of if one["ph"] in "sf"}
    # Between neighbours, each way; clocks are aligned to the time that a heartbeat takes on a busy machine.
    assert len(arrows) == 2 * (found["steps"] * replicas * 2 * 4 * (stages - 1))
    assert all(arrows[number, "f"] >= ts - 500_000 for (number, phase), ts in arrows.items() if phase == "s")
    assert [one["stage"] for one in found["stages"]] == list(range(stages))
    for one in found["stages"]:
        assert 0.0 < one["bubble"] < 1.0
        assert (one["held"], one["behind"]) == (schedule.held(one["stage"], stages, 4), 0)


def assert_counted(out: Path, pipeline: str, layout: StageLayout) -> None:
    """The summary has the staleness, versions and stashes of the schedule."""
    schedule, full = schedule_named(pipeline), range(layout.first(3), layout.first(12))
    for one in summary_of(out)["stages"]:
        behind = max(layout.step(number) - schedule.version(number, one["stage"], layout) for number in full)
        kept = 1 + max(layout.step(number) - schedule.back_version(number, one["stage"], layout) for number in full)
        assert (one["behind"], one["versions"]) == (behind, kept)
        held = schedule.held(one["stage"], 3, 4) if schedule.flushes else layout.held(one["stage"])
        assert one["held"] <= held


@pytest.mark.part(of=2)
@pytest.mark.parametrize("pipeline", ["gpipe:recompute=true", "flush"])
def test_stages_on_three_workers_end_in_the_bits_of_one_process(tmp_path: Path, pipeline: str) -> None:
    job, out = write_job(tmp_path, pipeline=pipeline, steps=12, replicas=2, scheduler=CYCLE), tmp_path / "run"
    finished = train(job, out, "--ps", "2", "--workers", "3")
    assert finished.code == 0, finished
    assert any("3 workers, 2 replicas in 3 stages" in told for told in events(out, "running"))
    assert same_bits(out, job)
    assert_seen(out, pipeline, stages=3, replicas=2)
    # Other cuts, and none, go on from there.
    job = write_job(tmp_path, pipeline=pipeline, steps=18, replicas=2, stages="2", scheduler=CYCLE)
    assert train(job, out, "--ps", "1", "--workers", "2", "--resume").code == 0
    assert same_bits(out, job)
    finished = train(job, out, "--workers", "2", "--resume", "--set", "pipeline=whole-model", "--steps", "24")
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == reference(load_job(job, [("steps", "24")])).sha256


FAILS_ONCE = """
from shardline.client.exchange.shard_exchange import Retrying
from shardline.client.exchange.shard_exchange import Restart

whole, failed = Retrying.exchange, []


def exchange(self, sender, pushes, want, sink, **limits):
    own = [one for one in pushes if one.step == 3 and sender.who.task == "worker/1"]
    if own and not failed:
        failed.extend(own)
        raise Restart("shard 0: lost: the push did not arrive")
    return whole(self, sender, pushes, want, sink, **limits)


Retrying.exchange = exchange
"""


def test_an_exchange_that_fails_is_made_again_and_no_stage_computes_anything_twice(tmp_path: Path) -> None:
    job, out = write_job(tmp_path, steps=8), tmp_path / "run"
    # Other stages have no reason to begin the step again, and would not send what came before to be computed with.
    job.write_text(job.read_text(encoding="utf-8") + FAILS_ONCE, encoding="utf-8")
    finished = train(job, out, "--ps", "2", "--workers", "3")
    assert finished.code == 0, finished
    assert same_bits(out, job)
    assert_seen(out, "flush", stages=3, replicas=1)


@pytest.mark.part(of=3)
@pytest.mark.parametrize("pipeline", ["flush", "stash:gap_aware=true", "ftpipe"])
@pytest.mark.long
def test_stages_are_where_the_model_says_and_two_workers_feed_one(tmp_path: Path, pipeline: str) -> None:
    job = write_job(tmp_path, pipeline=pipeline, workers="[2, 1, 1]", steps=12, replicas=2, codec="bf16")
    out = tmp_path / "run"
    finished = train(job, out, "--ps", "2", "--workers", "4")
    assert finished.code == 0, finished
    assert same_bits(out, job)
    if pipeline != "flush":
        assert_counted(out, pipeline, StageLayout(workers=(2, 1, 1), replicas=2, microbatches=4))
    who = {one["stage"]: one["tasks"] for one in summary_of(out)["stages"]}
    assert who == {0: ["worker/0", "worker/1"], 1: ["worker/2"], 2: ["worker/3"]}
    assert_refused(train(job, tmp_path / "few", "--workers", "3"), 2, "stage 2 of the pipeline is for worker/3")


@pytest.mark.part(of=2)
@pytest.mark.parametrize("model", [pytest.param(LAYERS, id="layers"), pytest.param(SPLIT, id="traced")])
def test_automatic_stages_are_found_by_every_process_again(tmp_path: Path, model: str) -> None:
    job, out = write_job(tmp_path, stages='"auto"', steps=12, model=model), tmp_path / "run"
    finished = train(job, out, "--ps", "2", "--workers", "3", "--evaluators", "1")
    assert finished.code == 0, finished
    assert summary_of(out)["evaluation"]["last"]["metrics"]["score"] == 1.0
    assert any("3 workers, 1 replicas in 3 stages" in told for told in events(out, "running"))
    cut = write_job(tmp_path, stages="3", steps=12)
    assert same_bits(out, cut)
    again = write_job(tmp_path, stages='"auto"', steps=18, model=model)
    finished = train(again, out, "--ps", "1", "--workers", "2", "--resume")
    assert finished.code == 0, finished
    assert same_bits(out, write_job(tmp_path, stages="2", steps=18))


def test_a_cut_that_is_no_layer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job, out = write_job(tmp_path, stages="[9]"), tmp_path / "run"
    assert_refused(
        train(job, out, "--workers", "2"), 2, r"9 does not begin a stage: give layers from 1 to 6, ascending"
    )
    assert not events(out, "running")


@pytest.mark.long
def test_the_example_learns_in_four_stages(tmp_path: Path) -> None:
    finished = train(EXAMPLE, tmp_path / "run", "--ps", "2", "--workers", "4", "--evaluators", "1", "--steps", "100")
    assert finished.code == 0, finished
    assert summary_of(tmp_path / "run")["evaluation"]["last"]["metrics"]["accuracy"] >= 0.9


@pytest.mark.part(of=3)
@pytest.mark.parametrize(
    ("dying", "options", "pipeline"),
    [
        pytest.param("worker/1", {"restart": True}, "flush", id="a stage comes back"),
        pytest.param("worker/1", {"restart": True}, "flush:recompute=true", id="a stage that recomputes comes back"),
        pytest.param("worker/0", {"restart": False}, "flush", id="a stage moves to another worker"),
        pytest.param("ps/1", {"restart": True}, "flush", id="a server comes back"),
        pytest.param("chief/0", {"restart": True}, "flush", id="the chief comes back"),
    ],
)
def test_a_death_changes_no_bit(tmp_path: Path, dying: str, options: dict[str, bool], pipeline: str) -> None:
    # Wide enough for int8; random rounding has to draw the same numbers again.
    job = write_job(tmp_path, pipeline=pipeline, width=256, codec="int8:stochastic=true")
    out = tmp_path / "run"
    with mortal_cluster(job, out, workers=3) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        wait_for_step(out, 13)
        cluster.kill(dying, **options)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    assert same_bits(out, job)
    if dying == "worker/0":
        assert any("stage 0 of replica 0 to worker/" in told for told in events(out)), events(out)


FULL = """
from shardline_pipeline.worker import memory as room

looks = []


def free_memory():
    # Enough for the stage with which a process begins, and for none that comes later.
    looks.append(1)
    return 10**9 if len(looks) == 1 else 100


room.free_memory = free_memory
"""


@pytest.mark.part(of=2)
@pytest.mark.parametrize("returns", [True, False])
def test_a_stage_that_fits_nowhere_else_waits_for_its_worker(tmp_path: Path, returns: bool) -> None:
    job, out = write_job(tmp_path), tmp_path / "run"
    job.write_text(job.read_text(encoding="utf-8") + FULL, encoding="utf-8")
    told = (
        r"stage 0, layer 0 \(Linear\) to layer 0 \(Linear\), does not fit: besides the model, its gradients, versions "
        r"of its parameters and optimizer state need 2,176 bytes, and 100 are left on cpu"
    )
    with mortal_cluster(job, out, workers=3) as cluster:
        wait_for_step(out, 13)
        cluster.kill("worker/0", restart=False)
        to = re.findall(r"worker/\d$", wait_for_event(out, "", "stage 0 of replica 0 to worker/[12]"))[0]
        log = cluster.log_path(to)
        wait_until(lambda: re.search(told, log.read_text(encoding="utf-8")), f"{to} to refuse", limit_s=DEATH_TIMEOUT_S)
        if returns:
            cluster.restart("worker/0")
        code = cluster.wait(timeout_s=PATIENCE_S)
    if returns:
        assert code == 0, events(out)
        assert same_bits(out, job)
    else:
        assert code == 2, events(out)
        assert any(re.search(f"{to}: {told}.* has not returned within 20 s", one) for one in events(out, "failure"))


@pytest.mark.part(of=6)
@pytest.mark.parametrize("pipeline", ["stash", "vertical-sync", "double-buffer", "ftpipe", "no-stash"])
def test_without_a_flush_a_cluster_has_the_bits_of_one_process_with_that_delay(tmp_path: Path, pipeline: str) -> None:
    # What divides gradients by gaps measures with the job's own schedule.
    made = {"pipeline": pipeline, "replicas": 2, "scheduler": "None" if pipeline == "ftpipe" else CYCLE}
    job, out = write_job(tmp_path, steps=12, **made), tmp_path / "run"
    assert train(job, out, "--ps", "2", "--workers", "4").code == 0
    assert same_bits(out, job)
    warned = [
        told for told in events(out, "pipeline") if "is a negative example: its backward passes use other" in told
    ]
    assert len(warned) == (pipeline == "no-stash")
    assert_counted(out, pipeline, StageLayout(workers=(2, 2, 2), replicas=2, microbatches=4))
    # Going on begins with an empty pipeline, with other cuts too.
    first = reference(load_job(job))
    job = write_job(tmp_path, steps=18, stages="2", **made)
    assert train(job, out, "--ps", "1", "--workers", "3", "--resume").code == 0
    assert summary_of(out)["sha256"] == reference(load_job(job), start=first).sha256


@pytest.mark.part(of=6, first=2)
@pytest.mark.parametrize(
    ("dying", "options", "pipeline"),
    [
        pytest.param("worker/1", {"restart": True}, "stash", id="a stage comes back"),
        pytest.param("worker/1", {"restart": True}, "ftpipe", id="a stage that keeps one version comes back"),
        pytest.param("worker/0", {"restart": False}, "stash", id="a stage moves to another worker"),
        pytest.param("worker/0", {"restart": False}, "no-stash", id="a stage without stashing moves"),
        pytest.param("ps/1", {"restart": True}, "stash", id="a server comes back"),
        pytest.param("chief/0", {"restart": True}, "stash", id="the chief comes back"),
    ],
)
def test_without_a_flush_a_death_takes_the_job_back_to_a_checkpoint(
    tmp_path: Path, dying: str, options: dict[str, bool], pipeline: str
) -> None:
    job, out = write_job(tmp_path, pipeline=pipeline), tmp_path / "run"
    with mortal_cluster(job, out, workers=3) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        wait_for_step(out, 13)
        cluster.kill(dying, **options)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    # Not the step of "rolling back": a checkpoint that is being written then may be whole before anything is restored.
    back = [int(found[1]) for told in events(out, "restore") if (found := re.search(r"restoring step (\d+)", told))]
    assert back, events(out)
    result = None
    for step in back:
        result = reference(load_job(job), step, start=result)
    assert summary_of(out)["sha256"] == reference(load_job(job), start=result).sha256, events(out)


@pytest.mark.part(of=7, first=5)
@pytest.mark.parametrize("pipeline", ["gpipe", "flush", "stash", "vertical-sync", "double-buffer", "ftpipe"])
def test_with_one_replica_asynchronous_stages_have_the_bits_of_synchronous_ones(tmp_path: Path, pipeline: str) -> None:
    job, out = write_job(tmp_path, pipeline=pipeline, steps=12, consistency="async"), tmp_path / "run"
    finished = train(job, out, "--ps", "2", "--workers", "3")
    assert finished.code == 0, finished
    assert same_bits(out, write_job(tmp_path, pipeline=pipeline, steps=12))
    assert_counted(out, pipeline, StageLayout.straight(3, 4))


def test_an_asynchronous_job_goes_on_without_its_pipeline_and_with_it_again(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"pipeline": "flush", "consistency": "async"}
    job, out = write_job(tmp_path, steps=12, replicas=2, **fields), tmp_path / "run"
    assert train(job, out, "--ps", "2", "--workers", "3").code == 0
    whole = ("--set", "pipeline=whole-model", "--set", "replicas=1", "--steps", "24")
    finished = train(job, out, "--ps", "2", "--workers", "2", "--resume", *whole)
    assert finished.code == 0, finished
    found = summary_of(out)
    assert (found["first_step"], found["steps"], found["versions"], found["consistency"]) == (12, 24, [24, 24], "async")
    finished = train(job, out, "--ps", "1", "--workers", "3", "--resume", "--steps", "36")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert (found["first_step"], found["steps"], found["versions"], found["consistency"]) == (24, 36, [36], "async")


@pytest.mark.part(of=5, first=1)
@pytest.mark.parametrize(
    ("dying", "options", "pipeline", "replicas", "mode"),
    [
        pytest.param("worker/1", {"restart": True}, "flush", 1, "async", id="a stage of the only replica comes back"),
        pytest.param("worker/1", {"restart": True}, "flush", 2, "ssp:slack=2", id="a stage comes back"),
        pytest.param("worker/0", {"restart": False}, "stash", 2, "async", id="a stage moves to another worker"),
        pytest.param("ps/1", {"restart": True}, "gpipe", 2, "async", id="a server comes back"),
        pytest.param("chief/0", {"restart": True}, "flush", 2, "async", id="the chief comes back"),
    ],
)
def test_a_death_takes_replicas_that_dont_wait_for_each_other_back_to_a_checkpoint(
    tmp_path: Path, dying: str, options: dict[str, bool], pipeline: str, replicas: int, mode: str
) -> None:
    fields: dict[str, Any] = {"pipeline": pipeline, "replicas": replicas, "steps": 80}
    job, out = write_job(tmp_path, **fields, consistency=mode), tmp_path / "run"
    # So that workers have a stage of both replicas: else the other may be at the end before anybody notices.
    with mortal_cluster(job, out, workers=2 + replicas) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        wait_for_step(out, 13)
        cluster.kill(dying, **options)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    went_back = r"rolling back all shards to the newest checkpoint \(step \d+ or later\)"
    assert any(re.search(went_back, told) for told in events(out)), events(out)
    assert summary_of(out)["steps"] == 80
    manifest = json.loads((out / "checkpoints" / "step-00000080" / "manifest.json").read_text(encoding="utf-8"))
    for held in manifest["extra"]["sequences"]:
        # None has done more than there were updates; and who did less, another did instead.
        done = [held[f"replica/{replica}"][1] for replica in range(replicas)]
        assert max(done) <= 80 and sum(done) >= 80, done
    # One replica has nobody to wait for: with a flush the bits are those of synchronous training without a death.
    assert replicas > 1 or same_bits(out, write_job(tmp_path, **fields))


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize(
    ("pipeline", "replicas", "mode"),
    [("flush", 1, "async"), ("stash", 2, "ssp:slack=2"), ("double-buffer", 2, "async")],
)
def test_with_standbys_replicas_that_dont_wait_for_each_other_go_on_although_a_server_dies(
    tmp_path: Path, pipeline: str, replicas: int, mode: str
) -> None:
    job = write_job(tmp_path, pipeline=pipeline, replicas=replicas, steps=100, consistency=mode)
    out = tmp_path / "run"
    with mortal_cluster(job, out, workers=3 * replicas, standbys=1) as cluster:
        for shard in (0, 1):
            wait_for_event(out, "standby", f"shard {shard} is protected")
        wait_for_step(out, 13)
        cluster.kill("ps/1")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    (recovery,) = summary_of(out)["recoveries"]
    assert (recovery["task"], recovery["lost"]) == ("ps/1", 0)
    assert not any("rolling back" in told for told in events(out)), events(out)
    assert set(summary_of(out)["versions"]) == {100}


@pytest.mark.part(of=2)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param(["--standbys", "1"], "leave out --standbys, or choose pipeline='flush'", id="standbys"),
        pytest.param(["--set", "clip_norm=1"], "clip_norm=1 is one decision about the gradients", id="clipping"),
    ],
)
def test_what_needs_all_stages_at_one_step_is_refused_without_a_flush(
    tmp_path: Path, options: list[str], told: str
) -> None:
    job, out = write_job(tmp_path, pipeline="stash"), tmp_path / "run"
    assert_refused(train(job, out, "--workers", "2", "--ps", "2", *options), 2, re.escape(told))


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize(("pipeline", "replicas"), [("flush", 1), ("flush", 2), ("stash:predict=true", 1)])
@pytest.mark.long
def test_where_workers_apply_a_death_takes_a_stage_back_to_a_checkpoint(
    tmp_path: Path, pipeline: str, replicas: int
) -> None:
    job, out = write_job(tmp_path, pipeline=pipeline, replicas=replicas, apply="worker"), tmp_path / "run"
    with mortal_cluster(job, out, workers=3) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        wait_for_step(out, 13)
        cluster.kill("worker/1", restart=replicas == 1)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    back = [int(found[1]) for told in events(out, "restore") if (found := re.search(r"restoring step (\d+)", told))]
    assert back, events(out)
    result = None
    for step in back if pipeline.startswith("stash") else ():
        result = reference(load_job(job), step, start=result)
    result = reference(load_job(job), start=result)
    assert summary_of(out)["sha256"] == result.sha256, events(out)
    if replicas == 1:
        # Batch norm's statistics alone: nobody else has any gradient of the same parameters.
        assert summary_of(out)["bytes"]["push"]["raw"] < 100 * 2000, summary_of(out)["bytes"]
    # The servers go on from there with the optimizer's state, under other cuts.
    job = write_job(tmp_path, pipeline=pipeline.partition(":")[0], replicas=replicas, steps=66, stages="2")
    assert train(job, out, "--ps", "1", "--workers", "2", "--resume").code == 0
    assert summary_of(out)["sha256"] == reference(load_job(job), start=result).sha256
