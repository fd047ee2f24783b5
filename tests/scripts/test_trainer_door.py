"""ShardlineTrainer in the place of Trainer, one changed line: bits of one process, replicas, rollbacks, resuming."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardline
from shardline.client.api.session import Session
from shardline.core.spec import TensorKind
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError
from tests.e2e.support import PATIENCE_S, mortal_cluster, summary_of, wait_for_event, wait_for_step
from tests.support.services import SEEDING, Services

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-scripts does it"
)

# After that: a module that skipped itself is there with nothing in it.
from tests.scripts.test_transformers import EVERY, assert_equal, make_model, samples  # noqa: E402

SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "save_steps": EVERY,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": EVERY,
    "max_grad_norm": 0.5,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}
STEPS = 16
STEADY: dict[str, Any] = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
"""For trainings that end early and go on."""


def train(kind: Any, out: Path, model: torch.nn.Module | None = None, *, resume: bool = False, **settings: Any) -> Any:
    work = kind(
        model=model if model is not None else make_model(),
        args=transformers.TrainingArguments(output_dir=str(out), **{**SETTINGS, **settings}),
        train_dataset=samples(),
        eval_dataset=samples()[:12],
    )
    work.train(resume_from_checkpoint=resume or None)
    return work


def dropping() -> torch.nn.Module:
    """The model with dropout."""
    model = make_model()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    return model


def losses(work: Any) -> list[float]:
    return [entry["loss"] for entry in work.state.log_history if "loss" in entry]


def door() -> Any:
    from shardline.integrations.transformers import ShardlineTrainer

    return ShardlineTrainer


def test_an_unmodified_trainer_ends_in_the_bits_of_one_without_shardline(
    joins: Callable[..., Services], tmp_path: Path
) -> None:
    expected = train(transformers.Trainer, tmp_path / "plain")
    services = joins()
    work = train(door(), tmp_path / "ours")
    assert work.session.job.consistency.clip_norm == 0.5
    work.session.close()
    found = services.end()
    assert (found["steps"], found["checkpoint_step"]) == (STEPS, STEPS)
    # Clipping sums squares in another order.
    assert losses(work) == pytest.approx(losses(expected), rel=1e-5)
    evaluated, theirs = (
        [e["eval_loss"] for e in one.state.log_history if "eval_loss" in e] for one in (work, expected)
    )
    assert len(evaluated) == STEPS // EVERY and evaluated == pytest.approx(theirs, rel=1e-5)


def test_without_clipping_the_bits_are_equal_also_without_a_cluster(
    joins: Callable[..., Services], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(transformers.Trainer, tmp_path / "plain", max_grad_norm=0.0)
    services = joins()
    work = train(door(), tmp_path / "ours", max_grad_norm=0.0)
    work.session.close()
    services.end()
    assert_equal(work.model, expected.model)
    monkeypatch.delenv("SHARDLINE_CLUSTER")
    monkeypatch.delenv("SHARDLINE_TASK")
    work = train(door(), tmp_path / "alone", max_grad_norm=0.0)
    work.session.close()
    assert_equal(work.model, expected.model)


def test_both_resume_from_the_same_step_or_are_told(
    joins: Callable[..., Services], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    connect = shardline.connect

    def connected(**settings: Any) -> Session:
        sessions.append(connect(**settings))
        return sessions[-1]

    monkeypatch.setattr(shardline, "connect", connected)
    expected = train(transformers.Trainer, tmp_path / "plain", **STEADY)
    services = joins()
    work = train(door(), tmp_path / "ours", **STEADY, max_steps=2 * EVERY)
    work.session.close()
    services.end()

    def refused(says: str, **how: Any) -> None:
        with pytest.raises(JobError, match=says):
            train(door(), **how)
        sessions[-1].fail(JobError("refused"))
        sessions[-1].shutdown()

    services = joins(out="another")
    refused(r"begins at step 8, but the job .* at step 0: .*--resume", out=tmp_path / "ours", resume=True)
    services.end(code=2)
    services = joins(resume=True)
    refused(r"begins at step 0, but the job .* at step 8: .*resume_from_checkpoint=", out=tmp_path / "more")
    services.end(code=2)

    services = joins(resume=True)
    work = train(door(), tmp_path / "ours", **STEADY, resume=True)
    work.session.close()
    assert services.end()["steps"] == STEPS
    assert_equal(work.model, expected.model)


def test_a_trainer_of_its_own_process_group_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(JobError, match=r"ShardlineTrainer .* already rank 0 of 1 .* torchrun out, and start"):
            door()(model=make_model(), args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    finally:
        torch.distributed.destroy_process_group()


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import json
from pathlib import Path
import torch
from tests.scripts.test_trainer_door import door, dropping, train

{before}
work = train(door(), Path({out!r}) / "trainer", {model}, **{settings!r})
{after}
print("replica", work.session.replica, "of", work.args.world_size, work.is_world_process_zero(), flush=True)
where = Path({out!r})
torch.save(work.model.state_dict(), where / f"model-{{work.session.replica}}.pt")
(where / f"history-{{work.session.replica}}.json").write_text(json.dumps(work.state.log_history))
"""


def script(folder: Path, *, before: str = "", model: str = "None", after: str = "", **settings: Any) -> Path:
    path = folder / "script.py"
    root = str(Path(__file__).parents[2])
    path.write_text(
        SCRIPT.format(root=root, out=str(folder), settings=settings, before=before, model=model, after=after)
    )
    return path


@pytest.mark.timeout(300)
def test_two_replicas_make_the_steps_of_one_process_with_their_batches_together(tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path / "plain", per_device_train_batch_size=8)
    path = script(tmp_path, per_device_train_batch_size=4)
    with mortal_cluster(path, tmp_path / "run", script=True, timeouts=Timeouts(total_s=PATIENCE_S)) as cluster:
        assert cluster.wait(timeout_s=2 * PATIENCE_S) == 0, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
    found = summary_of(tmp_path / "run")
    assert (found["steps"], found["replicas"], found["reason"]) == (STEPS, 2, "done")
    first, second = (torch.load(tmp_path / f"model-{i}.pt", weights_only=True) for i in (0, 1))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    histories = [json.loads((tmp_path / f"history-{i}.json").read_text()) for i in (0, 1)]
    # Replica 0's evaluation, on the whole set, is everyone's.
    scores = [[entry["eval_loss"] for entry in history if "eval_loss" in entry] for history in histories]
    theirs = [entry["eval_loss"] for entry in expected.state.log_history if "eval_loss" in entry]
    assert scores[0] == scores[1] == pytest.approx(theirs, rel=1e-4)
    logs = [(tmp_path / "run" / "logs" / f"worker-{i}.log").read_text() for i in (0, 1)]
    assert "replica 0 of 2 True" in logs[0] and "replica 1 of 2 False" in logs[1]
    assert "'eval_loss'" in logs[0] and "'eval_loss'" not in logs[1]
    assert (tmp_path / "trainer" / f"checkpoint-{STEPS}" / "model.safetensors").is_file()


SLOW = """
import time
from shardline.integrations.transformers import ShardlineTrainer

first = ShardlineTrainer.training_step
made = []


def slowly(self, *args, **named):
    made.append(self.state.global_step)
    time.sleep(0.2)
    return first(self, *args, **named)


ShardlineTrainer.training_step = slowly
"""


@pytest.mark.timeout(300)
def test_a_rollback_of_the_job_is_one_of_the_trainers(tmp_path: Path) -> None:
    # With dropout, whose numbers have to be drawn again, too.
    runs = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        path = script(
            folder,
            before=SLOW,
            model="dropping()",
            after=f"(Path({str(folder)!r}) / f'made-{{work.session.replica}}.json').write_text(json.dumps(made))",
            per_device_train_batch_size=2,
            save_steps=8,
            eval_strategy="no",
        )
        with mortal_cluster(path, folder / "run", script=True) as cluster:
            if name == "killed":
                wait_for_event(folder / "run", "checkpoint", "checkpoint of step 8")
                wait_for_step(folder / "run", 10)
                cluster.kill("ps/1")
            assert cluster.wait(timeout_s=2 * PATIENCE_S) == 0, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
        runs.append(folder)
    calm, killed = (summary_of(folder / "run") for folder in runs)
    assert (calm["steps"], killed["steps"]) == (2 * STEPS, 2 * STEPS)
    (recovery,) = killed["recoveries"]
    assert recovery["lost"] > 0
    assert killed["sha256"] == calm["sha256"]
    for replica in (0, 1):
        made = json.loads((runs[1] / f"made-{replica}.json").read_text())
        back = [now for before, now in itertools.pairwise(made) if now <= before]
        assert back == [recovery["from_step"]] and sorted({*made}) == [*range(2 * STEPS)]


def adapted() -> Any:
    """The model with adapters; its base weights are frozen."""
    peft = pytest.importorskip("peft", reason="peft is not installed; make test-scripts does it")
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = make_model()
    with SEEDING:
        torch.manual_seed(4)
        return peft.get_peft_model(model, config)


def test_adapters_train_alone_in_the_bits_of_one_process(joins: Callable[..., Services], tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path / "plain", adapted(), max_grad_norm=0.0)
    services = joins()
    work = train(door(), tmp_path / "ours", adapted(), max_grad_norm=0.0)
    trained = {spec.name for spec in work.session.job.tensors if spec.kind is TensorKind.PARAM}
    assert trained and all("lora_" in name for name in trained)
    work.session.close()
    assert services.end()["steps"] == STEPS
    assert_equal(work.model, expected.model)
    assert (tmp_path / "ours" / f"checkpoint-{STEPS}" / "adapter_model.safetensors").is_file()


class Stream(torch.utils.data.IterableDataset[Any]):
    """The samples without a length."""

    def __iter__(self) -> Any:
        return iter(samples())


SPLIT = """
import torch
from shardline.integrations.transformers import ShardlineTrainer
from tests.scripts.test_trainer_door import Stream, adapted

class Streaming(ShardlineTrainer):
    def __init__(self, *args, train_dataset, **named):
        super().__init__(*args, train_dataset=Stream(), **named)

    def training_step(self, model, inputs, *args):
        seen.append(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, *args)

seen = []
door = lambda: Streaming
model = adapted()
{spoilt}
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("spoilt", [False, True], ids=["equal", "other base"])
def test_adapters_and_a_stream_in_two_replicas_of_the_same_base_only(tmp_path: Path, spoilt: bool) -> None:
    path = script(
        tmp_path,
        before=SPLIT.format(
            spoilt="import os\nif os.environ['SHARDLINE_TASK'] == 'worker/1':\n"
            "    next(model.parameters()).data[0] += 1.0"
            if spoilt
            else ""
        ),
        model="model",
        after=f"(Path({str(tmp_path)!r}) / f'seen-{{work.session.replica}}.json').write_text(json.dumps(seen))",
        per_device_train_batch_size=4,
        max_steps=8,
        eval_strategy="no",
    )
    code = 2 if spoilt else 0
    with mortal_cluster(path, tmp_path / "run", script=True, timeouts=Timeouts(total_s=PATIENCE_S)) as cluster:
        assert cluster.wait(timeout_s=2 * PATIENCE_S) == code, [cluster.log_tail(f"worker/{i}", 20) for i in (0, 1)]
    found = summary_of(tmp_path / "run")
    if spoilt:
        assert "wte.weight, which is not trained, had other values than in worker/0" in found["reason"]
        return
    first, second = (json.loads((tmp_path / f"seen-{i}.json").read_text()) for i in (0, 1))
    # Each batch of four rows goes to one of the two.
    rows = [row.tolist() for row in (item["input_ids"] for item in samples())]
    assert [row for pair in zip(first, second, strict=True) for batch in pair for row in batch] == rows
