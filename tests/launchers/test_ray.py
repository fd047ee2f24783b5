"""A job on a Ray of this machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardline.errors import NonFiniteError, UsageError
from tests.e2e.support import expected_sha256, slow_job, wait_for_step, write_job
from tests.launchers.support import SCRIPT

ray = pytest.importorskip("ray", reason="pip install 'shardline[ray]'")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
OPTIONS = {"page": "off", "timeout": 60}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray's processes, of this module only."""
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def run(*arguments: Any, **named: Any) -> dict[str, Any]:
    from shardline.integrations import ray as door

    found: dict[str, Any] = door.run(*arguments, **named)
    return found


def processes_of(task: str) -> list[psutil.Process]:
    """Processes of a task, which are children of Ray's own."""
    found = [one for one in psutil.process_iter() if f" --task {task} " in " ".join(_line(one))]
    return [one for one in found if (parent := one.parent()) is not None and "TaskActor" in " ".join(_line(parent))]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_job_trains_in_actors_and_its_summary_comes_back(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=2)
    found = run(job, out=tmp_path / "run", ps=2, workers=2, evaluators=1, settings={"steps": 30}, options=OPTIONS)
    assert (found["steps"], len(found["versions"])) == (30, 2)
    assert found["sha256"] == expected_sha256(job, steps=30)
    assert found["evaluation"]["last"]["step"] == 30
    assert not processes_of("chief/0") and not processes_of("ps/1")


def test_a_killed_process_and_a_killed_actor_are_started_again(tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=2, steps=150, checkpoint_every=10), tmp_path / "run"
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            wait_for_step(out, 15)
            (server,) = processes_of("ps/0")
            server.send_signal(signal.SIGKILL)
            wait_for_step(out, 60)
            (worker,) = processes_of("worker/1")
            actor = worker.parent()
            assert actor is not None and "TaskActor" in actor.name() + " ".join(actor.cmdline())
            actor.send_signal(signal.SIGKILL)
        except BaseException as error:
            failed.append(error)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(job, out=out, ps=1, workers=2, options={**OPTIONS, "timeout": 20})
    killer.join()
    assert not failed, failed
    assert found["sha256"] == expected_sha256(job)


def test_a_script_is_a_worker_in_each_actor(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    script = tmp_path / "train.py"
    script.write_text(text.replace("STEPS = 500", "STEPS = 40"))
    found = run(script, out=tmp_path / "run", workers=2, script=True, options=OPTIONS)
    assert (found["steps"], found["replicas"], found["job"]) == (40, 2, "train")


def test_a_job_that_fails_raises_its_error(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=1, after_loss="value = value * float('nan')")
    with pytest.raises(NonFiniteError, match="loss"):
        run(job, out=tmp_path / "run", options=OPTIONS)


def test_a_cluster_without_room_says_what_is_asked_and_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardline.integrations import ray as door

    monkeypatch.setattr(door, "PLACE_S", 2.0)
    with pytest.raises(UsageError, match=r"no room for 102 tasks.*it has 6 CPUs"):
        run(write_job(tmp_path / "job.py"), out=tmp_path / "run", workers=100)
