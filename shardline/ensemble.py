"""Several models as one module that averages them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardline.errors import JobError, nearest

AVERAGES = ("outputs", "probabilities")


class Ensemble(nn.Module):
    """The average of several models (Hansen and Salamon, IEEE PAMI 1990). Plain torch: it needs no cluster.

        model = shardline.Ensemble([Net() for _ in range(5)])
        model.load_state_dict(load_file("runs/x/ensemble.safetensors"))    # of shardline sweep --ensemble

    members: two modules or more, each an object of its own, that return tensors of one shape for the same arguments.
    Their values are `members.0.<name>`, `members.1.<name>`, ... in the state_dict.

    average: "outputs": the mean of what they return. It fits every job: of a loss that is convex in the outputs, as
    cross-entropy of logits and squared error are, the ensemble never has more than its members have on average (Krogh
    and Vedelsby, NIPS 1995). "probabilities": the logarithm of their mean softmax, for classifiers that return logits;
    argmax and cross_entropy take it as they take logits (Lakshminarayanan et al., NIPS 2017).
    dim: of the classes; needed for "probabilities" of outputs with more dimensions than [classes] or [batch, classes].
    """

    def __init__(self, members: Iterable[nn.Module], average: str = "outputs", *, dim: int | None = None) -> None:
        """Raises JobError for another average, for one member, and for an object that is there twice."""
        super().__init__()
        given = list(members)
        if wrong := [type(one).__name__ for one in given if not isinstance(one, nn.Module)]:
            raise JobError(f"Ensemble: a member is {wrong[0]}; give modules: [Net() for _ in range(5)]")
        self.members, self.average, self.dim = nn.ModuleList(given), average, dim
        if average not in AVERAGES:
            close = nearest(str(average), AVERAGES)
            raise JobError(f"Ensemble: average is {average!r}; it must be {' or '.join(AVERAGES)}{close}")
        count, different = len(self.members), len({*self.members})
        if different < max(2, count):
            raise JobError(
                f"Ensemble: {count} members are {different} different modules; give two or more, each an object of its "
                "own: [Net() for _ in range(5)]"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The average, of the shape of a member's output. Raises JobError if the members' outputs can't be averaged."""
        outputs = [member(*args, **kwargs) for member in self.members]
        alike = all(isinstance(one, Tensor) and one.shape == outputs[0].shape for one in outputs)
        if not alike or not outputs[0].is_floating_point():
            kinds = (
                f"{one.dtype} {[*one.shape]}" if isinstance(one, Tensor) else type(one).__name__ for one in outputs
            )
            raise JobError(
                f"Ensemble: the members return {', '.join(dict.fromkeys(kinds))}; it averages tensors of floats "
                "of one shape, so give models of one kind, each with such a tensor as its output"
            )
        if self.average == "outputs":
            return torch.stack(outputs).mean(0)
        shape, dim = outputs[0].shape, -1 if self.dim is None else self.dim
        if self.dim is None and len(shape) > 2:
            raise JobError(
                f"Ensemble: outputs of shape {[*shape]} have their classes in any dimension; say which, such as dim=1, "
                "or average='outputs'"
            )
        if not -len(shape) <= dim < len(shape) or shape[dim] < 2:
            raise JobError(
                f"Ensemble: outputs of shape {[*shape]} have no two classes in dimension {dim}, so no probabilities; "
                "take average='outputs'"
            )
        logs = [functional.log_softmax(one, dim) for one in outputs]
        return torch.stack(logs).logsumexp(0) - math.log(len(logs))
