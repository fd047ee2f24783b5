"""Services started by hand, one after another and in the wrong order, further apart than the deadline of silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.support import HandCluster, expected_sha256, json_lines, summary_of, wait_until, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
SILENCE = ("--timeout", "10")


def test_tasks_that_are_there_long_before_their_chief_wait_for_it_and_say_so(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py", replicas=2, steps=20)
    out = tmp_path / "run"
    with HandCluster.write(tmp_path, ps=2, worker=1) as cluster:
        cluster.start("worker/0", *SILENCE, "--job", job, "--out", tmp_path / "worker")
        cluster.start("ps/1", *SILENCE)

        def said() -> list[str]:
            return [line["message"] for line in json_lines(tmp_path / "worker" / "logs" / "worker-0.jsonl")]

        chief = f"waiting for chief at {cluster.tasks['chief'][0]}, 9 min "
        # The second sentence comes ten seconds after the first: by then the deadline of silence is over.
        wait_until(lambda: sum(chief in text for text in said()) >= 2, "the wait for the chief", seen=said)
        cluster.start("chief/0", *SILENCE, "--job", job, "--out", out)
        missing = f"waiting for ps/0 at {cluster.tasks['ps'][0]}"
        wait_until(lambda: any(missing in text for text in said()), "the wait for ps/0", seen=said)
        cluster.start("ps/0", *SILENCE)
        assert {task: command.finish().code for task, command in cluster.commands.items()} == {
            "worker/0": 0,
            "ps/1": 0,
            "chief/0": 0,
            "ps/0": 0,
        }
        # On a busy machine the others may have needed more than a second to join, too.
        assert re.search(rf"{re.escape(missing)}(, [^\n]*)?, 9 min 5", cluster.commands["chief/0"].finish().err)
    assert summary_of(out)["sha256"] == expected_sha256(job)
