"""Checks for refusals, and that they changed nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from shardline.rpc.v1 import common_pb2
from tests.support.plain_client import FIRST_W, FROZEN, STATS, PlainClient, W

BAD = grpc.StatusCode.INVALID_ARGUMENT


def unchanged(client: PlainClient) -> None:
    """The shard is as PlainClient.start() left it."""
    values, _, end = client.pull()
    assert values == {W: FIRST_W, FROZEN: (7.0, 8.0), STATS: (0.5, 0.25)}
    assert (end.outcome, end.step, end.version) == (common_pb2.OUTCOME_SERVED, 0, 0)
    assert [item.step for item in client.progress(0).replicas] == [0]


def refused(code: grpc.StatusCode, sentence: str, function: Callable[[], Any]) -> None:
    """The call ends with this status, and with details that match."""
    with pytest.raises(grpc.RpcError) as caught:
        function()
    call: Any = caught.value
    assert call.code() is code, call.details()
    assert says(call.details(), sentence)


def says(text: str, sentence: str) -> bool:
    """Whether a text matches a pattern; the failing assertion shows both."""
    assert re.search(sentence, text), f"{text!r} does not say {sentence!r}"
    return True


OUTCOMES: dict[str, tuple[dict[str, Any], str, str]] = {
    "another plan": (
        {"data": {"plan_id": "feed"}},
        "NOT_CONFIGURED",
        "the plan is [0-9a-f]{32}; the message follows plan feed",
    ),
    "another job": (
        {"data": {"job": "other"}},
        "NOT_CONFIGURED",
        "this ps has job 'plain'; the message is for 'other'",
    ),
    "another timeline": (
        {"data": {"timeline": 7}},
        "WRONG_TIMELINE",
        "the timeline is 0x500000001; the message says 0x7",
    ),
    "a shard hosted elsewhere": ({"data": {"shard": 3}}, "REFUSED", r"shard 3 is not on this ps; it has \[0\]"),
    "an unknown lane": ({"data": {"lane": 42}}, "REFUSED", "lane number 42 is unknown to this ps"),
    "a pipeline stage": (
        {"data": {"stage": 1}},
        "REFUSED",
        "the message is for pipeline stage 1; this job has no stages",
    ),
    "features it hasn't got": (
        {"data": {"required_features": ["voted", "telepathy"]}},
        "REFUSED",
        "this ps does not support what the message requires: telepathy",
    ),
}
