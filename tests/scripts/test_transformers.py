"""A Hugging Face Trainer as a worker's loop: the bits of a run without Shardline, going on, what doesn't fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.client.api.session import Session
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, JobStopped
from tests.e2e.support import PATIENCE_S, mortal_cluster, summary_of
from tests.support.services import SEEDING, Services

transformers = pytest.importorskip("transformers", reason="transformers is not installed; make test-scripts does it")

EVERY = 4
"""Steps between checkpoints, of the Trainer and of the job."""


def make_model() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    with SEEDING:
        torch.manual_seed(3)
        model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 32, (64, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, out: Path, *, steps: int, **settings: Any) -> Any:
    arguments = {
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "save_steps": EVERY,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **settings,
    }
    return Saving(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(out), **arguments),
        train_dataset=samples(),
        optimizers=(optimizer, None),
    )


def plain(out: Path, *, steps: int, **settings: Any) -> torch.nn.Module:
    """The same without Shardline."""
    model = make_model()
    trainer(model, make_optimizer(model), out, steps=steps, **settings).train()
    return model


def attached(services: Services, **settings: Any) -> tuple[Session, torch.nn.Module, torch.optim.Optimizer]:
    session, model = services.connect(checkpoint_every=EVERY, **settings), make_model()
    return session, model, session.attach(model, make_optimizer(model))


def assert_equal(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_trainer_that_is_saved_and_goes_on_ends_in_the_bits_of_one_without_shardline(
    start: Callable[..., Services], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain(tmp_path / "plain", steps=3 * EVERY)
    services = start(ps=2, workers=1)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=2 * EVERY).train()
    session.close()
    assert services.end()["checkpoint_step"] == 2 * EVERY

    services = start(ps=1, workers=1, resume=True)
    session, model, optimizer = attached(services)
    assert session.link.orders.first_step == 2 * EVERY
    caplog.clear()
    goes_on = trainer(model, optimizer, tmp_path / "ours", steps=3 * EVERY)
    goes_on.train(resume_from_checkpoint=str(tmp_path / "ours" / f"checkpoint-{2 * EVERY}"))
    session.close()
    assert not [text for text in caplog.messages if "continues" in text or "written to" in text]
    assert services.end()["steps"] == 3 * EVERY
    assert_equal(model, expected)


def test_a_trainer_reads_its_data_in_forked_processes(start: Callable[..., Services], tmp_path: Path) -> None:
    expected = plain(tmp_path / "plain", steps=EVERY)
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=EVERY, dataloader_num_workers=2).train()
    session.close()
    assert services.end()["steps"] == EVERY
    assert_equal(model, expected)


def test_a_trainer_that_goes_on_while_the_job_begins_is_refused(start: Callable[..., Services], tmp_path: Path) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=EVERY).train()
    session.close()
    services.end()

    services = start(ps=1, workers=1, out="another")
    session, model, optimizer = attached(services)
    goes_on = trainer(model, optimizer, tmp_path / "ours", steps=2 * EVERY)
    with pytest.raises(JobError, match=r"saved at step 4, but the job and .* are at step 0.*--resume") as found:
        goes_on.train(resume_from_checkpoint=True)
    session.fail(found.value)
    session.shutdown()
    services.end(code=2)


def test_a_trainer_without_its_optimizers_state_is_told_that_its_weights_are_not_the_jobs(
    start: Callable[..., Services], tmp_path: Path
) -> None:
    plain(tmp_path / "plain", steps=EVERY, save_only_model=True)
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    goes_on = trainer(model, optimizer, tmp_path / "plain", steps=2 * EVERY)
    with pytest.raises(JobError, match=r"were written to in this process.* before attach") as found:
        goes_on.train(resume_from_checkpoint=True)
    session.fail(found.value)
    session.shutdown()
    services.end(code=2)


def test_a_trainer_that_begins_while_the_job_goes_on_is_told(
    start: Callable[..., Services], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=EVERY).train()
    session.close()
    services.end()

    services = start(ps=1, workers=1, resume=True)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "more", steps=EVERY).train()
    session.close()
    (said,) = [text for text in caplog.messages if "continues at step" in text]
    assert "continues at step 4" in said and "resume_from_checkpoint=" in said
    assert services.end()["steps"] == 2 * EVERY


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import torch
import transformers
import shardline
from tests.scripts.test_transformers import make_model, make_optimizer, samples, trainer

session = shardline.connect(checkpoint_every=4, clip_norm=1.0)
model = make_model()
optimizer = session.attach(model, make_optimizer(model))
work = trainer(model, optimizer, {out!r} + f"/trainer-{{session.replica}}", steps=8)
# Each replica its own samples: the Trainer knows of no others.
work.train_dataset = samples()[session.replica :: session.num_replicas]
work.train()
torch.save(model.state_dict(), {out!r} + f"/model-{{session.replica}}.pt")
session.close()
"""


@pytest.mark.timeout(300)
def test_two_replicas_of_a_trainer_end_with_the_same_model(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), out=str(tmp_path)))
    # Time enough to import all of it on a busy machine.
    with mortal_cluster(script, out, script=True, timeouts=Timeouts(total_s=PATIENCE_S)) as cluster:
        assert cluster.wait(timeout_s=2 * PATIENCE_S) == 0, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
    found = summary_of(out)
    assert (found["steps"], found["replicas"], found["reason"]) == (8, 2, "done")
    first, second = (torch.load(tmp_path / f"model-{i}.pt", weights_only=True) for i in (0, 1))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


Callback: Any = transformers.TrainerCallback
Trainer: Any = transformers.Trainer


class Saving(Trainer):  # type: ignore[misc]
    """Saves where its job is stopped, as docs/scripts.md has it."""

    def train(self, *how: Any, **more: Any) -> Any:
        try:
            return super().train(*how, **more)
        except JobStopped:
            self._save_checkpoint(self.model, trial=None)
            raise


class Stopping(Callback):  # type: ignore[misc]
    """Stops the job at a step of the Trainer."""

    def __init__(self, session: Session, step: int) -> None:
        self._session = session
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._session.link.client.stop("enough")


def test_a_trainer_whose_job_is_stopped_ends_there_and_goes_on_from_what_it_saved_then(
    start: Callable[..., Services], tmp_path: Path
) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    stopped = trainer(model, optimizer, tmp_path / "ours", steps=2_000)
    stopped.add_callback(Stopping(session, 6))
    with pytest.raises(JobStopped) as found:
        stopped.train()
    at = found.value.step
    assert stopped.state.global_step == at == session.step
    session.close()
    assert services.end()["checkpoint_step"] == at
    assert max(int(path.name.split("-")[1]) for path in (tmp_path / "ours").glob("checkpoint-*")) == at

    services = start(ps=1, workers=1, resume=True)
    session, model, optimizer = attached(services)
    trainer(model, optimizer, tmp_path / "ours", steps=at + EVERY).train(resume_from_checkpoint=True)
    session.close()
    assert services.end()["steps"] == at + EVERY
    assert_equal(model, plain(tmp_path / "plain", steps=at + EVERY))
