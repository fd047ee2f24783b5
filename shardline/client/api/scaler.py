"""A gradient scaler with the same scale in all replicas of a synchronous script."""

from __future__ import annotations

from typing import Any

import torch

from shardline.client.api.optimizer import ShardlineOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with the same arguments, for the optimizer that Session.attach returned.

    If one replica's gradients overflow, the servers skip the step for all replicas. torch's own scaler would then lower
    the scale of that replica alone; this one lowers it in all. For any other optimizer both behave the same.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch; call update() afterwards."""
        found = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and isinstance(optimizer, ShardlineOptimizer) and optimizer.skipped:
            for device_found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                device_found.fill_(1.0)
        return found
