"""One-time tokens of lanes: one use, a time, every byte."""

from __future__ import annotations

from shardline.lanes.token_acceptor import Tokens


def test_a_token_is_good_once() -> None:
    tokens = Tokens(10.0)
    token = tokens.grant(print, now_s=0.0)
    assert tokens.redeem(token, now_s=1.0) is print
    assert tokens.redeem(token, now_s=1.0) is None


def test_a_token_is_good_for_a_time() -> None:
    tokens = Tokens(10.0)
    early, late = (tokens.grant(print, now_s=0.0) for _ in range(2))
    assert tokens.redeem(early, now_s=9.9) is print
    assert tokens.redeem(late, now_s=10.0) is None
    assert len(tokens) == 0


def test_a_token_must_be_right_to_its_last_byte() -> None:
    tokens = Tokens(10.0)
    token = tokens.grant(print, now_s=0.0)
    for position in (0, 7, 8, 31):
        wrong = bytearray(token)
        wrong[position] ^= 1
        assert tokens.redeem(bytes(wrong), now_s=1.0) is None
    assert tokens.redeem(token, now_s=1.0) is print


def test_a_revoked_token_is_good_for_nothing() -> None:
    tokens = Tokens(10.0)
    token = tokens.grant(print, now_s=0.0)
    tokens.revoke(token)
    tokens.revoke(token)
    assert tokens.redeem(token, now_s=1.0) is None
