"""Proof of the admin token: never sent, good once, for one method at one task; and what certificates' roles allow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardline.errors import UsageError
from shardline.roles import ROLES
from shardline.rpc.auth.access import WINDOW, Access, Prover, role_of
from shardline.rpc.auth.rights import RIGHTS, Caller, Token, joining_refusal, right_of, role_refusal, takes_proof
from shardline.rpc.v1 import access_pb2, chief_pb2, parameter_server_pb2, places_pb2, worker_pb2
from shardline.security import ADMIN_KEY, PLAIN, Security, holds, key_of

STOP = "/shardline.rpc.v1.Chief/Stop"
LEAD = "/shardline.rpc.v1.ParameterServer/Lead"
HERE = "10.0.0.2:2222"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("job", "admin", "other"):
        (folder / name).write_text(f"the-{name}-token-of-this-test\n")
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> Security:
    return Security(token_file=folder / "job", admin_token_file=folder / "admin")


def proven(security: Security, access: Access, audience: str = HERE) -> Prover:
    prover = Prover(security, audience)
    prover.answer(access.challenge)
    return prover


def test_every_call_of_the_contract_has_its_row() -> None:
    services = {
        name: {method.name for method in service.methods}
        for module in (access_pb2, chief_pb2, parameter_server_pb2, places_pb2, worker_pb2)
        for name, service in module.DESCRIPTOR.services_by_name.items()
    }
    assert services == {name: set(calls) for name, calls in RIGHTS.items()}
    assert right_of("/grpc.health.v1.Health/Check").token is Token.NONE
    assert right_of("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo").token is Token.JOB
    assert right_of("/nobody.knows/Such").token is Token.JOB


def test_a_proof_is_good_for_one_call_of_its_method(both: Security) -> None:
    access = Access(both, HERE)
    prover = proven(both, access)
    first, second = prover.metadata(LEAD), prover.metadata(LEAD)
    assert not access.is_admin(STOP, first)
    assert access.is_admin(LEAD, second)
    assert access.is_admin(LEAD, first), "calls may overtake each other"
    assert not access.is_admin(LEAD, first) and not access.is_admin(LEAD, second)
    for metadata in (None, (), ((ADMIN_KEY, ""),), ((ADMIN_KEY, "Bearer the-admin-token-of-this-test"),)):
        assert not access.is_admin(LEAD, metadata)


def test_numbers_far_behind_the_newest_count_as_used(both: Security) -> None:
    access = Access(both, HERE)
    prover = proven(both, access)
    old = prover.metadata(LEAD)
    for _ in range(4 * WINDOW):
        metadata = prover.metadata(LEAD)
        assert access.is_admin(LEAD, metadata)
    assert not access.is_admin(LEAD, old)
    # No other way: what is remembered is bounded, and that shows in nothing but memory.
    (_, numbers), *_ = access._callers.values()
    assert len(numbers._used) <= 2 * WINDOW + 1


def test_a_server_that_is_asked_by_mistake_can_not_pass_the_proof_on(both: Security) -> None:
    """The relay: whoever is dialled hands the real server's challenge to the chief, and the chief's proof back."""
    real = Access(both, HERE)
    dialled_elsewhere = proven(both, real, audience="10.6.6.6:2222")
    assert not real.is_admin(LEAD, dialled_elsewhere.metadata(LEAD))
    assert not real._callers, "only callers that have proven themselves are remembered"


def test_no_part_of_the_token_travels(both: Security) -> None:
    prover = proven(both, Access(both, HERE))
    ((_, said),) = prover.metadata(LEAD)
    assert both.admin_token.decode() not in said and both.admin_token.hex() not in said
    assert "-token-of-this-test" not in repr(both)
    assert both.metadata() == (("authorization", "Bearer the-job-token-of-this-test"),)


def test_another_token_and_every_changed_word_prove_nothing(both: Security, folder: Path) -> None:
    access = Access(both, HERE)
    other = proven(Security(token_file=folder / "job", admin_token_file=folder / "other"), access)
    assert not access.is_admin(LEAD, other.metadata(LEAD))
    ((key, said),) = proven(both, access).metadata(LEAD)
    words = said.split(" ")
    for place in range(4):
        flipped = words[place][:-1] + ("1" if words[place][-1] != "1" else "2")
        changed = " ".join([*words[:place], flipped, *words[place + 1 :]])
        assert not access.is_admin(LEAD, ((key, changed),)), place
    for text in (said + " 0", " ".join(words[:3]), said.replace(words[2], "-1"), said.replace(words[2], "9" * 400)):
        assert not access.is_admin(LEAD, ((key, text),))
    assert access.is_admin(LEAD, ((key, said),))


def test_a_server_that_was_started_anew_says_so(both: Security) -> None:
    first, second = Access(both, HERE), Access(both, HERE)
    prover = proven(both, first)
    metadata = prover.metadata(LEAD)
    assert second.stale(metadata) and not first.stale(metadata) and not second.stale(None)
    assert not second.is_admin(LEAD, metadata)
    prover.forget()
    assert not prover.ready
    prover.answer(second.challenge)
    assert second.is_admin(LEAD, prover.metadata(LEAD))


def test_without_an_admin_token_the_jobs_is_every_right(both: Security, folder: Path) -> None:
    job = Security(token_file=folder / "job")
    assert Access(job).is_admin(STOP, None) and Access(job).challenge == b"" and not Access(job).stale(None)
    assert Access(PLAIN).has_job_token(None)
    prover = Prover(both, "chief")
    prover.answer(b"")
    assert prover.ready and prover.metadata(STOP) == ()
    assert Prover(job, "chief").ready, "who has no admin token asks for no challenge"


def test_tokens_are_checked_when_they_are_read(folder: Path) -> None:
    with pytest.raises(UsageError, match="contain the same token, so anyone with the job token would have every right"):
        Security(token_file=folder / "job", admin_token_file=folder / "job")
    (folder / "short").write_text("short")
    with pytest.raises(UsageError, match=r"--admin-token-file .*short has 5 characters; a token has 16 to 4096"):
        Security(admin_token_file=folder / "short")


@pytest.mark.parametrize("role", tuple(ROLES))
def test_who_may_take_part_as_whom(role: str) -> None:
    needs_admin = role in ("chief", "ps")
    assert bool(joining_refusal(role, Caller(admin=False))) == needs_admin
    assert not joining_refusal(role, Caller(admin=True))
    for named in ROLES:
        assert bool(joining_refusal(role, Caller(admin=True, role=named))) == (named != role)
    assert "set --admin-token-file" in joining_refusal("ps", Caller(admin=False))


def test_an_unknown_role_is_left_to_those_who_know_the_roles() -> None:
    # A certificate for "standby" would not help, so nothing may say that it would.
    assert joining_refusal("standby", Caller(admin=False, role="worker")) == ""
    assert role_refusal("worker", ("evaluator",), "Report") == (
        "the caller's certificate is for the role worker, but Report needs one for the role evaluator (or one without "
        "a role)"
    )


def test_a_certificates_role_is_one_of_ours_or_opens_nothing() -> None:
    def context(*uris: str) -> Any:
        return SimpleNamespace(auth_context=lambda: {"peer_uri": [uri.encode() for uri in uris]})

    assert role_of(context()) == "" == role_of(context("spiffe://example.org/ps"))
    assert role_of(context("urn:shardline:role:ps")) == "ps"
    for uris in (("urn:shardline:role:ps", "urn:shardline:role:chief"), ("urn:shardline:role:root",)):
        for roles in (("ps",), ("chief",), ROLES):
            assert role_refusal(role_of(context(*uris)), roles, "Lead")


def test_joining_and_commands_take_proofs_and_the_daily_calls_none() -> None:
    taken = {f"{s}/{c}" for s, calls in RIGHTS.items() for c in calls if takes_proof(f"/shardline.rpc.v1.{s}/{c}")}
    commands = {f"{s}/{c}" for s, calls in RIGHTS.items() for c, right in calls.items() if right.token is Token.ADMIN}
    assert taken == commands | {"Chief/Join", "Places/Take"}


def test_a_secret_is_known_by_its_key() -> None:
    assert holds(b"x" * 32, key_of(b"x" * 32)) and holds(b"", b"")
    assert not holds(b"", key_of(b"x" * 32)) and not holds(key_of(b"x" * 32), key_of(b"x" * 32))
