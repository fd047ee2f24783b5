"""Stand-ins for the parameter servers of pipelines without a flush, in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from shardline.core.parcel import ParcelKey
from shardline.core.reduce import mean_, tree_sum
from shardline.job import Job
from shardline_pipeline.model import Pipeline
from shardline_pipeline.replica_tensors import StepPart
from shardline_pipeline.runner import AtHome
from tests.support.pipelines import PATIENCE_S, Mail


class Server(AtHome):
    """Parcels at home, and one torch optimizer in the place of the servers."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model = job.build_model()
        self.optimizer = job.build_optimizer(self.model)
        self.pulled = dict(self.model.state_dict(keep_vars=True))
        self.stale: list[tuple[int, int]] = []

    def comes_first(self, keys: Sequence[ParcelKey]) -> bool:
        return False

    def settle(self) -> None:
        pass

    def staleness(self, stage: int, steps: int) -> None:
        self.stale.append((stage, steps))

    def predict(self, stage: int, late: int) -> dict[str, torch.Tensor]:
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        for _ in range(late):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        assert isinstance(model, Pipeline)
        named = model.named_parameters()
        return {name: one.detach() for name, one in named if model.stage_of(int(name.partition(".")[0])) == stage}

    def step(self, gradients: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        with torch.no_grad():
            for name, values in buffers.items():
                self.pulled[name].copy_(values)


class Shared(Mail):
    """The servers of several workers: a stage gets a version when all of its replicas have contributed."""

    def __init__(self, job: Job, stages: int) -> None:
        super().__init__()
        self.job = job
        self.model = job.build_model()
        self.optimizer = job.build_optimizer(self.model)
        self.tensors = dict(self.model.state_dict(keep_vars=True))
        self.versions = [0] * stages
        self.waiting: dict[tuple[int, int], dict[int, StepPart]] = {}

    def contribute(self, step: int, stages: Mapping[int, Sequence[int]], parts: Mapping[int, StepPart]) -> None:
        for replica, part in parts.items():
            for stage in stages[replica]:
                given = self.waiting.setdefault((stage, step), {})
                given[replica] = part
                if len(given) == self.job.replicas:
                    self._close(stage, [given[number] for number in range(self.job.replicas)])
        self.turn.notify_all()

    def _close(self, stage: int, parts: Sequence[StepPart]) -> None:
        assert isinstance(self.model, Pipeline)
        for name, parameter in self.model.named_parameters():
            own = self.model.stage_of_tensor(name) == stage
            total = tree_sum([part.gradients.get(name) for part in parts]) if own else None
            parameter.grad = None if total is None else mean_(total.clone(), len(parts))
        self.optimizer.step()
        with torch.no_grad():
            for name, values in parts[0].buffers.items():
                if self.model.stage_of_tensor(name) == stage:
                    self.tensors[name].copy_(values)
        self.versions[stage] += 1


class Desk:
    """One worker's exchange with them."""

    def __init__(self, shared: Shared, stages: Mapping[int, Sequence[int]]) -> None:
        self.send, self.here, self.take = shared.send, shared.here, shared.take
        self.wait, self.passed = shared.wait, shared.passed
        self.shared = shared
        self.own = {stage for own in stages.values() for stage in own}
        self.step = 0
        self.pulled: dict[str, torch.Tensor] = {}

    def comes_first(self, keys: Sequence[ParcelKey]) -> bool:
        assert self.shared.turn.wait_for(lambda: self._published() or any(map(self.here, keys)), PATIENCE_S)
        return any(map(self.here, keys))

    def _published(self) -> bool:
        return {self.shared.versions[stage] for stage in self.own} == {self.step}

    def settle(self) -> None:
        shared = self.shared
        assert shared.turn.wait_for(self._published, PATIENCE_S)
        self.pulled = {name: values.detach().clone() for name, values in shared.tensors.items()}

    def staleness(self, stage: int, steps: int) -> None:
        pass
