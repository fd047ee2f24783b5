"""Accelerator of shardline.integrations in the place of accelerate's: the bits of one process, replicas, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardline.core.timeouts import Timeouts
from shardline.errors import JobError
from tests.e2e.support import PATIENCE_S, mortal_cluster, summary_of
from tests.support.services import Services, make_model

accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed; make test-scripts does it")
pytest.importorskip("lightning.pytorch", reason="lightning is not installed; make test-scripts does it")

# After that: a module that skipped itself is there with nothing in it.
from tests.scripts.test_lightning import samples  # noqa: E402

EPOCHS, ROWS = 2, 64


class Stream(torch.utils.data.IterableDataset[Any]):
    """The samples without a length."""

    def __iter__(self) -> Any:
        return iter(list(samples()))


def train(accelerator: Any, *, batch: int, clip: float = 0.0, stream: bool = False) -> tuple[nn.Module, list[int]]:
    """A script's loop; returns the model, and the numbers of samples that each step saw."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data: Any = Stream() if stream else samples()
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for _ in range(EPOCHS):
        for points, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(points), labels))
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            seen.append(len(labels))
        accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model), seen


def door() -> Any:
    from shardline.integrations.accelerate import Accelerator

    return Accelerator


@pytest.mark.parametrize("stream", [False, True], ids=["data set", "stream"])
def test_a_script_ends_in_the_bits_of_one_process(joins: Callable[..., Services], stream: bool) -> None:
    expected, _ = train(accelerate.Accelerator(cpu=True), batch=8, stream=stream)
    services = joins()
    accelerator = door()(cpu=True)
    model, _ = train(accelerator, batch=8, stream=stream)
    accelerator.session.close()
    assert services.end()["steps"] == EPOCHS * ROWS // 8
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_the_servers_clip_to_the_norm_of_the_loop_and_to_no_other(joins: Callable[..., Services]) -> None:
    expected, _ = train(accelerate.Accelerator(cpu=True), batch=8, clip=0.1)
    services = joins()
    accelerator = door()(cpu=True, clip_norm=0.1)
    model, _ = train(accelerator, batch=8, clip=0.1)
    accelerator.session.close()
    services.end()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    services = joins(out="another")
    accelerator = door()(cpu=True)
    with pytest.raises(JobError, match=r"called with 0\.1, .*clip_norm=0 .*Accelerator\(clip_norm=0\.1\)") as found:
        train(accelerator, batch=8, clip=0.1)
    accelerator.session.fail(found.value)
    accelerator.session.shutdown()
    services.end(code=2)


def test_an_optimizer_needs_its_model_in_the_same_call(joins: Callable[..., Services]) -> None:
    services = joins()
    accelerator = door()(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match="an optimizer and 0 models"):
        accelerator.prepare(optimizer)
    accelerator.prepare(model, optimizer)
    accelerator.session.close()
    services.end()


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
import pytest
import torch
from shardline.errors import JobError
from shardline.integrations.accelerate import Accelerator
from tests.scripts.test_accelerate_door import samples, train

accelerator = Accelerator(cpu=True)
model, seen = train(accelerator, batch=4, stream={stream})
assert seen == [4] * 16, seen
replica = accelerator.process_index
assert accelerator.num_processes == 2 and accelerator.is_main_process == (replica == 0)
# An evaluation over all data, in each replica; one over a part is refused.
for points, labels in torch.utils.data.DataLoader(samples(), batch_size=32):
    assert len(accelerator.gather_for_metrics(labels)) == 32
with pytest.raises(JobError, match="leave the DataLoader of an evaluation out"):
    for points, labels in accelerator.prepare(torch.utils.data.DataLoader(samples(), batch_size=32)):
        accelerator.gather_for_metrics(labels)
accelerator.print("only the first says this")
torch.save(model.state_dict(), Path({out!r}) / f"model-{{replica}}.pt")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True], ids=["data set", "stream"])
def test_two_replicas_share_the_data(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), out=str(tmp_path), stream=stream))
    run = tmp_path / "run"
    with mortal_cluster(path, run, script=True, timeouts=Timeouts(total_s=PATIENCE_S)) as cluster:
        assert cluster.wait(timeout_s=2 * PATIENCE_S) == 0, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
    assert summary_of(run)["steps"] == EPOCHS * ROWS // 8
    first, second = (torch.load(tmp_path / f"model-{i}.pt", weights_only=True) for i in (0, 1))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    logs = [(run / "logs" / f"worker-{i}.log").read_text() for i in (0, 1)]
    assert ["only the first says this" in text for text in logs] == [True, False]
