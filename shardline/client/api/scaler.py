"""A gradient scaler whose scale is the same in all replicas of a synchronous script."""

from __future__ import annotations

from typing import Any

import torch

from shardline.client.api.optimizer import ShardlineOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with the same arguments, for an optimizer that Session.attach returned.

    Where one replica's gradients overflow, the servers skip the step for all of them. torch's own scaler then lowers
    the scale of that replica alone; this one lowers it in all. For any other optimizer both do the same.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch; to be followed by update()."""
        found = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and isinstance(optimizer, ShardlineOptimizer) and optimizer.skipped:
            for device_found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                device_found.fill_(1.0)
        return found
