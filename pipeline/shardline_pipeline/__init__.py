"""Pipelines: models cut into stages, each computed by another worker; and layers that workers share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
"""From __init__.pyi, on first use: `shardline --help` has a command of this package, and needs no torch."""
