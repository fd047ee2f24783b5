"""The job's optimizer on every worker; see worker_optimizer.py."""
