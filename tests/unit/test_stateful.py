"""Loaders with a state: what is kept of them by step, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardline.client.api.stateful import Stateful, decode, encode
from shardline.client.api.step_loop import StepLoop
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.orders import Orders, Phase
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, UsageError
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink


class Loader:
    """Numbers in an order drawn anew in each epoch, in batches of one."""

    def __init__(self, length: int = 7, num_workers: int = 0) -> None:
        self.length, self.num_workers = length, num_workers
        self._generator = torch.Generator().manual_seed(5)
        self._order: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self._order:
            self._order = torch.randperm(self.length, generator=self._generator).tolist()
        while self._order:
            yield self._order.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "order": tuple(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._order = list(state["order"])


def steps(loader: Stateful, numbers: range, every: int = 0) -> list[int]:
    found = []
    for step in numbers:
        loader.enter(step)
        found.append(next(loader))
        loader.leave(step, every)
    return found


def test_a_step_that_is_made_again_has_the_same_samples_also_in_the_next_process(tmp_path: Path) -> None:
    unbroken = steps(Stateful(Loader(), None), range(40))
    assert sorted(unbroken[:7]) == sorted(unbroken[7:14]) == [*range(7)]
    assert unbroken[:7] != unbroken[7:14]
    loader = Stateful(Loader(), tmp_path / "states")
    assert steps(loader, range(13), every=5) == unbroken[:13]
    for _ in range(2):
        # Left in the middle.
        loader.enter(13)
        assert (next(loader), next(loader)) == (unbroken[13], unbroken[14])
    assert steps(loader, range(13, 24), every=5) == unbroken[13:24]
    # The worker is killed before or after its gradients have left, or the job goes back to a checkpoint.
    for step in (24, 23, 20, 10, 5, 0):
        assert steps(Stateful(Loader(), tmp_path / "states"), range(step, step + 1)) == [unbroken[step]]


def test_the_chief_gets_the_first_step_s_state_and_that_at_which_the_job_stops(tmp_path: Path) -> None:
    told: dict[int, str] = {}

    def chief(step: int, state: str) -> str:
        told[step] = state
        return ""

    cluster = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})
    config = RoleConfig(role="worker", index=0, cluster=cluster, timeouts=Timeouts())
    loop = StepLoop(config, Metrics("worker", "worker/0"), lambda: False)
    link = SimpleNamespace(orders=Orders(phase=Phase.STOPPING, stop_step=7), wait=lambda *_, **__: None)
    loop.runner.now.joined = cast(ChiefLink, link)
    loader = Stateful(Loader(), tmp_path, chief)
    loop.stateful.append(loader)
    steps(loader, range(7), every=5)
    assert [*told] == [0, 5]
    for phase, stop in ((Phase.RUNNING, 0), (Phase.RUNNING, 500), (Phase.ENDED, 7)):
        link.orders = Orders(phase=phase, stop_step=stop)
        loop.runner.now.wait_for_change(link.orders)
    assert [*told] == [0, 5]
    link.orders = Orders(phase=Phase.STOPPING, stop_step=7)
    loop.runner.now.wait_for_change(link.orders)
    assert [*told] == [0, 5, 7]
    assert told[7] == (tmp_path / "step-00000007.json").read_text()


def test_states_of_old_steps_go_but_for_those_of_checkpoints(tmp_path: Path) -> None:
    steps(Stateful(Loader(), tmp_path), range(60), every=2)
    kept = sorted(int(path.stem.removeprefix("step-")) for path in tmp_path.iterdir())
    assert kept == [0, *range(26, 58, 2), 58, 59, 60]


def test_another_loader_is_refused(tmp_path: Path) -> None:
    steps(Stateful(Loader(), tmp_path), range(3))
    for other, has in ((Loader(8), "batches 8, num_workers 0"), (Loader(num_workers=2), "batches 7, num_workers 2")):
        with pytest.raises(JobError, match=f"before step 3 is of .*batches 7, num_workers 0, and this one has .*{has}"):
            Stateful(other, tmp_path).enter(3)
    with pytest.raises(
        JobError, match=r"before step 9 is neither .* nor here \(there is no .*step-00000009.json\); start the"
    ):
        Stateful(Loader(), tmp_path).enter(9)
    with pytest.raises(JobError, match="SHARDLINE_OUT names no folder"):
        Stateful(Loader(), None).enter(9)
    path = tmp_path / "step-00000003.json"
    path.write_text(re.sub("generator", "generated", path.read_text()))
    with pytest.raises(JobError, match="the loader refuses its state before step 3: KeyError: 'generator'"):
        Stateful(Loader(), tmp_path).enter(3)


def test_a_loop_of_ones_own_is_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a loop over session.steps\(\)"):
        Stateful(Loader(), None).leave(0, 0)


def test_states_are_kept_exactly() -> None:
    state: dict[Any, Any] = {
        "a": [1, 0.1, float("inf"), None, True, "x", b"\x00\xff"],
        3: ({"b": (1, (2,))}, {}),
        "t": [torch.arange(6).reshape(2, 3), torch.zeros(0, 2), torch.tensor(1.5, dtype=torch.float64)],
    }
    found = decode(encode(state, "state"))
    tensors, expected = found.pop("t"), state.pop("t")
    assert found == state
    for one, other in zip(tensors, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    with pytest.raises(JobError, match=r"has <object .*> at loader\['a'\]\[1\], which can't be kept"):
        encode({"a": [1, object()]}, "loader")


@pytest.mark.parametrize("every", [0, 5, 1000])
@pytest.mark.parametrize("kept", ["in files", "in memory"])
def test_the_step_that_a_process_began_with_is_kept_and_the_multiples_of_checkpoint_every(
    tmp_path: Path, every: int, kept: str
) -> None:
    unbroken = steps(Stateful(Loader(), None), range(60))
    folder = tmp_path / "states"
    steps(Stateful(Loader(), folder), range(37), every=every)
    if kept == "in files":
        loader = Stateful(Loader(), folder)
        assert steps(loader, range(37, 60), every=every) == unbroken[37:]
        back = 37
    else:
        loader = Stateful(Loader(), None)
        assert steps(loader, range(60), every=every) == unbroken
        back = 0
    for step in (back, 55) if every == 5 else (back,):
        assert steps(loader, range(step, step + 2), every=every) == unbroken[step : step + 2]
