"""Codec auto with real processes: measured, chosen, and in the end the bits of a job with the choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import events, summary_of, train, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]

# Raw pushes take long, as over a slow link; the chief measures for a shorter time than usual.
SLOW_WHEN_RAW = """
import time
from shardline.client.exchange.shard_exchange import StepFigures
from shardline.lanes.grpc.client import GrpcLane
from shardline_chief.rules.codecs import choice

choice.LEAST_S = 1.0
plain = GrpcLane.exchange

def exchange(lane, sender, contributions, want, sink, *, timeout_s):
    if contributions and contributions[0].codec in ("auto", "raw"):
        time.sleep(0.2)
    return plain(lane, sender, contributions, want, sink, timeout_s=timeout_s)

GrpcLane.exchange = exchange
# Nobody waits for others, who would be as slow; what is before the call's first byte looks as if.
StepFigures.blocked_s = 0.0
"""


def test_the_job_ends_in_the_bits_of_a_job_with_the_codecs_that_were_chosen(tmp_path: Path) -> None:
    # Enough of them for the chief to compare, however fast they are with a codec.
    fields = {"replicas": 3, "steps": 240, "width": 400}
    flags = ("--ps", "2", "--lane", "grpc", "--no-page")
    job = write_job(tmp_path / "job.py", codec="auto", **fields, after=SLOW_WHEN_RAW)
    assert train(job, tmp_path / "auto", "--workers", "2", *flags).code == 0
    told = "\n".join(events(tmp_path / "auto", "codec"))
    chosen = summary_of(tmp_path / "auto")
    up, down = (chosen["methods"][name] for name in ("codec_up", "codec_down"))
    assert up not in ("", "raw") and down, told
    assert f"with {up} for gradients and {down} for parameters the exchange should take" in told
    assert "the choice stands" in told and not chosen["recoveries"]
    same = write_job(tmp_path / "same.py", codec_up=up, codec_down=down, **fields)
    assert train(same, tmp_path / "same", "--workers", "1", *flags).code == 0
    assert (chosen["sha256"], chosen["steps"]) == (summary_of(tmp_path / "same")["sha256"], 240)
