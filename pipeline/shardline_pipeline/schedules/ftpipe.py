"""FTPipe, asynchronous with recomputation: a backward pass repeats its forward pass with the newest parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.schedules.asynchronous import OneVersion


@dataclass(frozen=True)
class FTPipe(OneVersion):
    """No flush and one version: backward passes first repeat their forward passes, with the newest parameters.

    Eliad et al.: Fine-tuning giant neural networks on commodity hardware (FTPipe, 2021), asynchronous pipelines with
    recomputation. A stage keeps of a microbatch only what came in, and no older version. Each gradient is right for its
    stage; stale is what came in, which the stages before have made with the parameters that they had then.

    predict: forward passes use the parameters that the backward pass will find, as far as the optimizer's state tells:
    see Stashing.
    """

    name: ClassVar[str] = "ftpipe"
    predict: bool = False

    @property
    def recompute(self) -> bool:
        return True
