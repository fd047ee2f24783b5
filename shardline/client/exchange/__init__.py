"""One exchange with all shards: calls, deadlines, retries and outcomes."""
