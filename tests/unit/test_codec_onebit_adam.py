"""1-bit Adam, codec and update rule together, against torch's Adam and the paper's algorithm, written as a loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardline import methods
from shardline.codecs.base import MemoryKey, Turn
from shardline.codecs.coding import Coding
from shardline.codecs.parts import ERROR
from shardline.codecs.quantizing.onebit_adam import MOMENTUM, OneBitAdam
from shardline.core.plan import make_plan
from shardline.core.spec import ScheduleSpec
from shardline.errors import JobError
from shardline.update import bucket_rule, check_tensors, rule
from tests.support.codecs import spec
from tests.support.jobs import make_job

ROWS, COLUMNS, BIAS = 40, 50, 7
ELEMENTS = ROWS * COLUMNS
ALL = ELEMENTS + BIAS
LR = 0.01


class Bucket:
    """A matrix and a vector in one bucket, pushed by some replicas and updated by the codec's own rule."""

    def __init__(self, codec: OneBitAdam, optimizer: str = "Adam", replicas: int = 1, **arguments: float) -> None:
        plan = make_plan([spec("weight", (ROWS, COLUMNS)), spec("bias", (BIAS,))], 1)
        self.coding = Coding(codec, plan).bucket(0, 0)
        self.bucket = self.coding.layout.bucket
        self.memories: list[dict[MemoryKey, torch.Tensor]] = [{} for _ in range(replicas)]
        chosen = rule(optimizer, [{"lr": LR, **arguments}], method=codec.at_server.rule)
        self.rule = bucket_rule(chosen, ScheduleSpec(), self.bucket, plan.tensors, torch.device("cpu"))
        self.values = torch.zeros(self.bucket.elements)
        self.payloads: list[int] = []

    def step(self, step: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """One step by gradients without padding; returns what was applied, the mean of what was decoded."""
        decoded = torch.zeros_like(self.values)
        for replica, (memory, gradient) in enumerate(zip(self.memories, gradients, strict=True)):
            payload = bytes(self.coding.coder.encode(self.wide(gradient), Turn(step, replica, memory=memory)))
            self.payloads.append(len(payload))
            decoded += self.coding.coder.decode(payload, Turn())
        decoded /= len(gradients)
        self.rule.apply(self.values, decoded, clock=step)
        return self.narrow(decoded)

    def wide(self, flat: torch.Tensor) -> torch.Tensor:
        found, at = torch.zeros(self.bucket.elements), 0
        for piece in self.bucket.slices:
            found[piece.offset : piece.end] = flat[at : at + piece.elements]
            at += piece.elements
        return found

    def narrow(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.cat([flat[piece.offset : piece.end] for piece in self.bucket.slices])


def gradient(step: int, replica: int = 0) -> torch.Tensor:
    return torch.randn(ALL, generator=torch.Generator().manual_seed(1000 * replica + step))


@pytest.mark.parametrize(("optimizer", "decay"), [("Adam", 0.0), ("AdamW", 0.0), ("AdamW", 0.1)])
def test_the_warm_up_is_torchs_optimizer_to_the_bit(optimizer: str, decay: float) -> None:
    ours = Bucket(OneBitAdam(warmup=20), optimizer, weight_decay=decay)
    theirs = torch.nn.Parameter(torch.zeros(ALL))
    plain = getattr(torch.optim, optimizer)([theirs], lr=LR, weight_decay=decay, foreach=False)
    for step in range(20):
        theirs.grad = gradient(step)
        plain.step()
        ours.step(step, [gradient(step)])
        assert torch.equal(ours.narrow(ours.values), theirs.detach()), step
    # Raw bytes, then a bit per value of the matrix.
    before = ours.payloads[-1]
    ours.step(20, [gradient(20)])
    assert ours.payloads[-1] < before / 20


def test_after_it_the_paper_s_algorithm() -> None:
    warmup, replicas, (first, second), eps = 6, 2, (0.9, 0.999), 1e-8
    ours = Bucket(OneBitAdam(warmup=warmup), replicas=replicas)
    theta, square, mean = torch.zeros(ALL), torch.zeros(ALL), torch.zeros(ALL)
    momenta, errors = [torch.zeros(ALL)] * replicas, [torch.zeros(ALL)] * replicas
    for step in range(40):
        gradients = [gradient(step, replica) for replica in range(replicas)]
        momenta = [first * m + (1 - first) * g for m, g in zip(momenta, gradients, strict=True)]
        applied = ours.step(step, gradients)
        if step < warmup:
            together = sum(gradients, torch.zeros(ALL)) / replicas
            mean = first * mean + (1 - first) * together
            square = second * square + (1 - second) * together**2
        else:
            sent = []
            for replica, (m, error) in enumerate(zip(momenta, errors, strict=True)):
                wanted, here = m + error, m.clone()
                matrix = wanted[:ELEMENTS]
                below, above = matrix[matrix < 0].mean(), matrix[matrix >= 0].mean()
                here[:ELEMENTS] = torch.where(matrix < 0, below, above)
                sent.append(here)
                errors[replica] = torch.cat((matrix - here[:ELEMENTS], torch.zeros(BIAS)))
            mean = sum(sent, torch.zeros(ALL)) / replicas
            torch.testing.assert_close(applied, mean, rtol=1e-4, atol=1e-5)
        seen = min(step + 1, warmup)
        divisor = (square / (1 - second**seen)).sqrt() + eps
        moved = mean / (1 - first ** (step + 1)) / divisor
        theta = theta - LR * (moved if step < warmup else moved.clamp(-1.0, 1.0))
        torch.testing.assert_close(ours.narrow(ours.values), theta, rtol=1e-3, atol=1e-4)
    for memory, m, error in zip(ours.memories, momenta, errors, strict=True):
        torch.testing.assert_close(memory["weight", 0, MOMENTUM], m[:ELEMENTS], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(memory["weight", 0, ERROR], error[:ELEMENTS], rtol=1e-3, atol=1e-3)
        assert ("bias", 0, ERROR) not in memory


def test_what_never_had_a_gradient_stays_where_it_is() -> None:
    ours, dead = Bucket(OneBitAdam(warmup=3)), slice(100, 150)
    for step in range(10):
        values = gradient(step)
        values[dead] = 0.0
        applied = ours.step(step, [values])
    assert applied[dead].all(), "signs are never zero"
    moved = ours.narrow(ours.values)
    assert not moved[dead].any() and moved[:100].all() and float(moved.abs().max()) < 1.0


@pytest.mark.parametrize(
    ("optimizer", "changes", "message"),
    [
        ("momentum", {}, "update rule onebit-adam runs with Adam and AdamW only, and the job's optimizer is SGD"),
        ("adam", {"codec": "onebit-adam:momentum=0.8"}, "has momentum=0.8, but the first of the betas of Adam is 0.9"),
        ("adam", {"consistency": "async"}, "in consistency async workers have no common steps"),
        ("adam", {"cadence": "local-sgd"}, "cadence local-sgd sends how far the parameters moved"),
        ("adam", {"clip_norm": 0.5}, "clip_norm=0.5 would clip momentum on the servers instead of gradients"),
        ("adam", {"error_memory": "exact"}, "error_memory 'exact' clears what workers remember at each checkpoint"),
        ("adam", {"codec_tensors": {"*": "raw"}}, "changes what the servers do with all tensors"),
        (
            "adam",
            {"rule": "gap-aware"},
            "needs update rule onebit-adam:warmup=100,momentum=0.9, but the job has gap-aware",
        ),
        ("adam", {"consistency": "sync:spares=1", "replicas": 2}, "drops what comes too late"),
    ],
)
def test_what_it_does_not_work_with_is_refused(optimizer: str, changes: dict[str, Any], message: str) -> None:
    job = make_job(optimizer, **{"codec": "onebit-adam", **changes})
    with pytest.raises(JobError, match=message.replace("*", r"\*")):
        job.spec(job.build_model())


def test_no_element_leaps_because_its_second_moment_is_small() -> None:
    ours, faint = Bucket(OneBitAdam(warmup=3)), slice(100, 150)
    for step in range(10):
        before = ours.narrow(ours.values).clone()
        values = gradient(step)
        values[faint] *= 1e-6
        ours.step(step, [values])
        if step >= 3:
            assert float((ours.narrow(ours.values) - before).abs().max()) <= LR * 1.0001


def test_the_summary_names_the_rule() -> None:
    job = make_job("adam", codec_up="onebit-adam:warmup=7")
    assert methods.chosen(job.spec(job.build_model()))["rule"] == "onebit-adam:warmup=7"


def test_a_dtype_of_which_the_codec_sends_gradients_is_refused() -> None:
    found = rule("Adam", [{}], method="onebit-adam")
    with pytest.raises(JobError, match="'w' has dtype bfloat16; onebit-adam trains float32 and float64 only"):
        check_tensors(found, [spec("w", (2, 2), "bfloat16")])


def test_the_rule_alone_is_none_to_choose() -> None:
    with pytest.raises(JobError, match="onebit-adam"):
        make_job("adam", rule="onebit-adam")


def test_the_codec_brings_its_rule_along() -> None:
    job = make_job("adam", codec="onebit-adam:warmup=7")
    found = job.spec(job.build_model())
    assert found.rule.method == "onebit-adam:warmup=7,momentum=0.9"
    assert not math.isnan(found.rule.groups[0]["lr"])  # type: ignore[arg-type]
