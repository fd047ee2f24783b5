"""Handling of a loss or gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardline.client.exchange.retrying import Observer
from shardline.client.step.staging import GradientStaging
from shardline.errors import NonFiniteError


class NonFinite:
    """A worker's handling of NaN and infinity. policy: the job's nan_policy."""

    def __init__(self, policy: str, staging: GradientStaging, observer: Observer) -> None:
        self._policy = policy
        self._staging = staging
        self._observer = observer

    def judge(self, step: int, replica: int, bad: Sequence[str], *, early: bool = False) -> None:
        """Handle a loss ("loss") or gradients (by name) that are not finite. Raises NonFiniteError under "stop".

        early: found on a lane's thread, while other gradients of the step are being sent.
        """
        if not bad:
            return
        for name in bad:
            self._observer.not_finite(name)
        if self._policy == "stop":
            if not early:
                self._staging.clear()
            raise stop_error(step, replica, bad, early=early)
        if not early:
            named = self._staging.extras.nonfinite
            named.extend(name for name in bad if name not in named)


def loss_names(loss: float | None) -> list[str]:
    """["loss"] if it is NaN or infinite, else []."""
    return [] if loss is None or -float("inf") < loss < float("inf") else ["loss"]


def stop_error(step: int, replica: int, bad: Sequence[str], *, early: bool) -> NonFiniteError:
    """The error of the policy "stop". bad: "loss" and names of tensors. early: found while gradients were leaving."""
    sent = "other gradients of this step may already have been sent and applied" if early else "nothing was sent"
    return NonFiniteError(
        f"step {step}, replica {replica}: {_names(bad)} has NaN or infinity; {sent}. "
        "Lower the learning rate, clip gradients (clip_norm), or set nan_policy='skip'"
    )


def _names(bad: Iterable[str]) -> str:
    return ", ".join(name if name == "loss" else f"the gradient of {name!r}" for name in bad)
