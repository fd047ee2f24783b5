"""What each credential may do: one row per call of the API.

A call needs a token (`Token`), and if its caller's certificate names a role, that role must be in the row. Joining is
decided by the role to be joined as (`joining`). docs/security.md has the same table, and tests/contract/test_rights.py
checks it against every method of every service.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

from shardline.roles import ROLES, Role

PACKAGE = "shardline.rpc.v1"
ROLE_URI = "urn:shardline:role:"
"""Prefix of the role in a certificate, in a subject alternative name of type URI."""


class Token(enum.Enum):
    NONE = "nothing"
    JOB = "the job token"
    ADMIN = "the job token and proof of the admin token"


@dataclass(frozen=True)
class Right:
    token: Token
    may: Callable[[Role], bool] = lambda role: True
    """Whether a certificate for this role allows the call. One without a role allows every call."""
    life: bool = False
    """Its messages name a life of a task and must carry the secret that the chief gave to that life."""

    @property
    def roles(self) -> Collection[str]:
        """Roles whose certificates allow the call."""
        return ROLES.having(self.may)


@dataclass(frozen=True)
class Caller:
    """Identity of a caller, according to its tokens and certificate."""

    admin: bool
    """It has proven that it has the admin token, or the cluster has none."""
    role: str = ""
    """Role named by its certificate; empty = no certificate, or none named."""


_LOOK = Right(Token.JOB)
_TRAIN = Right(Token.JOB, lambda role: role.trains, life=True)
_SEND = Right(Token.JOB, lambda role: role.trains or role.sends, life=True)
_COMMAND = Right(Token.ADMIN, lambda role: role.leads)
_AMONG_SERVERS = Right(Token.ADMIN, lambda role: role.holds)

RIGHTS: dict[str, dict[str, Right]] = {
    "Access": {"Challenge": _LOOK},
    "Chief": {
        # For some roles it needs proof of the admin token: see joining().
        "Join": _LOOK,
        "Heartbeat": Right(Token.JOB, life=True),
        "GetJob": _LOOK,
        "Lease": _TRAIN,
        "Loader": _TRAIN,
        "Report": Right(Token.JOB, lambda role: role.scores, life=True),
        "FetchCut": _LOOK,
        "Status": _LOOK,
        "Stop": Right(Token.ADMIN),
        "Move": Right(Token.ADMIN),
    },
    "Places": {"Take": _LOOK},
    "ParameterServer": {
        "OpenLane": _SEND,
        "Push": _SEND,
        "Pull": _SEND,
        "PushPull": _SEND,
        "Progress": _SEND,
        # Only where workers run the optimizer, so its state is theirs.
        "GetState": _TRAIN,
        "PutState": _TRAIN,
        "Status": _LOOK,
        "Lead": _COMMAND,
        "Configure": _COMMAND,
        "SetMembership": _COMMAND,
        "Restore": _COMMAND,
        "Activate": _COMMAND,
        "Promote": _COMMAND,
        "Cut": _COMMAND,
        # Reads everything that a shard holds, including optimizer state.
        "GetCut": _COMMAND,
        "Release": _COMMAND,
        "Stop": _COMMAND,
    },
    # Workers know the lives of those that compute stages from their orders.
    "Worker": {"OpenParcelLane": _TRAIN, "Deliver": _TRAIN},
    "Coordinator": {"Vote": _AMONG_SERVERS},
    "Replication": {"Replicate": _AMONG_SERVERS},
}

_BY_METHOD = {
    f"/{PACKAGE}.{service}/{call}": right for service, calls in RIGHTS.items() for call, right in calls.items()
}
_OPEN = ("/grpc.health.",)
"""Anyone who reaches the port may ask whether the task is up; the health service reveals nothing else."""
_PROVES = frozenset(
    {method for method, right in _BY_METHOD.items() if right.token is Token.ADMIN}
    | {f"/{PACKAGE}.Chief/Join", f"/{PACKAGE}.Places/Take"}
)


def right_of(method: str) -> Right:
    """Requirements of a call like "/shardline.rpc.v1.Chief/Stop"; unknown calls and reflection need a job token."""
    if method.startswith(_OPEN):
        return Right(Token.NONE)
    return _BY_METHOD.get(method, _LOOK)


def takes_proof(method: str | bytes) -> bool:
    """Whether callers with the admin token prove it with this call."""
    return (method.decode() if isinstance(method, bytes) else method) in _PROVES


def role_refusal(role: str, roles: Collection[str], what: str) -> str:
    """Why a certificate's role may not do `what`; empty if it may."""
    if not role or role in roles:
        return ""
    return (
        f"the caller's certificate is for the role {role}, but {what} needs one for the role {' or '.join(roles)} (or "
        "one without a role)"
    )


def joining(role: str) -> Token:
    """Token needed to join, or to ask for an index. The chief calls any task that joined as a ps, as admin."""
    return Token.ADMIN if role in ROLES and ROLES[role].commands else Token.JOB


def joining_refusal(role: str, caller: Caller) -> str:
    """Why a caller may not join in this role; empty if it may. Unknown roles are refused elsewhere."""
    if joining(role) is Token.ADMIN and not caller.admin:
        return (
            f"joining as {role} needs the admin token in addition to the job token; set --admin-token-file (or "
            "SHARDLINE_ADMIN_TOKEN_FILE) to the same token as on the chief"
        )
    return role_refusal(caller.role, (role,), f"joining as {role}") if role in ROLES else ""
