"""One exchange with all shards: calls, deadlines, retries, and what came of them."""
