"""`docker compose up --scale worker=4`: indices come from the chief, and workers beyond the replicas are spares."""

from __future__ import annotations

import re

import pytest

from shardline.job import load_job
from shardline.testing import reference
from tests.containers.stack import ROOT, TASKS, Stack, run

STEPS = 800


@pytest.mark.long
def test_spares_take_the_place_of_workers_that_die_and_the_result_stays_the_same() -> None:
    with Stack("scale", STEPS=str(STEPS), TIMEOUT="30") as stack:
        stack.compose("up", "-d", "--no-build", "--scale", "worker=4", *TASKS)
        stack.wait_line("chief", "training from step 0")
        for number in range(4):
            stack.wait_line("chief", rf"worker/{number} joined")
        # Killed by hand, so that no policy starts it again: a worker that has a replica.
        joined = [line for line in stack.lines("chief") if re.search(r"worker/\d joined from", line)]
        host = re.search(r"worker/0 joined from (\w+):2222", "\n".join(joined))
        assert host is not None
        after = stack.mark("chief")
        run("docker", "kill", host[1])
        stack.wait_line("chief", r"worker/0 is dead: .*replica 0 to worker/[123]", after=after)
        codes = stack.exit_codes()
        assert sorted(codes.values()) == [0] * 7 + [137]
        assert stack.summary()["steps"] == STEPS
        job = load_job(ROOT / "examples" / "digits" / "job.py", [("steps", str(STEPS))])
        assert stack.summary()["sha256"] == reference(job).sha256
