"""The job: what the user writes in JOB.py, how such a file is loaded, and which part is sent to other tasks.

    import shardline

    job = shardline.Job(
        model=make_model,                    # () -> nn.Module
        loss=loss,                           # (model, batch) -> scalar mean loss
        dataset=make_dataset,                # a map-style or iterable data set, or a function that makes one
        evaluate=evaluate,                   # (model) -> {"accuracy": 0.98}
        optimizer="SGD",
        optimizer_args={"lr": 0.1, "momentum": 0.9},
        batch_size=32,
        replicas=2,
        epochs=10,                           # or steps=600
    )

Every process of a cluster that computes reads this file; the parameter servers never see it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from shardline import division, methods
from shardline.cadence import CADENCES, Rounds
from shardline.codecs import assigned, keep_whole, of as codecs_of, without_zeros
from shardline.consistency import CONSISTENCIES, Clock, of as consistency_of
from shardline.core.places import AUTO, PLACES, placed
from shardline.core.scores import MOST
from shardline.core.settings import WORKER, JobSettings, check as check_settings, check_field, short
from shardline.core.spec import ConsistencySpec, JobSpec, ScheduleSpec
from shardline.data import Batch, DataOrder, seed_everything
from shardline.errors import JobError, calling
from shardline.fit import check_fit, check_runner, divide
from shardline.host.printable import unicode
from shardline.host.python_file import run_file
from shardline.model import check_extra_state, make_gradients_dense, model_tensors, pretrained, sparse_weights
from shardline.nn import tables_of
from shardline.schedule import complete, constant
from shardline.scheduler import GroupSettings, MakeScheduler
from shardline.seams import Resident
from shardline.update import check_rule, check_tensors, is_own, rule, rule_from_optimizer

__all__ = ["Job", "load_job", "lowest_is_best", "model_tensors"]

MAX_METRICS = 1024
"""Metrics of a checkpoint; more would not fit into a message."""
MAX_METRIC_NAME = 1024
"""Characters of a metric's name."""
_LOW_WORDS = ("loss", "error", "perplexity", "bits")


@dataclass(frozen=True, kw_only=True)
class Job(JobSettings):
    """One training run. Frozen; checked when it is made: JobError names the field, its value and the remedy.

    In addition to the fields below it has those of shardline.core.settings.JobSettings.
    """

    model: Callable[[], nn.Module]
    """Returns the model, in training mode. The generators are seeded first, so that all processes start equal."""
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    """Mean loss of a batch: a scalar tensor, or a mapping or an output of transformers with one as "loss"."""
    dataset: Any
    """Samples: an object with len() and [index], an iterable, or a function without arguments that returns one. A
    DataLoader stands for its data set, batch size, collate function and processes; the job has an order of its own."""
    optimizer: str | type[torch.optim.Optimizer]
    """A class of torch.optim, or its name; where workers run it, any class."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Scores the model; called in evaluation mode and without gradients."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer class, such as {"lr": 0.1, "momentum": 0.9, "fused": True}."""
    param_groups: Callable[[nn.Module], Sequence[Mapping[str, Any]]] | None = None
    """Parameter groups as in torch: [{"params": [...], "lr": 0.01}, ...]; a parameter in no group is not trained."""
    schedule: ScheduleSpec = field(default_factory=constant)
    """Learning-rate factor by step (by version in asynchronous mode); total_steps 0 = `steps`."""
    scheduler: MakeScheduler | None = None
    """Makes a torch scheduler for an optimizer, instead of `schedule`; stepped with each step (with a cadence, pass; in
    asynchronous mode, batch): lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=500)."""
    consistency: str | Resident = "sync"
    """"sync": every step is one update from all replicas. "async": every worker's gradient is an update of its own."""
    rule: str | Resident = "torch"
    """How the servers change the parameters; "torch": by the optimizer itself."""
    codec: str | Resident = "raw"  # type: ignore[assignment]
    """Encoding of gradients and parameters: "raw", or "bf16" and "fp16" for half the bytes (rounded)."""
    codec_up: str | Resident = ""  # type: ignore[assignment]
    """Encoding of gradients alone; "" = that of `codec`."""
    codec_down: str | Resident = ""  # type: ignore[assignment]
    """Encoding of parameters alone; "" = that of `codec`."""
    codec_parcels: str | Resident = ""  # type: ignore[assignment]
    """Encoding of activations and their gradients between the stages of a pipeline; "" = they travel as they are."""
    codec_tensors: Mapping[str, Any] = field(default_factory=dict)
    """Encoding of single tensors, both ways, by the first pattern that their name matches: {"*.bias": "raw"}."""
    communication: str | Mapping[str, str] = AUTO
    """What holds a tensor, by the first pattern that its name matches, where the cluster has both: "ps" = servers,
    "allreduce" = the workers themselves: {"embed*": "ps", "*": "allreduce"}. "auto" = tables on servers."""
    cadence: str | Resident = "every-step"  # type: ignore[assignment]
    """When a worker exchanges with the servers, and what it sends."""
    topology: str | Resident = "flat"  # type: ignore[assignment]
    """Which task a worker talks to for each shard."""
    pipeline: str | Resident = "whole-model"  # type: ignore[assignment]
    """How workers share the stages of a shardline.Pipeline, with `accumulate` microbatches per step."""
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    """Layers that `tensor_ranks` workers share, by pattern of their names: {"blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise"}, or {"blocks.*.mlp": "colwise/rowwise"}. See docs/tensor-parallel.md."""
    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch from a list of samples; None = torch's default_collate."""
    workers: int = 0
    """Workers of the cluster, where stages or cuts are "auto"; 0 = unknown. Set where a job file is run."""
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Data sets that `dataset` has returned, by seed; a job made by dataclasses.replace() needn't call it again."""

    def __post_init__(self) -> None:
        # A module is callable too, but needs an input.
        ready_made = isinstance(self.model, nn.Module)
        _require(not ready_made, "model", self.model, "give a function that returns it, such as lambda: Net()")
        for name in ("model", "loss"):
            _require(callable(getattr(self, name)), name, getattr(self, name), "give a function")
        for name in ("evaluate", "param_groups", "collate", "scheduler"):
            value = getattr(self, name)
            _require(value is None or callable(value), name, value, "give a function, or None")
        for name in methods.FIELDS:
            # As text or as an object; stored as text.
            object.__setattr__(self, name, methods.canonical(name, getattr(self, name)))
        _require(isinstance(self.codec_tensors, Mapping), "codec_tensors", self.codec_tensors, "give a dict")
        chosen = {str(pattern): methods.canonical("codec", codec) for pattern, codec in self.codec_tensors.items()}
        object.__setattr__(self, "codec_tensors", chosen)
        _check_communication(self.communication)
        shared = self.tensor_parallel
        _require(isinstance(shared, Mapping), "tensor_parallel", shared, "give a dict of patterns and styles")
        if isinstance(self.dataset, DataLoader):
            for name, value in _unpacked(self.dataset, self).items():
                object.__setattr__(self, name, value)
        _check_dataset(self.dataset)
        division.of(self).check_choices()
        _require(bool(self.steps or self.epochs), "steps", self.steps, "give a whole number >= 1, or epochs")
        if self.epochs and (not self.steps or isinstance(self.steps, _Counted)):
            object.__setattr__(self, "steps", _steps_of_epochs(self))
        check_settings(self)
        _require(isinstance(self.optimizer_args, Mapping), "optimizer_args", self.optimizer_args, "give a dict")
        remedy = "use shardline.schedule.constant, step, linear or cosine"
        _require(isinstance(self.schedule, ScheduleSpec), "schedule", self.schedule, remedy)
        complete(self.schedule, self.steps)
        consistency_of(self.consistency_spec()).needed(self.replicas)
        # Reports a wrong class or argument at the job file's line, before any process starts.
        if is_own(self.optimizer):
            found = rule_from_optimizer(self._optimizer_of([nn.Parameter(torch.zeros(1, 1))]), method=str(self.rule))
            local = CADENCES.parse(self.cadence).outer_rule is not None
            check_runner(found, on_workers=self.apply == WORKER or local)
        else:
            check_rule(rule(self.optimizer, groups=(dict(self.optimizer_args),), method=str(self.rule)))

        if self.scheduler is not None:
            constant_rate = self.schedule == constant()
            _require(constant_rate, "schedule", self.schedule, "leave it out where the job has a scheduler")
            if self.param_groups is None:
                self.group_settings(self._optimizer_of([nn.Parameter(torch.zeros(1, 1))]))

    @property
    def shares_layers(self) -> bool:
        """Whether layers are named that several workers compute together."""
        return bool(self.tensor_parallel)

    @property
    def contributors(self) -> int:
        """Number of replicas that make one update: `replicas`, or 1 if each worker's gradient is an update."""
        return consistency_of(self.consistency_spec()).contributors(self.replicas)

    @functools.cached_property
    def data(self) -> Any:
        """The data set itself; if `dataset` is a factory, made once, with the generators seeded with `seed`.

        Raises JobError if the factory raises, or returns no data set.
        """
        if not _is_factory(self.dataset):
            return self.dataset
        maker, made = self.made.get(self.seed, (None, None))
        if maker is self.dataset:
            return made
        seed_everything(self.seed)
        with calling("dataset()"):
            made = self.dataset()
        if _is_factory(made):
            raise JobError(
                f"dataset() returned {short(made)}, which is not a data set: it needs len() and [index], or iter()"
            )
        _check_dataset(made, "dataset()", one_shot=True)
        self.made[self.seed] = (self.dataset, made)
        return made

    @property
    def samples(self) -> int:
        """Length of a map-style data set; 0 for an iterable one. Raises JobError for one of length 0."""
        data = self.data
        if not _is_map_style(data):
            return 0
        with calling("len(dataset)"):
            count = len(data)
        if count == 0:
            raise JobError(f"the data set ({type(data).__name__}) has no samples; its len() is 0")
        return count

    def one_pass(self) -> Iterable[Any]:
        """The iterable data set, ready to be read from its start; one-shot iterators are made again each time."""
        data = self.data
        if not _is_one_shot(data):
            return data  # type: ignore[no-any-return]
        with calling("dataset()"):
            return self.dataset()  # type: ignore[no-any-return]

    def data_order(self) -> DataOrder:
        """Order of a map-style data set. Raises JobError if it is too small for one step."""
        return DataOrder(
            seed=self.seed,
            samples=self.samples,
            replicas=self.contributors,
            accumulate=self.accumulate,
            batch_size=self.batch_size,
        )

    def build_model(self) -> nn.Module:
        """A new model with the initial values that all processes of this job share: a function of the seed alone."""
        return division.of(self).build(self._made)

    def _made(self) -> nn.Module:
        """What model() returns, with the generators seeded."""
        # In addition to seed_everything: torch's own function also seeds a CUDA that the factory itself initialises.
        torch.manual_seed(self.seed)
        seed_everything(self.seed)
        with calling("model()"):
            model = self.model()
        if not isinstance(model, nn.Module):
            raise JobError(f"model() returned {short(model)}; it must return a torch.nn.Module")
        make_gradients_dense(model)
        return model

    def _optimizer_of(self, groups: list[Any]) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
        try:
            optimizer: torch.optim.Optimizer = cls(groups, **copy.deepcopy(dict(self.optimizer_args)))
        except (TypeError, ValueError) as error:
            name = cls.__name__ if is_own(cls) else f"torch.optim.{cls.__name__}"
            raise JobError(f"{name} does not accept optimizer_args or param_groups: {error}") from error
        return optimizer

    def group_settings(self, optimizer: torch.optim.Optimizer) -> GroupSettings | None:
        """Settings that `scheduler` gives an optimizer's groups; None if the job has none."""
        if self.scheduler is None:
            return None
        settings = GroupSettings(
            self.scheduler, self._optimizer_of, optimizer.param_groups, every=max(1, self.checkpoint_every)
        )
        if settings.follows_scores:
            _check_follows_scores(self)
        return settings

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The plain torch.optim object over the model's own parameters.

        Raises JobError if nothing is trainable, or torch refuses the arguments or the parameter groups.
        """
        groups: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not groups:
            beside = "; beside its embedding tables it needs one, such as a bias" if tables_of(model) else ""
            raise JobError(f"the model has no parameters that require a gradient, so there is nothing to train{beside}")
        if self.param_groups is not None:
            with calling("param_groups(model)"):
                groups = [dict(group) for group in self.param_groups(model)]
        return self._optimizer_of(groups)

    def consistency_spec(self) -> ConsistencySpec:
        """Mode, clipping and NaN policy."""
        mode = division.of(self).consistency(CONSISTENCIES.parse(self.consistency))
        return ConsistencySpec(mode=str(mode), clip_norm=float(self.clip_norm), nan_policy=self.nan_policy)

    def spec(self, model: nn.Module) -> JobSpec:
        """The job's identity, for a model made by build_model.

        Raises JobError for a model or a data set that can't be trained on.
        """
        optimizer = self.build_optimizer(model)
        settings = self.group_settings(optimizer)
        check_extra_state(model, self.extra_state)
        found = rule_from_optimizer(optimizer, method=str(self.rule))
        tensors = assigned(model_tensors(model, optimizer.param_groups, rule=found), self.codec_tensors)
        tensors = without_zeros(self, tensors, sparse_weights(model))
        tensors = keep_whole(codecs_of(self), tensors)
        tensors = tensors if isinstance(self.communication, str) else placed(tensors, self.communication)
        check_tensors(found, tensors)
        parts = division.of(self)
        tensors = parts.tensors(model, tensors)
        if self.samples:
            self.data_order()
        spec = JobSpec(
            name=self.name,
            tensors=tensors,
            rule=found,
            schedule=complete(self.schedule, self.steps),
            consistency=self.consistency_spec(),
            **{**self.settings(), "replicas": self.contributors, "steps": int(self.steps)},
            best_metric=self.best_metric,
            best_is_lowest=self.best_mode == "min" or (not self.best_mode and lowest_is_best(self.best_metric)),
            samples=self.samples,
            hosts=parts.hosts(model),
            follows_scores=settings is not None and settings.follows_scores,
            pretrained=pretrained(model),
        )
        spec = divide(spec)
        check_fit(spec)
        return spec

    def score(self, model: nn.Module) -> dict[str, float]:
        """The model's metrics from `evaluate`, as floats; {} if the job has none.

        Runs in evaluation mode and without gradients, and restores every module's mode. Raises JobError if evaluate
        raises or returns no dict of numbers.
        """
        if self.evaluate is None:
            return {}
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad(), calling("evaluate(model)"):
                found = self.evaluate(model)
        finally:
            for module, mode in modes:
                module.training = mode
        if not isinstance(found, Mapping) or not found:
            raise JobError(
                f'evaluate(model) returned {short(found)}; it must return a dict such as {{"accuracy": 0.97}}'
            )
        try:
            scores = {unicode(str(name)): float(value) for name, value in found.items()}
        except (TypeError, ValueError) as error:
            raise JobError(f"evaluate(model) returned a metric that is not a number: {error}") from error
        if len(scores) > MAX_METRICS:
            raise JobError(f"evaluate(model) returned {len(scores)} metrics; the limit is {MAX_METRICS}")
        longest = max(scores, key=len)
        if len(longest) > MAX_METRIC_NAME:
            raise JobError(
                f"evaluate(model) returned a metric whose name has {len(longest)} characters, "
                f"{short(longest)}; the limit is {MAX_METRIC_NAME}"
            )
        return scores

    def best(self, scores: Mapping[str, float]) -> tuple[str, bool]:
        """(metric for comparing checkpoints, whether its lowest value is best) for scores of score()."""
        metric = self.best_metric or next(iter(scores))
        return metric, self.best_mode == "min" or (not self.best_mode and lowest_is_best(metric))


def lowest_is_best(metric: str) -> bool:
    """Whether a metric of this name is better when lower."""
    return any(word in metric.lower() for word in _LOW_WORDS)


def _unpacked(loader: DataLoader[Any], job: Job) -> dict[str, Any]:
    """Fields of a job from a DataLoader. Raises JobError for one with an order of its own."""
    batches = loader.batch_sampler
    own = loader.sampler if batches is None or type(batches) is BatchSampler else batches
    shuffles = type(own) is RandomSampler and not own.replacement and own.num_samples == len(own.data_source)
    if not (shuffles or type(own) is SequentialSampler or isinstance(loader.dataset, IterableDataset)):
        raise JobError(
            f"Job.dataset is a DataLoader with a {type(own).__name__}, but the job has an order of its own, which "
            "follows from its seed; give a data set in the order that you want, or an iterable one"
        )
    if loader.batch_size is None:
        raise JobError("Job.dataset is a DataLoader without a batch_size; give its data set and Job.batch_size")
    if loader.worker_init_fn is not None and loader.num_workers:
        raise JobError(
            "Job.dataset is a DataLoader with a worker_init_fn, which a job's loaders would not call; leave it out, "
            "and have the data set prepare itself where a process first reads from it"
        )
    if job.batch_size not in (0, loader.batch_size):
        raise JobError(
            f"Job.batch_size is {job.batch_size}, and that of the DataLoader {loader.batch_size}; leave one out"
        )
    return {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "collate": job.collate or loader.collate_fn,
        "loaders": job.loaders or loader.num_workers,
    }


def _check_follows_scores(job: Job) -> None:
    """Raise JobError for a job whose learning rate can't follow scores."""
    every, what = job.checkpoint_every, "scheduler is a ReduceLROnPlateau, which follows the scores of `evaluate`"
    if job.evaluate is None or not every:
        raise JobError(f"{what} every checkpoint_every steps: set both, and start an evaluator (--evaluators 1)")
    mode, rounds = consistency_of(job.consistency_spec()), CADENCES.parse(job.cadence).rounds
    if mode.clock is Clock.VERSION or rounds != Rounds():
        raise JobError(
            f"{what} by the step, which consistency {mode} with cadence {job.cadence} has none of that all workers "
            "share; choose consistency='sync' and cadence='every-step', or another scheduler"
        )
    if job.steps // every > MOST:
        raise JobError(
            f"{what}: {job.steps} steps with checkpoint_every={every} are {job.steps // every} scores, and {MOST} are "
            f"the limit; set checkpoint_every to at least {-(-job.steps // MOST)}"
        )


def _check_communication(value: object) -> None:
    fits = value == AUTO
    if isinstance(value, Mapping):
        fits = bool(value) and all(isinstance(name, str) and place in PLACES for name, place in value.items())
    remedy = f"give {AUTO!r}, or a dict of patterns with {' or '.join(map(repr, PLACES))}"
    _require(fits, "communication", value, remedy)


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise JobError(f"Job.{name} is {short(value)}; {remedy}")


def _is_map_style(data: object) -> bool:
    # An IterableDataset inherits a __getitem__ that only raises.
    cls = type(data)
    return hasattr(cls, "__getitem__") and hasattr(cls, "__len__") and not isinstance(data, IterableDataset)


def _is_factory(data: object) -> bool:
    if isinstance(data, type):
        return True
    return callable(data) and not hasattr(type(data), "__getitem__") and not hasattr(type(data), "__iter__")


def _is_one_shot(data: object) -> bool:
    return not _is_map_style(data) and hasattr(type(data), "__next__")


def _check_dataset(data: object, where: str = "dataset", *, one_shot: bool = False) -> None:
    if isinstance(data, DataLoader):
        raise JobError(
            f"Job.{where} returned a DataLoader; return its data set, and give its batch_size and collate_fn as the "
            "job's batch_size and collate"
        )
    if _is_factory(data) or _is_map_style(data):
        return
    _require(hasattr(type(data), "__iter__"), where, data, "give an object with len() and [index], or with iter()")
    if _is_one_shot(data) and not one_shot:
        raise JobError(
            f"Job.{where} is {short(data)}, which can be read only once; give a function that returns it, or an "
            "object whose __iter__ starts from the beginning each time"
        )


class _Counted(int):
    """Steps that `epochs` gave: replace() has them counted again, since the batch may be another."""


def _steps_of_epochs(job: Job) -> _Counted:
    """Whole steps in `epochs` passes over the data; of rounds as many as it takes for all of it.

    Raises JobError for data without a length.
    """
    for name in ("epochs", "batch_size"):
        check_field(name, getattr(job, name))
    if not job.samples:
        raise JobError(f"Job.epochs is {job.epochs}, but the data set has no len(); give steps instead")
    passes = job.epochs * job.data_order().steps_per_epoch
    rounds = CADENCES.parse(str(job.cadence)).rounds
    single = min(passes, rounds.start)
    return _Counted(single + -(-(passes - single) // rounds.ticks))


def load_job(path: Path, overrides: Iterable[tuple[str, str]] = (), *, workers: int = 0, mirrored: bool = False) -> Job:
    """The `job` that a Python file defines, with fields replaced by `overrides`, such as ("steps", "200").

    workers: of the cluster that runs it; 0 = unknown. mirrored: a job of one replica gets one for each of them.

    The file runs as a module with a unique name. From then on its folder is first on sys.path, as with `python FILE`,
    so that it can import its siblings at any time. Raises JobError for a missing file, a file that raises or defines no
    shardline.Job, an override that is unknown or invalid, and a job that can't be mirrored.
    """
    path = Path(path)
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.glob("*.py"))) or "no .py file"
        raise JobError(f"{path} is a folder; name the job file in it (it holds {inside})")
    if not path.exists():
        if not path.parent.is_dir():
            raise JobError(f"no job file {path}: folder {path.parent} does not exist")
        names = sorted(p.name for p in path.parent.iterdir() if p.suffix == ".py")
        near = difflib.get_close_matches(path.name, names, n=3) or names[:5]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; there is no .py file in that folder"
        raise JobError(f"no job file {path}{hint}")
    if path.suffix != ".py":
        raise JobError(f"{path} is not a .py file; a job file is Python that defines `job = shardline.Job(...)`")
    job = getattr(_run_job_file(path), "job", None)
    if not isinstance(job, Job):
        raise JobError(f"{path}: `job` is {short(job)}; it must be a shardline.Job(...)")
    changes: dict[str, Any] = {"workers": job.workers or workers}
    if not job.name:
        changes["name"] = unicode(path.resolve().parent.name if path.stem == "job" else path.stem)
    if mirrored and job.replicas == 1:
        changes["replicas"] = workers
    made = changed(job, overrides, **changes)
    if mirrored:
        _check_mirrored(made, workers)
    return made


def changed(job: Job, overrides: Iterable[tuple[str, str]], **changes: Any) -> Job:
    """The job with fields, and arguments of its optimizer, replaced, such as ("steps", "200") or ("lr", "0.1").

    changes: fields that the overrides may replace once more. Raises JobError for one that is unknown or invalid.
    """
    arguments: dict[str, Any] = {}
    for name, text in overrides:
        field, value = methods.override(name, text)
        (arguments if field in methods.ARGUMENTS else changes)[field] = value
    if arguments:
        changes["optimizer_args"] = {**job.optimizer_args, **arguments}
    if "epochs" in changes:
        changes.setdefault("steps", 0)
    return dataclasses.replace(job, **changes)


def _check_mirrored(job: Job, workers: int) -> None:
    if job.shares_layers or str(job.pipeline) != division.WholeModel.name:
        how = "tensor_parallel" if job.shares_layers else f"pipeline {job.pipeline}"
        raise JobError(
            f"workers that are mirrored compute whole replicas, but this job has {how}; use --workers and --ps"
        )
    if job.contributors == job.replicas < workers:
        raise JobError(
            f"{workers} workers are mirrored, but the job has {job.replicas} replicas, so some would compute nothing; "
            f"use at most --mirrored {job.replicas}, or --set replicas={workers}"
        )


def _run_job_file(path: Path) -> object:
    """The module of a job file; its code runs only if it can define `job` at all."""

    def check(tree: ast.Module) -> None:
        if not _may_define_job(tree):
            raise JobError(
                f"{path} does not define `job`, so it was not run; add `job = shardline.Job(...)`, or start a plain "
                f"training script with `shardline train --script {path}`"
            )

    module = run_file(path, "job", check=check)
    if not hasattr(module, "job"):
        raise JobError(f"{path} ended without defining `job`; add `job = shardline.Job(...)` at its top level")
    return module


def _may_define_job(tree: ast.Module) -> bool:
    """Whether anything outside functions and classes could bind the name `job`."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and node.id == "job" and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" or (alias.asname or alias.name) == "job" for alias in node.names):
                return True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # A function named job is no Job, but gets a clearer error message this way.
            if node.name == "job":
                return True
        elif isinstance(node, ast.Global) and "job" in node.names:
            return True
        else:
            todo.extend(ast.iter_child_nodes(node))
    return False
