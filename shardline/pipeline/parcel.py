"""What stages of a pipeline hand to each other: activations one way, their gradients the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, order=True)
class ParcelKey:
    """Which pass a parcel is for. A repeated pass makes the same bits, so a second parcel of a key changes nothing."""

    step: int
    replica: int
    stage: int
    """The stage that it is for."""
    microbatch: int
    back: bool
    """It is a gradient for a backward pass, not an activation for a forward pass."""

    def __str__(self) -> str:
        what = "gradient" if self.back else "activation"
        return (
            f"the {what} for stage {self.stage} of replica {self.replica}, microbatch {self.microbatch} of step "
            f"{self.step}"
        )


@dataclass(frozen=True)
class Parcel:
    """A tensor for one pass of one stage."""

    key: ParcelKey
    values: torch.Tensor
    needs_grad: bool = False
    """An activation whose stage waits for its gradient."""
    random_state: bytes = b""
    """State of torch's generator after the forward pass, with which the next stage goes on; empty in gradients."""
