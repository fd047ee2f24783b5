"""Models of any form in stages: traced by torch.export, cut by torch.distributed.pipelining."""

from __future__ import annotations

from shardline_pipeline.split.model import Split

__all__ = ["Split"]
