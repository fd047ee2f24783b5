"""Which steps are copied, what is held, and that what was released stays released."""

from __future__ import annotations

import pytest
import torch

from shardline.core.image import VALUE, BucketImage, WorkerSequence
from shardline.storage.cuts import CutBook


def image(bucket: int, step: int) -> BucketImage:
    return BucketImage(shard=0, bucket=bucket, step=step, version=step, tensors={VALUE: torch.zeros(2)})


def reach(book: CutBook, step: int, *buckets: int) -> None:
    for bucket in buckets:
        if book.wanted(step):
            book.store(image(bucket, step))


def test_steps_of_the_cadence_are_wanted_and_whole_when_every_bucket_is_there() -> None:
    book = CutBook(2, 10)
    assert [step for step in range(31) if book.wanted(step)] == [10, 20]  # 30 is beyond the budget of two
    book = CutBook(2, 10)
    reach(book, 10, 1)
    assert book.get(10) is None
    assert book.status() == [(10, False, False)]
    reach(book, 10, 0)
    found = book.get(10)
    assert found is not None and [item.bucket for item in found] == [0, 1]
    assert book.status() == [(10, True, False)]
    assert book.held_bytes == 2 * 8
    assert book.get(20) is None


def test_without_a_cadence_only_requests_are_wanted() -> None:
    book = CutBook(1, 0)
    assert not any(book.wanted(step) for step in range(20))
    book.request(7)
    assert [step for step in range(20) if book.wanted(step)] == [7]


def test_step_0_is_cut_on_request_only() -> None:
    book = CutBook(1, 5)
    assert not book.wanted(0)
    book.request(0)
    assert book.wanted(0)


def test_beyond_the_budget_a_step_is_skipped_by_all_buckets_and_counted_once() -> None:
    book = CutBook(2, 1, budget=2)
    for step in (1, 2, 3):
        reach(book, step, 0, 1)
    assert book.status() == [(1, True, False), (2, True, False), (3, False, True)]
    assert book.skipped_total == 1
    book.release(1)
    # The decision on step 3 was made by its first bucket and stays, though there is room now.
    assert not book.wanted(3)
    assert book.wanted(4)
    assert book.skipped_total == 1


def test_a_request_is_made_room_for() -> None:
    book = CutBook(1, 1, budget=1)
    reach(book, 1, 0)
    book.request(2)
    assert book.wanted(2)


@pytest.mark.parametrize("released", [10, 15, 20])
def test_a_bucket_that_reaches_a_released_step_late_makes_no_copy(released: int) -> None:
    book = CutBook(2, 10)
    reach(book, 10, 0)
    assert book.release(released) == 1
    reach(book, 10, 1)
    assert book.status() == []
    assert book.held_bytes == 0
    assert book.wanted(20) is (released < 20)
    assert book.wanted(30)


def test_release_never_goes_back() -> None:
    book = CutBook(1, 10)
    book.release(20)
    book.release(10)
    assert not book.wanted(20)


def test_a_request_overrides_a_release() -> None:
    book = CutBook(1, 10)
    book.release(20)
    book.request(20)
    assert book.wanted(20)


def test_release_leaves_later_cuts_and_requests() -> None:
    book = CutBook(1, 10)
    reach(book, 10, 0)
    reach(book, 20, 0)
    book.request(25)
    assert book.release(10) == 1
    assert book.status() == [(20, True, False)]
    assert book.wanted(25)


def test_a_new_timeline_forgets_releases_too() -> None:
    book = CutBook(1, 10)
    reach(book, 10, 0)
    book.request(13)
    book.release(20)
    book.clear()
    assert book.status() == []
    assert not book.wanted(13)
    reach(book, 10, 0)
    assert book.get(10) is not None


def test_a_withdrawn_request_leaves_nothing_but_what_the_cadence_wants() -> None:
    book = CutBook(2, 10)
    book.request(7)
    reach(book, 7, 0)
    book.withdraw(7)
    assert book.status() == [] and not book.wanted(7)
    reach(book, 10, 0)
    book.request(10)
    book.withdraw(10)
    reach(book, 10, 1)
    assert book.status() == [(10, True, False)]


def test_a_cut_taken_at_one_instant_stands_under_the_number_it_was_asked_for() -> None:
    book = CutBook(2, 0)
    pushes = {"worker/0": WorkerSequence(1, 5)}
    book.store_all(40, [image(0, 3), image(1, 4)], pushes)
    pushes["worker/0"] = WorkerSequence(1, 6)
    cut = book.whole(40)
    assert cut is not None and cut.sequences == {"worker/0": WorkerSequence(1, 5)}
    found = book.get(40)
    assert found is not None and [item.step for item in found] == [3, 4]
    assert book.release(40) == 1
