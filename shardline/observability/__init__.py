"""Logs, metrics, and the view of a cluster that pages and terminals show."""
