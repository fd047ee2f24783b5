"""`shardline bench net`: measures a cluster's network."""
