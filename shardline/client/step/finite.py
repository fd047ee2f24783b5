"""What follows from a loss or a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardline.errors import NonFiniteError


def loss_names(loss: float | None) -> list[str]:
    """["loss"] where it is NaN or infinite."""
    return [] if loss is None or -float("inf") < loss < float("inf") else ["loss"]


def stop_error(step: int, replica: int, bad: Sequence[str], *, early: bool) -> NonFiniteError:
    """What the policy "stop" raises. bad: "loss" and names of tensors; early: it was met while gradients left."""
    sent = "others of this step may have been sent and applied before" if early else "nothing was sent"
    return NonFiniteError(
        f"step {step}, replica {replica}: {_names(bad)} has NaN or infinity; {sent}. "
        f"Lower the learning rate, clip gradients (clip_norm), or set nan_policy='skip'"
    )


def _names(bad: Iterable[str]) -> str:
    return ", ".join(name if name == "loss" else f"the gradient of {name!r}" for name in bad)
