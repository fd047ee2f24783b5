"""A shard's memory as seen by the code that serves it."""
