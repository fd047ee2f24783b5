"""A model of Pipeline.split as a sequence of parts, each from a module with which a stage can begin up to the next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.errors import JobError, calling
from shardline_pipeline.split.trace import EmptyStagesError

if TYPE_CHECKING:
    from shardline_pipeline.split.model import Split


class Unit(nn.Module):
    """One part, with the parameters and buffers that it uses."""

    def __init__(self, split: Split, number: int, start: str) -> None:
        super().__init__()
        # Not as a module of this one, which would have all parameters then.
        self.__dict__["split"] = split
        self._number = number
        self.start = start
        """The module that it begins with."""
        own = dict([*split.whole.named_parameters(), *split.whole.named_buffers()])
        for place, name in enumerate(split.traced.parts[number].tensors.values()):
            tensor = own[name]
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"tensor{place}", tensor)
            else:
                self.register_buffer(f"tensor{place}", tensor)

    def forward(self, given: Any) -> Any:
        """What the next part gets; the first one is given what Units.entry() makes."""
        split: Split = self.__dict__["split"]
        if self._number:
            return split.run(self._number, given)
        inputs, named = given
        return split.run(0, *inputs, **named)


class Units(nn.Sequential):
    """The parts, in order.

    Raises JobError for a model that can't be traced, or in which no other module can begin a stage.
    """

    def __init__(self, split: Split) -> None:
        starts = _candidates(split)
        if not starts:
            raise JobError(
                f"Pipeline.split: no stage of the {type(split.whole).__name__} can begin with any of its modules: each "
                "begins where the model does, is called several times or never, or has nothing that is trained"
            )
        finest = _cut(split, starts)
        names = ("its beginning", *finest.traced.starts)
        super().__init__(*(Unit(finest, number, name) for number, name in enumerate(names)))
        self.__dict__["split"] = finest
        self.hosts = split.hosts
        self._cuts = () if split.automatic else split.cuts

    @property
    def whole(self) -> Split:
        """The model with its own names, cut at every part."""
        found: Split = self.__dict__["split"]
        return found

    def spans(self) -> list[range]:
        """The parts of each stage that the model has; [] where one begins with another module, or none is known."""
        starts = {part.start: number for number, part in enumerate(self) if isinstance(part, Unit)}
        if not all(cut in starts for cut in self._cuts):
            return []
        ends = [0, *sorted(starts[cut] for cut in self._cuts), len(self)]
        return [range(first, end) for first, end in itertools.pairwise(ends)]

    @staticmethod
    def entry(inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What the first part is given, of what the model is called with."""
        return tuple(inputs), dict(named)


def _cut(split: Split, starts: Sequence[str]) -> Split:
    """The model, cut where it begins something. What it computes for nothing is in no trace."""
    found = split.cut_at(starts)
    try:
        found.stage_of_tensor("")
    except EmptyStagesError as error:
        found = split.cut_at([name for name in starts if name not in error.needless])
    return found


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _candidates(split: Split) -> list[str]:
    """Modules with something to train, called once, each of which begins elsewhere than the model and the others."""
    model, calls = split.whole, dict[str, list[int]]()
    counter = _Counter()  # type: ignore[no-untyped-call]
    hooks = []
    for name, module in model.named_modules():
        if name and any(parameter.requires_grad for parameter in module.parameters()):
            seen = calls.setdefault(name, [])
            hooks.append(module.register_forward_pre_hook(lambda *_, seen=seen: seen.append(counter.count)))
    try:
        with calling(f"the {type(model).__name__}, with the example inputs,"), torch.no_grad(), counter:
            split.run_example()
    finally:
        for hook in hooks:
            hook.remove()
    begins: dict[int, str] = {}
    for name, seen in calls.items():
        if len(seen) == 1 and seen[0]:
            # Of those that begin at the same place, the outermost, which named_modules() has first.
            begins.setdefault(seen[0], name)
    return [begins[place] for place in sorted(begins)]
