"""The expected result of training: a one-process reference with a plain torch optimizer, without Shardline.

    result = reference(job)
    assert result.sha256 == summary["sha256"]

Synchronous: the R logical replicas, or those chosen for the step, run one after another, their gradients are added
along the canonical tree, and a torch.optim object steps on the model's own parameters. Asynchronous: one worker's
batches, one after another. Under an update rule other than the optimizer's own, the rule itself updates the parameters,
like one server with one worker. In a pipeline without a flush, each stage computes with parameters as old as there, and
the pipeline is empty where the training begins, or goes on from `start`. Layers that workers share are refused: their
sums are rounded in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardline import cadence, consistency, division
from shardline.core.contributions import Contributions, mean
from shardline.core.gradients import flat_bucket, write_bucket
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import Plan, make_plan
from shardline.core.push_context import PushContext
from shardline.core.reduce import Block, clip_scale, global_norm, mean_, tree_sum, whole_square_sums
from shardline.core.scores import counts
from shardline.core.spec import JobSpec, TensorKind
from shardline.core.tensor_bytes import params_sha256
from shardline.data import BatchSource
from shardline.errors import JobError, NonFiniteError
from shardline.host.process import torch_threads
from shardline.job import Job
from shardline.model import Owners, named_values
from shardline.nn import EmbeddingTable, tables_of
from shardline.schedule import complete, factor
from shardline.scheduler import GroupSettings
from shardline.storage.table import IDS, TableBucket
from shardline.update import Need, bucket_rule, hyper_numbers, runs_on_workers
from shardline.update.base import RuleState

Gradients = dict[str, torch.Tensor | None]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ReferenceResult:
    """The result of a training. All tensors are copies, on the model's device."""

    step: int
    """Steps done, skipped ones included."""
    version: int
    """Updates applied: steps minus the skipped ones."""
    params: Mapping[str, torch.Tensor]
    """Every parameter by its first name, frozen ones included; of each table its ids as NAME.ids and its rows as
    NAME.rows, in the order of checkpoints."""
    buffers: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]
    """Optimizer state by parameter name: {"fc.weight": {"momentum_buffer": ...}}; absent if torch has none yet. Under
    another rule by bucket: {"bucket 0": {"tensors": ..., "scalars": ..., "initialized": ...}}."""
    losses: tuple[float, ...]
    """Mean loss over the replicas of each step of this call."""
    tables: Mapping[str, BucketImage] = field(default_factory=dict)
    """Rows of tables, with their optimizer state."""
    skipped: tuple[int, ...] = field(default=())
    """Steps skipped because of a NaN or infinity (nan_policy "skip")."""

    @property
    def sha256(self) -> str:
        """shardline.core.tensor_bytes.params_sha256 of the parameters."""
        return params_sha256(self.params)


def reference(
    job: Job,
    steps: int | None = None,
    *,
    start: ReferenceResult | None = None,
    choices: Sequence[Collection[int]] = (),
) -> ReferenceResult:
    """Train in this process, alone, up to `steps` (default: the job's) and return the result.

    start: continue from an earlier result, like a resumed job; `steps` still counts from the job's first step.
    choices: the replicas that make each step, from step 0 on, as a run with spares has journaled them; () = all of
    them in every step.
    Bit-identical to a cluster in synchronous mode, and in asynchronous mode with one worker, or in a pipeline with one
    replica, on one machine class. Raises NonFiniteError under the policy "stop", naming tensor, replica and step.
    """
    with torch_threads(job.threads):
        run = Training(job, choices)
        if start is not None:
            if run.spec.follows_scores:
                raise JobError("reference() can't continue a job that follows scores: these are of its whole history")
            run.load(start)
        losses = [run.step() for _ in range(run.at, job.steps if steps is None else steps)]
        return run.result(tuple(losses))


class Training:
    """Training in this process alone, step by step; reference() makes all steps of one."""

    def __init__(
        self,
        job: Job,
        choices: Sequence[Collection[int]] = (),
        *,
        device: torch.device | None = None,
        in_buckets: bool = False,
    ) -> None:
        """choices: see reference(). in_buckets: keep the optimizer's state as servers do, for images() and restore().

        Raises JobError for a job that can't be trained so.
        """
        self.job = job
        self.choices = choices
        self.model = job.build_model().to(device)
        self.spec: JobSpec = job.spec(self.model)
        if cadence.of(self.spec).rounds.ticks != 1 or self.spec.inner is not None:
            raise JobError(
                f"training in one process makes steps of one pass each; cadence {self.spec.cadence} has other ones"
            )
        self.source = BatchSource(job)
        self._compute = division.of(self.spec).in_one_process(job, self.model, self.source, self._predict)
        self.plan: Plan = make_plan(self.spec.tensors, 1)
        self.owners = Owners(self.model)
        values = named_values(self.model)
        kinds = {tensor.name: tensor.kind for tensor in self.spec.tensors}
        frozen = (TensorKind.PARAM, TensorKind.FROZEN)
        self.params = {name: value for name, value in values.items() if kinds[name] in frozen}
        self.trained = {name: value for name, value in values.items() if kinds[name] is TensorKind.PARAM}
        self.buffers = {name: value for name, value in values.items() if kinds[name] is TensorKind.BUFFER}
        self.tables = _Tables(self.model, self.spec, self.plan)
        optimizer = job.build_optimizer(self.model)
        settings = job.group_settings(optimizer)
        self.scores: list[tuple[int, float | None]] = []
        """Those that the job's ReduceLROnPlateau follows."""
        if settings is not None:
            settings.scores = lambda: self.scores
        plain = runs_on_workers(self.spec.rule) and not in_buckets
        self.stepper: _Stepper | _RuleStepper = (
            _Stepper(job, optimizer, settings, self.trained)
            if plain
            else _RuleStepper(self.spec, self.plan, settings, self.trained)
        )
        self.at = 0
        self.version = 0
        self.skipped: list[int] = []

    def step(self) -> float:
        """One step; returns the mean loss over its replicas."""
        if self.spec.follows_scores and counts(self.at, self.spec.checkpoint_every):
            metrics = self.job.score(self.model)
            self.scores.append((self.at, metrics[self.spec.best_metric or next(iter(metrics))]))
        replicas = sorted(self.choices[self.at]) if self.choices else range(self.spec.replicas)
        before = copies(self.buffers)
        after = before
        contributions: list[Gradients] = []
        losses = []
        for replica in replicas:
            _assign(self.buffers, before)
            losses.append(self._compute(self.at, replica))
            self.owners.settle(f"step {self.at}")
            # The next replica's zero_grad only drops references, so these tensors don't change.
            contributions.append({name: value.grad for name, value in self.trained.items()})
            self.tables.add(replica)
            if replica == replicas[0]:
                after = copies(self.buffers)
        bad = _non_finite(replicas, contributions, losses)
        if bad and self.spec.consistency.nan_policy == "stop":
            raise NonFiniteError(f"{bad} in step {self.at}")
        if bad:
            _assign(self.buffers, before)
            self.skipped.append(self.at)
        else:
            _assign(self.buffers, after)
            mode = consistency.of(self.spec.consistency)
            shared = mode.worker_half(self.spec).shares_steps
            gradients = self._combine(contributions) if shared else self._clip_as_torch(contributions[0])
            # PROTOCOL 1.1: the learning rate follows the step or the version.
            self.stepper.step(gradients, self.version if mode.clock is consistency.Clock.VERSION else self.at)
            self.tables.step(replicas if shared else replicas[:1])
            self.version += 1
        self.at += 1
        return sum(losses) / len(losses)

    def _predict(self, steps: int) -> list[Values]:
        """All parameters after 1, 2, ... steps of the optimizer, without a gradient."""
        twin = copy.deepcopy(self.stepper)
        found = []
        for number in range(steps):
            twin.step({name: torch.zeros_like(value) for name, value in self.trained.items()}, self.at + number)
            found.append({**copies(self.params), **twin.parameters()})
        return found

    def _combine(self, contributions: list[Gradients]) -> Gradients:
        gradients: Gradients = {}
        for name in self.trained:
            total = tree_sum([one[name] for one in contributions])
            gradients[name] = None if total is None else mean_(total, len(contributions))
        if self.spec.consistency.clip_norm > 0.0:
            scale = clip_scale(global_norm(whole_square_sums(self.plan, gradients)), self.spec.consistency.clip_norm)
            if scale < 1.0:
                for gradient in gradients.values():
                    if gradient is not None:
                        gradient.mul_(scale)
        return gradients

    def _clip_as_torch(self, gradients: Gradients) -> Gradients:
        """A worker's own gradient, clipped by torch's function (PROTOCOL 1.5)."""
        if self.spec.consistency.clip_norm > 0.0:
            nn.utils.clip_grad_norm_(list(self.trained.values()), self.spec.consistency.clip_norm)
        return gradients

    def load(self, start: ReferenceResult) -> None:
        self.at, self.version, self.skipped = start.step, start.version, list(start.skipped)
        _assign(self.params, start.params)
        self.tables.load(start.tables)
        _assign(self.buffers, start.buffers)
        self.stepper.load(start.optimizer)

    def parameters(self) -> Values:
        """Copies of all parameters, which differ from the model's if the rule looks ahead."""
        return {**copies(self.params), **self.stepper.parameters(), **self.tables.parameters()}

    def score(self) -> dict[str, float]:
        """The metrics of the parameters as they are now, from the job's `evaluate`; {} if it has none."""
        seen = copies(self.trained)
        _assign(self.trained, self.stepper.parameters())
        try:
            return self.job.score(self.model)
        finally:
            _assign(self.trained, seen)

    def images(self) -> list[BucketImage]:
        """The content of its buckets, as a server's for a checkpoint. It was made with in_buckets."""
        assert isinstance(self.stepper, _RuleStepper)
        values = {**self.parameters(), **copies(self.buffers)}
        states = iter(self.stepper.rules)
        images = []
        tables = {bucket.number: bucket for bucket in self.tables.buckets.values()}
        for number, bucket in enumerate(self.plan.shards[0].buckets):
            if number in tables:
                images.append(tables[number].image())
                continue
            none = RuleState({}, {}, (False,) * len(bucket.slices))
            state = next(states).export() if bucket.kind is TensorKind.PARAM else none
            flat = flat_bucket(self.plan, bucket, values)
            images.append(
                BucketImage(
                    shard=0,
                    bucket=number,
                    step=self.at,
                    version=self.version,
                    tensors={VALUE: flat, **state.tensors},
                    scalars=state.scalars,
                    initialized=state.initialized,
                )
            )
        return images

    def restore(self, images: Iterable[BucketImage]) -> None:
        """Go on from the content of its buckets; the inverse of images(). Raises CheckpointError."""
        optimizer: dict[str, dict[str, Any]] = {}
        for bucket, image in zip(self.plan.shards[0].buckets, images, strict=True):
            if bucket.kind is TensorKind.TABLE:
                self.tables.load({self.plan.tensors[bucket.slices[0].tensor].name: image})
                continue
            write_bucket(self.plan, bucket, image.tensors[VALUE], {**self.params, **self.buffers})
            self.at, self.version = image.step, image.version
            if bucket.kind is TensorKind.PARAM:
                state = {"tensors": image.tensors, "scalars": image.scalars, "initialized": image.initialized}
                optimizer[f"bucket {len(optimizer)}"] = state
        self.stepper.load(optimizer)

    def result(self, losses: tuple[float, ...]) -> ReferenceResult:
        return ReferenceResult(
            step=self.at,
            version=self.version,
            params=self.parameters(),
            tables=self.tables.images(),
            buffers=copies(self.buffers),
            optimizer=self.stepper.state(),
            losses=losses,
            skipped=tuple(self.skipped),
        )


class _Tables:
    """The model's tables, as one server has them."""

    def __init__(self, model: nn.Module, spec: JobSpec, plan: Plan) -> None:
        self.modules = tables_of(model)
        self.buckets = {
            plan.tensors[bucket.slices[0].tensor].name: TableBucket(
                0,
                number,
                bucket,
                plan.tensors,
                spec.schedule,
                contributions=Contributions(bucket, spec.replicas, in_tree=False),
                keeps_previous=False,
            )
            for number, bucket in enumerate(plan.shards[0].buckets)
            if bucket.kind is TensorKind.TABLE
        }
        for module in self.modules.values():
            module.source = self

    def rows(self, wanted: Sequence[tuple[EmbeddingTable, torch.Tensor]]) -> list[torch.Tensor]:
        return [self.buckets[table.name].rows(ids, self.buckets[table.name].step) for table, ids in wanted]

    def add(self, replica: int) -> None:
        for name, module in self.modules.items():
            packed = module.take()
            self.buckets[name].contributions.add(Block(replica, 1), packed, (packed is not None,), 0)

    def step(self, replicas: Sequence[int]) -> None:
        for bucket in self.buckets.values():
            bucket.apply(mean(bucket.contributions.take_of(replicas), len(replicas)))

    def images(self) -> dict[str, BucketImage]:
        return {name: bucket.image() for name, bucket in self.buckets.items()}

    def parameters(self) -> Values:
        found = {}
        for name, image in self.images().items():
            ids = found[f"{name}.ids"] = image.tensors[IDS]
            found[f"{name}.rows"] = image.tensors[VALUE].view(len(ids), -1)
        return found

    def load(self, images: Mapping[str, BucketImage]) -> None:
        for name, image in images.items():
            self.buckets[name].restore(image, self.buckets[name].rule_of(image))


class _Stepper:
    """The torch.optim object."""

    def __init__(
        self, job: Job, optimizer: torch.optim.Optimizer, settings: GroupSettings | None, trained: Values
    ) -> None:
        self.optimizer = optimizer
        self.schedule = complete(job.schedule, job.steps)
        self.settings = settings
        self.trained = trained
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, gradients: Gradients, clock: int) -> None:
        """One update of the model's parameters; a gradient of None leaves its parameter and its state unchanged."""
        rate_factor = factor(self.schedule, clock)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * rate_factor
        if self.settings is not None:
            self.settings.set(self.optimizer, clock)
        for name, value in self.trained.items():
            value.grad = gradients[name]
        # Where a server's rounding depends on the number of threads, it is that of one.
        with torch_threads(1):
            self.optimizer.step()

    def parameters(self) -> Values:
        return copies(self.trained)

    def state(self) -> dict[str, dict[str, Any]]:
        return {
            name: {key: _copy(item) for key, item in self.optimizer.state[value].items()}
            for name, value in self.trained.items()
            if self.optimizer.state.get(value)
        }

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, items in state.items():
            self.optimizer.state[self.trained[name]] = {key: _copy(item) for key, item in items.items()}


class _RuleStepper:
    """An update rule over the buckets of one server. The model's parameters are those that its one worker pulls."""

    def __init__(self, spec: JobSpec, plan: Plan, settings: GroupSettings | None, trained: Values) -> None:
        self.plan = plan
        self.settings = settings
        self.trained = trained
        self.task = "" if consistency.of(spec.consistency).worker_half(spec).shares_steps else "worker/0"
        self.device = device = next(iter(trained.values())).device
        self.buckets = [bucket for bucket in plan.shards[0].buckets if bucket.kind is TensorKind.PARAM]
        self.rules = [bucket_rule(spec.rule, spec.schedule, bucket, plan.tensors, device) for bucket in self.buckets]
        self.values = [flat_bucket(plan, bucket, trained, device) for bucket in self.buckets]
        self._pull()

    def step(self, gradients: Gradients, clock: int) -> None:
        """One push of the worker, and its pull."""
        context = PushContext(task=self.task, base_version=clock, clock=clock)
        groups = self.settings.at(clock) if self.settings is not None else ()
        for bucket, updater, values in zip(self.buckets, self.rules, self.values, strict=True):
            held = [self.plan.tensors[piece.tensor] for piece in bucket.slices]
            flat = flat_bucket(self.plan, bucket, gradients, self.device)
            present = [gradients[tensor.name] is not None for tensor in held]
            hyper = hyper_numbers(updater.site.spec.name, groups[held[0].group]) if groups else None
            updater.apply(values, flat, clock=clock, present=present, hyper=hyper, context=context)
        self._pull()

    def _pull(self) -> None:
        for bucket, updater, values in zip(self.buckets, self.rules, self.values, strict=True):
            answer = updater.answer(values, self.task)
            if Need.PULLS in updater.rule.needs:
                updater.sent(self.task, answer)
            write_bucket(self.plan, bucket, answer, self.trained)

    def parameters(self) -> Values:
        """Copies of the trained parameters, which differ from the worker's if the rule looks ahead."""
        found = copies(self.trained)
        for bucket, flat in zip(self.buckets, self.values, strict=True):
            write_bucket(self.plan, bucket, flat, found)
        return found

    def state(self) -> dict[str, dict[str, Any]]:
        return {f"bucket {number}": updater.export()._asdict() for number, updater in enumerate(self.rules)}

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of state(); the parameters are in the model."""
        for number, (bucket, updater) in enumerate(zip(self.buckets, self.rules, strict=True)):
            self.values[number] = flat_bucket(self.plan, bucket, self.trained, self.device)
            updater.load(**state[f"bucket {number}"])
        self._pull()


def copies(values: Mapping[str, torch.Tensor]) -> Values:
    """Tensors of their own, without a graph, by the same names."""
    return {name: value.detach().clone() for name, value in values.items()}


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _assign(values: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(new[name])


def _non_finite(replicas: Sequence[int], contributions: list[Gradients], losses: list[float]) -> str:
    """What is NaN or infinite, as the start of a sentence; "" if all is finite."""
    for replica, gradients, loss in zip(replicas, contributions, losses, strict=True):
        if not math.isfinite(loss):
            return f"the loss of replica {replica} is {loss}"
        for name, gradient in gradients.items():
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                return f"the gradient of {name!r} from replica {replica} is not finite"
    return ""
