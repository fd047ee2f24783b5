"""What the chief commands and what shards agree on: authority, configuration, status, votes."""
