"""Public names of installed packages that add methods: see shardline.plugins."""

from __future__ import annotations

from typing import Any

from shardline import plugins


def __getattr__(name: str) -> Any:
    for package in plugins.packages():
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(f"no installed package of shardline.plugins has {name!r}")
