"""The tables of docs/jobs.md, "What a model may be" and "Changes to the model in training", beside plain PyTorch.

Each row ends in the same bits, or is refused with its sentence. A few are short; `make test-models` tries all of them,
with overlap and without, over shm and tcp.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn

from shardline.config import RoleConfig
from shardline.errors import ShardlineError
from shardline.model import named_tensors
from shardline_chief import service as chief
from shardline_lab.comparison.difference import differences
from shardline_lab.comparison.plain import PlainTraining, checked_job
from shardline_lab.comparison.served import InProcessCluster, train_served
from shardline_ps import service as ps
from tests.models.changes import CHANGES
from tests.models.row import Row
from tests.models.rows import ROWS
from tests.support.services import TIMEOUTS, Services

CPU = torch.device("cpu")
# Otherwise models of this size are sent whole, and nothing overlaps.
pytestmark = pytest.mark.usefixtures("no_push_is_small")
DOCS = Path(__file__).parents[2] / "docs" / "jobs.md"
TABLES = {"What a model may be": ROWS, "Changes to the model in training": CHANGES}
ROLES: dict[str, Callable[[RoleConfig], int]] = {"chief": chief.run, "ps": ps.run}
WAYS = list(itertools.product(("shm", "tcp"), (True, False)))
"""(lane, overlap)."""
SHORT = 5
"""One of so many cases is tried by `make test`, each in one way."""
STEPS = 6
"""Of a script."""


def cases(kind: str) -> list[ParameterSet]:
    """(row, case, lane, overlap) of every case in every way. kind: "jobs" or "scripts"."""
    found = []
    names = [(row, name) for row in itertools.chain(*TABLES.values()) for name in getattr(row, kind)]
    for number, (row, name) in enumerate(names):
        for way, (lane, overlap) in enumerate(WAYS):
            short = number % SHORT == 0 and way == number // SHORT % len(WAYS)
            label = f"{name}-{lane}-{'overlap' if overlap else 'plain'}"
            marks = [] if short else [pytest.mark.models]
            found.append(pytest.param(row, name, lane, overlap, id=label, marks=marks))
    return found


def refused(row: Row, case: str, train: Callable[[], object]) -> ShardlineError:
    """Train what is refused; returns how."""
    assert row.sentence is not None
    with pytest.raises(ShardlineError, match=re.escape(row.sentence)) as found:
        train()
    assert re.match(row.finds.get(case, ""), str(found.value))
    return found.value


@pytest.mark.part(of=3)
@pytest.mark.parametrize(("row", "case", "lane", "overlap"), cases("jobs"))
def test_a_job_is_as_in_torch_or_refused(row: Row, case: str, lane: str, overlap: bool, tmp_path: Path) -> None:
    job = row.jobs[case]()
    checked = checked_job(job, job.steps).job
    cluster = InProcessCluster(role=ROLES.__getitem__, out=tmp_path, lane=lane, overlap=overlap, timeouts=TIMEOUTS)
    if row.sentence is not None:
        refused(row, case, lambda: train_served(checked, cluster))
        return
    expected = PlainTraining(checked, CPU).run(job.steps)
    assert not differences(expected, train_served(checked, cluster))


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return model()


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize(("row", "case", "lane", "overlap"), cases("scripts"))
def test_a_script_is_as_in_torch_or_refused(
    row: Row,
    case: str,
    lane: str,
    overlap: bool,
    start: Callable[..., Services],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = row.scripts[case]
    monkeypatch.setenv("SHARDLINE_LANE", lane)
    services, model = start(ps=2, workers=1), seeded(script.model)

    def train() -> None:
        with services.connect() as session:
            optimizer = session.attach(model, script.optimizer(model), overlap=overlap and script.overlaps)
            script.loop(model, optimizer, session.steps(STEPS))

    if row.sentence is not None:
        services.end(refused(row, case, train).exit_code)
        return
    train()
    services.end()
    plain = seeded(script.model)
    script.loop(plain, script.optimizer(plain), iter(range(STEPS)))
    expected, found = ({STEPS: dict(named_tensors(one))} for one in (plain, model))
    assert not differences(expected, found)


@pytest.mark.parametrize(("title", "rows"), TABLES.items())
def test_the_tables_in_the_docs_are_those_of_this_suite(title: str, rows: Sequence[Row]) -> None:
    section = DOCS.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    table = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert table == [(row.what, row.says) for row in rows]
