"""The version of the protocol that this code speaks, and what a peer may ask of it."""

PROTOCOL_MINOR = 1
FEATURES = ("sync", "async", "voted", "cut", "restore")
