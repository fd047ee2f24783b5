"""The example of a person's own training script, run as `shardline train --script` runs it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shardline.cli.launcher import LaunchOptions, LocalCluster
from shardline.client.api.stateful import Stateful
from tests.e2e.support import (
    PATIENCE_S,
    assert_refused,
    json_lines,
    mortal_cluster,
    summary_of,
    traced,
    train,
    wait_for_step,
    wait_until,
)
from tests.unit.test_stateful import Loader, steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def test_the_digits_script_learns_on_two_servers_with_two_workers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = train(SCRIPT, out, "--script", "--ps", "2", "--workers", "2", "--profile", "20:22")
    assert finished.code == 0, finished
    # What the first worker prints, and no other's.
    assert re.findall(r"replica \d of 2: test accuracy", finished.out) == ["replica 0 of 2: test accuracy"]
    found = summary_of(out)
    assert (found["steps"], found["versions"], found["replicas"], found["job"]) == (500, [500, 500], 2, "train")
    assert [line["step"] for line in json_lines(out / "logs" / "steps.jsonl")] == list(range(500))
    for replica in (0, 1):
        spans = traced(out, replica)
        assert {name: spans[name] for name in spans if name.startswith("step ")} == {"step 20": 1, "step 21": 1}
        assert spans["push"] == spans["wait"] == spans["pull"] >= 2 * 2
        assert f"trace:       {out / f'trace-worker-{replica}.json'}" in finished.out
        said = (out / "logs" / f"worker-{replica}.log").read_text()
        accuracy = re.search(rf"replica {replica} of 2: test accuracy (\d\.\d+)", said)
        assert accuracy is not None, said
        assert float(accuracy[1]) >= 0.95


def test_the_digits_script_trains_asynchronously_each_worker_its_own_steps(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert text.count("STEPS = 500") == 1
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(text.replace("STEPS = 500", "STEPS = 100"))
    finished = train(script, out, "--script", "--ps", "2", "--workers", "2", "--consistency", "async")
    assert finished.code == 0, finished
    found = summary_of(out)
    assert (found["consistency"], found["versions"], found["checkpoint_step"]) == ("async", [200, 200], 200)
    for replica in (0, 1):
        assert f"replica {replica} of 2: test accuracy" in (out / "logs" / f"worker-{replica}.log").read_text()


UNEVEN = """
import torch
import shardline

session = shardline.connect()
model = torch.nn.Linear(3, 2)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(5 if session.replica == 0 else 8):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
print("left the loop")
session.close()
"""


def test_a_script_whose_workers_make_different_numbers_of_steps_ends_with_a_sentence(tmp_path: Path) -> None:
    script, out = tmp_path / "uneven.py", tmp_path / "run"
    script.write_text(UNEVEN)
    finished = train(script, out, "--script", "--ps", "2", "--workers", "2")
    sentence = "worker/0 ended after 5 steps, but worker/1 was to make 6 or more: "
    assert_refused(finished, 2, re.escape(sentence))
    found = summary_of(out)
    assert (found["steps"], found["checkpoint_step"]) == (5, 5)
    assert found["reason"].startswith(sentence)
    for replica in (0, 1):
        assert "left the loop" in (out / "logs" / f"worker-{replica}.log").read_text()
    # Who started this one by hand has no launcher that tells.
    assert (
        f"worker/1 ERROR the job has ended with exit code 2: {sentence}" in (out / "logs" / "worker-1.log").read_text()
    )


MEETING = """
import sys
import time
import torch
import shardline

session = shardline.connect()
model = torch.nn.Linear(3, 2)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
session.barrier()
for step in session.steps(60):
    time.sleep(0.02)
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    if step % 5 == 0:
        assert session.barrier()
        print(f"met in step {step}", flush=True)
    optimizer.step()
assert session.barrier()
print("met after the loop", flush=True)
session.close()
"""


@pytest.mark.chaos
@pytest.mark.parametrize("dying", ["worker/1", "chief/0", "ps/0"])
def test_a_script_with_barriers_goes_on_after_a_death(tmp_path: Path, dying: str) -> None:
    script, out = tmp_path / "meeting.py", tmp_path / "run"
    script.write_text(MEETING)
    with mortal_cluster(script, out, script=True, overrides=(("checkpoint_every", "10"),)) as cluster:
        wait_for_step(out, 22)
        cluster.kill(dying)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, [cluster.log_tail(task, 30) for task in cluster.tasks()]
    assert summary_of(out)["steps"] == 60
    for replica in (0, 1):
        said = (out / "logs" / f"worker-{replica}.log").read_text()
        assert "met in step 55" in said
        assert said.count("met after the loop") == 1


LOADING = """
import sys
import time
from pathlib import Path
import torch
import shardline
from tests.unit.test_stateful import Loader

session = shardline.connect()
model = torch.nn.Linear(1, 1)
optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
batches = session.stateful(Loader(11 + session.replica))
with open(Path(__file__).with_name(f"read-{session.replica}"), "a") as read:
    for step in session.steps(int(sys.argv[1])):
        sample = next(batches)
        if step in (15, 27) and session.replica == 0:
            Path(__file__).with_name(f"stands-{step}").touch()
            while not Path(__file__).with_name(f"go-{step}").exists():
                time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(1, 1) * sample).sum().backward()
        optimizer.step()
        print(step, sample, file=read, flush=True)
session.close()
"""


@pytest.mark.processes
def test_a_stateful_loader_reads_in_one_order_over_deaths_rollbacks_and_a_resume(tmp_path: Path) -> None:
    script, out = tmp_path / "loading.py", tmp_path / "run"
    script.write_text(LOADING)
    every = (("checkpoint_every", "10"),)
    with mortal_cluster(script, out, script=True, script_args=("45",), overrides=every) as cluster:
        for step, dying in ((15, "worker/1"), (27, "ps/0")):
            wait_until((tmp_path / f"stands-{step}").exists, f"step {step}")
            if dying == "ps/0":
                # Step 20's states are in its checkpoint.
                for state in (out / "stateful").glob("*/step-00000020.json"):
                    state.unlink()
            cluster.kill(dying)
            (tmp_path / f"go-{step}").touch()
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, [cluster.log_tail(task, 30) for task in cluster.tasks()]
    assert summary_of(out)["steps"] == 45
    shutil.rmtree(out / "stateful")
    resumed = LaunchOptions(
        job=script, out=out, script=True, script_args=("60",), overrides=every, workers=2, resume=True
    )
    with LocalCluster(resumed) as cluster:
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, [cluster.log_tail(task, 30) for task in cluster.tasks()]
    for replica in (0, 1):
        lines = [line.split() for line in (tmp_path / f"read-{replica}").read_text().splitlines()]
        unbroken = steps(Stateful(Loader(11 + replica), None), range(60))
        # Of a step that was made again too. A worker that was killed in a step may not have written it.
        assert all(unbroken[int(step)] == int(sample) for step, sample in lines)
        assert len({step for step, _ in lines}) >= 59
        assert len(lines) > 60, "the job went back to step 20"


def test_what_only_a_script_itself_can_say_is_refused_as_a_flag(tmp_path: Path) -> None:
    finished = train(SCRIPT, tmp_path / "run", "--script", "--steps", "10")
    assert_refused(finished, 2, r"steps is decided by the script itself; .* after --")
    assert not (tmp_path / "run").exists()
