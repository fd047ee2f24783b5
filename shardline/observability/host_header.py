"""The Host header of a request to a page: the name by which its reader addresses this machine.

A page that is open to everyone on its own machine answers only to loopback's names. Otherwise a web site that points
its own name at 127.0.0.1 (DNS rebinding) could read the page through a browser on this machine.
"""

from __future__ import annotations

from shardline.security import is_loopback


def host_of(header: str) -> str:
    """The host in a Host header, without port and brackets; empty if invalid."""
    text = header.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def names_loopback(header: str) -> bool:
    return is_loopback(host_of(header))
