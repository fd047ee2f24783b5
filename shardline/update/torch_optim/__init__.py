"""torch.optim as an update rule: its own arithmetic on flat buckets, slice by slice or all at once."""

from shardline.update.torch_optim.rule import Torch

__all__ = ["Torch"]
