"""A job's optimizer as a value: which torch.optim classes work, their arguments, and why the others don't. Pure.

    spec = rule("AdamW", ({"lr": 1e-3}, {"lr": 1e-3, "weight_decay": 0.0}))
    spec = rule_from_optimizer(optimizer)

A RuleSpec made here is canonical: every group has every argument of the class, defaults filled in, numbers as floats,
so two jobs with the same rule compare equal. Arguments with the value None (foreach, fused, adjust_lr_fn) are left out;
`differentiable` and `capturable` must be False and are left out. A None inside a tuple (Adafactor's first eps) is
encoded as -1.0, which torch itself refuses, so it is unambiguous.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardline.core.spec import Argument, RuleSpec
from shardline.errors import JobError, ProtocolError, nearest

ALLOWED: Mapping[str, bool] = {
    "SGD": True,
    "Adam": True,
    "AdamW": True,
    "Adamax": True,
    "Adagrad": True,
    "Adadelta": True,
    "ASGD": True,
    "NAdam": True,
    "RAdam": True,
    "RMSprop": True,
    "Rprop": True,
    "Muon": False,
    "Adafactor": False,
}
"""Classes of torch.optim that work; True if the rule is element-wise, so that a tensor may be cut anywhere."""

REFUSED: Mapping[str, str] = {
    "LBFGS": "it calls a closure that recomputes the loss, but a parameter server has no model",
    "SparseAdam": "it takes only sparse gradients, but gradients arrive dense; use AdamW or Adagrad",
}
"""Classes of torch.optim that can't work, and why."""

_OFF = ("differentiable", "capturable")
"""Switches for graphs through the optimizer; a parameter server records none."""

_NO_EPS = -1.0

_OWN: dict[str, tuple[str, ...]] = {}
"""Arguments of optimizers from outside torch, by the name of their rule, where this process has their class."""


@dataclass(frozen=True)
class _Parameter:
    """One argument of a class. kind: "number", "integer", "flag", "text" or "numbers"."""

    kind: str
    default: Any
    optional: bool
    length: int = 0


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class with this name. Raises JobError with the reason for a refused or unknown one."""
    if name in REFUSED:
        raise JobError(f"optimizer {name} can't run on parameter servers: {REFUSED[name]}")
    if name not in ALLOWED:
        raise JobError(
            f"optimizer {name!r} is not a torch.optim class that Shardline supports; use one of {_works()}"
            f"{nearest(name, ALLOWED)}"
        )
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return cls


def rule(
    name: str | type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]] = ({},), *, method: str = "torch"
) -> RuleSpec:
    """A validated, canonical RuleSpec; see the top of this module.

    groups: arguments of each parameter group, with the class's own names. method: the choice from
    shardline.update.RULES, which is checked later. Raises JobError for a class that doesn't work, no group, an unknown
    argument, a wrong type, or a value that torch refuses.
    """
    name = _class_name(name)
    if not groups:
        raise JobError(f"{name} has no parameter group; give at least one ({{}} for the defaults)")
    return RuleSpec(
        name=name, groups=tuple(_group(name, number, group) for number, group in enumerate(groups)), method=method
    )


def rule_from_optimizer(optimizer: torch.optim.Optimizer, *, method: str = "torch") -> RuleSpec:
    """The rule of a torch.optim optimizer with its current param_groups. Raises the same JobErrors as rule().

    Keys that are no argument of the class (such as a scheduler's "initial_lr", or a name) are left out, as torch
    ignores them. A learning rate in a tensor becomes a number.
    """
    name = _class_name(type(optimizer))
    known = (*_parameters(name), *_OFF)
    groups = [{key: value for key, value in group.items() if key in known} for group in optimizer.param_groups]
    if name == "Adagrad":
        # Adagrad fills its accumulators in the constructor, with the constructor's argument, whatever the group says.
        for group in groups:
            group["initial_accumulator_value"] = optimizer.defaults["initial_accumulator_value"]
    return rule(name, groups, method=method)


def is_own(optimizer: str | type[torch.optim.Optimizer]) -> bool:
    """Return whether a class is from outside torch, or a rule's name is that of one, such as "lion_pytorch.Lion"."""
    if isinstance(optimizer, str):
        return "." in optimizer
    return (
        isinstance(optimizer, type)
        and issubclass(optimizer, torch.optim.Optimizer)
        and getattr(torch.optim, optimizer.__name__, None) is not optimizer
    )


def own_group(name: str, number: int, defaults: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Argument]:
    """A canonical group of an optimizer from outside torch, with the arguments that its defaults have.

    Raises JobError for an argument that is no flag, text, number or tuple of numbers.
    """
    where = f"{name}, parameter group {number}"
    _OWN[name] = tuple(defaults)
    found: dict[str, Argument] = {}
    for key, default in defaults.items():
        value = group.get(key, default)
        if value is None and default is None:
            continue
        kind = _own_kind(value)
        if not kind:
            raise JobError(f"{where}: {key} is {value!r}; only flags, texts, numbers and tuples of numbers can be sent")
        if kind == "numbers":
            found[key] = tuple(_number(f"{where}: {key}", item) for item in value)
        else:
            found[key] = _number(f"{where}: {key}", value) if kind == "number" or key == "lr" else value
    if "lr" not in found:
        raise JobError(f"{where} has no lr; schedules and pages need one")
    return found


def _own_kind(value: Any) -> str:
    """The kind of an argument, as in _Parameter; "" for one that can't be sent."""
    for kind, types in (("flag", bool), ("text", str), ("integer", int), ("number", numbers.Real)):
        if isinstance(value, types):
            return kind
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return "number"
    if isinstance(value, tuple | list) and value and all(_own_kind(item) in ("integer", "number") for item in value):
        return "numbers"
    return ""


def torch_arguments(name: str, group: Mapping[str, Argument]) -> dict[str, Any]:
    """Keyword arguments for the class, from a canonical group."""
    arguments: dict[str, Any] = dict(group)
    if name == "Adafactor":
        first, second = arguments["eps"]
        arguments["eps"] = (None if first == _NO_EPS else first, second)
    return arguments


def hyper_numbers(name: str, group: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a param_group that may change from step to step, as in PushContext.hyper.

    Items of tuples have names such as "betas.0" (OneCycleLR changes them). Flags and texts are not included.
    """
    found: dict[str, float] = {}
    for key, parameter in _parameters_in(name, group).items():
        value = group.get(key)
        if parameter.kind in ("number", "integer") and value is not None:
            found[key] = float(value)
        elif parameter.kind == "numbers" and value is not None:
            found.update({f"{key}.{i}": _NO_EPS if item is None else float(item) for i, item in enumerate(value)})
    return found


def fixed_settings(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a param_group that can't change from step to step: flags, texts, and whether a number is given."""
    found = {key: group.get(key, False) for key in _OFF}
    for key, parameter in _parameters_in(name, group).items():
        value = group.get(key, parameter.default)
        numbers = parameter.kind in ("number", "integer", "numbers")
        found[key] = "a number" if numbers and value is not None else value
    return found


def momentum(group: Mapping[str, Argument]) -> float:
    """The momentum of a canonical group, the first of the betas in Adam's family; 0 if there is none."""
    betas = group.get("betas", (0.0,))
    assert isinstance(betas, tuple)
    return float(cast(float, group.get("momentum", 0.0))) or float(betas[0])


def with_hyper(name: str, group: Mapping[str, Argument], hyper: Mapping[str, float]) -> dict[str, Argument]:
    """A canonical group with some numbers replaced.

    Raises ProtocolError for a name that is no number of this rule, a value that is not finite, or a momentum for which
    RMSprop does not keep a state; nothing is changed then.
    """
    merged: dict[str, Argument] = dict(group)
    known = hyper_numbers(name, group)
    for key, value in hyper.items():
        if key not in known:
            raise ProtocolError(f"{key!r} is not a setting of {name} that can change; those are {', '.join(known)}")
        if not math.isfinite(value):
            raise ProtocolError(f"{key} of {name} is {value}; it must be finite")
        if name == "RMSprop" and key == "momentum" and (value == 0.0) != (known[key] == 0.0):
            raise ProtocolError(
                f"momentum of RMSprop can't change from {known[key]} to {value}: its buffer exists from the first "
                "step or never; start with a small momentum instead of 0"
            )
        base, _, index = key.partition(".")
        if index:
            items = merged[base]
            assert isinstance(items, tuple)
            at = int(index)
            merged[base] = (*items[:at], float(value), *items[at + 1 :])
        elif _parameters_in(name, group)[key].kind == "integer" and value == int(value):
            merged[key] = int(value)
        else:
            merged[key] = float(value)
    return merged


def _works() -> str:
    return ", ".join(ALLOWED)


def _class_name(name: str | type[torch.optim.Optimizer]) -> str:
    if isinstance(name, type):
        if getattr(torch.optim, name.__name__, None) is not name:
            raise JobError(
                f"{name.__module__}.{name.__qualname__} is not a class of torch.optim, and parameter servers run no "
                f"other code; use one of {_works()}"
            )
        return _class_name(name.__name__)
    optimizer_class(name)
    return name


def _parameters_in(name: str, group: Mapping[str, Any]) -> Mapping[str, _Parameter]:
    """Arguments of a class; of one from outside torch those that a group has."""
    if not is_own(name):
        return _parameters(name)
    return {
        key: _Parameter(kind=_own_kind(group[key]), default=group[key], optional=False)
        for key in _OWN.get(name, tuple(group))
        if key in group
    }


@functools.cache
def _parameters(name: str) -> Mapping[str, _Parameter]:
    """Arguments of a class, except the parameters and the switches that must stay off."""
    table = {}
    for key, parameter in inspect.signature(optimizer_class(name)).parameters.items():
        if key == "params" or key in _OFF:
            continue
        text = inspect.formatannotation(parameter.annotation)
        length = 0
        if text.startswith("tuple"):
            kind, length = "numbers", len(parameter.default)
        elif text.startswith("bool"):
            kind = "flag"
        elif text.startswith("str"):
            kind = "text"
        else:
            kind = "integer" if text == "int" else "number"
        optional = "None" in text and kind != "numbers"
        table[key] = _Parameter(kind=kind, default=parameter.default, optional=optional, length=length)
    return table


def _group(name: str, number: int, group: Mapping[str, Any]) -> Mapping[str, Argument]:
    """A canonical group; torch's own constructor validates the values."""
    where = f"{name}, parameter group {number}"
    table = _parameters(name)
    for key, value in group.items():
        if key in _OFF:
            if value is not False:
                raise JobError(f"{where}: {key} must be False, since parameter servers record no graph")
        elif key not in table:
            raise JobError(f"{where}: unknown argument {key!r}; {name} takes {', '.join(table)}{nearest(key, table)}")
    arguments: dict[str, Argument] = {}
    for key, parameter in table.items():
        value = _value(f"{where}: {key}", parameter, group.get(key, parameter.default))
        if value is not None:
            arguments[key] = value
    shape = (2, 2) if name == "Muon" else (2,)
    try:
        optimizer_class(name)([torch.nn.Parameter(torch.zeros(shape))], **torch_arguments(name, arguments))
    except (ValueError, RuntimeError, TypeError) as error:
        raise JobError(f"{where}: {error}") from None
    return arguments


def _value(where: str, parameter: _Parameter, value: Any) -> Argument:
    """The value in canonical form. Raises JobError for a wrong type."""
    if value is None and parameter.optional:
        return None
    if parameter.kind == "numbers":
        if not isinstance(value, (tuple, list)) or len(value) != parameter.length:
            raise JobError(f"{where} is {value!r}; it must be {parameter.length} numbers, such as {parameter.default}")
        holes = [item is None for item in parameter.default]
        return tuple(
            _NO_EPS if item is None and hole else _number(where, item) for item, hole in zip(value, holes, strict=True)
        )
    if parameter.kind == "number":
        return _number(where, value)
    expected = {"flag": bool, "text": str, "integer": int}[parameter.kind]
    if type(value) is not expected:
        words = {"flag": "True or False", "text": "a string", "integer": "a whole number"}[parameter.kind]
        raise JobError(f"{where} is {value!r}; it must be {words}")
    return cast(Argument, value)


def _number(where: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise JobError(f"{where} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise JobError(f"{where} is a whole number too large for a float") from None
    if math.isnan(number):
        raise JobError(f"{where} is NaN; it must be a number")
    return number
