"""Buckets that came in one message: loaded from it, without memory between."""

from __future__ import annotations

import pytest
import torch

from shardline.client.layout import ModelLayout
from shardline.client.step.weights import Arrivals, BucketSink
from shardline.codecs import coding_of
from shardline.core.plan import make_plan
from shardline.core.spec import TensorSpec
from shardline.errors import ProtocolError
from shardline.waist import Arrival

SHAPES = {"first": (64,), "second": (3, 40)}


def made(codec: str = "raw") -> tuple[ModelLayout, BucketSink, Arrivals]:
    """A sink for one bucket with two tensors."""
    plan = make_plan([TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()], 1)
    assert len(plan.shards[0].buckets) == 1
    layout = ModelLayout(plan, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    arrivals = Arrivals([(0, 0)])
    return layout, BucketSink(layout, 0, coding_of(codec, plan), arrivals), arrivals


def sent(layout: ModelLayout, codec: str = "raw") -> tuple[Arrival, bytes, torch.Tensor]:
    values = torch.arange(float(layout.plan.shards[0].buckets[0].elements))
    dtype = torch.float32 if codec == "raw" else torch.bfloat16
    payload = values.to(dtype).view(torch.uint8).numpy().tobytes()
    return (
        Arrival(bucket=0, step=1, version=1, unchanged=False, codec=codec, payload_bytes=len(payload)),
        payload,
        values,
    )


@pytest.mark.parametrize("codec", ["raw", "bf16"])
@pytest.mark.parametrize("hold", [False, True])
def test_it_is_loaded_from_the_message_when_the_model_may_be_written_to(
    hold: bool, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, sink, arrivals = made(codec)
    arrival, payload, values = sent(layout, codec)
    arrivals.begin(hold=hold)
    sink.begin()

    def never(arrival: Arrival) -> memoryview:
        raise AssertionError("a copy of the bucket")

    monkeypatch.setattr(sink, "buffer", never)
    sink.whole(arrival, memoryview(payload))
    if hold:
        assert not any(tensor.any() for tensor in layout.tensors)
        arrivals.release()
    assert arrivals.load([(0, 0)]) and sink.wire_bytes == len(payload)
    for piece in layout.plan.shards[0].buckets[0].slices:
        loaded = layout.tensors[piece.tensor].reshape(-1)
        assert torch.equal(loaded, values[piece.offset : piece.end].to(torch.bfloat16).float())


def test_one_of_the_wrong_length_is_refused() -> None:
    layout, sink, arrivals = made()
    arrivals.begin(hold=False)
    sink.begin()
    short = Arrival(bucket=0, step=1, version=1, unchanged=False, codec="raw", payload_bytes=4)
    with pytest.raises(ProtocolError, match="payload of 4 bytes"):
        sink.whole(short, b"1234")
    assert not sink.arrived and not any(tensor.any() for tensor in layout.tensors)
