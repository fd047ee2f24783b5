"""What a worker takes along from one history of its job into the next, and what it doesn't."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardline.client.api import workplace
from shardline.client.api.workplace import Workplace
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import JobView, Orders
from shardline.core.outcome import Outcome
from shardline.core.placement import Placement
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, JobSpec, RuleSpec, TensorSpec
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.lanes.base import Lane
from shardline.model import model_tensors
from shardline.observability.metrics import Metrics
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.waist import Standing

TIMEOUTS = Timeouts(total_s=2.0)


@pytest.fixture
def link() -> Iterator[ChiefLink]:
    made = ChiefLink("127.0.0.1:1", TIMEOUTS, Applicant(role="worker", index=0))
    yield made
    made.close()


def view_of(timeline: int) -> JobView:
    tensors = (TensorSpec(name="w", shape=(64,), dtype="float32"),)
    job = JobSpec(name="job", tensors=tensors, rule=RuleSpec(name="SGD", groups=({"lr": 0.1},)), replicas=1, steps=9)
    placement = (Placement(shard=0, task="ps/0", address="127.0.0.1:1"),)
    return JobView(job=job, plan=make_plan(tensors, 1), placement=placement, timeline=timeline)


class Told:
    """A link that knows one view of the job."""

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.identity = Identity("worker/0", 1)
        self.orders = Orders()
        self.client = SimpleNamespace(get_job=lambda who: self.view)
        self.suspected: list[tuple[set[str], int]] = []

    def ask(self, question: Callable[[], Any]) -> Any:
        return question()

    def suspect(self, tasks: Any, timeline: int) -> None:
        self.suspected.append((set(tasks), timeline))


@pytest.fixture
def place() -> Iterator[Workplace]:
    spec = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",), "worker": ("127.0.0.1:0",)})
    config = RoleConfig(role="worker", index=0, cluster=spec, timeouts=TIMEOUTS, lane="grpc")
    made = Workplace(
        config,
        Metrics("worker", "worker/0"),
        still_ordered=lambda: True,
        still_open=lambda key: True,
        settle=lambda: None,
    )
    made.furnish(
        {"w": torch.zeros(64)}, torch.optim.SGD([torch.zeros(1)]), replace(view_of(1).job, script=True), overlap=False
    )
    yield made
    made.close()


def test_servers_not_heard_are_told_only_while_the_history_in_which_they_were_not_heard_is_in_force(
    link: ChiefLink,
) -> None:
    link.obey(Orders(version=1, timeline=5))
    link.suspect(["ps/1"], 5)
    assert list(link._beat(threading.Event()).suspects) == ["ps/1"]
    # ps/1 may be another process there.
    link.obey(Orders(version=2, timeline=6))
    assert list(link._beat(threading.Event()).suspects) == []


def test_silence_is_told_with_the_history_that_it_was_met_in(place: Workplace) -> None:
    told = Told(view_of(5))
    place.renew(told)  # type: ignore[arg-type]
    before = place.trainer.exchange
    told.view = replace(told.view, timeline=6)
    place.renew(told)  # type: ignore[arg-type]
    before.observer.silent(frozenset({0}))
    assert told.suspected == [(set(), 5), (set(), 6), ({"ps/0"}, 5)]


def test_a_renewal_whose_servers_can_not_be_found_is_made_again_as_a_whole(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(view_of(5))
    place.renew(told)  # type: ignore[arg-type]
    told.view = replace(told.view, timeline=6)

    def nowhere(*_: object, **__: object) -> Lane:
        raise UnreachableError("ps/0 has no address")

    with monkeypatch.context() as patch:
        patch.setattr(workplace, "open_lane", nowhere)
        with pytest.raises(UnreachableError):
            place.renew(told)  # type: ignore[arg-type]
    before = place.trainer
    place.renew(told)  # type: ignore[arg-type]
    assert place.view is told.view
    assert place.trainer is not before


def test_after_a_renewal_the_next_pass_waits_for_no_tensor_that_only_the_last_trainer_held(place: Workplace) -> None:
    model = nn.Linear(4, 4)
    tensors = model_tensors(model)
    view = replace(view_of(5), job=replace(view_of(5).job, tensors=tensors), plan=make_plan(tensors, 1))
    place.furnish(model, torch.optim.SGD(model.parameters(), lr=0.1), view.job, overlap=False)
    told = Told(view)
    place.renew(told)  # type: ignore[arg-type]
    before = weakref.ref(place.trainer)
    told.view = replace(view, timeline=6)
    place.renew(told)  # type: ignore[arg-type]
    assert before() is None
    gc.collect()
    assert place.gate is not None
    place.gate.look()
    assert place.gate.loose == []


def test_a_worker_that_wakes_goes_on_where_the_slowest_is(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(5)
    told = Told(replace(view, job=replace(view.job, consistency=ConsistencySpec(mode="ssp"))))
    place.renew(told)  # type: ignore[arg-type]
    asked: list[Sequence[int]] = []

    def standings(replicas: Sequence[int]) -> dict[int, Standing]:
        asked.append(replicas)
        least = dict.fromkeys(replicas, 7)
        told = {"outcome": Outcome.SERVED, "reason": "", "step_max": 9, "version": 9, "last_seq": 3}
        return {0: Standing(timeline=5, replicas=least, **told)}  # type: ignore[arg-type]

    monkeypatch.setattr(place.trainer, "standings", standings)
    half = place.trainer.half
    place.rest()
    assert half.stamp(0).clock == 1
    place.wake()
    assert half.stamp(0).clock == 8
    assert asked == [(), (0,)]


def test_a_worker_that_could_not_wake_is_still_resting(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(5)
    place.renew(Told(replace(view, job=replace(view.job, consistency=ConsistencySpec(mode="ssp")))))  # type: ignore[arg-type]
    answers: list[dict[int, Standing] | None] = [{}, None]

    def standings(replicas: Sequence[int]) -> dict[int, Standing]:
        found = answers.pop(0)
        if found is None:
            raise UnreachableError("ps/1 did not answer")
        return found

    monkeypatch.setattr(place.trainer, "standings", standings)
    place.rest()
    assert not place.wake() and place.resting
