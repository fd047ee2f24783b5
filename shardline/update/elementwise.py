"""Base of rules that compute each element independently: declared states, and slices combined into runs.

An example of a rule in its own file:

    @RULES.add
    @dataclass(frozen=True)
    class HeavyBall(ElementwiseRule):
        \"""Momentum of each worker's own gradients.\"""

        name: ClassVar[str] = "heavy-ball"
        needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER})
        momentum: float = 0.9

        def states(self, spec, group, dtype, device):
            return {"velocity": StateSpec(dtype=dtype, device=device, per_worker=True)}

        def make(self, site):
            return HeavyBallBucket(self, site, self.momentum)

    class HeavyBallBucket(ElementwiseBucketRule):
        def __init__(self, rule, site, momentum):
            super().__init__(rule, site)
            self._momentum = momentum

        def update(self, run, arguments, context):
            velocity = run.state("velocity")
            velocity.mul_(self._momentum).add_(run.gradient)
            run.values.sub_(velocity, alpha=arguments["lr"])
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardline.core.plan import padded
from shardline.core.push_context import PushContext
from shardline.core.spec import DTYPES, RuleSpec, TensorKind, TensorSpec
from shardline.errors import JobError
from shardline.update.base import (
    BucketRule,
    RuleState,
    Site,
    StateSpec,
    Update,
    UpdateRule,
    padding_positions,
    parse_state_key,
    state_key,
)


@dataclass(frozen=True)
class ElementwiseRule(UpdateRule):
    """Base of residents with an ElementwiseBucketRule: real floating-point tensors, cut anywhere."""

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        for tensor in tensors:
            if tensor.kind is not TensorKind.PARAM:
                continue
            if not 0 <= tensor.group < len(spec.groups):
                raise JobError(
                    f"{tensor.name!r} is in parameter group {tensor.group}, but the job has {len(spec.groups)}"
                )
            if not DTYPES[tensor.dtype].is_floating_point:
                raise JobError(f"{tensor.name!r} has dtype {tensor.dtype}; {self} updates floating-point tensors only")


class States:
    """Declared states of one bucket: flat tensors and numbers per slice, zeros until they are written.

    Used by one thread at a time. Keys: see state_key().
    """

    def __init__(self, owner: BucketRule, declared: Sequence[str]) -> None:
        """declared: names from owner.states that are kept here."""
        self._owner = owner
        self._declared = frozenset(declared)
        bucket = owner.site.bucket
        self._ends = [min(piece.offset + padded(piece.elements), bucket.elements) for piece in bucket.slices]
        self._tensors: dict[str, Tensor] = {}
        self._numbers: dict[str, list[float]] = {}

    def tensor(self, name: str, worker: str = "") -> Tensor:
        """The state itself: flat, in the bucket's layout."""
        state, key = self._owner.states[name], self._key(name, worker)
        if key not in self._tensors:
            length = self._owner.length_of(key)
            self._tensors[key] = torch.zeros(length, dtype=state.dtype, device=state.device)
        return self._tensors[key]

    def numbers(self, name: str, worker: str = "") -> list[float]:
        """The numbers themselves, one per slice."""
        key = self._key(name, worker)
        return self._numbers.setdefault(key, [0.0] * len(self._owner.site.bucket.slices))

    def _key(self, name: str, worker: str) -> str:
        # A shared state has the same key for every pusher.
        return state_key(name, worker if self._owner.states[name].per_worker else "")

    def workers(self) -> frozenset[str]:
        """Workers with state of their own."""
        return frozenset(parse_state_key(key)[1] for key in (*self._tensors, *self._numbers)) - {""}

    def drop(self, worker: str) -> None:
        for held in (self._tensors, self._numbers):
            for key in [key for key in held if parse_state_key(key)[1] == worker]:
                del held[key]

    def numbers_of_all(self, name: str) -> list[list[float]]:
        """Each worker's numbers under this name."""
        return [numbers for key, numbers in self._numbers.items() if parse_state_key(key)[0] == name]

    def runs(
        self,
        values: Tensor,
        *,
        gradient: Tensor | None = None,
        present: Sequence[bool] | None = None,
        worker: str = "",
    ) -> list[Run]:
        """Longest runs of neighbours that are present (None: all) and have equal numbers.

        values, gradient: the bucket's, flat. worker: whose states per worker the runs give.
        """
        held = list(self._numbers.values())
        return [
            Run(
                self,
                slices,
                slice(self._owner.site.bucket.slices[slices.start].offset, self._ends[slices.stop - 1]),
                values,
                values[:0] if gradient is None else gradient,
                worker,
            )
            for slices in list(neighbours(len(self._ends), present, lambda number: tuple(n[number] for n in held)))
        ]

    def owns(self, key: str) -> bool:
        return parse_state_key(key)[0] in self._declared

    def complete(self) -> None:
        """Create missing states, except those per worker."""
        for name in self._declared:
            state = self._owner.states[name]
            if not state.per_worker:
                _ = self.numbers(name) if state.scalar else self.tensor(name)

    def export(self, padding: Tensor) -> tuple[dict[str, Tensor], dict[str, tuple[float, ...]]]:
        """Copies on the CPU. padding: positions to set to zero."""
        tensors = {key: tensor.to("cpu", copy=True).index_fill_(0, padding, 0) for key, tensor in self._tensors.items()}
        return tensors, {key: tuple(numbers) for key, numbers in self._numbers.items()}

    def put(self, state: RuleState) -> None:
        """Replace everything by copies of the states that belong here."""
        device = self._owner.site.device
        self._tensors = {
            key: tensor.detach().to(device, copy=True) for key, tensor in state.tensors.items() if self.owns(key)
        }
        self._numbers = {key: list(numbers) for key, numbers in state.scalars.items() if self.owns(key)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())


def neighbours(
    count: int, present: Sequence[bool] | None, key: Callable[[int], object], apart: Sequence[bool] = ()
) -> Iterator[range]:
    """Longest runs of slices that are present (None: all) and have equal keys; one that is `apart` ends its run."""
    start, current = 0, None
    for number in range(count + 1):
        here = key(number) if number < count and (present is None or present[number]) else None
        if here != current or (number and apart and apart[number - 1]):
            if current is not None:
                yield range(start, number)
            start, current = number, here


class Run:
    """Neighbouring slices that are handled in one call: all have a gradient, and equal numbers.

    slices: their numbers. span: their elements in the bucket, padding included; values and gradient are those. The
    gradient is not to be changed, and empty where nothing is pushed.
    """

    def __init__(
        self, states: States, slices: range, span: slice, values: Tensor, gradient: Tensor, worker: str
    ) -> None:
        self._states = states
        self._worker = worker
        self.slices = slices
        self.span = span
        self.values = values[span]
        self.gradient = gradient[span]

    def state(self, name: str) -> Tensor:
        """The run's part of a state, to be changed in place; for a state per worker, the pusher's."""
        return self._states.tensor(name, self._worker)[self.span]

    def number(self, name: str) -> float:
        """The number shared by all slices of the run; for a number per worker, the pusher's."""
        return self._states.numbers(name, self._worker)[self.slices.start]

    def set_number(self, name: str, value: float) -> None:
        numbers = self._states.numbers(name, self._worker)
        numbers[self.slices.start : self.slices.stop] = [value] * len(self.slices)

    def workers_with(self, name: str) -> int:
        """How many workers have a number other than 0 under this name."""
        return sum(numbers[self.slices.start] != 0 for numbers in self._states.numbers_of_all(name))


class StatesBucketRule(BucketRule):
    """Base of bucket rules that keep States: those that are named, or all that the rule declares."""

    def __init__(self, rule: UpdateRule, site: Site, named: Iterable[str] | None = None) -> None:
        super().__init__(rule, site)
        self.kept = States(self, tuple(self.states if named is None else named))

    @property
    def workers(self) -> frozenset[str]:
        return self.kept.workers()

    def left(self, worker: str) -> None:
        """See BucketRule. A rule whose shared states contain the worker's part removes it first."""
        self.kept.drop(worker)

    def sent(self, worker: str, values: Tensor) -> None:
        """See BucketRule; for rules that have sent_states()."""
        self.kept.tensor("sent", worker).copy_(values)
        numbers = self.kept.numbers("was_sent", worker)
        numbers[:] = [1.0] * len(numbers)


class ElementwiseBucketRule(StatesBucketRule):
    """Base of bucket rules that compute each element independently."""

    def __init__(self, rule: UpdateRule, site: Site) -> None:
        super().__init__(rule, site)
        self._begun = [False] * len(site.bucket.slices)
        self._padding = padding_positions(site.bucket, site.device)

    @abstractmethod
    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        """Change run.values and the run's states in place. arguments: the group's, with this push's learning rate."""

    def carry_out(self, update: Update) -> None:
        values, context = update.values, update.context
        if update.source is not None:
            values.copy_(update.source)
        with torch.no_grad():
            for run in self.kept.runs(values, gradient=update.gradient, present=update.present, worker=context.task):
                self.update(run, update.arguments, context)
                self._begun[run.slices.start : run.slices.stop] = [True] * len(run.slices)
        self.clear_padding(values)

    def clear_padding(self, values: Tensor) -> None:
        if self._padding.numel():
            values.index_fill_(0, self._padding, 0)

    @property
    def begun(self) -> bool:
        return any(self._begun)

    def export(self) -> RuleState:
        if any(self._begun):
            self.kept.complete()
        return RuleState(*self.kept.export(self._padding.cpu()), tuple(self._begun))

    def put(self, state: RuleState) -> None:
        self.kept.put(state)
        self._begun = list(state.initialized)

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes


def sent_states(dtype: torch.dtype, device: torch.device) -> dict[str, StateSpec]:
    """What was sent to each worker: the values, and a flag per slice that says whether there are any."""
    return {
        "sent": StateSpec(dtype=dtype, device=device, per_worker=True),
        "was_sent": StateSpec(dtype=torch.float64, device=device, scalar=True, per_worker=True),
    }


def moved(run: Run) -> Tensor | None:
    """The parameters minus what the pusher was last sent, a new tensor; None if it was sent nothing."""
    return run.values - run.state("sent") if run.number("was_sent") else None
