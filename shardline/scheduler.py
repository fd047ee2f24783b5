"""A torch learning-rate scheduler in a job: the settings that it gives the optimizer's parameter groups, by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardline.core.scores import Scores, followed
from shardline.core.settings import short
from shardline.errors import JobError, calling

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
BuildOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class GroupSettings:
    """Settings of an optimizer's groups by step.

    The scheduler changes a stand-in: an optimizer of the same class whose groups hold one matrix of one element each
    (Muon takes no scalars). It is stepped as often as the training, ReduceLROnPlateau once per score, and made anew to
    go back, so the settings follow from the step and the scores before it.
    """

    def __init__(
        self, make: MakeScheduler, build: BuildOptimizer, groups: Iterable[Mapping[str, Any]], *, every: int
    ) -> None:
        """build(groups) makes an optimizer like the one that trains with these groups. every: steps between scores.

        Raises JobError if make(optimizer) raises, or returns no scheduler of this optimizer.
        """
        self._every = every
        self.scores: Callable[[], Scores] = tuple
        """Returns the scores that are known; see shardline.core.scores."""
        self._make = make
        self._build = build
        self._given = [{key: copy.deepcopy(group[key]) for key in group if key != "params"} for group in groups]
        self._begin()

    def _begin(self) -> None:
        # Copies: a scheduler changes a learning rate that is a tensor in place.
        groups = [{**copy.deepcopy(group), "params": [torch.nn.Parameter(torch.zeros(1, 1))]} for group in self._given]
        self._optimizer = self._build(groups)
        self._step = 0
        with calling("scheduler(optimizer)"):
            self._scheduler = self._make(self._optimizer)
        if not isinstance(self._scheduler, LRScheduler):
            raise JobError(
                f"scheduler(optimizer) returned {short(self._scheduler)}; it must return a scheduler of "
                "torch.optim.lr_scheduler"
            )
        if getattr(self._scheduler, "optimizer", None) is not self._optimizer:
            raise JobError(
                f"scheduler(optimizer) returned a {type(self._scheduler).__name__} of another optimizer, which changes "
                "nothing here; make one for the optimizer that it is given, in every call"
            )
        if len(self._optimizer.param_groups) != len(self._given):
            raise JobError(
                f"scheduler(optimizer) made {len(self._given)} parameter groups into "
                f"{len(self._optimizer.param_groups)}; set groups in Job.param_groups"
            )

    @property
    def follows_scores(self) -> bool:
        """Return whether the scheduler follows scores instead of the step."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def at(self, step: int) -> Sequence[Mapping[str, Any]]:
        """Settings of each group at a step, without "params". Raises JobError if the scheduler raises."""
        scores = followed(self.scores(), step, self._every) if self.follows_scores else []
        count = len(scores) if self.follows_scores else step
        if count < self._step:
            self._begin()
        with calling(f"scheduler.step(), for step {step},"):
            while self._step < count:
                if isinstance(self._scheduler, ReduceLROnPlateau):
                    self._scheduler.step(scores[self._step])
                else:
                    # Without gradients it changes nothing; a scheduler warns if it is stepped first.
                    self._optimizer.step()
                    self._scheduler.step()
                self._step += 1
        return [
            {key: value for key, value in group.items() if key in given}
            for group, given in zip(self._optimizer.param_groups, self._given, strict=True)
        ]

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Give an optimizer with these groups the settings of a step."""
        for group, settings in zip(optimizer.param_groups, self.at(step), strict=True):
            group.update(settings)
