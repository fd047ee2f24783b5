"""shardline sweep: one model per process or device, each with other settings."""
