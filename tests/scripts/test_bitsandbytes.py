"""Optimizers of bitsandbytes on a CPU, run by workers: those that keep float32 states; 8-bit ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import JobError
from shardline.job import Job
from tests.integration.test_comparison import compare
from tests.support.jobs import make_job

library: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; make test-scripts does it")


def job(name: str) -> Job:
    base = make_job("lion", apply="worker")
    return replace(base, optimizer=getattr(library.optim, name), optimizer_args={"lr": 0.01})


@pytest.mark.parametrize("name", ["Lion", "AdamW", "RMSprop"])
def test_an_optimizer_of_bitsandbytes_has_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    assert not compare(job(name), tmp_path)


def test_states_in_8_bits_are_refused_before_training() -> None:
    with pytest.raises(JobError, match=r"AdamW8bit keeps a state 'state1' of shape .* in uint8"):
        job("AdamW8bit")
