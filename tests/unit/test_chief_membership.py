from __future__ import annotations

import pytest

from shardline_chief.rules.messages import Join
from shardline_chief.rules.state.membership import LIVES, Admitted, Life, Member, Membership, Refused

DEAD_S = 20.0
SUSPECT_S = 6.0


def table(term: int = 3) -> Membership:
    return Membership(term, suspect_s=SUSPECT_S, dead_s=DEAD_S)


def ask(index: int | None = 0, *, stable_id: str = "a", role: str = "worker") -> Join:
    return Join(role=role, index=index, stable_id=stable_id, address="10.0.0.1:5000")


def admit(members: Membership, join: Join, now_s: float = 0.0, limit: int = 4) -> Member:
    decision = members.join(now_s, join, limit=limit)
    assert isinstance(decision, Admitted), decision
    return decision.member


def test_incarnations_carry_the_term_and_never_repeat() -> None:
    members = table(term=3)
    first = admit(members, ask(0))
    second = admit(members, ask(1))
    assert first.incarnation >> 32 == second.incarnation >> 32 == 3
    assert second.incarnation > first.incarnation


def test_join_without_an_index_takes_the_lowest_free_one() -> None:
    members = table()
    admit(members, ask(0, stable_id="a"))
    admit(members, ask(2, stable_id="b"))
    assert admit(members, ask(None, stable_id="c")).task == "worker/1"
    assert admit(members, ask(None, stable_id="d")).task == "worker/3"
    full = members.join(0.0, ask(None, stable_id="e"), limit=4)
    assert isinstance(full, Refused)
    assert full.retry


def test_index_outside_the_cluster_is_refused_for_good() -> None:
    refused = table().join(0.0, ask(7), limit=4)
    assert isinstance(refused, Refused)
    assert not refused.retry
    assert "worker/7" in refused.reason
    assert "4" in refused.reason


def test_second_process_of_a_living_index_is_refused_with_who_holds_it() -> None:
    members = table()
    old = admit(members, ask(0, stable_id="a"))
    refused = members.join(2.5, ask(0, stable_id="b"), limit=4)
    assert isinstance(refused, Refused)
    assert refused.retry
    assert "10.0.0.1:5000" in refused.reason
    assert "2.5 s" in refused.reason
    assert members.current("worker/0", old.incarnation)


@pytest.mark.parametrize("how", ["stream broken", "silent"])
def test_suspect_task_is_replaced_and_fenced_at_once(how: str) -> None:
    members = table()
    old = admit(members, ask(0, stable_id="a"))
    now_s = 1.0
    if how == "silent":
        now_s = SUSPECT_S
    else:
        members.stream_broken(old.task, old.incarnation)
    members.tick(now_s)
    decision = members.join(now_s, ask(0, stable_id="b"), limit=4)
    assert isinstance(decision, Admitted)
    assert decision.replaced is not None
    assert decision.replaced.incarnation == old.incarnation
    assert not members.current("worker/0", old.incarnation)
    assert not members.heard("worker/0", old.incarnation, now_s)


def test_same_process_joining_again_gets_a_new_incarnation() -> None:
    members = table()
    old = admit(members, ask(0, stable_id="a"))
    new = admit(members, ask(0, stable_id="a"))
    assert new.incarnation != old.incarnation
    assert not members.current(old.task, old.incarnation)


def test_a_place_takes_lives_at_once_up_to_a_number_and_then_one_a_minute() -> None:
    members = table()
    lives = [admit(members, ask(0, stable_id="a")) for _ in range(LIVES)]
    refused = members.join(0.0, ask(0, stable_id="a"), limit=4)
    assert isinstance(refused, Refused)
    assert refused.retry
    assert f"worker/0 has joined {LIVES} times in a short time" in refused.reason
    assert "may join again in 60 s" in refused.reason
    assert members.current("worker/0", lives[-1].incarnation)
    admit(members, ask(1, stable_id="b"))
    lives = [admit(members, ask(0, stable_id="a"), now_s=60.0 * minute) for minute in range(1, 100)]
    assert isinstance(members.join(60.0 * 99 + 59.0, ask(0, stable_id="a"), limit=4), Refused)


def test_silence_makes_suspect_then_dead_and_each_is_told_once() -> None:
    members = table()
    admit(members, ask(0), now_s=100.0)
    assert members.tick(100.0 + SUSPECT_S - 0.1) == []
    (suspect,) = members.tick(100.0 + SUSPECT_S)
    assert suspect.member.state is Life.SUSPECT
    assert "worker/0" in suspect.sentence
    assert "6.0 s" in suspect.sentence
    assert members.tick(100.0 + SUSPECT_S + 1) == []
    (dead,) = members.tick(100.0 + DEAD_S)
    assert dead.member.state is Life.DEAD
    assert "20.0 s" in dead.sentence
    assert members.tick(1000.0) == []
    assert members.living("worker") == []


def test_broken_stream_is_suspect_at_once_and_a_beat_clears_it() -> None:
    members = table()
    worker = admit(members, ask(0))
    members.stream_broken(worker.task, worker.incarnation)
    (suspect,) = members.tick(0.1)
    assert suspect.member.state is Life.SUSPECT
    assert "stream broke" in suspect.sentence
    assert members.heard(worker.task, worker.incarnation, 0.2)
    (alive,) = members.tick(0.3)
    assert alive.member.state is Life.ALIVE
    assert "alive again" in alive.sentence


def test_broken_stream_of_an_old_incarnation_does_not_touch_the_new_one() -> None:
    members = table()
    old = admit(members, ask(0, stable_id="a"))
    admit(members, ask(0, stable_id="a"))
    members.stream_broken(old.task, old.incarnation)
    assert members.tick(0.1) == []


def test_a_task_that_left_is_not_declared_dead() -> None:
    members = table()
    worker = admit(members, ask(0))
    members.leave(worker.task)
    assert members.tick(1000.0) == []
    assert not members.current(worker.task, worker.incarnation)


def test_living_members_come_by_role_as_asked_then_by_index() -> None:
    members = table()
    for role, index in (("worker", 2), ("worker", 0), ("chief", 0), ("ps", 0)):
        admit(members, ask(index, role=role))
    assert [m.task for m in members.living("chief", "worker")] == ["chief/0", "worker/0", "worker/2"]


# Indices that the chief hands out


def place(members: Membership, address: str, now_s: float = 0.0, *, limit: int = 2, role: str = "worker") -> object:
    return members.place(now_s, role, address, limit=limit, keep_s=60.0)


def at(address: str, index: int, *, stable_id: str = "a") -> Join:
    return Join(role="worker", index=index, stable_id=stable_id, address=address)


def test_places_are_handed_out_in_order_and_each_only_once() -> None:
    members = table()
    assert place(members, "a:1") == 0
    assert place(members, "b:1") == 1
    full = place(members, "c:1")
    assert isinstance(full, Refused)
    assert full.retry
    assert "all 2 places" in full.reason


def test_who_asks_again_before_joining_gets_the_same_place() -> None:
    members = table()
    assert place(members, "a:1") == 0
    assert place(members, "b:1") == 1
    assert place(members, "a:1", 59.0) == 0
    assert place(members, "b:1", 59.0) == 1


def test_place_of_a_task_that_never_joined_is_given_away_after_its_time() -> None:
    members = table()
    assert place(members, "a:1", limit=1) == 0
    assert isinstance(place(members, "b:1", 59.9, limit=1), Refused)
    assert place(members, "b:1", 60.0, limit=1) == 0
    assert isinstance(place(members, "a:1", 61.0, limit=1), Refused)


def test_task_started_again_takes_its_own_place_before_it_is_declared_dead() -> None:
    members = table()
    for index, address in enumerate(("a:1", "b:1")):
        assert place(members, address) == index
        admit(members, at(address, index))
    members.stream_broken("worker/1", members.get("worker/1").incarnation)  # type: ignore[union-attr]
    members.tick(1.0)
    assert place(members, "b:1", 1.0, limit=4) == 1
    assert place(members, "c:1", 1.0, limit=4) == 2
    again = members.join(2.0, at("b:1", 1, stable_id="new"), limit=4)
    assert isinstance(again, Admitted)
    assert again.replaced is not None


def test_place_of_a_dead_task_goes_to_a_stranger_and_stays_his() -> None:
    members = table()
    assert place(members, "a:1", limit=1) == 0
    admit(members, at("a:1", 0))
    members.declare_dead("worker/0")
    assert place(members, "b:1", 30.0, limit=1) == 0
    admit(members, at("b:1", 0, stable_id="b"), 31.0)
    assert isinstance(place(members, "a:1", 32.0, limit=1), Refused)


def test_port_0_tells_two_tasks_of_one_machine_apart_from_no_other() -> None:
    members = table()
    assert place(members, "a:0") == 0
    assert place(members, "a:0") == 1


def test_join_without_an_index_leaves_places_that_were_handed_out() -> None:
    members = table()
    assert place(members, "a:1") == 0
    assert admit(members, ask(None, stable_id="c")).task == "worker/1"
