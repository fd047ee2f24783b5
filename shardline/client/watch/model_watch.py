"""The user's model, looked at in each step by owner and name: what has a meaning counts, what has none is refused.

Buffers that were assigned anew keep their values, parameters with other memory are followed there. Parameters belong to
the servers: what this process writes into one would be lost at the next pull, or stay here alone. It may be undone
before the step's gradients are sent, as sharpness-aware optimizers and evaluations with averaged weights do.

Writes are noticed by torch's counters. These don't see writes through `p.data`, so in some steps digests of all values
are compared: those of a habit (weight clipping) are found in the first steps, those that last within EVERY.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardline.client.exchange.shard_exchange import Interrupted, Restart, Stopped
from shardline.client.layout import ModelLayout
from shardline.core.spec import TensorKind
from shardline.core.tensor_bytes import same_bits
from shardline.errors import JobError, UnreachableError
from shardline.model import BEFORE, Owners, check_overlap, described, parameters_of

log = logging.getLogger("shardline.client")

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
EVERY = 64
"""Values are compared by digest in the first two steps and then in one of so many: half a percent of the time."""


class ModelWatch:
    """Looks at one model. Used by the computing thread.

    model: the user's, or tensors by name. values: its tensors by first name. groups: of the optimizer. script: whose
    loop is the user's own. divided: workers have parts of the model, whose passes put other buffers into it.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        groups: Iterable[Mapping[str, Any]],
        *,
        script: bool,
        divided: bool,
    ) -> None:
        self._owners = Owners(model, assignable=not divided) if isinstance(model, nn.Module) else None
        self._divided = divided
        grouped = {id(parameter) for group in groups for parameter in parameters_of(group)}
        names = dict(model.named_parameters() if isinstance(model, nn.Module) else model)
        self._frozen = {
            name: values[name]
            for name in names
            # The groups of a job file have no frozen parameters, even if its author would train them later.
            if name in values and not values[name].requires_grad and (not script or id(values[name]) in grouped)
        }
        self._layout: ModelLayout | None = None
        self._numbers: list[int] = []
        """Parameters, by number in the plan."""
        self._counted: set[int] = set()
        """Those whose counter is their own."""
        self._constant: dict[int, int] = {}
        """Digests of parameters that no pull writes to."""
        self._digests: dict[int, int] = {}
        """Digests of this step's values, of other parameters."""
        self._compared: dict[int, tuple[int, int]] = {}
        """torch's counter and the digest of these, when values of a step were last compared."""
        self._doubtful: set[int] = set()
        """Parameters that have to be judged."""
        self._visited: set[int] = set()
        """Parameters that were written to and put back in some step: their digests are always compared."""
        self._passes = 0
        """How often values have arrived, or will have."""

    def meet(self, layout: ModelLayout | None) -> None:
        """Look at the memory and the values of these tensors, the model's own, from now on.

        None: whatever their values are, they are not the servers' (see WorkerMethods.copies).
        """
        self._layout = layout
        self._digests, self._constant, self._compared = {}, {}, {}
        self._doubtful.clear()
        if layout is None:
            return
        kinds = [spec.kind for spec in layout.plan.tensors]
        self._numbers = [number for number, one in enumerate(kinds) if one not in (TensorKind.BUFFER, TensorKind.TABLE)]
        storages: dict[int, list[int]] = {}
        for number, tensor in enumerate(layout.tensors):
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
        # Views of one tensor may have one counter.
        self._counted = {numbers[0] for numbers in storages.values() if len(numbers) == 1}.intersection(self._numbers)

    # When values arrive

    def arrived(self) -> None:
        """The tensors have this step's values, and nothing of the user's has run since."""
        self._passes += 1
        if self._layout is None:
            return
        self._layout.recount()
        self._doubtful.clear()
        digest, kinds = self._layout.digest, self._layout.plan.tensors
        if not self._constant:
            self._constant = {n: digest(n) for n in self._numbers if kinds[n].kind is TensorKind.FROZEN}
        chosen = self._numbers if _is_closely(self._passes) else self._visited
        self._digests = {number: self._arrived(number) for number in chosen if number not in self._constant}

    def _arrived(self, number: int) -> int:
        """Return the digest of a value that the servers have sent: the last one known, if none has come since."""
        assert self._layout is not None, "values arrive in one"
        count, (known_count, known) = self._layout.tensors[number]._version, self._compared.get(number, (-1, 0))
        found = known if count == known_count else self._layout.digest(number)
        self._compared[number] = count, found
        return found

    def sent(self) -> None:
        """The next values arrive while the user's code runs."""
        self._passes += 1
        self._digests = {}

    @property
    def waits(self) -> bool:
        """True if the next values have to arrive before the user's code runs."""
        return self._layout is not None and (_is_closely(self._passes + 1) or bool(self._visited))

    def resumed(self, *, one_step: bool) -> None:
        """The user's code has loaded values that were saved at this step. one_step: all servers are at one step."""
        if self._layout is not None and not one_step:
            # Others have gone on since then.
            self._layout.recount()
            self._digests = {}
            self._doubtful.clear()

    # When a pass begins and ends

    def put_back(self) -> None:
        """Forget what a pass has assigned to buffers."""
        if self._owners is not None and not self._divided:
            self._owners.put_back()

    def look(self, step: int, *, settled: bool) -> Sequence[int]:
        """Look at the model before gradients of this step are sent.

        settled: no pull is running that may write to the tensors. Returns parameters that were written to and have to
        be judged, since their values of this step are not known here. Raises JobError, naming the step and the tensor.
        """
        if not settled:
            return ()
        when = f"step {step}"
        if self._owners is not None:
            self._owners.settle(when)
        if any(map(_REQUIRES_GRAD, self._frozen.values())):
            name = next(name for name, tensor in self._frozen.items() if tensor.requires_grad)
            raise JobError(
                f"{when}: {name!r} requires a gradient now, but it did not when training began, so that no server "
                f"updates it; let it require a gradient {BEFORE}, and freeze it in the loop as long as it is not to "
                "train: without a gradient it is not updated either"
            )
        if self._layout is None:
            return ()
        return self._compare(self._layout, when, self._follow(self._layout, when))

    def _follow(self, layout: ModelLayout, when: str) -> list[int]:
        """Follow tensors that were given other memory; returns their numbers."""
        moved = [number for number in layout.moved() if not self._divided or number in self._numbers]
        specs = layout.plan.tensors
        for number in moved:
            now, before = layout.tensors[number], layout.mapped(number)
            if _kind(now) != _kind(before):
                raise JobError(
                    f"{when}: {specs[number].name!r} has {described(now)} now, and had {described(before)} when "
                    f"training began (.to(), .double(), p.data = ...); convert the model {BEFORE}"
                )
        if moved:
            try:
                check_overlap((spec.name, tensor) for spec, tensor in zip(specs, layout.tensors, strict=True))
            except JobError as error:
                raise JobError(f"{when}: {error}") from None
            layout.follow()
        return moved

    def _compare(self, layout: ModelLayout, when: str, moved: Collection[int]) -> Sequence[int]:
        """Refuse parameters whose values are known not to be those of the step. moved: have other memory than before.

        Returns those that may not be.
        """
        suspects = self._counted.intersection(layout.written()) | set(self._numbers).intersection(moved)
        constant, closely = self._constant, _is_closely(self._passes)
        known = self._digests | (constant if closely else {n: constant[n] for n in suspects & constant.keys()})
        self._refuse(layout, when, [number for number, before in known.items() if layout.digest(number) != before])
        self._doubtful |= suspects - known.keys()
        self._visited |= suspects - self._constant.keys()
        if suspects:
            layout.recount()
        return sorted(self._doubtful)

    def judge(self, step: int, fetch: Callable[[], object] | None) -> None:
        """Compare what look() has returned with the servers' values of the step. Raises JobError like look().

        fetch: pulls these again, which must not happen between a forward pass and its backward pass; None if that is
        not possible.
        """
        numbers, when, layout = sorted(self._doubtful), f"step {step}", self._layout
        self._doubtful.clear()
        assert layout is not None, "nothing is in doubt without one"
        if fetch is None:
            log.warning(
                "%s: %s in this process, where the values of the servers are not known; if they were not put back, "
                "the change is lost or stays in this process alone",
                when,
                _named(layout, numbers),
            )
            return
        kept = {number: layout.tensors[number].detach().clone() for number in (*numbers, *layout.buffers)}
        try:
            fetch()
        except (Restart, Interrupted, Stopped, UnreachableError) as error:
            # Whoever sends the step meets it again.
            log.info("%s: can't compare with the servers' values: %s", when, error or "interrupted")
            return
        finally:
            with torch.no_grad():
                for number in layout.buffers:
                    layout.tensors[number].copy_(kept[number])
        self._refuse(layout, when, [n for n in numbers if not same_bits(layout.tensors[n], kept[n])])

    def _refuse(self, layout: ModelLayout, when: str, numbers: Sequence[int]) -> None:
        if numbers:
            raise JobError(
                f"{when}: {_named(layout, numbers)} in this process, but the values of parameters are the servers', "
                f"so that the change would be lost; write them {BEFORE}, undo the change before the step ends, or "
                "compute what you need from the parameter in forward() (max_norm, clipping of weights)"
            )


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _named(layout: ModelLayout, numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"{layout.plan.tensors[numbers[0]].name!r}{more} {'were' if more else 'was'} written to"


def _is_closely(passes: int) -> bool:
    """Return whether the values of a step are compared by digest."""
    return passes <= 2 or passes % EVERY == 0


UNWATCHED = ModelWatch({}, {}, (), script=False, divided=False)
"""Looks at nothing: no code but Shardline's has the model."""
