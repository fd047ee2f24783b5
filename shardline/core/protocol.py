"""The protocol version of this code, and the features that a peer may require."""

PROTOCOL_MINOR = 1
FEATURES = ("sync", "async", "voted", "cut", "restore")
