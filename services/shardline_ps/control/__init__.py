"""What the chief commands and what the shards agree on: authority, configuration, status, votes."""
