"""What this version of the protocol is called, and what it can do."""

from __future__ import annotations

PROTOCOL_MINOR = 1
FEATURES = ("sync", "async", "voted", "cut", "restore")
"""What a message may require of whoever reads it."""
