"""Passes of stages that a team computes: all ranks in one order, since they sum activations in every pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from shardline.pipeline.base import Pass
from shardline.pipeline.runner import StageRunner, Unit
from shardline.pipeline.stage_work import At


class TeamRunner(StageRunner):
    """A StageRunner of each rank of a process group, whose rank 0 says which unit is next."""

    def choose(self, first: Mapping[Unit, tuple[At, Pass]]) -> Unit:
        """See StageRunner.choose. What rank 0 has ready, the others have or will get."""
        if len(first) > 1:
            units = sorted(first)
            number = torch.tensor([units.index(super().choose(first)) if dist.get_rank() == 0 else 0])
            dist.broadcast(number, src=0)
            chosen = units[int(number)]
            first = {chosen: first[chosen]}
        return super().choose(first)
