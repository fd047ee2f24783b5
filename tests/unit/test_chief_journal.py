from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardline.errors import UsageError
from shardline_chief.io.journal import Journal


def test_second_chief_in_the_same_folder_is_refused_with_the_process_that_holds_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "chief"), pytest.raises(UsageError, match=str(os.getpid())):
        Journal(tmp_path / "chief")


def test_terms_grow_over_starts(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        assert journal.begin_term() == 1
    with Journal(tmp_path) as journal:
        assert journal.begin_term() == 2
        assert journal.begin_term() == 3
    with Journal(tmp_path) as journal:
        assert journal.last_term() == 3


def test_entries_of_all_terms_come_back_in_order(tmp_path: Path) -> None:
    for number in range(3):
        with Journal(tmp_path) as journal:
            journal.begin_term()
            journal.write("timeline", timeline=number, state="preparing")
    with Journal(tmp_path) as journal:
        assert [(entry["term"], entry["timeline"]) for entry in journal.read()] == [(1, 0), (2, 1), (3, 2)]


def test_entry_is_on_disk_when_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path) as journal:
        journal.begin_term()
        synced: list[int] = []
        real = os.fsync

        def fsync(handle: int) -> None:
            synced.append(os.fstat(handle).st_size)
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        journal.write("stop", step=12)
        assert synced == [(tmp_path / "journal-1.jsonl").stat().st_size]


@pytest.mark.parametrize("kept", range(0, 40, 3))
def test_a_crash_in_mid_write_loses_only_that_entry(tmp_path: Path, kept: int) -> None:
    with Journal(tmp_path) as journal:
        journal.begin_term()
        journal.write("first", value=1)
        whole = (tmp_path / "journal-1.jsonl").stat().st_size
        journal.write("second", value="a string that makes the line longer than the cut")
    os.truncate(tmp_path / "journal-1.jsonl", whole + kept)
    with Journal(tmp_path) as journal:
        assert [entry["kind"] for entry in journal.read()] == ["first"]
        journal.begin_term()
        journal.write("third")
        assert [entry["kind"] for entry in journal.read()] == ["first", "third"]


def test_an_entry_after_a_full_disk_is_not_glued_to_the_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path) as journal:
        journal.begin_term()
        real = os.write

        def half(handle: int, data: memoryview) -> int:
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(handle, data[: len(data) // 2])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            journal.write("lost")
        monkeypatch.setattr(os, "write", real)
        journal.write("kept")
        assert [entry["kind"] for entry in journal.read()] == ["kept"]


def test_a_folder_that_can_not_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose a folder that you can write to"):
        Journal(tmp_path / "file" / "chief")


def test_writing_before_a_term_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal, pytest.raises(UsageError, match="begin_term"):
        journal.write("plan")
