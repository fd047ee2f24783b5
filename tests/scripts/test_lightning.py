"""A Lightning Trainer as a worker's loop: the bits of a run without Shardline, saving, going on, replicas, a scaler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api.session import Session
from shardline.errors import JobError
from tests.integration.test_scaler import OVERFLOWS, SCALE
from tests.support.services import Services, make_model

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; make test-scripts does it")

STEPS = 8


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return torch.utils.data.TensorDataset(
        torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)
    )


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A classifier; with a session, one whose optimizer it attaches."""

    def __init__(self, session: Session | None = None, *, overflows: bool = False) -> None:
        super().__init__()
        self.net, self.session, self.overflows = make_model(), session, overflows

    def training_step(self, items: list[torch.Tensor], index: int) -> torch.Tensor:
        points, labels = items
        loss = nn.functional.cross_entropy(self.net(points), labels)
        replica = self.session.replica if self.session is not None else 0
        return loss * float("inf") if self.overflows and (index, replica) in OVERFLOWS else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        return optimizer if self.session is None else self.session.attach(self.net, optimizer)


def trainer(out: Path, *, steps: int = STEPS, **settings: Any) -> Any:
    saving = lightning.callbacks.ModelCheckpoint(dirpath=out, filename="{step}", every_n_train_steps=STEPS)
    return lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
        default_root_dir=out,
        **settings,
    )


def loader(session: Session | None = None) -> torch.utils.data.DataLoader[Any]:
    """Batches in order; of a session's replica alone where there is one."""
    data: Any = samples()
    if session is not None:
        sampler = torch.utils.data.DistributedSampler(
            data, num_replicas=session.num_replicas, rank=session.replica, shuffle=False
        )
        return torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    return torch.utils.data.DataLoader(data, batch_size=2, shuffle=False)


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_trainer_that_is_saved_and_goes_on_ends_in_the_bits_of_one_without_shardline(
    start: Callable[..., Services], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # It goes on in the middle of an epoch, with the first batches once more.
    trainer(tmp_path / "plain").fit(Module(), loader())
    expected = Module()
    goes_on = trainer(tmp_path / "plain", steps=2 * STEPS)
    goes_on.fit(expected, loader(), ckpt_path=str(tmp_path / "plain" / f"step={STEPS}.ckpt"))

    services = start(ps=2, workers=1)
    session = services.connect()
    trainer(tmp_path / "ours").fit(Module(session), loader(session))
    session.close()
    assert services.end()["checkpoint_step"] == STEPS

    services = start(ps=1, workers=1, resume=True)
    session = services.connect()
    module = Module(session)
    caplog.clear()
    goes_on = trainer(tmp_path / "ours", steps=2 * STEPS)
    goes_on.fit(module, loader(session), ckpt_path=str(tmp_path / "ours" / f"step={STEPS}.ckpt"))
    session.close()
    assert not [text for text in caplog.messages if "continues" in text or "written to" in text]
    assert services.end()["steps"] == 2 * STEPS
    assert_equal(module.net, expected.net)


def test_a_trainer_reads_its_data_in_forked_processes(start: Callable[..., Services], tmp_path: Path) -> None:
    expected = Module()
    trainer(tmp_path / "plain").fit(expected, loader())
    services = start(ps=1, workers=1)
    session = services.connect()
    module = Module(session)
    data = torch.utils.data.DataLoader(samples(), batch_size=2, num_workers=2, persistent_workers=True)
    trainer(tmp_path / "ours").fit(module, data)
    session.close()
    assert services.end()["steps"] == STEPS
    assert_equal(module.net, expected.net)


def test_a_trainer_and_a_job_that_begin_at_different_steps_are_told(
    start: Callable[..., Services], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=1, workers=1)
    session = services.connect()
    trainer(tmp_path / "ours").fit(Module(session), loader(session))
    session.close()
    services.end()

    services = start(ps=1, workers=1, out="another")
    session = services.connect()
    with pytest.raises(
        JobError, match=rf"saved at step {STEPS}, but the job and .* are at step 0.*ckpt_path="
    ) as found:
        trainer(tmp_path / "ours", steps=2 * STEPS).fit(
            Module(session), loader(session), ckpt_path=str(tmp_path / "ours" / f"step={STEPS}.ckpt")
        )
    session.fail(found.value)
    session.shutdown()
    services.end(code=2)

    services = start(ps=1, workers=1, resume=True)
    session = services.connect()
    caplog.clear()
    trainer(tmp_path / "anew").fit(Module(session), loader(session))
    session.close()
    (said,) = [text for text in caplog.messages if "continues at step" in text]
    assert f"continues at step {STEPS}" in said and "ckpt_path=" in said
    services.end()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, shardline.GradScaler], ids=["torch", "shardline"])
def test_two_replicas_share_the_samples_and_what_overflows(
    start: Callable[..., Services], tmp_path: Path, kind: Callable[..., torch.amp.GradScaler]
) -> None:
    services = start(ps=2, workers=2)
    scalers = [kind("cpu", init_scale=SCALE, growth_interval=4) for _ in range(2)]

    def worker(index: int) -> nn.Module:
        session = services.connect(index, nan_policy="skip")
        module = Module(session, overflows=True)
        mixed = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scalers[index])
        # Autocast on a CPU computes in bfloat16; the scaler is what is tried here.
        mixed.forward_context = torch.enable_grad
        trainer(tmp_path / f"replica-{index}", plugins=[mixed], use_distributed_sampler=False).fit(
            module, loader(session)
        )
        session.close()
        return module.net

    first, second = services.workers(lambda: worker(0), lambda: worker(1))
    assert_equal(first, second)
    found = services.end()
    assert (found["steps"], found["skipped_steps"]) == (STEPS, 2)
    if kind is shardline.GradScaler:
        assert scalers[0].get_scale() == scalers[1].get_scale()
