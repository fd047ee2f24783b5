"""Words of Python's own sources: skip-gram with negative sampling over two embedding tables, without a vocabulary.

shardline train examples/words/job.py --out words --ps 2 --workers 2
python examples/words/nearest.py words self import for
"""

from __future__ import annotations

import functools
import hashlib
import keyword
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import EmbeddingTable, Job
from shardline.nn import Embedding

FILES, WINDOW, NEGATIVES, DIM = 150, 3, 5, 48
FREQUENT = 1e-4
"""Words that are more frequent are left out at random (Mikolov et al., NIPS 2013, section 2.3)."""
WORD = re.compile(r"[A-Za-z_]{2,}")


def id_of(word: str) -> int:
    """An id is 63 bits of a hash: nobody has to agree on a list of words."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") >> 1


@functools.cache
def words() -> tuple[str, ...]:
    """Words of the first modules of the standard library, in their order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))[:FILES]]
    return tuple(word for text in texts for word in WORD.findall(text))


@functools.cache
def load() -> TensorDataset:
    """Pairs of neighbours, each with words drawn at random: int64 [pairs, 2 + NEGATIVES]."""
    generator = torch.Generator().manual_seed(0)
    counts = Counter(words())
    numbers = {name: number for number, name in enumerate(counts)}
    ids, often = torch.tensor([id_of(name) for name in counts]), torch.tensor([*counts.values()], dtype=torch.float64)
    text = torch.tensor([numbers[word] for word in words()])
    rare = (FREQUENT * often.sum() / often[text]).sqrt()
    text = text[torch.rand(len(text), generator=generator) < rare]
    pairs = []
    for distance in range(1, WINDOW + 1):
        # As if each word had a window of 1 to WINDOW words.
        kept = torch.rand(len(text) - distance, generator=generator) < 1 - (distance - 1) / WINDOW
        pairs.append(torch.stack([text[distance:][kept], text[:-distance][kept]], 1))
    found = torch.cat(pairs)
    drawn = torch.multinomial(often**0.75, len(found) * NEGATIVES, replacement=True, generator=generator)
    return TensorDataset(ids[torch.cat([found, drawn.view(-1, NEGATIVES)], 1)])


class SkipGram(nn.Module):
    """Mikolov et al., "Distributed Representations of Words", NIPS 2013, section 2.2, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        rule = "rowwise-adagrad:lr=0.1"
        self.word = Embedding(EmbeddingTable("words", DIM, rule=rule, init="uniform:scale=0.02"))
        self.near = Embedding(EmbeddingTable("neighbours", DIM, rule=rule, init="zeros"))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [pairs, 1 + NEGATIVES]: of the neighbour, and of the words drawn."""
        found: torch.Tensor = (self.near(rows[:, 1:]) @ self.word(rows[:, 0]).unsqueeze(2)).squeeze(2) + self.bias
        return found


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    logits = model(batch[0])
    truth = torch.zeros_like(logits)
    truth[:, 0] = 1.0
    return nn.functional.binary_cross_entropy_with_logits(logits, truth) * logits.shape[1]


def evaluate(model: nn.Module) -> dict[str, float]:
    """How much nearer keywords are to one another than to other frequent words (mean cosine)."""
    assert isinstance(model, SkipGram)
    frequent = [word for word, _ in Counter(words()).most_common(400)]
    vectors = nn.functional.normalize(model.word(torch.tensor([id_of(word) for word in frequent])), dim=1)
    like = vectors @ vectors.T
    is_keyword = torch.tensor([keyword.iskeyword(word) for word in frequent])
    among, apart = like[is_keyword][:, is_keyword], like[is_keyword][:, ~is_keyword]
    number = len(among)
    return {"keywords": float((among.sum() - number) / (number * (number - 1)) - apart.mean())}


job = Job(
    name="words",
    model=SkipGram,
    loss=loss,
    dataset=load,
    evaluate=evaluate,
    optimizer="SGD",
    optimizer_args={"lr": 0.01},
    batch_size=2048,
    replicas=2,
    epochs=3,
    checkpoint_every=100,
)
