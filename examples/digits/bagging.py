"""The digits for an ensemble: each model trains on a draw of its own, as in bagging (Breiman, Machine Learning 1996).

shardline sweep examples/digits/bagging.py --grid seed=0,1,2,3,4 --ensemble
"""

from __future__ import annotations

import dataclasses

import torch
from job import job as digits, load
from torch.utils.data import Subset

DRAWN = 200


def drawn() -> Subset[tuple[torch.Tensor, ...]]:
    """Some of the 1,437 training images, drawn by the job's `seed`, with which the generators have been seeded."""
    images = load(train=True)
    return Subset(images, torch.randint(len(images), (DRAWN,)).tolist())


job = dataclasses.replace(digits, name="bagging", dataset=drawn, steps=150, checkpoint_every=0)
