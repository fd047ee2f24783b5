"""L.Trainer(strategy=ShardlineStrategy()): the bits of one process, replicas, saving, resuming, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardline.core.timeouts import Timeouts
from shardline.errors import JobError
from tests.e2e.support import PATIENCE_S, mortal_cluster, summary_of
from tests.support.services import Services

pytest.importorskip("lightning.pytorch", reason="lightning is not installed; make test-scripts does it")

# After that: a module that skipped itself is there with nothing in it.
from tests.scripts.test_lightning import STEPS, Module, assert_equal, samples, trainer

SCHEDULED = 3


class Scored(Module):
    """The classifier with a schedule and a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.scores: list[float] = []

    def training_step(self, items: list[torch.Tensor], index: int) -> torch.Tensor:
        self.seen.append(len(items[0]))
        return super().training_step(items, index)

    def validation_step(self, items: list[torch.Tensor], index: int) -> None:
        points, labels = items
        self.log("score", nn.functional.cross_entropy(self.net(points), labels), batch_size=len(labels))

    def on_validation_epoch_end(self) -> None:
        self.scores.append(float(self.trainer.callback_metrics["score"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, SCHEDULED)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    out: Path,
    *,
    batch: int = 4,
    steps: int = STEPS,
    resume: Path | None = None,
    shuffled: bool = False,
    again: bool = False,
    **settings: Any,
) -> Any:
    trains = trainer(out, steps=steps, val_check_interval=4, **settings)
    module = Scored()
    data = samples()
    # With more than one replica Lightning's sampler shuffles, with seed 0.
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0) if shuffled else None
    loaders = [torch.utils.data.DataLoader(data, batch, sampler=order), torch.utils.data.DataLoader(data, 16)]
    trains.fit(module, *loaders, ckpt_path=resume)
    if again:
        trains.fit(Scored(), *loaders)
    return module


def strategy(**settings: Any) -> Any:
    from shardline.integrations.lightning import ShardlineStrategy

    return ShardlineStrategy(**settings)


def test_a_strategy_ends_in_the_bits_of_one_process_and_goes_on(joins: Callable[..., Services], tmp_path: Path) -> None:
    fit(tmp_path / "plain")
    saved = f"step={STEPS}.ckpt"
    expected = fit(tmp_path / "plain", steps=2 * STEPS, resume=tmp_path / "plain" / saved)
    services = joins()
    ours = strategy()
    fit(tmp_path / "ours", strategy=ours)
    ours.session.close()
    assert services.end()["checkpoint_step"] == STEPS

    services = joins(resume=True)
    ours = strategy()
    module = fit(tmp_path / "ours", steps=2 * STEPS, resume=tmp_path / "ours" / saved, strategy=ours)
    ours.session.close()
    assert services.end()["steps"] == 2 * STEPS
    assert_equal(module.net, expected.net)
    assert module.scores == expected.scores


def test_the_servers_clip(joins: Callable[..., Services], tmp_path: Path) -> None:
    expected = fit(tmp_path / "plain", gradient_clip_val=0.1)
    services = joins()
    ours = strategy()
    module = fit(tmp_path / "ours", strategy=ours, gradient_clip_val=0.1)
    assert ours.session.job.consistency.clip_norm == 0.1
    ours.session.close()
    services.end()
    for name, value in expected.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_what_can_not_train_is_refused(joins: Callable[..., Services], tmp_path: Path) -> None:
    def refused(says: str, ours: Any, **how: Any) -> None:
        with pytest.raises(JobError, match=says) as found:
            fit(tmp_path / "ours", strategy=ours, **how)
        ours.session.fail(found.value)
        ours.session.shutdown()

    services = joins()
    ours = strategy()
    with pytest.raises(JobError, match="already trains as worker/0"):
        strategy()
    with pytest.raises(JobError, match="has already trained a model as worker/0"):
        fit(tmp_path / "ours", strategy=ours, again=True)
    ours.session.close()
    services.end()
    services = joins(out="another")
    refused(rf"saved at step {STEPS}, but the job", strategy(), resume=tmp_path / "ours" / f"step={STEPS}.ckpt")
    services.end(code=2)
    services = joins(resume=True)
    refused(rf"Trainer begins at step 0, but the job .* at step {STEPS}: .*ckpt_path=", strategy())
    services.end(code=2)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import json
from pathlib import Path
import torch
from shardline.integrations.lightning import ShardlineStrategy
from tests.scripts.test_lightning_door import fit

out = Path({out!r})
strategy = ShardlineStrategy()
module = fit(out / "saved", batch=2, strategy=strategy)
replica = strategy.session.replica
assert (strategy.global_rank, strategy.world_size) == (replica, 2) and strategy.is_global_zero == (replica == 0)
assert strategy.broadcast(replica) == 0
torch.save(module.net.state_dict(), out / f"model-{{replica}}.pt")
(out / f"scores-{{replica}}.json").write_text(json.dumps([module.scores, module.seen]))
"""


@pytest.mark.timeout(300)
def test_two_replicas_make_the_steps_of_one_process_with_their_batches_together(tmp_path: Path) -> None:
    expected = fit(tmp_path / "plain", shuffled=True)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), out=str(tmp_path)))
    with mortal_cluster(path, tmp_path / "run", script=True, timeouts=Timeouts(total_s=PATIENCE_S)) as cluster:
        assert cluster.wait(timeout_s=2 * PATIENCE_S) == 0, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
    assert summary_of(tmp_path / "run")["steps"] == STEPS
    first, second = (torch.load(tmp_path / f"model-{i}.pt", weights_only=True) for i in (0, 1))
    scores = [json.loads((tmp_path / f"scores-{i}.json").read_text()) for i in (0, 1)]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert scores[0] == scores[1] == [pytest.approx(expected.scores, rel=1e-5), [2] * STEPS]
    assert [*(tmp_path / "saved").iterdir()] == [tmp_path / "saved" / f"step={STEPS}.ckpt"]
