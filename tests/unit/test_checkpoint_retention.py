"""Whatever is committed, damaged, killed or refused by the disk, in any order: the newest whole checkpoint stays."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from shardline.checkpoint import Checkpoint, CheckpointStore, committed_steps
from shardline.checkpoint.manifest import MANIFEST, step_folder
from shardline.errors import CheckpointError
from tests.support.checkpoints import Killed, MortalFiles, cut_of, flip_byte, operations

SHARD = "shard-00000-of-00001.safetensors"
ALL_OPERATIONS = 60
"""More than any commit has here, so some failures come too late to do anything."""


@dataclass(frozen=True)
class Commit:
    """Of a step this far from the newest whole one; at = operation that fails, or kills the process.

    A run that goes on may be told to keep another number.
    """

    ahead: int = 1
    keep: int = 3
    seed: int = 0
    at: int = -1
    kill: bool = False


@dataclass(frozen=True)
class Damage:
    """Of one of the checkpoints there, counted from the newest."""

    number: int
    what: str


@dataclass(frozen=True)
class MarkBest:
    """Of one of the checkpoints there."""

    number: int


Act = Commit | Damage | MarkBest
ACTS = st.one_of(
    st.builds(Commit, ahead=st.integers(1, 2)),
    st.builds(
        Commit,
        ahead=st.integers(-1, 3),
        keep=st.integers(1, 3),
        seed=st.integers(0, 1),
        at=st.integers(-1, ALL_OPERATIONS),
        kill=st.booleans(),
    ),
    st.builds(Damage, number=st.integers(0, 2), what=st.sampled_from(("flip", "cut short", "no manifest", "no file"))),
    st.builds(MarkBest, number=st.integers(0, 3)),
)


def whole(folder: Path) -> set[int]:
    """Steps that can be read to the last byte."""
    found = set()
    for step in committed_steps(folder):
        try:
            Checkpoint(folder / step_folder(step)).verify()
        except CheckpointError:
            continue
        found.add(step)
    return found


def damage(folder: Path, what: str) -> None:
    file = folder / SHARD
    if what == "no manifest":
        (folder / MANIFEST).unlink(missing_ok=True)
    elif what == "no file":
        file.unlink(missing_ok=True)
    elif file.exists() and file.stat().st_size:
        if what == "flip":
            flip_byte(file, -1)
        else:
            file.write_bytes(file.read_bytes()[:-1])


def commit(folder: Path, act: Commit, newest: int) -> int | None:
    """The step that was committed, None where it could not be."""
    error = None if act.kill else OSError(errno.EIO, "Input/output error")
    files = MortalFiles(act.at, error)
    step = max(0, newest + act.ahead)
    try:
        CheckpointStore(folder, act.keep, files=files).commit(cut_of(step=step, seed=act.seed, shards=1))
    except (CheckpointError, Killed):
        return None
    return step


@settings(max_examples=40, deadline=None, derandomize=True)
@given(acts=st.lists(ACTS, min_size=2, max_size=9))
@example(acts=[Commit(), Commit(), Commit(), Damage(0, "flip"), Damage(1, "no file"), Commit(ahead=-1, keep=1)])
@example(acts=[Commit(), Commit(), Damage(0, "cut short"), Commit(at=30), Commit(at=30, kill=True), Commit()])
def test_the_newest_whole_checkpoint_is_never_removed(acts: list[Act]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        best: int | None = None
        for act in acts:
            steps, before = committed_steps(folder), whole(folder)
            match act:
                case Damage():
                    if act.number < len(steps):
                        damage(folder / step_folder(steps[-1 - act.number]), act.what)
                    continue
                case MarkBest():
                    if act.number < len(steps):
                        best = steps[-1 - act.number]
                        CheckpointStore(folder, 3).mark_best(best, {"accuracy": 0.5})
                case Commit():
                    done = commit(folder, act, max(before, default=0))
                    after = whole(folder)
                    assert done is None or done in after
                    if done is not None and act.at < 0:
                        # Nothing failed, so what is too many went.
                        assert len([s for s in committed_steps(folder) if s <= done]) <= act.keep + (best is not None)
            after = whole(folder)
            assert not before or (after and max(after) >= max(before)), (
                f"{act}: {sorted(before)} became {sorted(after)}"
            )
            assert best is None or best not in before or best in after


@pytest.mark.parametrize("kill", [False, True])
def test_a_damaged_step_that_can_not_be_replaced_costs_nothing_that_was_whole(tmp_path: Path, kill: bool) -> None:
    for at in range(0, operations(tmp_path) + 3, 3):
        folder = tmp_path / f"at-{at}"
        store = CheckpointStore(folder, 2, files=MortalFiles())
        for step in (1, 2):
            store.commit(cut_of(step=step, shards=1))
        damage(folder / step_folder(2), "flip")
        done = commit(folder, Commit(at=at, kill=kill, keep=2), newest=1)
        assert whole(folder) in ({1}, {1, 2})
        assert done is None or 2 in whole(folder)


def test_a_step_that_could_only_not_be_read_is_put_back_where_its_successor_can_not_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unwilling(MortalFiles):
        def rename(self, source: Path, target: Path) -> None:
            if source.name.startswith("tmp-"):
                raise OSError(errno.EIO, "Input/output error")
            super().rename(source, target)

    store = CheckpointStore(tmp_path, 2, files=Unwilling())
    CheckpointStore(tmp_path, 2, files=MortalFiles()).commit(cut_of(step=1, shards=1))
    with monkeypatch.context() as patch:

        def unreadable(checkpoint: Checkpoint) -> None:
            raise CheckpointError("it can't be read just now")

        patch.setattr(Checkpoint, "verify", unreadable)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.commit(cut_of(step=1, shards=1))
    assert whole(tmp_path) == {1}
