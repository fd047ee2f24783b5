"""Hugging Face's Trainer on a cluster: `from shardline.integrations.transformers import ShardlineTrainer as Trainer`.

Nothing else in the script changes. For another class of Trainer: `class Mine(ShardlineMixin, SFTTrainer): pass`.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

import shardline
from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.errors import JobError, JobStopped, RolledBackError
from shardline.integrations.accelerate import take_place
from shardline.integrations.processes import attach, check_no_process_group, other_step

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

KEPT = 8
"""Positions that are kept for a rollback: it goes to the job's newest checkpoint, which is a few behind at most."""


class ShardlineMixin(Base):
    """Trains through the servers; to be named before a class of Trainer. `session` is the worker's session.

    The data are split by replica, max_grad_norm is the norm to which the servers clip, replica 0 evaluates, prints and
    saves, and the job writes a checkpoint wherever save_strategy="steps" writes one. Other settings of the job come
    from `shardline train` and the environment. Raises JobError where torch.distributed is in use, and where only one of
    the job and the Trainer resumes.
    """

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        args = args if args is not None else transformers.TrainingArguments(output_dir="tmp_trainer")
        check_no_process_group(type(self).__name__)
        if args.n_gpu > 1:
            raise JobError(
                f"this process sees {args.n_gpu} GPUs, which a Trainer would use with DataParallel: start each worker "
                "with a GPU of its own in CUDA_VISIBLE_DEVICES"
            )
        saves = args.save_strategy == SaveStrategy.STEPS and args.save_steps >= 1
        self.session = shardline.connect(
            seed=args.seed,
            clip_norm=float(args.max_grad_norm or 0.0),
            nan_policy="skip" if args.fp16 else "stop",
            checkpoint_every=int(args.save_steps) if saves else None,
        )
        take_place(self.session)
        # Both would need a process group: to send batches, and to count the tokens of all replicas.
        args.accelerator_config.dispatch_batches = False
        args.average_tokens_across_devices = False
        self._kept = tempfile.TemporaryDirectory(prefix="shardline-trainer-")
        self._fresh_scheduler: dict[str, Any] | None = None
        super().__init__(model, args, *more, **named)

    # Taking the job's step

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        if not isinstance(getattr(optimizer, "optimizer", optimizer), ShardlineOptimizer):
            self.optimizer = attach(self.session, self.model, optimizer)
        return self.optimizer

    def train(self, *args: Any, **named: Any) -> Any:
        """As in transformers; save a checkpoint of the step where the job is stopped, and raise JobStopped."""
        try:
            return super().train(*args, **named)
        except JobStopped:
            self._save_checkpoint(self.model, trial=None)
            raise

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: str | None = None, **named: Any
    ) -> Any:
        self.create_optimizer()
        begins = self.session.step
        if resume_from_checkpoint is None:
            # A job without a checkpoint goes back to its beginning.
            self._save_rng_state(self._made(begins))
        resume = self._position(resume_from_checkpoint)
        while True:
            try:
                return super()._inner_training_loop(batch_size, args, resume_from_checkpoint=resume, **named)
            except RolledBackError as error:
                # The model holds the parameters of that step.
                kept = self._folder(error.step)
                resume = resume_from_checkpoint if error.step == begins and not kept.is_dir() else str(kept)

    def _in_step(self) -> bool:
        """Return whether all replicas make the same steps, so that the Trainer's step is the job's."""
        return self.session.trainer.half.shares_steps

    def _position(self, resume: str | None) -> str | None:
        """Folder of the Trainer's state at the job's step, which may have none. Raises JobError if only one resumes."""
        state = Path(resume or "") / TRAINER_STATE_NAME
        begins = TrainerState.load_from_json(str(state)).global_step if resume and state.is_file() else 0
        step, first = self.session.step, self.session.link.orders.first_step
        if begins == step or not self._in_step():
            return resume
        if step > first:
            # This worker was restarted, while the others went on.
            newest = get_last_checkpoint(self.args.output_dir) if Path(self.args.output_dir).is_dir() else None
            return newest if newest and newest.endswith(f"-{step}") else str(self._folder(step))
        raise other_step(self.session, begins, "resume_from_checkpoint")

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(max_steps, per_epoch, epochs, resume, trial)
        if not self._in_step() or self.state.global_step == self.session.step:
            return found
        self.state.global_step = self.session.step
        epoch, rest = divmod(self.session.step, per_epoch)
        return epoch, 0 if self.args.ignore_data_skip else rest * self.args.gradient_accumulation_steps

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._fresh_scheduler is None:
            self._fresh_scheduler = copy.deepcopy(self.lr_scheduler.state_dict())
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and not (Path(checkpoint) / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(copy.deepcopy(self._fresh_scheduler))
            for _ in range(self.state.global_step):
                self.lr_scheduler.step()

    # Positions that a rollback may return to

    def _folder(self, step: int) -> Path:
        return Path(self._kept.name) / f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{step}"

    def _keep(self) -> None:
        folder = self._made(self.state.global_step)
        self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
        torch.save(self.optimizer.state_dict(), os.path.join(folder, OPTIMIZER_NAME))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER_NAME))
        self._save_rng_state(folder)

    def _made(self, step: int) -> str:
        folder = self._folder(step)
        folder.mkdir(exist_ok=True)
        for old in sorted(folder.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)[:-KEPT]:
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        return str(folder)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **named)
        every = self.session.job.checkpoint_every
        if every and self.state.global_step % every == 0:
            self._keep()

    # What replicas do differently

    def _clip_grad_norm(self, model: Any) -> Any:
        """Return this replica's norm, which nothing is divided by: the servers clip."""
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))

    def log(self, logs: dict[str, Any], *args: Any, **named: Any) -> None:
        """As in transformers; the loss is the job's, too."""
        if "loss" in logs:
            self.session.log_loss(logs["loss"])
        super().log(logs, *args, **named)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **named: Any) -> Any:
        """Evaluate in replica 0, on the whole data set; all replicas, which must all call this, return its metrics."""
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(data, dict) or not self.session.attached:
            return super().evaluate(eval_dataset, *args, **named)
        found: Any = {}
        if self.session.replica == 0:
            found = super().evaluate(eval_dataset, *args, **named)
        found = self.session.broadcast({name: float(value) for name, value in found.items()})
        if self.session.replica > 0:
            self.log(dict(found))
            self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def get_eval_dataloader(self, *args: Any, **named: Any) -> Any:
        """The whole data set, which one replica evaluates."""
        return self._whole(super().get_eval_dataloader, *args, **named)

    def get_test_dataloader(self, *args: Any, **named: Any) -> Any:
        """The whole data set, which each replica predicts."""
        return self._whole(super().get_test_dataloader, *args, **named)

    def _whole(self, make: Any, *args: Any, **named: Any) -> Any:
        state = self.accelerator.state
        number, state.num_processes = state.num_processes, 1
        try:
            return make(*args, **named)
        finally:
            state.num_processes = number


class ShardlineTrainer(ShardlineMixin, transformers.Trainer):
    """transformers.Trainer, with the same arguments, whose parameters are on the servers."""
