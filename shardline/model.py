"""A model's tensors for the plan: parameters, tied names, frozen parameters, buffers."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardline.core.settings import REFUSE
from shardline.core.spec import MAX_PRETRAINED, RuleSpec, TensorKind, TensorSpec, dtype_name
from shardline.errors import JobError, MismatchError
from shardline.nn import EmbeddingTable, FetchedRows, FetchRows, tables_of
from shardline.update import wants_whole
from shardline.update.rows.turnover import Always, Never


def model_tensors(
    model: nn.Module, groups: Sequence[Mapping[str, Any]] | None = None, *, rule: RuleSpec | None = None
) -> tuple[TensorSpec, ...]:
    """The tensors of a model for the plan: parameters in named_parameters order, then persistent buffers.

    groups: the optimizer's param_groups; None = all trainable parameters in one group. A parameter that requires no
    gradient, or is in no group, is FROZEN: torch wouldn't update it either. Tied weights are one tensor, under their
    first name, with the others as aliases. Non-persistent buffers and extra state are not tensors of a state_dict and
    are left out: each process has its own.
    rule: decides what must not be cut; None = nothing.

    Raises JobError, naming the tensor, if the model has nothing to train, contains a sparse, quantized, meta or not yet
    initialised tensor, one made under torch.inference_mode(), or two different tensors that overlap in memory, or if a
    group has a parameter that is not in the model; TensorError for an unsupported dtype.
    """
    grouped = [
        (number, parameter)
        for number, group in enumerate(groups if groups is not None else [{"params": model.parameters()}])
        for parameter in parameters_of(group)
    ]
    group_of = {id(parameter): number for number, parameter in grouped}
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    _check_grouped(grouped, tensors)
    # Not by type: tensors that the user names need not be nn.Parameters.
    parameters = {id(tensor) for tensor in model.parameters()}
    tables = {id(table.placeholder): table for table in tables_of(model).values()}
    specs = []
    for key, (name, *aliases) in names.items():
        tensor = tensors[key]
        if (table := tables.get(key)) is not None:
            specs.append(table_spec(table))
            continue
        _check_storable(name, tensor)
        kind = TensorKind.BUFFER
        if key in parameters:
            kind = TensorKind.PARAM if tensor.requires_grad and key in group_of else TensorKind.FROZEN
        shape = tuple(tensor.shape)
        specs.append(
            TensorSpec(
                name=name,
                shape=shape,
                dtype=dtype_name(tensor.dtype, name),
                kind=kind,
                group=group_of[key] if kind is TensorKind.PARAM else 0,
                whole=kind is TensorKind.PARAM and rule is not None and wants_whole(rule, shape),
                aliases=tuple(aliases),
            )
        )
    if not any(spec.kind in (TensorKind.PARAM, TensorKind.TABLE) for spec in specs):
        frozen = sum(spec.kind is TensorKind.FROZEN for spec in specs)
        reason = f" ({frozen} parameters are frozen or in no parameter group)" if frozen else ""
        raise JobError(f"the model has no parameters that require a gradient{reason}, so there is nothing to train")
    check_overlap([(names[key][0], tensor) for key, tensor in tensors.items() if key not in tables])
    return tuple(specs)


def table_spec(table: EmbeddingTable) -> TensorSpec:
    return TensorSpec(
        name=table.name,
        shape=tuple(table.placeholder.shape),
        dtype="float32",
        kind=TensorKind.TABLE,
        rule=table.rule,
        init=table.init,
        admit="" if table.admit == Always.name else table.admit,
        evict="" if table.evict == Never.name else table.evict,
        max_rows=table.max_rows or 0,
        memory_rows=table.memory_rows or 0,
    )


def check_extra_state(model: nn.Module, choice: str) -> None:
    """Raise JobError, naming the module, for a model with extra state. choice: see Settings.extra_state."""
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if names and choice == REFUSE:
        raise JobError(
            f"module {names[0]!r}{f' and {len(names) - 1} more have' if len(names) > 1 else ' has'} extra state "
            "(get_extra_state), which a job's checkpoints don't keep, so that it would begin anew after a restart; "
            "keep it in a buffer, or choose extra_state='unsaved' if it may be lost"
        )


class Owners:
    """Finds a model's tensors by owner and name, and notices when the user's code has put others in their place.

    assignable: the model's persistent buffers may be assigned anew, `self.mean = 0.9 * self.mean + ...`; else that is
    refused.
    """

    def __init__(self, model: nn.Module, *, assignable: bool = True) -> None:
        self._model = model
        self._assignable = assignable
        self._names = dict(named_tensors(model))
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._look()

    def _look(self) -> None:
        """Remember which objects the modules hold."""
        self._modules = list(self._model.modules())
        self._held = [*self._objects()]
        self._sizes = self._counts()
        self._buffers = [(table, key, buffer) for _, table, key, buffer in persistent_buffers(self._model)]

    def _tables(self) -> Iterator[dict[str, Any]]:
        return itertools.chain(map(_PARAMETERS, self._modules), map(_MODULES, self._modules))

    def _objects(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._tables()))

    def _counts(self) -> list[int]:
        return [*map(len, self._tables()), *map(len, map(_BUFFERS, self._modules))]

    @property
    def changed(self) -> bool:
        """True if an object is new or gone. Takes about a microsecond per module and half of one per tensor."""
        return not (
            self._counts() == self._sizes
            and all(map(operator.is_, self._objects(), self._held))
            and all(table.get(key) is buffer for table, key, buffer in self._buffers)
        )

    def put_back(self) -> None:
        """Have the modules hold the buffers of the start again, without the values that were assigned since."""
        for table, key, buffer in self._buffers:
            if table.get(key) is not buffer:
                table[key] = buffer

    def settle(self, when: str) -> None:
        """Move the values of buffers that were assigned anew into those of the start, which the modules hold again.

        when: for the message, such as "step 5". Raises JobError, naming the tensor, if a parameter was replaced, or a
        tensor is new, gone or renamed, or if a buffer has another shape, dtype or device.
        """
        if not self.changed:
            return
        now = dict(named_tensors(self._model))
        for name, tensor in self._names.items():
            if name not in now:
                raise JobError(f"{when}: {self._gone(name, now)}")
            if now[name] is not tensor and name in self._parameters:
                raise JobError(
                    f"{when}: the model has another object as parameter {name!r} than the one that is trained "
                    f"(replaced, or tied to another parameter); do that {BEFORE}, or write the values in place"
                )
        for name in now.keys() - self._names.keys():
            raise JobError(
                f"{when}: {name!r} is new in the model, so no server has it and nobody trains it; add it {BEFORE}"
                + ("" if isinstance(now[name], nn.Parameter) else ", or register the buffer with persistent=False")
            )
        assigned: dict[str, torch.Tensor] = {}
        for name, tensor in self._names.items():
            if now[name] is not tensor:
                self._check_assigned(name, now, when)
                assigned[name] = now[name]
        with torch.no_grad():
            for name, value in assigned.items():
                # It may be a view of what it replaces.
                self._names[name].copy_(value.detach().clone())
        for name, table, key, _ in persistent_buffers(self._model):
            table[key] = self._names[name]
        self._look()

    def _gone(self, name: str, now: Mapping[str, torch.Tensor]) -> str:
        held = self._names[name]
        called = next((other for other, tensor in now.items() if tensor is held and other not in self._names), None)
        what = f"is now called {called!r} (pruned, parametrized or wrapped)" if called else "is no longer in the model"
        return f"{name!r} {what}, but checkpoints have the tensors that the model began with; change the model {BEFORE}"

    def _check_assigned(self, name: str, now: Mapping[str, torch.Tensor], when: str) -> None:
        """Raise JobError for a buffer whose new value can't be kept in the old one."""
        value, held = now[name], self._names[name]
        if not self._assignable:
            raise JobError(
                f"{when}: buffer {name!r} was assigned anew, which stages of a pipeline can't follow; write its value "
                "in place, with .copy_()"
            )
        for other, tensor in self._names.items():
            if tensor is held and now[other] is not value:
                raise JobError(
                    f"{when}: buffers {name!r} and {other!r} were one tensor and are two now; assign both, or write "
                    "in place, with .copy_()"
                )
        if value.requires_grad:
            raise JobError(
                f"{when}: buffer {name!r} was assigned a value that carries the graph of this pass; assign .detach() "
                "of it"
            )
        if (value.shape, value.dtype, value.device) != (held.shape, held.dtype, held.device):
            raise JobError(
                f"{when}: buffer {name!r} was assigned a value of {described(value)}, but its checkpoints have "
                f"{described(held)}; keep shape, dtype and device, or register the buffer with persistent=False"
            )


_PARAMETERS, _MODULES, _BUFFERS = map(operator.attrgetter, ("_parameters", "_modules", "_buffers"))
BEFORE = "before training begins (in the model function of a job file, before attach() in a script)"
"""When a model may be changed, in messages."""


def described(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


_WAS_SPARSE = "_shardline_sparse"


def make_gradients_dense(model: nn.Module) -> None:
    """Set `sparse` of layers to False, so that their gradients are dense; sparse_weights() still knows them."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.sparse = False
            setattr(module, _WAS_SPARSE, True)


def sparse_weights(model: nn.Module) -> list[str]:
    """Names of the weights of layers that were made with `sparse=True`: their gradients are zeros but in a few rows."""
    layers = {id(module.weight) for module in model.modules() if hasattr(module, _WAS_SPARSE)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in layers]


def named_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by their first names, in the order of model_tensors; not copies."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


@torch.no_grad()
def load_values(model: nn.Module, tensors: Mapping[str, torch.Tensor], rows: FetchRows) -> None:
    """Load a checkpoint's parameters and buffers into a model of the same job, in place, including tied weights.

    rows: the checkpoint's; the model's tables read there from now on.
    Raises MismatchError, naming the tensor, if the model's differs; nothing is changed then.
    """
    tables = tables_of(model)
    own = {name: value for name, value in named_values(model).items() if name not in tables}
    for name, target in own.items():
        if name not in tensors:
            raise MismatchError(f"the checkpoint has no tensor {name!r}, but the model has; is it from another job?")
        value = tensors[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise MismatchError(
                f"tensor {name!r} is {value.dtype} {tuple(value.shape)} in the checkpoint, {target.dtype} "
                f"{tuple(target.shape)} in the model; is it from another job?"
            )
        if target.is_meta:
            raise MismatchError(f"tensor {name!r} of the model is on meta, without memory; make the model on a device")
    for name, target in own.items():
        target.copy_(tensors[name])
    for table in tables.values():
        table.source = FetchedRows(rows)


def parameters_of(group: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Parameters of one group in any form that torch accepts: tensors, or (name, tensor)."""
    params = group["params"]
    for item in [params] if isinstance(params, torch.Tensor) else params:
        yield item[1] if isinstance(item, tuple) else item


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter, then of every persistent buffer; tied ones under each of their names.

    The model's own tensors, as in its state_dict; then of every table what stands for its rows.
    """
    yield from model.named_parameters(remove_duplicate=False)
    for name, _, _, buffer in persistent_buffers(model):
        yield name, buffer
    for name, table in tables_of(model).items():
        yield name, table.placeholder


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """(name, table of the module, key in it, buffer) of every persistent buffer."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, module._buffers, key, buffer


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise JobError(
            f"{name!r} is not initialised yet (a lazy module); run the model once on a batch inside the model factory"
        )
    if tensor.is_meta:
        raise JobError(f"{name!r} is on the meta device and has no values; build the model on the CPU or a GPU")
    if tensor.is_inference():
        raise JobError(
            f"{name!r} was made under torch.inference_mode(), so torch refuses to write to it; make it outside, or use "
            "torch.no_grad()"
        )
    if tensor.is_quantized:
        raise JobError(f"{name!r} is quantized ({tensor.dtype}); Shardline trains unquantized tensors")
    if tensor.layout != torch.strided:
        raise JobError(f"{name!r} has layout {tensor.layout}; Shardline supports dense (strided) tensors")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise JobError(f"{name!r} is an expanded view whose elements share memory; store .contiguous() of it")


def _check_grouped(grouped: Sequence[tuple[int, torch.Tensor]], tensors: Mapping[int, torch.Tensor]) -> None:
    """Refuse a parameter of a group that is no tensor of the model: nobody would train it."""
    for number, parameter in grouped:
        if parameter.requires_grad and id(parameter) not in tensors:
            raise JobError(
                f"parameter group {number} has a parameter of shape {tuple(parameter.shape)} that is not in the model, "
                "so no server would train it; make it a parameter of the model, such as model.temperature = "
                "nn.Parameter(...), which the loss reads from there"
            )


@dataclass(frozen=True)
class _Span:
    """A tensor's memory: bytes [start, end), in which elements of other tensors may lie too."""

    device: str
    start: int
    end: int
    name: str
    tensor: torch.Tensor


def check_overlap(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise JobError for two tensors that share elements: an update of one would silently change the other.

    Views that share a storage, but no element of it, are fine: side by side as in cuDNN's recurrent layers, or
    interleaved as the columns of a fused matrix.
    """
    spans = []
    for name, tensor in named:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            end = start + (last + 1) * tensor.element_size()
            spans.append(_Span(str(tensor.device), start, end, name, tensor))
    spans.sort(key=lambda span: (span.device, span.start, span.end))
    together: list[_Span] = []
    for span in spans:
        if together and (span.device != together[0].device or span.start >= max(other.end for other in together)):
            together.clear()
        if together and _overlap(together, span):
            other = next(other for other in together if _overlap([other], span))
            raise JobError(
                f"{other.name!r} and {span.name!r} are different tensors that share memory; tie weights by assigning "
                "the same Parameter object to both, or make one a copy with .clone()"
            )
        together.append(span)


def _overlap(others: Sequence[_Span], new: _Span) -> bool:
    """Return whether a tensor shares an element with one of the others, by a map of their memory."""
    spans = [*others, new]
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    unit = math.gcd(*(span.tensor.element_size() for span in spans), *(span.start - first for span in spans))
    taken = torch.zeros((last - first) // unit, dtype=torch.bool)

    def part(span: _Span) -> torch.Tensor:
        units = span.tensor.element_size() // unit
        strides = [stride * units for stride in span.tensor.stride()]
        return taken.as_strided((*span.tensor.shape, units), (*strides, 1), (span.start - first) // unit)

    for other in others:
        part(other).fill_(True)
    return bool(part(new).any())


def pretrained(model: nn.Module | Mapping[str, Any]) -> str:
    """JSON with the model's class and configuration, and those of its adapters by name; "" for any other model."""
    adapters: Mapping[str, Any] = {}
    base: Any = model
    if _is_a(model, "peft.", "PeftModel"):
        adapters, base = base.peft_config, base.get_base_model()
    if not _is_a(base, "transformers.", "PreTrainedModel"):
        return ""
    found = {
        "model": type(base).__name__,
        "config": json.loads(base.config.to_json_string(use_diff=False)),
        "adapters": {name: config.to_dict() for name, config in adapters.items()},
    }
    text = json.dumps(found, sort_keys=True, default=_plain)
    return text if len(text) <= MAX_PRETRAINED else ""


def _is_a(value: object, package: str, name: str) -> bool:
    """Find the class by its name and package, which need not be installed, among those of the value."""
    return any(kind.__name__ == name and kind.__module__.startswith(package) for kind in type(value).__mro__)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
