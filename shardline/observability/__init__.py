"""Logs, metrics, and the cluster view for pages and terminals."""
