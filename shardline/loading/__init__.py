"""Processes that read a job's batches ahead of its training."""
