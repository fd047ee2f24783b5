"""Proof of the admin token without sending it, and identification of callers; messages: rpc/v1/access.proto.

A server draws a challenge when it starts. A caller derives a key from the admin token, the challenge, its own nonce and
the audience (the peer it believes it is calling), and proves with every call that it has that key. Each proof is valid
for one call of one method of one task.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardline.rpc.auth.proof import mac
from shardline.rpc.auth.rights import ROLE_URI, Caller
from shardline.security import ADMIN_KEY, Metadata, Security

CHALLENGE_BYTES = 32
NONCE_BYTES = 16
LONGEST_NONCE_BYTES = 64
CHIEF_AUDIENCE = "chief"
"""Audience of the chief, whose address can be a different name in each caller's configuration."""
STALE_KEY = "shardline-challenge"
"""Trailing metadata of a refused call whose proof answers an old challenge: the server has been restarted."""
WINDOW = 1024
"""How far calls of one connection may arrive out of order."""


def _session_key(token: bytes, audience: str, challenge: bytes, nonce: bytes) -> bytes:
    return mac(token, b"shardline admin 1", audience.encode(), challenge, nonce)


def _proof(key: bytes, method: str, number: int) -> bytes:
    return mac(key, method.encode(), str(number).encode())


class Prover:
    """The calling side of one channel. Thread-safe.

    audience: "chief", or the address of the parameter server being called.
    """

    def __init__(self, security: Security, audience: str) -> None:
        self._token = security.admin_token
        self._audience = audience
        self._lock = threading.Lock()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenge: bytes | None = None
        self._key = b""
        self._number = 0

    @property
    def ready(self) -> bool:
        """Whether metadata() can be called without another challenge."""
        return not self._token or self._challenge is not None

    def answer(self, challenge: bytes) -> None:
        """Set the server's challenge; empty = it requires no proofs."""
        with self._lock:
            if challenge != self._challenge:
                self._challenge = challenge
                self._key = _session_key(self._token, self._audience, challenge, self._nonce)

    def forget(self) -> None:
        """Forget the challenge: the server has been restarted and has a new one."""
        with self._lock:
            self._challenge = None

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """Proof for one call of a method; empty if there is no admin token, or the server requires no proof."""
        with self._lock:
            if not self._token or not self._challenge:
                return ()
            self._number += 1
            proof = _proof(self._key, method, self._number)
            words = (self._challenge.hex(), self._nonce.hex(), str(self._number), proof.hex())
        return ((ADMIN_KEY, " ".join(words)),)


class _Numbers:
    """The used call numbers of one caller."""

    def __init__(self) -> None:
        self._highest = 0
        self._used: set[int] = set()

    def use(self, number: int) -> bool:
        """Mark a number as used; False if it was before, or is too old to tell."""
        if number <= self._highest - WINDOW or number in self._used:
            return False
        self._used.add(number)
        if number > self._highest:
            self._highest = number
            if len(self._used) > 2 * WINDOW:
                self._used = {used for used in self._used if used > number - WINDOW}
        return True


class Access:
    """The called side: identifies callers. For one server; used on its loop.

    audience: what callers must have addressed; a server's is its address, set once that is known.
    """

    def __init__(self, security: Security, audience: str = "") -> None:
        self._security = security
        self.audience = audience
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES) if security.admin_token else b""
        self._callers: dict[bytes, tuple[bytes, _Numbers]] = {}
        """Key and used numbers by nonce, only of callers that have proven themselves, so that others can't fill it."""

    def has_job_token(self, metadata: Metadata) -> bool:
        """Whether a call's metadata contain the job token; True if none is set."""
        return self._security.check_metadata(metadata)

    def stale(self, metadata: Metadata) -> bool:
        """Whether a call's proof answers the challenge of an earlier process of this task."""
        said = _Said.of(metadata)
        return bool(self.challenge) and said is not None and said.challenge != self.challenge

    def is_admin(self, method: str, metadata: Metadata) -> bool:
        """Whether a call's metadata prove the admin token; True if none is set. Each proof is valid once."""
        if not self._security.admin_token:
            return True
        said = _Said.of(metadata)
        if said is None or said.challenge != self.challenge:
            return False
        known = self._callers.get(said.nonce)
        if known is None:
            key = _session_key(self._security.admin_token, self.audience, said.challenge, said.nonce)
            known = (key, _Numbers())
        key, numbers = known
        if not hmac.compare_digest(_proof(key, method, said.number), said.proof):
            return False
        self._callers[said.nonce] = known
        return numbers.use(said.number)

    def caller(self, method: str, context: Any) -> Caller:
        """The caller of an admitted call. Uses its proof up, so call it only once per call."""
        return Caller(admin=self.is_admin(method, context.invocation_metadata()), role=role_of(context))


@dataclass(frozen=True)
class _Said:
    """A caller's proof, as sent."""

    challenge: bytes
    nonce: bytes
    number: int
    proof: bytes

    @classmethod
    def of(cls, metadata: Metadata) -> _Said | None:
        """None if there is none, or it is malformed."""
        words = next((_text(value) for key, value in metadata or () if key == ADMIN_KEY), "").split(" ")
        if len(words) != 4 or not words[2].isascii() or not words[2].isdigit() or len(words[2]) > 18:
            return None
        try:
            challenge, nonce, proof = (bytes.fromhex(words[place]) for place in (0, 1, 3))
        except ValueError:
            return None
        if len(challenge) != CHALLENGE_BYTES or not NONCE_BYTES <= len(nonce) <= LONGEST_NONCE_BYTES:
            return None
        return cls(challenge, nonce, int(words[2]), proof)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def role_of(context: Any) -> str:
    """Role named by the caller's certificate; empty without one, or if it names several."""
    facts: Mapping[str, Iterable[bytes]] = context.auth_context()
    named = {uri for uri in map(_text, facts.get("peer_uri", ())) if uri.startswith(ROLE_URI)}
    return "/".join(sorted(uri.removeprefix(ROLE_URI) for uri in named))
