"""shardline check."""
