"""shardline partition."""
