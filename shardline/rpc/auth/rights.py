"""What each credential may do: one row per call of the contract.

A call needs a token (`Token`), and its caller's certificate, where that names a role, must name one of the row's
roles. Joining is decided by the role that is joined as (`JOINING`). docs/security.md shows the same table, and
tests/contract/test_rights.py walks it over every method of every service.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

PACKAGE = "shardline.rpc.v1"
ROLES = ("chief", "ps", "worker", "evaluator")
"""Roles that a certificate can name."""
ROLE_URI = "urn:shardline:role:"
"""What stands before the role in a certificate, among its alternative names of the kind URI."""


class Token(enum.Enum):
    """What a call must bring."""

    NONE = "nothing"
    JOB = "the job token"
    ADMIN = "the job token and proof of the admin token"


@dataclass(frozen=True)
class Right:
    """What one call needs."""

    token: Token
    roles: Collection[str] = ROLES
    """Roles whose certificates may make it. A certificate that names no role may make every call."""
    life: bool = False
    """Its messages name a life of a task and must carry the secret that the chief gave to that life."""


@dataclass(frozen=True)
class Caller:
    """Who makes a call, as far as tokens and certificates say."""

    admin: bool
    """It has proven that it holds the admin token, or the cluster has none."""
    role: str = ""
    """What its certificate names; empty = no certificate, or one that names none."""


_LOOK = Right(Token.JOB)
_TRAIN = Right(Token.JOB, roles=("worker", "chief"), life=True)
_COMMAND = Right(Token.ADMIN, roles=("chief",))
_AMONG_SERVERS = Right(Token.ADMIN, roles=("ps",))

RIGHTS: dict[str, dict[str, Right]] = {
    "Access": {"Challenge": _LOOK},
    "Chief": {
        # Needs proof of the admin token for some roles: see JOINING.
        "Join": _LOOK,
        "Heartbeat": Right(Token.JOB, life=True),
        "GetJob": _LOOK,
        "Lease": _TRAIN,
        "Report": Right(Token.JOB, roles=("evaluator",), life=True),
        "FetchCut": _LOOK,
        "Status": _LOOK,
        "Stop": Right(Token.ADMIN),
    },
    "Places": {"Take": _LOOK},
    "ParameterServer": {
        "OpenLane": _TRAIN,
        "Push": _TRAIN,
        "Pull": _TRAIN,
        "PushPull": _TRAIN,
        "Progress": _TRAIN,
        "Status": _LOOK,
        "Lead": _COMMAND,
        "Configure": _COMMAND,
        "SetMembership": _COMMAND,
        "Restore": _COMMAND,
        "Activate": _COMMAND,
        "Promote": _COMMAND,
        "Cut": _COMMAND,
        # Reads all that a shard holds, optimizer state included.
        "GetCut": _COMMAND,
        "Release": _COMMAND,
        "Stop": _COMMAND,
    },
    "Coordinator": {"Vote": _AMONG_SERVERS},
    "Replication": {"Replicate": _AMONG_SERVERS},
}
JOINING = {"chief": Token.ADMIN, "ps": Token.ADMIN, "worker": Token.JOB, "evaluator": Token.JOB}
"""What joining, or asking for an index, needs by role. The chief dials whoever joins as a ps, and commands it."""

_BY_METHOD = {
    f"/{PACKAGE}.{service}/{call}": right for service, calls in RIGHTS.items() for call, right in calls.items()
}
_OPEN = ("/grpc.health.",)
"""Whoever reaches the port may ask whether the task lives; the health service tells nothing else."""
_PROVES = frozenset(
    {method for method, right in _BY_METHOD.items() if right.token is Token.ADMIN}
    | {f"/{PACKAGE}.Chief/Join", f"/{PACKAGE}.Places/Take"}
)


def right_of(method: str) -> Right:
    """What a call such as "/shardline.rpc.v1.Chief/Stop" needs; reflection and unknown calls need the job token."""
    if method.startswith(_OPEN):
        return Right(Token.NONE)
    return _BY_METHOD.get(method, _LOOK)


def takes_proof(method: str | bytes) -> bool:
    """Whether a caller that holds the admin token proves it with this call."""
    return (method.decode() if isinstance(method, bytes) else method) in _PROVES


def role_refusal(role: str, roles: Collection[str], what: str) -> str:
    """Why a certificate's role may not do `what`; empty where it may."""
    if not role or role in roles:
        return ""
    return (
        f"the caller's certificate is for the role {role}, and {what} needs one for the role {' or '.join(roles)} "
        "(or one that names no role)"
    )


def joining_refusal(role: str, caller: Caller) -> str:
    """Why somebody may not take part in this role; empty where it may. Unknown roles are refused elsewhere."""
    if JOINING.get(role) is Token.ADMIN and not caller.admin:
        return (
            f"taking part as {role} needs the admin token besides the job's; set --admin-token-file (or "
            "SHARDLINE_ADMIN_TOKEN_FILE) as the chief has it"
        )
    return role_refusal(caller.role, (role,), f"taking part as {role}") if role in ROLES else ""
