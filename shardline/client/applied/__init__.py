"""The job's optimizer on every worker; see here.py."""
