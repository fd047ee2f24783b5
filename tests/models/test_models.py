"""Each row of docs/jobs.md, "What a model may be", beside plain PyTorch: the same bits, or refused with the sentence.

A few are short; `make test-models` tries all of them, with overlap and without, over shm and tcp.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from shardline.comparison import InProcessCluster, PlainTraining, checked_job, differences, train_served
from shardline.config import RoleConfig
from shardline.errors import ShardlineError
from shardline.model import named_tensors
from shardline_chief import service as chief
from shardline_ps import service as ps
from tests.models.rows import ROWS, Row, seeded
from tests.support.services import TIMEOUTS, Services

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[2] / "docs" / "jobs.md"
ROLES: dict[str, Callable[[RoleConfig], int]] = {"chief": chief.run, "ps": ps.run}
WAYS = list(itertools.product(("shm", "tcp"), (True, False)))
"""(lane, overlap)."""
SHORT = 3
"""One of so many cases is tried by `make test`, each in one way."""


def cases(names: list[tuple[Row, str]]) -> list[ParameterSet]:
    """(row, case, lane, overlap) of every case in every way."""
    found = []
    for number, (row, name) in enumerate(names):
        for way, (lane, overlap) in enumerate(WAYS):
            short = number % SHORT == 0 and way == number // SHORT % len(WAYS)
            label = f"{name or row.what}-{lane}-{'overlap' if overlap else 'plain'}"
            marks = [] if short else [pytest.mark.models]
            found.append(pytest.param(row, name, lane, overlap, id=label, marks=marks))
    return found


@pytest.mark.parametrize(("row", "case", "lane", "overlap"), cases([(row, name) for row in ROWS for name in row.jobs]))
def test_a_job_is_as_in_torch_or_refused(row: Row, case: str, lane: str, overlap: bool, tmp_path: Path) -> None:
    job = row.jobs[case]()
    checked = checked_job(job, job.steps).job
    cluster = InProcessCluster(role=ROLES.__getitem__, out=tmp_path, lane=lane, overlap=overlap, timeouts=TIMEOUTS)
    if row.sentence is not None:
        with pytest.raises(ShardlineError, match=re.escape(row.sentence)):
            train_served(checked, cluster)
        return
    expected = PlainTraining(checked, CPU).run(job.steps)
    assert not differences(expected, train_served(checked, cluster))


@pytest.mark.parametrize(("row", "case", "lane", "overlap"), cases([(row, "") for row in ROWS if row.loop is not None]))
def test_a_script_is_as_in_torch_or_refused(
    row: Row,
    case: str,
    lane: str,
    overlap: bool,
    start: Callable[..., Services],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert row.model is not None and row.optimizer is not None and row.loop is not None
    make = seeded(row.model)
    plain = make()
    row.loop(plain, row.optimizer(plain), iter(range(6)))

    monkeypatch.setenv("SHARDLINE_LANE", lane)
    services = start(ps=2, workers=1)
    session, model = services.connect(), make()
    optimizer = session.attach(model, row.optimizer(model), overlap=overlap and row.overlaps)
    if row.sentence is not None:
        with pytest.raises(ShardlineError, match=re.escape(row.sentence)):
            row.loop(model, optimizer, session.steps(6))
        session.shutdown()
        return
    row.loop(model, optimizer, session.steps(6))
    session.wait()
    expected, found = ({6: dict(named_tensors(one))} for one in (plain, model))
    session.close()
    assert not differences(expected, found)
    services.end()


def test_the_table_in_the_docs_is_that_of_this_suite() -> None:
    section = DOCS.read_text().partition("## What a model may be\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    table = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert table == [(row.what, row.says) for row in ROWS]
