"""Show the words nearest to some, from the newest checkpoint of a run: python nearest.py RUN WORD..."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from job import id_of, words
from torch.nn.functional import normalize

from shardline.checkpoint import find_checkpoint


def main(run: str, *asked: str) -> None:
    names = [word for word, count in Counter(words()).items() if count >= 20]
    checkpoint = find_checkpoint(Path(run))
    vectors = normalize(checkpoint.rows("words", torch.tensor([id_of(name) for name in names])), dim=1)
    for word in asked:
        query = normalize(checkpoint.rows("words", torch.tensor([id_of(word)])), dim=1)
        best = (vectors @ query[0]).topk(9)
        near = [f"{names[at]} {score:.2f}" for score, at in zip(*map(torch.Tensor.tolist, best), strict=True)]
        print(f"{word}: {', '.join(item for item in near if item.split()[0] != word)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
