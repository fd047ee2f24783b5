"""What a loop over steps() is told that leaves optimizer.step() out; see also the integration test of the same name."""

from __future__ import annotations

import pytest

from shardline.client.api.stepper import MissingSteps
from shardline.errors import JobError


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "passes without calling optimizer.step()" in text]


def test_slow_passes_at_one_step_are_told_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    loop = MissingSteps(60.0)
    for now_s in range(10):
        loop.begin(5, float(now_s))
    assert not warnings(caplog)
    loop.begin(5, 10.0)
    (said,) = warnings(caplog)
    assert "at step 5 for 10 s and 10 passes" in said
    for now_s in range(11, 70):
        loop.begin(5, float(now_s))
    assert len(warnings(caplog)) == 1
    loop.begin(5, 70.0)
    assert len(warnings(caplog)) == 2


def test_many_passes_at_one_step_are_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = MissingSteps(60.0)
    for _ in range(100):
        loop.begin(5, 0.0)
    assert not warnings(caplog)
    loop.begin(5, 0.0)
    assert len(warnings(caplog)) == 1


def test_one_long_pass_and_steps_that_are_made_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    loop = MissingSteps(60.0)
    for step in range(300):
        assert not loop.begin(step, 100.0 * step)
        loop.reset()
    assert not warnings(caplog)


def test_others_are_asked_after_every_ten_seconds_and_may_wait_for_the_timeout() -> None:
    loop = MissingSteps(60.0)
    asked = [now_s for now_s in range(40) if loop.begin(5, float(now_s))]
    assert asked == [10, 20, 30]
    loop.waited_for(5, [], 30.0)
    loop.waited_for(5, [0, 2], 40.0)
    loop.waited_for(5, [0, 2], 99.0)
    with pytest.raises(JobError, match=r"step 5: optimizer.step\(\) was not called in 39 .*replica 0, 2 waited 60 s"):
        loop.waited_for(5, [0, 2], 100.0)


def test_a_step_that_is_made_begins_the_wait_anew() -> None:
    loop = MissingSteps(60.0)
    loop.waited_for(5, [0], 0.0)
    loop.reset()
    loop.waited_for(6, [0], 100.0)
    loop.waited_for(6, [], 130.0)
    loop.waited_for(6, [0], 161.0)
