"""Every test of real launchers: its processes carry a mark, and none of them may be left."""

from __future__ import annotations

import os

import pytest

from shardline_launchers.command import NOT_FOR_SCRIPTS
from tests.e2e.conftest import nothing_left as nothing_left

LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMIX_", "JOB_COMPLETION_INDEX", *NOT_FOR_SCRIPTS)


@pytest.fixture(autouse=True)
def no_launcher(nothing_left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may have been started by a launcher, which is not the tests' own."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
