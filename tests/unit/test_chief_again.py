"""A chief is started in a folder that has a journal already: whose job it goes on with, and what it says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.orders import Phase
from shardline.core.spec import TensorSpec
from shardline.errors import ProtocolError, UsageError
from shardline_chief import service
from shardline_chief.rules.actions import Command, CommandResult, Configure, Find
from shardline_chief.rules.replay import Remembered, replay
from shardline_chief.rules.state.leases import Leases
from tests.support.chief_cluster import FakePs, make_job, running
from tests.support.mortal_chief import Mortal

CLUSTER = ClusterSpec({"chief": ("127.0.0.1:0",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})


def done(**fields: Any) -> Remembered:
    known = {"job": make_job(), "checkpoint_step": 100, "ended": (0, "done"), "closed": True, **fields}
    return Remembered(term=1, timeline=1 << 32 | 1, **known)


def config(out: Path, **fields: Any) -> RoleConfig:
    return RoleConfig(role="chief", index=0, cluster=CLUSTER, out=out, **fields)


def test_a_job_that_was_done_before_its_chief_went_is_done_for_the_next_one_too(tmp_path: Path) -> None:
    settings = service.settings_of(config(tmp_path))
    assert service.done_already(done(), make_job(), settings)
    assert service.done_already(done(ended=(0, "done before: all")), make_job(), settings)
    leases = Leases.resumed({}, 100)
    assert not service.done_already(done(leases=leases), make_job(), settings)


@pytest.mark.parametrize(
    "other",
    [
        {"ended": (0, "stopped: enough"), "stopping": ("enough", 0)},
        {"ended": (4, "ps/0 is gone")},
        {"checkpoint_step": 90},
        {"closed": False},
        {"job": make_job(batch_size=7)},
        {"job": make_job(steps=50)},
    ],
)
def test_what_was_stopped_failed_or_is_another_job_is_refused_as_ever(tmp_path: Path, other: dict[str, Any]) -> None:
    assert not service.done_already(done(**other), make_job(), service.settings_of(config(tmp_path)))
    assert not service.done_already(done(), None, service.settings_of(config(tmp_path)))
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"up to step 10.*--resume"):
        service.checkpoint_to_resume(config(tmp_path), tmp_path)


def test_the_page_comes_back_where_it_was_or_where_there_is_room() -> None:
    first = service.open_page(config(Path("out"), page="127.0.0.1:0"), "")
    assert first is not None
    taken = service.open_page(config(Path("out"), page="127.0.0.1:0"), first.address)
    assert taken is not None
    assert taken.address != first.address
    first.close()
    again = service.open_page(config(Path("out"), page="127.0.0.1:0"), first.address)
    assert again is not None
    assert again.address == first.address
    again.close()
    taken.close()
    assert service.open_page(config(Path("out"), page=None), first.address) is None


def test_the_journal_has_the_page_of_the_last_chief() -> None:
    cluster = Mortal(job=make_job())
    cluster.note("chief", uuid="u", resume=None, takes_over=None, page="127.0.0.1:7000")
    assert replay(cluster.entries).page == "127.0.0.1:7000"
    cluster.note("chief", uuid="v", resume=None, takes_over=1, page="127.0.0.1:7001")
    assert replay(cluster.entries).page == "127.0.0.1:7001"


# Losses in a row

LARGE = tuple(TensorSpec(name=f"layer{number}", shape=(64, 64), dtype="float32") for number in range(6))


def lose(cluster: Any, number: int) -> None:
    cluster.kill_ps(number)
    cluster.restart_ps(number)
    cluster.tick()
    cluster.tick()


def test_a_loss_counts_as_one_in_a_row_until_every_shard_has_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = running(mode="async", tensors=LARGE)
    cluster.advance(30)
    find = cluster.find

    def found(action: Find) -> None:
        find(action)
        # Each shard was above the checkpoint's number when that was taken.
        for ps in cluster.ps:
            ps.restored = 3

    monkeypatch.setattr(cluster, "find", found)
    lose(cluster, 1)
    assert cluster.program.state.progress.step > cluster.program.state.progress.base_step
    assert cluster.program.state.losses.attempts == 1
    for ps in cluster.ps:
        ps.version += 1
    cluster.tick()
    assert cluster.program.state.losses.attempts == 0


def test_a_server_that_is_found_empty_when_it_is_to_keep_its_shards_is_lost_again() -> None:
    cluster = running(mode="async", tensors=LARGE)
    cluster.advance(30)
    cluster.kill_ps(1)
    cluster.hold_commands = True
    cluster.restart_ps(1)
    cluster.tick()
    while not isinstance(cluster.held[-1].order, Configure):
        held, cluster.held = cluster.held, []
        for command in held:
            cluster.carry_out(command)
        cluster.settle()
    (configure,) = cluster.held
    assert configure.order.keep == {0}
    cluster.held = []
    cluster.hold_commands = False
    # ps/0 was started again too, and nobody has noticed but for its stream.
    cluster.ps[0] = FakePs(0, restored=cluster.ps[1].restored)
    cluster.program.stream_broken("ps/0", cluster.lives["ps/0"], cluster.now_s)
    refuse(cluster, configure, "ps/0")
    cluster.restart_ps(0)
    cluster.tick()
    cluster.tick()
    assert cluster.finish is None
    assert cluster.program.state.phase is Phase.RUNNING
    assert all(ps.initialized and ps.active for ps in cluster.ps)
    assert "ps/0 does not have the expected shards" in cluster.text()


def refuse(cluster: Any, command: Command, task: str) -> None:
    error = ProtocolError("Configure wants to keep shards [0], but shards [0] are not on this ps; create them again")
    cluster.program.done(command.number, CommandResult(values={"ps/1": 1000}, errors={task: error}), cluster.now_s)
    cluster.settle()
