"""Deep Gradient Compression against the paper's algorithm, written as a loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardline.codecs import CODECS
from shardline.codecs.base import MemoryKey, Turn
from shardline.codecs.coding import MEASURED_EVERY, Coding, PushEncoders
from shardline.codecs.parts import ERROR
from shardline.codecs.sparse.dgc import DGC, MOMENTUM
from shardline.core.plan import make_plan
from shardline.errors import JobError
from tests.support.codecs import spec
from tests.support.jobs import make_job

ROWS, COLUMNS, BIAS = 40, 50, 7
ELEMENTS = ROWS * COLUMNS
STEPS = 30


def run(codec: DGC, steps: int = STEPS) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[MemoryKey, torch.Tensor]]:
    """Gradients, what was decoded, and the memory in the end, of a matrix and a vector in one bucket."""
    plan = make_plan([spec("weight", (ROWS, COLUMNS)), spec("bias", (BIAS,))], 1)
    bucket = Coding(codec, plan).bucket(0, 0)
    memory: dict[MemoryKey, torch.Tensor] = {}
    gradients, decoded = [], []
    for step in range(steps):
        values = torch.zeros(bucket.layout.bucket.elements)
        for piece in bucket.layout.bucket.slices:
            generator = torch.Generator().manual_seed(100 * step + piece.tensor)
            values[piece.offset : piece.end] = torch.randn(piece.elements, generator=generator)
        payload = bytes(bucket.coder.encode(values, Turn(step, memory=memory)))
        back = bucket.coder.decode(payload, Turn())
        for found, flat in ((gradients, values), (decoded, back)):
            found.append(torch.cat([flat[piece.offset : piece.end] for piece in bucket.layout.bucket.slices]))
    return gradients, decoded, memory


def test_a_matrix_follows_algorithm_1_of_the_paper() -> None:
    gradients, decoded, memory = run(DGC(ratio=0.05))
    u, v = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for gradient, sent in zip(gradients, decoded, strict=True):
        u = 0.9 * u + gradient[:ELEMENTS]
        v = v + u
        chosen = torch.zeros(ELEMENTS, dtype=torch.bool)
        chosen[v.abs().topk(math.ceil(0.05 * ELEMENTS)).indices] = True
        assert torch.equal(sent[:ELEMENTS], torch.where(chosen, v, 0.0))
        u, v = u.masked_fill(chosen, 0.0), v.masked_fill(chosen, 0.0)
    assert torch.equal(memory["weight", 0, ERROR], v) and torch.equal(memory["weight", 0, MOMENTUM], u)


@pytest.mark.parametrize("ratio", [0.05, 1.0])
def test_a_vector_has_the_momentum_of_sgd_to_the_bit(ratio: float) -> None:
    gradients, decoded, _ = run(DGC(ratio=ratio))
    ours, theirs = torch.zeros(BIAS), torch.nn.Parameter(torch.zeros(BIAS))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD([ours], lr=0.1)
    for gradient, sent in zip(gradients, decoded, strict=True):
        theirs.grad, ours.grad = gradient[ELEMENTS:].clone(), sent[ELEMENTS:].clone()
        optimizer.step()
        plain.step()
    assert torch.equal(ours, theirs.detach())


def test_all_entries_with_masking_are_plain_sgd() -> None:
    gradients, decoded, _ = run(DGC(ratio=1.0))
    for gradient, sent in zip(gradients, decoded, strict=True):
        assert torch.equal(sent[:ELEMENTS], gradient[:ELEMENTS])


def test_more_is_sent_during_the_warm_up() -> None:
    codec = DGC(ratio=0.001, warmup=10)
    assert [codec.ratio_at(step) for step in (0, 1, 2, 4, 6, 8, 9, 10, 99)] == [
        *(0.25, 0.25, 0.25**2, 0.25**3, 0.25**4, 0.001, 0.001, 0.001, 0.001)
    ]
    assert DGC(ratio=0.1, warmup=10).ratio_at(9) == 0.1
    _, decoded, _ = run(codec, 12)
    sent = [int(values[:ELEMENTS].count_nonzero()) for values in decoded]
    assert sent == [500, 500, 125, 125, 32, 32, 8, 8, 2, 2, 2, 2]


def test_a_gradient_is_clipped_before_momentum() -> None:
    gradients, decoded, _ = run(DGC(ratio=1.0, clip=0.5), 1)
    for part in (slice(ELEMENTS), slice(ELEMENTS, None)):
        limited = gradients[0][part] * (0.5 / gradients[0][part].norm())
        torch.testing.assert_close(decoded[0][part], limited)


@pytest.mark.parametrize(
    ("optimizer", "changes", "message"),
    [
        ("momentum", {}, "optimizer SGD has momentum 0.9 in parameter group 0 on the servers; set that to 0"),
        ("adam", {}, "optimizer Adam has momentum 0.9 in parameter group 0 on the servers"),
        ("rmsprop", {}, "optimizer RMSprop has momentum 0.5 in parameter group 0 on the servers"),
        ("momentum", {"rule": "dana", "consistency": "async"}, "optimizer SGD has momentum 0.9"),
        ("sgd", {"cadence": "local-sgd"}, "cadence local-sgd sends how far the parameters moved"),
        ("sgd", {"clip_norm": 1.0}, "clip_norm=1 would clip momentum on the servers instead of gradients"),
    ],
)
def test_momentum_on_workers_and_servers_is_refused(optimizer: str, changes: dict[str, Any], message: str) -> None:
    job = make_job(optimizer, codec="dgc", **changes)
    with pytest.raises(JobError, match=f"codec dgc adds momentum to gradients on each worker, .*{message}"):
        job.spec(job.build_model())


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        ("sgd", {"codec": "dgc"}),
        ("adagrad", {"codec": "dgc"}),
        ("momentum", {"codec": "dgc:momentum=0.0", "clip_norm": 1.0}),
        # There workers clip, before momentum.
        ("sgd", {"codec": "dgc", "clip_norm": 1.0, "consistency": "async"}),
    ],
)
def test_momentum_in_one_place_is_allowed(optimizer: str, changes: dict[str, Any]) -> None:
    job = make_job(optimizer, **changes)
    assert job.spec(job.build_model()).codec == changes["codec"]


@pytest.mark.parametrize("codec", ["dgc", "onebit-adam:warmup=1"])
def test_momentum_that_is_sent_whole_is_no_error(codec: str) -> None:
    coding = Coding(CODECS.parse(codec), make_plan([spec("bias", (BIAS,))], 1))
    encoders = PushEncoders(coding)
    for step in range(MEASURED_EVERY + 1):
        encoders.begin(0, step)
        encoders.encode(0, 0, 0, torch.ones(coding.plan.shards[0].buckets[0].elements))
        encoders.settle()
    assert coding.relative_error == 0.0 == encoders.memory_norm
