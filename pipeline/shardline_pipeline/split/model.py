"""A model of any form, in stages."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardline.core.parcel import pack, unpack
from shardline.core.spec import TensorKind, TensorSpec
from shardline.core.tensor_bytes import same_bits
from shardline.errors import JobError, calling
from shardline_pipeline.hosts import hosts_of
from shardline_pipeline.split.trace import SHARED, EmptyStagesError, Inputs, Name, Traced, trace
from shardline_pipeline.staged import StagedModel, wanted_stages

if TYPE_CHECKING:
    from shardline_pipeline.partition.profile import Profile


class Split(StagedModel):
    """A model in stages; made by Pipeline.split(), which see.

    It shares the modules, parameters and buffers of the model, and their names. In one process the model itself runs;
    stages run what was traced of it, with the same parameters and buffers. Tracing waits until stages are asked for,
    and is repeated after a move to another device, and between training and evaluation.
    """

    cuts_option = "Pipeline.split: cuts"

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        example_kwargs: Mapping[str, Any],
        cuts: str | Sequence[str],
        workers: Sequence[int | Sequence[int]],
    ) -> None:
        super().__init__()
        # Not as a module of this one, which would change all names.
        self.__dict__["whole"] = model
        self.training = model.training
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        given = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        self._example = self._bound(given, dict(example_kwargs))
        self._traced: Traced | None = None
        self._traced_for: Any = None
        self._cuts: tuple[str, ...] | None = None
        self._starts: tuple[int, ...] = ()
        if isinstance(cuts, str):
            self.automatic = cuts
            self.hosts = hosts_of(workers, wanted_stages(cuts, self.cuts_option) or len(workers))
        else:
            self._cut(cuts)
            self.hosts = hosts_of(workers, self.num_stages)

    def _cut(self, cuts: Sequence[str]) -> None:
        modules = dict(self.whole.named_modules())
        for cut in cuts:
            if not cut or cut not in modules or cuts.count(cut) > 1:
                raise JobError(
                    f"Pipeline.split: cuts {list(cuts)}: {cut!r} does not begin a stage; give names of the model's "
                    f"modules, each once, such as {', '.join(map(repr, list(modules)[1:6]))}"
                )
        self._cuts, self._traced = tuple(cuts), None

    def in_layers(self) -> nn.Sequential:
        return Units(self)

    def begin_with(self, layers: Sequence[int], profile: Profile) -> None:
        self._cut([profile.module(number) for number in layers])
        self._starts, self.profile = tuple(layers), profile

    def span(self, stage: int) -> range:
        assert self.profile is not None
        ends = (0, *self._starts, len(self.profile.layers))
        return range(ends[stage], ends[stage + 1])

    @property
    def cuts(self) -> tuple[str, ...]:
        """Modules with which a stage begins, in any order. Raises JobError where build_model() has yet to find them."""
        if self._cuts is None:
            raise self._unsettled()
        return self._cuts

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.whole.training = self.training
        return self.whole(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "whole" not in self.__dict__:
                raise
            return getattr(self.__dict__["whole"], name)

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    def run(self, stage: int, *inputs: Any, **named: Any) -> Any:
        traced = self._trace()
        values = (
            self._inputs(traced, inputs, named) if stage == 0 else dict(zip(traced.handed[stage], *inputs, strict=True))
        )
        part = traced.parts[stage]
        own = dict([*self.whole.named_parameters(), *self.whole.named_buffers()])
        for name in part.tensors.values():
            if traced.owners[name] == stage:
                values[SHARED + name] = own[name]
        tensors = {inside: values[SHARED + name] for inside, name in part.tensors.items()}
        takes = tuple(values[arg] if isinstance(arg, Name) else arg for arg in part.takes)
        returned = functional_call(part.module, tensors, takes, tie_weights=False)
        values.update(zip(part.gives, returned if part.several else (returned,), strict=True))
        if stage < self.num_stages - 1:
            return tuple(values[name] for name in traced.handed[stage + 1])
        outputs = [values[one] if isinstance(one, Name) else one for one in traced.outputs]
        return pytree.tree_unflatten(outputs, traced.form)

    @property
    def traced(self) -> Traced:
        return self._trace()

    def cut_at(self, cuts: Sequence[str]) -> Split:
        return Split(self.whole, self._example[0], self._example[1], cuts, ())

    def run_example(self) -> Any:
        return self.whole(*self._example[0], **self._example[1])

    def stage_of_tensor(self, name: str) -> int:
        """The first stage that uses a tensor, which hands it to others; 0 for what no stage uses."""
        return self._trace().owners.get(name, 0)

    def where(self, stage: int) -> str:
        starts = ("its beginning", *map(repr, self._trace().starts))
        ends = (*map(repr, self._trace().starts), "its end")
        return f"stage {stage}, the {type(self.whole).__name__} from {starts[stage]} to {ends[stage]}"

    def end_of(self, stage: int) -> str:
        return f"what is before {self._trace().starts[stage]!r}"

    def staged(self, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        owners = self._trace().owners
        unused = [one.name for one in tensors if one.kind is TensorKind.PARAM and one.name not in owners]
        if unused:
            names = f"{', '.join(map(repr, unused[:5]))}{' and others' if len(unused) > 5 else ''}"
            raise JobError(
                f"Pipeline.split: nothing that the {type(self.whole).__name__} computes with the example inputs uses "
                f"{names}, so no stage can train it; freeze it with requires_grad_(False), or remove it"
            )
        return super().staged(tensors)

    # Inputs

    def _bound(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> Inputs:
        try:
            found = inspect.signature(self.whole.forward).bind(*given, **named)
        except TypeError as error:
            raise JobError(
                f"Pipeline.split: {type(self.whole).__name__}.forward() was called wrongly: {error}"
            ) from error
        return found.args, found.kwargs

    def _inputs(self, traced: Traced, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        found, form = pytree.tree_flatten(self._bound(given, named))
        expected, expected_form = pytree.tree_flatten(self._example)
        if form != expected_form or list(map(_kind, found)) != list(map(_kind, expected)):
            raise JobError(
                f"loss(model, batch) calls the model with {_shown(found)}, but its stages were traced with "
                f"{_shown(expected)}; give Pipeline.split example inputs of the shapes that one microbatch has, "
                "batch_size first"
            )
        return dict(zip(traced.inputs, found, strict=True))

    # Tracing

    def _trace(self) -> Traced:
        self.whole.training = self.training
        device = next(iter(self.whole.parameters())).device
        key = (device, [module.training for module in self.whole.modules()])
        if self._traced is None or key != self._traced_for:
            args, named = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self._example)
            traced = trace(self.whole, (args, named), self.cuts)
            self._traced, self._traced_for = traced, key
            self._check_bits((args, named))
        return self._traced

    def _check_bits(self, inputs: Inputs) -> None:
        """Refuse what was traced if it does something else than the model, once, with the example inputs."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.whole.named_buffers()}
        device = next(iter(self.whole.parameters())).device
        cuda = device.type == "cuda"
        seen = []
        what = f"the {type(self.whole).__name__}, with the example inputs,"
        with torch.random.fork_rng([device] if cuda else []), calling(what):
            for stages in (False, True):
                torch.manual_seed(0)
                output = self._by_stages(inputs) if stages else self.whole(*inputs[0], **inputs[1])
                after = {name: buffer.detach().clone() for name, buffer in self.whole.named_buffers()}
                leaves = [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor)]
                seen.append((leaves, after, torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()))
                with torch.no_grad():
                    for name, buffer in self.whole.named_buffers():
                        buffer.copy_(buffers[name])
        (ours, our_buffers, our_state), (theirs, their_buffers, their_state) = seen
        other = ["outputs"] if not all(map(same_bits, ours, theirs)) else []
        other += [f"buffer {name!r}" for name in buffers if not same_bits(our_buffers[name], their_buffers[name])]
        other += ["random numbers"] if not torch.equal(our_state, their_state) else []
        if other:
            raise JobError(
                f"Pipeline.split: the stages of the {type(self.whole).__name__} have other {', '.join(other)} than the "
                "model itself, so training would not have the bits of one process; list its layers instead: "
                "Pipeline([...], stages=...)"
            )

    def _by_stages(self, inputs: Inputs) -> Any:
        with calling(f"{self.where(0)}, with the example inputs,"):
            returned = self.run(0, *inputs[0], **inputs[1])
        for stage in range(1, self.num_stages):
            values, places = pack(returned, stage - 1, self.end_of(stage - 1))
            leaves = [value.detach().clone().requires_grad_(value.requires_grad) for value in values]
            with calling(f"{self.where(stage)}, with the example inputs,"):
                returned = self.run(stage, unpack(leaves, places))
        return returned


def _kind(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)
        for value in values
    )


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
    """A split model as a sequence of parts, each from a module with which a stage can begin up to the next.

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
    """Cut the model where it begins something: what it computes for nothing is in no trace."""
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
