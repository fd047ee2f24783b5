"""The laboratory: what a job would do on a cluster that need not exist."""
