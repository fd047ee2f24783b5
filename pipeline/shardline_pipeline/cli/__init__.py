"""The command `shardline partition`."""
