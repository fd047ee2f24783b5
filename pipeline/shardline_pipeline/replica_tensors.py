"""What the passes of a replica change in a worker's stages, kept apart for each replica: gradients and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardline.core.tensor_bytes import same_bits
from shardline_pipeline.staged import StagedModel

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A worker's part of one replica's step."""

    gradients: Values
    """Mean over the microbatches, by name."""
    buffers: Values
    """Those that are not in the model's own memory, by name."""
    loss: float | None
    """Mean over the microbatches, where the last stage is."""


class ReplicaTensors:
    """Gradients and buffers of some replicas. Those of one at a time are in each stage of the model; see enter().

    So passes of several replicas may follow each other in any order, and each replica has the bits that it has alone.
    """

    def __init__(self, model: StagedModel) -> None:
        self.parameters: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(model.num_stages)]
        """By stage and name."""
        self.buffers: list[dict[str, torch.Tensor]] = [{} for _ in range(model.num_stages)]
        for name, parameter in model.named_parameters():
            self.parameters[model.stage_of_tensor(name)][name] = parameter
        for name, buffer in model.named_buffers():
            self.buffers[model.stage_of_tensor(name)][name] = buffer
        self._own: dict[str, torch.Tensor] = {}
        """The buffers' own memory, while other memory is in their place."""
        self._values: dict[int, dict[str, torch.Tensor]] = {}
        """Buffers, by replica."""
        self._gradients: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        """By replica and stage, of those that are not in the model."""
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        """The newest copy of a replica's buffer that kept() has made."""
        self._inside: dict[int, int] = {}
        """The replica that is in the model, by stage."""

    def __contains__(self, replica: int) -> bool:
        return replica in self._values

    def in_model(self) -> dict[str, torch.Tensor]:
        return {name: buffer for buffers in self.buffers for name, buffer in buffers.items()}

    def open(self, replica: int, stages: Iterable[int], values: Values | None = None) -> None:
        """Begin with a replica. values: its buffers, copied; None = the model's own memory, for one replica."""
        found: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, buffer in self.buffers[stage].items():
                own = self._own.setdefault(name, buffer.data)
                found[name] = own if values is None else values[name].detach().clone()
        self._values[replica] = found

    def enter(self, replica: int, stage: int) -> None:
        """Put a replica's gradients and buffers into a stage of the model. Call before each pass."""
        inside = self._inside.get(stage)
        if inside == replica:
            return
        if inside is not None:
            self._gradients[inside, stage] = self._left(stage)
        found = self._gradients.pop((replica, stage), {})
        for name, parameter in self.parameters[stage].items():
            parameter.grad = found.get(name)
        for name, buffer in self.buffers[stage].items():
            buffer.data = self._values[replica][name]
        self._inside[stage] = replica

    def take(self, replica: int, stages: Iterable[int]) -> dict[str, torch.Tensor]:
        """A replica's gradients by name, which begin anew."""
        found: dict[str, torch.Tensor] = {}
        for stage in stages:
            inside = self._inside.get(stage) == replica
            found.update(self._left(stage) if inside else self._gradients.pop((replica, stage), {}))
        return found

    def buffers_of(self, replica: int, stage: int) -> dict[str, torch.Tensor]:
        """Copies of a replica's buffers of a stage, as they are now."""
        return {name: self._values[replica][name].clone() for name in self.buffers[stage]}

    def kept(self, replica: int, stage: int) -> dict[str, torch.Tensor]:
        """The same, where a buffer that has not changed since the last call is not copied again."""
        for name in self.buffers[stage]:
            now, last = self._values[replica][name], self._kept.get((replica, name))
            if last is None or not same_bits(last, now):
                self._kept[replica, name] = now.clone()
        return {name: self._kept[replica, name] for name in self.buffers[stage]}

    @contextmanager
    def again(self, replica: int, stage: int, kept: Values) -> Iterator[None]:
        """Have other values in a replica's buffers of a stage for a pass, which changes none of either. Call enter()
        before.
        """
        try:
            for name, buffer in self.buffers[stage].items():
                buffer.data = kept[name].clone()
            yield
        finally:
            for name, buffer in self.buffers[stage].items():
                buffer.data = self._values[replica][name]

    def clear(self) -> None:
        """End with all replicas: gradients are dropped, and the model has its own buffers."""
        for stage in range(len(self.parameters)):
            self._left(stage)
            for name, buffer in self.buffers[stage].items():
                if name in self._own:
                    buffer.data = self._own[name]
        self._own.clear()
        self._values.clear()
        self._gradients.clear()
        self._kept.clear()
        self._inside.clear()

    def _left(self, stage: int) -> dict[str, torch.Tensor]:
        """The gradients in a stage of the model, taken out."""
        found = {name: one.grad for name, one in self.parameters[stage].items() if one.grad is not None}
        for parameter in self.parameters[stage].values():
            parameter.grad = None
        return found
