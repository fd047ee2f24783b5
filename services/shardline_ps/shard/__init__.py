"""One shard: its buckets, how updates reach them, its cuts."""
