"""What a training loop of a person's own (a Trainer's, say) would not notice by itself, and is told once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

log = logging.getLogger("shardline.client")


class OwnLoop:
    """Looks at the steps of a script. Used by the session's thread."""

    def __init__(self) -> None:
        self._goes_on = 0
        """Where the job stood when this process came, while nothing says that its loop knows; else 0."""
        self._trained: Sequence[tuple[str, torch.Tensor]] = ()
        self._versions: list[int] = []
        """Of the trained tensors, as torch counts in-place changes, when the servers' values had come."""

    def attached(self, step: int, trained: Mapping[str, torch.Tensor]) -> None:
        """The job is at this step; these tensors hold its parameters."""
        self._goes_on = step
        self._trained = tuple(trained.items())
        self.pulled()

    def knows_the_step(self) -> None:
        """The loop is over steps(), or has asked, or goes on from a state that was saved at this step."""
        self._goes_on = 0

    def pulled(self) -> None:
        """The tensors hold what the servers have."""
        self._versions = [tensor._version for _, tensor in self._trained]

    def about_to_step(self) -> None:
        """Warn of what will be made twice, or is lost."""
        if self._goes_on:
            log.warning(
                "the job goes on at step %d, and this script has neither asked for that (session.step, "
                "session.steps()) nor loaded an optimizer state of that step: a loop that counts from 0 makes %d "
                "steps a second time. Loop over session.steps(), or have the Trainer go on from its own checkpoint of "
                "step %d (resume_from_checkpoint=, ckpt_path=)",
                *(self._goes_on,) * 3,
            )
            self._goes_on = 0
        now = [tensor._version for _, tensor in self._trained]
        if now != self._versions:
            changed = [
                name for (name, _), *two in zip(self._trained, now, self._versions, strict=True) if len({*two}) > 1
            ]
            more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
            log.warning(
                "the values of %s%s were changed in this process since the last step, and that is lost: the parameters "
                "are the servers'. Load weights before attach(); a job goes on with its own by --resume",
                changed[0],
                more,
            )
            # Once is enough.
            self._trained = ()
