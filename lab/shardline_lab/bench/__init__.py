"""`shardline bench`: measures a cluster's network (net), and codecs."""
