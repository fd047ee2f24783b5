"""A worker that hands its neighbour in a pipeline what no pass makes: it is named, not the user's model or loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import zstandard
from torch import nn
from torch.utils.data import TensorDataset

from shardline.codecs.lossless import AMPLE_BYTES, MOST_TIMES
from shardline.core.parcel import Form, Parcel, ParcelKey
from shardline.data import BatchSource
from shardline.errors import JobError, ProtocolError
from shardline.job import Job
from shardline_pipeline import schedule_named
from shardline_pipeline.activation_coding import ActivationCoding
from shardline_pipeline.model import Pipeline
from shardline_pipeline.runner import AtHome, StageRunner

Change = Callable[[Parcel], Parcel]


class Lying(AtHome):
    """Parcels of one worker as if another had sent them, who changes those of one direction."""

    def __init__(self, change: Change, *, back: bool) -> None:
        super().__init__()
        self._change, self._back = change, back

    def take(self, key: ParcelKey) -> Parcel:
        parcel = replace(super().take(key), sender="worker/7")
        return self._change(parcel) if key.back is self._back else parcel


def compute(change: Change, *, back: bool, **fields: str) -> None:
    """A step of two stages."""
    torch.manual_seed(0)
    job = Job(
        model=lambda: Pipeline([nn.Linear(4, 8), nn.Linear(8, 2)], stages=[1]),
        loss=lambda model, batch: model(batch[0]).square().mean(), dataset=TensorDataset(torch.ones(8, 4)),
        batch_size=4, steps=1, optimizer="SGD", optimizer_args={"lr": 0.1}, pipeline="flush", **fields,
    )  # fmt: skip
    model = job.build_model()
    assert isinstance(model, Pipeline)
    runner = StageRunner(model, job, BatchSource(job), schedule_named("flush"), Lying(change, back=back))
    runner.run(0, {0: range(2)})


def bomb(nbytes: int) -> torch.Tensor:
    """A few bytes of zstd that stand for many zeros."""
    return torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(bytes(nbytes))), dtype=torch.uint8)


def huge(parcel: Parcel) -> Parcel:
    rows = 4 * AMPLE_BYTES // 32
    return replace(parcel, values=(bomb(rows * 32),), forms=(Form("lossless", "float32", (rows, 8), (0, 1)),))


CASES: dict[str, tuple[Change, bool, str]] = {
    "no random state": (lambda one: replace(one, random_state=b""), False, "its 0 bytes are no state of cpu"),
    "a random state of noise": (
        lambda one: replace(one, random_state=b"\xff" * len(one.random_state)),
        False,
        "bytes are no state of cpu's random generator",
    ),
    "an activation that is small only on its way": (huge, False, r"codec lossless makes 1048576 to 268435456 bytes"),
    "a gradient of another shape": (
        lambda one: replace(one, values=(torch.ones(4, 9),), forms=()),
        True,
        r"it is torch.float32 \(4, 9\), of an output of torch.float32 \(4, 8\)",
    ),
    "a gradient of another dtype": (
        lambda one: replace(one, values=(torch.ones(4, 8, dtype=torch.float64),), forms=()),
        True,
        "it is torch.float64",
    ),
    "a gradient that is small only on its way": (huge, True, "of an output of torch.float32"),
    "a gradient of no output": (lambda one: replace(one, places=(3,)), True, "there is no gradient of tensor 3 of 1"),
}


@pytest.mark.parametrize(("change", "back", "words"), CASES.values(), ids=CASES)
def test_what_no_pass_makes_is_said_of_the_worker_that_sent_it(change: Change, back: bool, words: str) -> None:
    with pytest.raises(ProtocolError, match=rf"worker/7 sent the .* that can't be used: .*{words}"):
        compute(change, back=back, codec_parcels="lossless")


def test_a_model_that_fails_with_what_came_says_from_whom_it_came() -> None:
    with pytest.raises(JobError, match=r"it was given torch.float32 \(4, 5\), which came from worker/7"):
        compute(lambda one: replace(one, values=(torch.ones(4, 5),)), back=False)


def test_a_step_of_neighbours_who_tell_the_truth_is_computed() -> None:
    compute(lambda one: one, back=True, codec_parcels="lossless")


def test_many_zeros_go_as_they_are_and_come_back() -> None:
    coding, key = ActivationCoding("lossless", 0), ParcelKey(0, 0, 1, 0, False)
    values = torch.zeros(AMPLE_BYTES // 4 + 1)
    payload, form = coding.encode(values, key, 0, "the output")
    assert payload.nbytes == values.nbytes > MOST_TIMES
    assert torch.equal(coding.decode(payload, form, key, "the output"), values)
