"""Calls between tasks: servers, channels, deadlines, limits, and the link to the chief."""
