"""Nothing in the chief, a server or a worker, all in this process, gets longer with each step."""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardline_chief.page.history import Curve
from tests.support.services import Services, backward, make_model
from tests.support.waiting import wait_for

BEGIN, END = 200, 600
"""Steps: what there is at first is made in the first ones."""


def containers() -> list[Any]:
    """All lists, dicts, sets and deques without a limit of their own."""
    gc.collect()
    there = gc.get_objects()
    # A curve of the page has a limit, which a test of its own checks.
    bounded = {id(item.bins) for item in there if type(item) is Curve}
    bounded |= {id(item) for item in there if type(item) is collections.deque and item.maxlen is not None}
    kinds = (list, dict, set, collections.deque, collections.OrderedDict, collections.Counter)
    return [item for item in there if type(item) in kinds and id(item) not in bounded]


def longer(before: dict[int, int]) -> list[str]:
    """What got longer by more than half of the steps. before: lengths by id."""
    most = (END - BEGIN) // 2
    found = [item for item in containers() if len(item) - before.get(id(item), 0) > most]
    return [f"{type(item).__name__} of {len(item)}: {list(item)[:1]!r}" for item in found if item is not before]


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Show the collector all objects, also those made while modules were imported."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize(
    ("ps", "settings"),
    [
        (1, {"consistency": "sync", "checkpoint_every": 100}),
        pytest.param(2, {"consistency": "async", "codec_up": "topk:ratio=0.1"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_list_grows_with_the_steps(start: Callable[..., Services], ps: int, settings: dict[str, Any]) -> None:
    services = start(ps=ps, workers=1)
    session, model = services.connect(**settings), make_model()
    optimizer = session.attach(model, torch.optim.Adam(model.parameters(), lr=0.001), overlap=True)
    before: dict[int, int] = {}
    for step in session.steps(END):
        optimizer.zero_grad()
        backward(model, step)
        session.log_loss(1.0)
        optimizer.step()
        if step == BEGIN:
            before = {id(item): len(item) for item in containers()}
    with contextlib.suppress(AssertionError):
        # What has yet to be reported is not kept.
        wait_for(lambda: not longer(before), "reports to leave")
    found = longer(before)
    session.close()
    assert services.end()["steps"] == END
    assert before and not found, found
