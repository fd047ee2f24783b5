"""What a shard's memory looks like to whoever serves it."""
