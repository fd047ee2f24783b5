"""torchdata's StatefulDataLoader in a script: where it goes on, the order is that of an unbroken run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.client.api.stateful import Stateful
from shardline.errors import JobError

loading: Any = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed; make test-scripts does it"
)


def loader(workers: int, *, seeded: bool = True, length: int = 10) -> Any:
    generator = torch.Generator().manual_seed(3) if seeded else None
    data = torch.arange(float(length))
    return loading.StatefulDataLoader(data, batch_size=2, shuffle=True, generator=generator, num_workers=workers)


def steps(batches: Stateful, numbers: range) -> list[list[float]]:
    found = []
    for step in numbers:
        batches.enter(step)
        found.append(next(batches).tolist())
        batches.leave(step, 5)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeded", [True, False])
# Within an epoch, at its end, and at the beginning of the next one.
@pytest.mark.parametrize("stop", [7, 10, 11])
def test_a_loader_goes_on_in_the_order_of_an_unbroken_run(
    tmp_path: Path, workers: int, seeded: bool, stop: int
) -> None:
    torch.manual_seed(0)
    unbroken = steps(Stateful(loader(workers, seeded=seeded), None), range(18))
    torch.manual_seed(0)
    assert steps(Stateful(loader(workers, seeded=seeded), tmp_path), range(stop)) == unbroken[:stop]
    torch.manual_seed(9)
    assert steps(Stateful(loader(workers, seeded=seeded), tmp_path), range(stop, 18)) == unbroken[stop:]


def test_a_loader_with_other_processes_or_another_length_is_refused(tmp_path: Path) -> None:
    steps(Stateful(loader(0), tmp_path), range(3))
    with pytest.raises(JobError, match=r"num_workers 0.*, and this one has .*num_workers 2"):
        Stateful(loader(2), tmp_path).enter(3)
    with pytest.raises(JobError, match=r"batches 5.*, and this one has .*batches 6"):
        Stateful(loader(0, length=12), tmp_path).enter(3)
