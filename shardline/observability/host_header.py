"""The Host header of a request to a page: under which name its reader knows this machine.

A page that is open to everybody on its own machine answers to loopback's names only. Otherwise a web site that points
its own name at 127.0.0.1 (DNS rebinding) could read the page in the browser of a person who works on this machine.
"""

from __future__ import annotations

from shardline.security import is_loopback


def host_of(header: str) -> str:
    """The host in a Host header, without port and brackets; empty where it is none."""
    text = header.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def names_loopback(header: str) -> bool:
    """Whether a Host header names this machine by one of loopback's names."""
    return is_loopback(host_of(header))
