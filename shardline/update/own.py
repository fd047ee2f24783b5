"""The rule "own": an optimizer from outside torch, which only processes that have its class can run.

The class comes with the job file or the script, so workers run it (apply="worker"), and servers keep its state for
checkpoints without knowing what it means: the rule's text says which states there are. What can be kept is a tensor of
the parameter's shape or a number per parameter, and no parameter's update may depend on another's.

    spec = own_rule(Lion(model.parameters(), lr=1e-4))
    spec.name == "own.Lion", spec.method == "own:keeps=exp_avg-same"
"""

from __future__ import annotations

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.spec import DTYPE_NAMES, DTYPES, Argument, RuleSpec
from shardline.errors import JobError
from shardline.host.process import torch_threads
from shardline.host.python_file import PREFIX
from shardline.update.arguments import is_own, optimizer_class, own_group, torch_arguments
from shardline.update.base import BucketRule, RuleState, Site, StateSpec, Update
from shardline.update.torch_optim import eager
from shardline.update.torch_optim.rule import Torch
from shardline.update.torch_optim.whole import WholeStates

NUMBERS: Mapping[str, tuple[type, torch.dtype]] = {"int": (int, torch.int64), "float": (float, torch.float64)}
"""Python's own numbers in a state, by their word in the rule's text."""
SHAPES = ((4, 3), (5,), (64, 65))
STATE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
NEEDS = "a job's optimizer keeps per parameter tensors of its shape and numbers, which it makes in its first step"

TEMPLATES: dict[str, torch.optim.Optimizer] = {}
"""Optimizers without parameters, by the name of their rule, in a process that has their class."""


@dataclass(frozen=True)
class Own(Torch):
    """The job's own optimizer, from outside torch; workers run it."""

    name: ClassVar[str] = "own"
    keeps: str = ""
    """NAME-KIND of each state, joined by "+"; KIND is "same" for a tensor of the parameter's shape and dtype, a dtype,
    "0d." before a dtype for a tensor that is a number, or a word of NUMBERS."""

    def check(self, spec: RuleSpec) -> None:
        """Raise JobError for what no worker could have sent."""
        if not is_own(spec.name):
            raise JobError(f"rule {self} is for optimizers from outside torch; {spec.name} is torch's")
        for number, group in enumerate(spec.groups):
            if not isinstance(group.get("lr"), float):
                raise JobError(f"{spec.name}, parameter group {number}: lr is {group.get('lr')!r}; it must be a number")
        self._kinds(torch.float32)

    def wants_whole(self, spec: RuleSpec, shape: Sequence[int]) -> bool:
        """See UpdateRule. Nobody knows here what the class does with a tensor."""
        return len(shape) > 0

    def _kinds(self, dtype: torch.dtype) -> dict[str, tuple[StateSpec, str]]:
        """Each state's kind for parameters of a dtype, and its word. Raises JobError for a text that says none."""
        found = {}
        for item in self.keeps.split("+") if self.keeps else ():
            name, _, word = item.partition("-")
            kind = word.removeprefix("0d.")
            at = dtype if kind == "same" else NUMBERS[kind][1] if kind in NUMBERS else DTYPES.get(kind)
            if not STATE_NAME.fullmatch(name) or at is None:
                raise JobError(f"rule {self}: {item!r} names no state")
            number = kind in NUMBERS or word != kind
            found[name] = StateSpec(dtype=at, device=torch.device("cpu"), scalar=number), word
        return found

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        return {name: kind for name, (kind, _) in self._kinds(dtype).items()}

    def python_numbers(self, dtype: torch.dtype) -> dict[str, type]:
        """The states that are Python's own numbers, by name."""
        return {name: NUMBERS[word][0] for name, (_, word) in self._kinds(dtype).items() if word in NUMBERS}

    def make(self, site: Site) -> BucketRule:
        return OwnBucketRule(self, site)


class OwnStates(WholeStates):
    """The optimizer of one bucket, in a process that has its class."""

    def __init__(self, rule: Own, site: Site, kinds: Mapping[str, StateSpec], arguments: Mapping[str, Any]) -> None:
        template = template_of(site.spec.name)

        def make(params: list[torch.nn.Parameter], **given: Any) -> torch.optim.Optimizer:
            return twin(template, [{"params": params, **given}])

        super().__init__(make, arguments, rule, site, kinds)
        self._numbers = rule.python_numbers(site.dtype)
        self._own = own_attributes(self._optimizer)

    def apply(self, update: Update, arguments: Mapping[str, Any]) -> None:
        super().apply(update, arguments)
        _check_unchanged(self._site.spec.name, self._optimizer, arguments, self._own)
        for parameter, spec in zip(self._parameters, self._specs, strict=True):
            for name, state in self._optimizer.state.get(parameter, {}).items():
                kind = self._kinds.get(name)
                if kind is None or (isinstance(state, Tensor) and not kind.scalar and state.shape != spec.shape):
                    about = f"of shape {tuple(state.shape)}" if isinstance(state, Tensor) else f"{state!r}"
                    raise JobError(
                        f"{self._site.spec.name} keeps a state {name!r} {about} for {spec.name!r} of shape "
                        f"{spec.shape}; {NEEDS}"
                    )

    def set_state(
        self, flat: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> None:
        super().set_state(flat, scalars, initialized)
        for state in self._optimizer.state.values():
            state.update({name: kind(state[name].item()) for name, kind in self._numbers.items() if name in state})


class OwnBucketRule(BucketRule):
    """The optimizer and its state for one bucket; on a server, which has no such class, only the state."""

    def __init__(self, rule: Own, site: Site) -> None:
        super().__init__(rule, site)
        self._own = rule
        self._held = RuleState({}, {}, (False,) * len(site.bucket.slices))
        """The state, as long as no optimizer has it."""
        self._running: OwnStates | None = None

    def carry_out(self, update: Update) -> None:
        if self._running is None:
            self._running = OwnStates(self._own, self.site, self.states, update.arguments)
            flat = {name: tensor.to(self.site.device) for name, tensor in self._held.tensors.items()}
            self._running.set_state(flat, self._held.scalars, self._held.initialized)
        # As with torch's whole-tensor rules: the bits of sums depend on the number of threads.
        with torch_threads(1):
            self._running.apply(update, update.arguments)

    def export(self) -> RuleState:
        running = self._running
        if running is None:
            return RuleState({name: one.clone() for name, one in self._held.tensors.items()}, *self._held[1:])
        tensors = {name: flat.cpu() for name, flat in running.flat.items()}
        scalars = {name: tuple(numbers) for name, numbers in running.scalars.items()}
        return RuleState(tensors, scalars, tuple(running.initialized))

    def put(self, state: RuleState) -> None:
        self._running, begun = None, any(state.initialized)
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.tensors.items()} if begun else {}
        self._held = RuleState(kept, state.scalars if begun else {}, state.initialized)

    @property
    def nbytes(self) -> int:
        return self._running.nbytes if self._running is not None else sum(t.nbytes for t in self._held.tensors.values())


def twin(template: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with all that another one's constructor has set, and these parameter groups."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__)
    made.__dict__.update(own_attributes(template))
    made.state, made.param_groups = defaultdict(dict), []
    for group in groups:
        made.add_param_group({**copy.deepcopy(template.defaults), **group})
    return made


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of what an optimizer keeps beside its state and its parameter groups."""
    return {name: copy.deepcopy(value) for name, value in vars(optimizer).items() if name not in torchs_attributes()}


@functools.cache
def torchs_attributes() -> frozenset[str]:
    """Attributes of torch's own optimizers. Asked when an optimizer from outside is there, as it makes one."""
    return frozenset((*vars(torch.optim.SGD([torch.zeros(1)])), "_opt_called"))


def _alike(one: Any, other: Any) -> bool:
    """Compare two attributes by their contents."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(map(_alike, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, bool | int | float | complex | str | bytes | set | frozenset):
        return bool(one == other)
    return _alike(vars(one), vars(other)) if hasattr(one, "__dict__") and not callable(one) else True


def _check_unchanged(
    name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Raise JobError if a step has changed the parameter group, or what the optimizer keeps beside its state."""
    found = optimizer.param_groups[0]
    changed = [f"{key!r} in its parameter group" for key, value in group.items() if not _alike(found[key], value)]
    now = {key: value for key, value in vars(optimizer).items() if key not in torchs_attributes()}
    # A flag may say that there was a step: one that begins with kept states sets it again, see _stepped.
    changed += [
        f"{key!r} as an attribute"
        for key in now
        if key not in own or not (_alike(now[key], own[key]) or (own[key] is False and now[key] is True))
    ]
    if changed:
        raise JobError(f"{name} keeps {changed[0]} from step to step, which checkpoints can't; {NEEDS}")


def optimizer_of(rule: RuleSpec, params: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """A job's optimizer over these parameters, by group. Raises JobError if its class is not in this process."""
    groups = [
        {"params": [*own], **torch_arguments(rule.name, group)} for own, group in zip(params, rule.groups, strict=True)
    ]
    if is_own(rule.name):
        return twin(template_of(rule.name), groups)
    # Adagrad takes its first accumulators from the constructor's arguments, not from the group's.
    return optimizer_class(rule.name)(groups, **torch_arguments(rule.name, rule.groups[0]))


def template_of(name: str) -> torch.optim.Optimizer:
    if name not in TEMPLATES:
        raise JobError(f"{name} can't run here: this process has no job file or script with its class")
    return TEMPLATES[name]


def own_rule(optimizer: torch.optim.Optimizer, method: str) -> RuleSpec:
    """The rule of an optimizer from outside torch, whose class this process can run from now on.

    method: the job's choice of a rule. Raises JobError for another one than "torch", and for an optimizer whose state
    or arguments can't be kept, or whose step needs more than gradients.
    """
    # The name of a class's rule, the same in all processes: "own.Lion" of a job file, "lion_pytorch.Lion".
    cls = type(optimizer)
    package = cls.__module__.partition(".")[0]
    name = f"{'own' if package == '__main__' or package.startswith(PREFIX) else package}.{cls.__qualname__}"
    if method != Torch.name:
        raise JobError(
            f"update rule {method} changes what servers do, and these can't run {name}, which is not torch's; leave "
            "`rule` out, or choose an optimizer of torch.optim"
        )
    template = twin(optimizer, [])
    groups = [own_group(name, number, optimizer.defaults, group) for number, group in enumerate(optimizer.param_groups)]
    kept = {_states_text(name, template, group) for group in groups}
    if len(kept) > 1:
        raise JobError(f"{name} keeps other states in one parameter group than in another; give the groups one form")
    spec = RuleSpec(name=name, groups=tuple(groups), method=str(Own(keeps=kept.pop())))
    TEMPLATES[name] = template
    return spec


def _states_text(name: str, template: torch.optim.Optimizer, group: Mapping[str, Argument]) -> str:
    """The states that a few steps on small tensors leave, as in Own.keeps."""
    shapes = [shape for shape in SHAPES if not _refuses(name, template, group, shape)]
    if not shapes:
        _stepped(name, template, group, SHAPES[:1], torch.float32)
    values, together = _stepped(name, template, group, shapes, torch.float32)
    alone = [_stepped(name, template, group, [shape], torch.float32) for shape in shapes]
    if not all(torch.equal(one, found[0][0]) for one, found in zip(values, alone, strict=True)):
        raise JobError(
            f"{name} updates a parameter by what other parameters have, or at random, but workers update the "
            "parameters one by one; choose another optimizer"
        )
    if not all(map(torch.equal, values, _stepped(name, template, group, shapes, torch.float32, again=True)[0])):
        raise JobError(f"{name} goes on otherwise when it begins again with the states it has kept; {NEEDS}")
    try:
        halves = _stepped(name, template, group, shapes, torch.bfloat16)[1]
    except JobError:
        halves = together
    words: dict[str, str] = {}
    for shape, state, half in zip(shapes, together, halves, strict=True):
        for key, item in state.items():
            word = _word(item, half.get(key), shape)
            if not word or not STATE_NAME.fullmatch(str(key)) or words.setdefault(str(key), word) != word:
                tensor = isinstance(item, Tensor)
                about = f"of shape {tuple(item.shape)} in {str(item.dtype)[6:]}" if tensor else repr(item)
                raise JobError(f"{name} keeps a state {key!r} {about} for a parameter of shape {shape}; {NEEDS}")
    return "+".join(f"{key}-{word}" for key, word in sorted(words.items()))


def _word(item: Any, half: Any, shape: tuple[int, ...]) -> str:
    """The kind of a state in the rule's text; "" if it can't be kept. half: the same of a bfloat16 parameter."""
    if isinstance(item, Tensor) and item.dtype in DTYPE_NAMES:
        follows = isinstance(half, Tensor) and item.dtype is torch.float32 and half.dtype is torch.bfloat16
        word = "same" if follows else DTYPE_NAMES[item.dtype]
        return word if item.shape == shape else f"0d.{word}" if item.dim() == 0 else ""
    return next((word for word, (kind, _) in NUMBERS.items() if type(item) is kind), "")


def _refuses(name: str, template: torch.optim.Optimizer, group: Mapping[str, Argument], shape: tuple[int, ...]) -> bool:
    try:
        _stepped(name, template, group, [shape], torch.float32)
    except JobError:
        return True
    return False


def _stepped(
    name: str,
    template: torch.optim.Optimizer,
    group: Mapping[str, Argument],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    *,
    again: bool = False,
) -> tuple[list[Tensor], list[dict[Any, Any]]]:
    """Values and states of parameters of these shapes after two steps; again: with a new optimizer for the second."""
    params = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in shapes]
    try:
        optimizer = twin(template, [{"params": params, **group}])
        before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        own = own_attributes(optimizer)
        for sign in (1.0, -0.5):
            for parameter in params:
                parameter.grad = torch.linspace(-1.0, sign, parameter.numel(), dtype=dtype).reshape(parameter.shape)
            eager.step(optimizer)
            if again and sign > 0:
                states = optimizer.state
                optimizer = twin(template, [{"params": params, **group}])
                optimizer.state.update(states)
    except Exception as error:
        raise JobError(f"{name} can't step with gradients alone: {type(error).__name__}: {error}") from error
    after = optimizer.param_groups[0]
    _check_unchanged(name, optimizer, {**{key: None for key in after if key != "params"}, **before}, own)
    return [parameter.detach() for parameter in params], [dict(optimizer.state[one]) for one in params]
