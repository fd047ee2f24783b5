"""Processes that are stopped for longer than a silence may last, and go on: nobody was silent while nobody listened."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.e2e import support
from tests.e2e.support import (
    Command,
    expected_sha256,
    pid_of,
    slow_job,
    summary_of,
    train_command,
    wait_for_event,
    wait_for_step,
)
from tests.e2e.warm import descendants

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
STOP_TIMEOUT_S = 9
"""--timeout: whoever is silent for a third of it is dead."""
STOPPED_S = 4.5


def stop(pids: Iterable[int], seconds: float) -> None:
    """Stop processes, and let them go on later."""
    stopped = []
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        threading.Event().wait(seconds)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.part(of=2)
@pytest.mark.parametrize(
    ("who", "mode", "standbys"),
    [("chief", "async", 1), ("everything", "async", 1), ("everything", "sync", 0)],
    ids=["chief-with-standbys", "everything-with-standbys", "everything"],
)
def test_a_pause_costs_no_task_no_update_and_no_restart(tmp_path: Path, who: str, mode: str, standbys: int) -> None:
    steps = 300 if mode == "async" else 100
    settings = {} if mode == "async" else {"replicas": 2}
    job = slow_job(
        tmp_path / "job.py", step_s=0.03, consistency=mode, steps=steps, checkpoint_every=steps // 2, **settings
    )
    out = tmp_path / "run"
    command = Command(
        *train_command(job, out, "--ps", "2", "--workers", "2", "--evaluators", "1", "--standbys", str(standbys)),
        "--timeout",
        str(STOP_TIMEOUT_S),
    )
    if standbys:
        for shard in range(2):
            wait_for_event(out, "standby", f"shard {shard}", while_runs=command)
    wait_for_step(out, steps // 5, while_runs=command)
    assert support.nursery is not None
    stop([pid_of(out, "chief/0")] if who == "chief" else descendants(support.nursery.pid), STOPPED_S)
    ended = command.finish()
    assert ended.code == 0, ended
    assert "ended with exit code" not in ended.err, ended.err
    found = summary_of(out)
    assert (found["recoveries"], found["repeated_batches"], found["lost_updates"]) == ([], 0, 0), found
    assert found["versions"] == [steps, steps]
    if mode == "sync":
        assert found["sha256"] == expected_sha256(job)
