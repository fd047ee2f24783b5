"""The worker: trains replicas of a job."""
