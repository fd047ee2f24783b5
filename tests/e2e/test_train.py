"""`shardline train`: what a whole local cluster of separate processes ends in, resumes from and leaves behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from shardline.cluster import ClusterSpec, parse_address
from shardline.core.timeouts import Timeouts
from shardline.errors import UsageError
from shardline.rpc.client import ChiefClient
from shardline.security import Security
from tests.e2e.support import (
    RUN_ID,
    Command,
    events,
    expected_sha256,
    json_lines,
    processes,
    shardline,
    summary_of,
    traced,
    train,
    train_command,
    wait_until,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Runs where `import shardline` must fail, as on a machine that has PyTorch and nothing of this project.
PLAIN_TORCH = """
import importlib.abc, json, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("shardline"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
try:
    import shardline
except ModuleNotFoundError:
    pass
else:
    sys.exit("shardline can be imported here")
import torch
from torch import nn
from safetensors.torch import load_file

model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 4))
for path in sys.argv[1:]:
    state = torch.load(path, weights_only=True) if path.endswith(".pt") else load_file(path)
    model.load_state_dict(state, strict=True)
    print(json.dumps({name: value.double().sum().item() for name, value in sorted(model.state_dict().items())}))
"""


@pytest.mark.usefixtures("warm")
def test_train_ends_in_the_reference_bits_and_resumes_on_another_cluster_past_a_damaged_checkpoint(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job.py", replicas=3, checkpoint_every=10)
    out, copied = tmp_path / "run", tmp_path / "new" / "summary.json"
    flags = ["--ps", "2", "--workers", "2", "--evaluators", "1", "--steps", "20", "--seed", "5"]
    flags += ["--profile", "15:25"]
    finished = Command(*train_command(job, out, *flags, "--summary", copied), cold=True).finish()
    assert finished.code == 0, finished
    found = summary_of(out)
    assert json.loads(copied.read_text()) == found
    assert found["sha256"] == expected_sha256(job, steps=20, seed=5)
    assert found["sha256"] != expected_sha256(job, steps=20)
    check_summary(found, out)
    check_logs(out, timelines=1, steps=range(20))
    for place in ("checkpoints/step-00000020", "logs", "logs/steps.jsonl", "logs/tensorboard", "summary.json"):
        assert str(out / place) in finished.out, finished.out
    assert "20 steps in" in finished.out
    assert "evaluation at step 20: accuracy" in finished.out
    check_exports(out, tmp_path)
    for worker in range(2):
        spans = traced(out, worker)
        assert {name for name in spans if name.startswith("step ")} == {f"step {step}" for step in range(15, 20)}
        assert spans["push"] == spans["pull"] >= 5 * 2

    # The newest checkpoint is cut short: the one before it serves, loudly, on other numbers of tasks.
    shard = out / "checkpoints" / "step-00000020" / "shard-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    finished = train(job, out, "--ps", "1", "--workers", "3", "--steps", "30", "--seed", "5", "--resume")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert found["sha256"] == expected_sha256(job, steps=30, seed=5)
    assert (found["first_step"], found["steps"], found["ps"], found["workers"]) == (10, 30, 1, 3)
    assert found["evaluation"] == {"last": None, "best": None}
    chief_log = (out / "logs" / "chief-0.log").read_text()
    assert "shard-00001-of-00002.safetensors" in chief_log
    assert [line["step"] for line in json_lines(out / "logs" / "steps.jsonl")] == [*range(20), *range(10, 30)]

    # A second --resume with nothing left to do, and a fresh start over an earlier run, are told apart from training.
    assert "contains an earlier run" in train(job, out).err
    assert train(job, out).code == 2


def check_summary(found: dict[str, object], out: Path) -> None:
    """Everything the issue asks of the summary of 20 steps with 3 replicas on 2 workers and 2 ps."""
    assert (found["steps"], found["first_step"], found["workers"], found["ps"], found["replicas"]) == (20, 0, 2, 2, 3)
    assert (found["exit_code"], found["reason"], found["consistency"]) == (0, "done", "sync")
    assert isinstance(found["seconds"], float)
    assert found["seconds"] > 0
    assert found["steps_per_second"] == pytest.approx(20 / found["seconds"], rel=1e-3)
    assert found["versions"] == [20, 20]
    assert found["staleness"] == {"mean": 0.0, "max": 0}
    assert (found["skipped_steps"], found["duplicate_mismatches"]) == (0, 0)
    traffic = found["bytes"]
    assert isinstance(traffic, dict)
    for direction in ("push", "pull"):
        assert traffic[direction]["raw"] > 0
        # All tasks are on one host, and what lies in shared memory is on no wire.
        assert traffic[direction]["wire"] == 0
    scores = found["evaluation"]
    assert isinstance(scores, dict)
    assert scores["last"]["step"] == 20
    assert scores["best"]["metrics"]["accuracy"] >= scores["last"]["metrics"]["accuracy"]
    assert 0.0 < scores["last"]["metrics"]["loss"] < 2.0
    assert found["checkpoint"] == str(out / "checkpoints" / "step-00000020")
    assert Path(str(found["checkpoint"])).is_dir()


def check_logs(out: Path, *, timelines: int, steps: range) -> None:
    """Steps in order with their losses, events, TensorBoard files, a log per task."""
    lines = json_lines(out / "logs" / "steps.jsonl")
    assert [line["step"] for line in lines] == list(steps)
    assert len({line["timeline"] for line in lines}) == timelines
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {line["samples"] for line in lines} == {24}
    assert list((out / "logs" / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events(out, "joined")) == 5
    for task in ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "evaluator-0"):
        assert (out / "logs" / f"{task}.log").exists()


def check_exports(out: Path, folder: Path) -> None:
    """Both kinds of export load in plain torch and hold the same values."""
    files = [folder / "model.safetensors", folder / "model.pt"]
    for file in files:
        finished = shardline("export", out / "checkpoints" / "step-00000020", file)
        assert (finished.code, finished.out.strip()) == (0, str(file)), finished
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", PLAIN_TORCH, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    first, second = (json.loads(line) for line in loaded.stdout.splitlines())
    assert first == second
    assert first["1.num_batches_tracked"] == 20


@pytest.mark.usefixtures("warm")
def test_asynchronous_training_does_every_batch_once_and_measures_its_staleness(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py")
    out = tmp_path / "run"
    finished = train(job, out, "--ps", "2", "--workers", "2", "--steps", "200", "--consistency", "async")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert (found["steps"], found["versions"], found["consistency"]) == (200, [200, 200], "async")
    # Push and pull are one call, so each update of the other worker in between makes one more: W-1 on average.
    assert found["staleness"]["mean"] == pytest.approx(1.0, abs=0.15)
    assert found["staleness"]["max"] >= 1
    assert found["repeated_batches"] == 0
    assert found["checkpoint_step"] == 200
    batches = sorted(line["step"] for line in json_lines(out / "logs" / "steps.jsonl"))
    assert batches == list(range(200))


@pytest.mark.usefixtures("warm")
def test_cluster_behind_mutual_tls_and_a_token_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Every connection there is: commands, heartbeats, votes on the norm, a worker, the launcher's own."""
    ca = trustme.CA()
    cert = ca.issue_cert("127.0.0.1")
    files = {"tls-ca": ca.cert_pem, "tls-cert": cert.cert_chain_pems[0], "tls-key": cert.private_key_pem}
    flags: list[str | Path] = ["--token-file", tmp_path / "token"]
    (tmp_path / "token").write_text("a-token-that-nobody-may-see\n")
    for name, blob in files.items():
        blob.write_to_path(str(tmp_path / name))
        flags += [f"--{name}", tmp_path / name]
    job = write_job(tmp_path / "job.py", clip_norm=0.5, checkpoint_every=10)
    out = tmp_path / "run"
    command = Command(*train_command(job, out, "--ps", "2", "--steps", "6", *flags))
    # Its address is known before it listens; it serves before the others are started, until they are done.
    spec = wait_until(lambda: addressed(out), "the chief has its address", while_runs=command)
    host, port = parse_address(spec.chief)
    said = wait_until(lambda: Security().diagnose(host, port), "the chief answers", while_runs=command)
    assert "it uses TLS" in said
    without_token = {name.replace("-", "_"): tmp_path / name for name in files}
    client = ChiefClient(spec.chief, Timeouts(total_s=10.0), Security(**without_token))
    with pytest.raises(UsageError, match="does not carry the token of this job"):
        client.status()
    client.close()
    finished = command.finish()
    assert finished.code == 0, finished
    assert summary_of(out)["sha256"] == expected_sha256(job, steps=6)
    written = finished.out + finished.err + "".join(path.read_text() for path in (out / "logs").glob("*.log"))
    assert "a-token-that-nobody-may-see" not in written
    assert written.count("refused a call") == 1, "the one without a token"


def addressed(out: Path) -> ClusterSpec | None:
    """The cluster as the launcher wrote it with the chief's address; None before."""
    with contextlib.suppress(FileNotFoundError):
        spec = ClusterSpec.from_json((out / "cluster.json").read_text())
        return spec if parse_address(spec.chief)[1] else None
    return None


def test_nothing_of_a_test_is_invisible_to_the_search_for_what_is_left(nothing_left: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process.pid in processes(nothing_left), f"{RUN_ID} is not in its environment"
    finally:
        process.communicate(b"\n", timeout=10)
