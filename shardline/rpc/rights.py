"""Which calls change the cluster itself, and so need the admin token besides the job's.

These are the chief's commands to a parameter server, what servers tell each other of a step that all of them take, and
what only an admin may ask of the chief. Everything else is the daily work of the job's tasks, and looking on.
tests/unit/test_security_admin.py holds that every call of the contract stands in one of the two tables.
"""

from __future__ import annotations

PACKAGE = "shardline.rpc.v1"

ADMIN_CALLS = {
    "ParameterServer": (
        "Lead",
        "Configure",
        "SetMembership",
        "Prepare",
        "Restore",
        "Activate",
        "Promote",
        "Cut",
        "GetCut",
        "Release",
        "Stop",
    ),
    "Coordinator": ("Vote",),
    "Replication": ("Replicate",),
    "Chief": ("Stop",),
}
"""By service. GetCut reads all that a shard holds, optimizer state included."""
JOB_CALLS = {
    "ParameterServer": ("OpenLane", "Push", "Pull", "PushPull", "Progress", "Status"),
    "Chief": ("Join", "Heartbeat", "GetJob", "Lease", "Report", "FetchCut", "Status"),
    "Places": ("Take",),
}

_ADMIN = frozenset(f"/{PACKAGE}.{service}/{call}" for service, calls in ADMIN_CALLS.items() for call in calls)


def needs_admin(method: str | bytes) -> bool:
    """Whether a call, such as "/shardline.rpc.v1.Chief/Stop", needs the admin token."""
    return (method.decode() if isinstance(method, bytes) else method) in _ADMIN
