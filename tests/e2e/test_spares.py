"""Spares with real processes: a slow worker holds nobody back, and any run can be repeated to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.core.choices import members
from shardline.job import load_job
from shardline.testing import reference
from shardline_chief.io.journal import run_to_replay
from tests.e2e.support import (
    PATIENCE_S,
    assert_refused,
    events,
    mortal_cluster,
    summary_of,
    train,
    wait_for_event,
    wait_for_step,
    write_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.usefixtures("warm")]
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "job.py"
# The process that is the first to compute a loss is slow for the rest of its life.
SLOW = """
import functools, os, time

@functools.cache
def delay_s():
    try:
        os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
        return {slow_s}
    except FileExistsError:
        return 0.01
"""
SLOW_DIGITS = """
import dataclasses, importlib.util
spec = importlib.util.spec_from_file_location("digits_job", {digits!r})
digits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(digits)
{slow}
def loss(model, batch):
    time.sleep(delay_s())
    return digits.loss(model, batch)

job = dataclasses.replace(digits.job, loss=loss, replicas=5)
"""


def slow_spare_job(path: Path, *, slow_s: float, **settings: object) -> Path:
    """The small job, with four replicas of which a step needs three."""
    slow = SLOW.format(mark=str(path.with_suffix(".slow")), slow_s=slow_s)
    fields = {"replicas": 4, "consistency": "sync:spares=1", **settings}
    return write_job(path, imports=slow, after_loss="time.sleep(delay_s())", **fields)


@pytest.mark.processes
def test_digits_are_learned_without_waiting_for_a_slow_worker_and_once_more_to_the_bit(tmp_path: Path) -> None:
    mark, slow_s = tmp_path / "slow", tmp_path / "slow_s"
    job = tmp_path / "job.py"
    slow = SLOW.format(mark=str(mark), slow_s=f"float(open({str(slow_s)!r}).read())")
    text = SLOW_DIGITS.format(digits=str(DIGITS), slow=slow)
    slow_s.write_text("1.0", encoding="utf-8")
    job.write_text(text, encoding="utf-8")
    flags = ("--ps", "2", "--workers", "5", "--consistency", "sync:spares=1", "--steps", "200")
    finished = train(job, tmp_path / "run", *flags, "--evaluators", "1")
    assert finished.code == 0, finished
    found = summary_of(tmp_path / "run")
    assert found["evaluation"]["last"]["metrics"]["accuracy"] >= 0.95
    drops = [counts["dropped"] for counts in found["contributions"].values()]
    assert sum(drops) == 200 and max(drops) > 100
    # This time another worker may be the slow one, and steps have to wait for it.
    slow_s.write_text("0.1", encoding="utf-8")
    mark.unlink()
    again = train(job, tmp_path / "again", *flags, "--replay", tmp_path / "run")
    assert again.code == 0, again
    assert summary_of(tmp_path / "again")["sha256"] == found["sha256"]
    assert summary_of(tmp_path / "again")["contributions"] == found["contributions"]
    refused = train(job, tmp_path / "other", *flags, "--seed", "5", "--replay", tmp_path / "run")
    assert_refused(refused, 2, "that run was of another job .seed: 5 here, 0 there.")


@pytest.mark.chaos
@pytest.mark.parametrize("standbys", [0, 1])
def test_the_journal_has_every_choice_whoever_dies(tmp_path: Path, standbys: int) -> None:
    job = slow_spare_job(tmp_path / "job.py", slow_s=0.2, steps=300, checkpoint_every=20)
    out = tmp_path / "run"
    with mortal_cluster(job, out, workers=4, standbys=standbys) as cluster:
        if standbys:
            for shard in (0, 1):
                wait_for_event(out, "standby", f"shard {shard} is protected")
        wait_for_step(out, 40)
        cluster.kill("worker/1")
        wait_for_step(out, 80)
        cluster.kill("chief/0")
        wait_for_event(out, "adopted", "no step is repeated")
        wait_for_step(out, 130)
        cluster.kill("ps/0")
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    found, run = summary_of(out), run_to_replay(out)
    assert [recovery["task"] for recovery in found["recoveries"]] == ["ps/0"]
    assert (run.choices.first, run.choices.end) == (0, 300)
    choices = [members(choice) for choice in run.choices.made]
    assert found["sha256"] == reference(load_job(job, []), choices=choices).sha256
