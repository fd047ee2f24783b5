"""What an evaluator does where the chief doesn't take a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardline.core.orders import Orders, Phase
from shardline.errors import ProtocolError
from shardline.host.process import Termination
from shardline.observability.metrics import Metrics
from shardline.rpc.client import Parameters
from shardline_evaluator.service import Evaluator


class Link:
    """A chief with checkpoints of steps 10 and 20 that refuses any score with metrics, and maybe its reason too."""

    def __init__(self, *, refuses_all: bool) -> None:
        self.refuses_all = refuses_all
        self.told: list[tuple[int, Mapping[str, float], str]] = []
        self.orders = Orders(phase=Phase.RUNNING, checkpoint_step=10)
        self.identity = self.client = self

    def wait(self, wanted: Callable[[Orders], bool], timeout_s: float | None = None) -> bool:
        if not wanted(self.orders):
            more = self.orders.checkpoint_step < 20
            self.orders = Orders(phase=Phase.RUNNING if more else Phase.ENDED, checkpoint_step=20)
        return True

    def ask(self, question: Callable[[], Any]) -> Any:
        return question()

    def leave(self) -> None: ...

    def set_step(self, step: int) -> None: ...

    def fetch_parameters(self, step: int) -> Parameters:
        return Parameters(step=step, tensors={"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})

    def report(self, who: object, step: int, metrics: Mapping[str, float], seconds: float, failure: str) -> bool:
        self.told.append((step, metrics, failure))
        if metrics or self.refuses_all:
            raise ProtocolError("with it this run has 1025 different names of metrics; the limit is 1024")
        return False


def steps_told(*, refuses_all: bool) -> list[tuple[int, bool, bool]]:
    """Step, and whether it was told with metrics or with a reason."""
    link: Any = Link(refuses_all=refuses_all)
    job: Any = SimpleNamespace(evaluate=len, score=lambda model: {"loss": 1.0})
    metrics = Metrics("evaluator", "evaluator/0")
    assert Evaluator(link, job, nn.Linear(2, 1), metrics, Termination()).run() == 0
    return [(step, bool(metrics), "1025 different names" in failure) for step, metrics, failure in link.told]


def test_a_score_that_the_chief_refuses_is_told_as_a_failure_and_the_next_checkpoint_is_scored() -> None:
    assert steps_told(refuses_all=False) == [(10, True, False), (10, False, True), (20, True, False), (20, False, True)]


def test_an_evaluator_lives_on_where_the_chief_refuses_the_reason_too() -> None:
    assert [step for step, *_ in steps_told(refuses_all=True)] == [10, 10, 20, 20]
