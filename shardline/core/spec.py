"""What is trained, as values sent to all tasks: tensors, update rule, schedule, consistency, the job's identity.

Everything here is frozen and compares by value. shardline.rpc.messages.convert turns it into protobuf and back.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

import torch

from shardline.core.settings import Settings
from shardline.errors import JobError, TensorError

Argument = float | int | bool | str | tuple[float, ...] | None
"""One argument of a torch.optim class."""

Task = NewType("Task", str)
"""A task's name, such as "worker/3"."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
"""dtypes that a plan supports, by the name used in specs, manifests and errors."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Name of a torch dtype. Raises TensorError naming the tensor if the plan does not support it."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise TensorError(
            f"tensor {tensor!r} has dtype {dtype}, which Shardline doesn't support; use one of {', '.join(DTYPES)}"
        ) from None


def itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize


MAX_PRETRAINED = 1 << 20
"""Characters of a job's `pretrained`; of a larger one nothing is kept."""


class TensorKind(enum.Enum):
    PARAM = "param"
    """Updated by the rule."""
    FROZEN = "frozen"
    """requires_grad is False: set once, never updated."""
    BUFFER = "buffer"
    """Assigned from replica 0 each step (batch norm statistics); DistributedDataParallel's rule."""
    TABLE = "table"
    """Rows by id, of which a step reads and updates some: see core.rows. The first dimension is PARTS, not rows."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the model's state_dict."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind = TensorKind.PARAM
    group: int = 0
    """Parameter group of the rule; 0 for buffers and frozen parameters."""
    whole: bool = False
    """True if the rule needs the whole tensor, so it is never cut."""
    aliases: tuple[str, ...] = ()
    """Other state_dict names of the same storage (tied weights)."""
    fragment: int = 0
    """Part of the model that is exchanged by itself: at a time, see Cadence.fragments, where buffers and frozen
    parameters have 0; or by the workers of a stage, see shardline.division."""
    codec: str = ""
    """The codec of its gradients and parameters; "" = the job's."""
    part_of: str = ""
    """The state_dict name of the tensor that this is a part of, where workers share a layer; "" = it is whole."""
    part_dim: int = 0
    """The dimension along which that tensor is cut into equal parts."""
    part: int = 0
    """Number of this part, which is also the rank of the workers that compute with it."""
    parts: int = 0
    """Number of parts; 0 = it is whole."""
    rule: str = ""
    """Of a table: the update rule of its rows, see update.rows; "" of other tensors."""
    init: str = ""
    """Of a table: the values of rows without an update."""
    admit: str = ""
    """Of a table: which ids get a row, see update.rows; "" = all."""
    evict: str = ""
    """Of a table: which rows are removed; "" = none."""
    max_rows: int = 0
    """Of a table: rows at most; 0 = any number."""
    memory_rows: int = 0
    """Of a table: rows in the servers' memory, of which others are on disk; 0 = all."""
    place: str = field(default="", compare=False)
    """Servers that hold it, see core.places: PS or ALLREDUCE; "" = the chief chooses. It changes no step."""

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a 0-d tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row (index of the first dimension)."""
        count = 1
        for size in self.shape[1:]:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True)
class RuleSpec:
    """How parameters are updated: a class of torch.optim, its arguments per parameter group, and the rule over it."""

    name: str
    groups: tuple[Mapping[str, Argument], ...]
    method: str = "torch"
    """A choice from shardline.update.RULES; "torch" runs the class itself."""

    @property
    def label(self) -> str:
        """Name of the rule with its optimizer in errors."""
        return self.name if self.method.partition(":")[0] in ("torch", "own") else f"{self.method} over {self.name}"


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Learning-rate factor over steps; see shardline.schedule."""

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    step_size: int = 0
    gamma: float = 1.0
    final_factor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ConsistencySpec:
    """Mode, clipping and NaN policy."""

    mode: str = "sync"
    """The mode as CONSISTENCIES parses it, NAME or NAME:KEY=VALUE,...: "sync", "async"."""
    clip_norm: float = 0.0
    """Global gradient norm above which gradients are scaled down; 0 = off."""
    nan_policy: str = "stop"
    """"stop" the job at a NaN, or "skip" the step."""

    def __post_init__(self) -> None:
        if self.nan_policy not in ("stop", "skip"):
            raise JobError(f"nan_policy is {self.nan_policy!r}; it must be 'stop' or 'skip'")
        if not (self.clip_norm >= 0.0 and self.clip_norm < float("inf")):
            raise JobError(f"clip_norm is {self.clip_norm}; it must be a finite number >= 0 (0 = no clipping)")


@dataclass(frozen=True, kw_only=True)
class InnerSpec:
    """The optimizer that each worker runs by itself, under a cadence that trains locally."""

    rule: RuleSpec
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    """Learning-rate factor over steps of the job, which are rounds of local training."""
    clip_norm: float = 0.0
    """Global norm above which a replica's gradient is scaled down before its local step; 0 = off."""

    def __post_init__(self) -> None:
        if not (self.clip_norm >= 0.0 and self.clip_norm < float("inf")):
            raise JobError(f"clip_norm is {self.clip_norm}; it must be a finite number >= 0 (0 = no clipping)")


@dataclass(frozen=True, kw_only=True)
class JobSpec(Settings):
    """A job's identity: two tasks train the same job if these are equal.

    `replicas` is 1 in a mode whose updates come from one worker's gradients.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    rule: RuleSpec
    """What the servers run."""
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    consistency: ConsistencySpec = field(default_factory=ConsistencySpec)
    inner: InnerSpec | None = None
    """What the workers run; None unless the cadence trains locally. See shardline.fit.divide()."""
    best_metric: str = ""
    best_is_lowest: bool = False
    samples: int = 0
    """Length of a map-style data set; 0 if it is iterable or a script's own."""
    script: bool = False
    """Whether the user's own script drives the steps."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """In a pipeline: numbers of the workers of each stage; () = the chief chooses. See docs/pipelines.md."""
    follows_scores: bool = False
    """The learning rate follows the evaluator's scores; see shardline.core.scores."""
    pretrained: str = field(default="", compare=False)
    """How the model's own library makes it anew, see shardline.model; "" = not known. Not part of the identity:
    another version of the library writes it otherwise."""

    # The chief asks for these at every heartbeat, so they are looked up in the tensors once.

    @functools.cached_property
    def ranks(self) -> int:
        """Number of workers that share each layer; 1 if none does."""
        return max((tensor.parts for tensor in self.tensors), default=0) or 1

    @property
    def shares_layers(self) -> bool:
        """Whether several workers compute a layer together."""
        return self.ranks > 1

    @functools.cached_property
    def has_tables(self) -> bool:
        """Whether the model has embedding tables. Passes pull their rows, once the pull behind the last push ended."""
        return any(tensor.kind is TensorKind.TABLE for tensor in self.tensors)

    @functools.cached_property
    def fragments(self) -> int:
        return 1 + max(tensor.fragment for tensor in self.tensors)

    @functools.cached_property
    def tensor_codecs(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.codec for tensor in self.tensors} - {""}))


def flattened(job: JobSpec) -> dict[str, Any]:
    """A job's values by path, such as "rule.groups[0].lr"; tensors by name, so that their order doesn't matter."""
    found: dict[str, Any] = {}
    _flatten(job, "", found)
    return found


def _flatten(value: Any, path: str, out: dict[str, Any]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            if item.compare:
                _flatten(getattr(value, item.name), f"{path}.{item.name}" if path else item.name, out)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            _flatten(value[key], f"{path}.{key}", out)
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for index, item in enumerate(value):
            _flatten(item, f"{path}[{getattr(item, 'name', index)}]", out)
    elif isinstance(value, tuple) and value and isinstance(value[0], Mapping):
        for index, item in enumerate(value):
            _flatten(item, f"{path}[{index}]", out)
    else:
        out[path] = value.value if isinstance(value, enum.Enum) else value


def differences(ours: JobSpec, theirs: JobSpec, *, where: str = "in the job", limit: int = 5) -> list[str]:
    """Differences of two jobs, one short phrase each: "tensors[fc1.weight].shape: (10, 4) here, (10, 8) in the job".

    `ours` is the joining task's, `theirs` the cluster's, or that of `where`. At most `limit` phrases, then a count.
    """
    mine, other = flattened(ours), flattened(theirs)
    phrases = []
    for path in [*mine, *(path for path in other if path not in mine)]:
        here, there = mine.get(path, "absent"), other.get(path, "absent")
        if here != there:
            phrases.append(f"{path}: {here} here, {there} {where}")
    if len(phrases) > limit:
        phrases[limit:] = [f"and {len(phrases) - limit} more"]
    return phrases


def parts_of(tensor: TensorSpec, dim: int, count: int) -> tuple[TensorSpec, ...]:
    """A tensor cut into this many equal parts along a dimension, whose size is a multiple of it."""
    shape = list(tensor.shape)
    shape[dim] //= count
    return tuple(
        dataclasses.replace(
            tensor,
            name=f"{tensor.name}[{part}/{count}]",
            shape=tuple(shape),
            part_of=tensor.name,
            part_dim=dim,
            part=part,
            parts=count,
        )
        for part in range(count)
    )


def joined(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors of the state_dict: parts of one put together."""
    found = []
    for tensor in tensors:
        if not tensor.parts:
            found.append(tensor)
        elif tensor.part == 0:
            shape = list(tensor.shape)
            shape[tensor.part_dim] *= tensor.parts
            whole = TensorSpec(name=tensor.part_of, shape=tuple(shape), dtype=tensor.dtype, kind=tensor.kind)
            found.append(dataclasses.replace(whole, group=tensor.group, codec=tensor.codec))
    return tuple(found)


def span_of_part(tensor: TensorSpec) -> tuple[int, int]:
    """(first index, length) of a part along the dimension in which its tensor is cut."""
    length = tensor.shape[tensor.part_dim]
    return tensor.part * length, length


def names(tensors: Sequence[TensorSpec]) -> list[str]:
    return [tensor.name for tensor in tensors]
