"""Layers that several workers share, each with a part of their weights (horizontal model parallelism). Pure."""

from shardline.pipeline.across.layers import STYLES, SharedLayer, check_choices, handed_in_parts, shared_layers
from shardline.pipeline.across.parts import cut

__all__ = ["STYLES", "SharedLayer", "check_choices", "cut", "handed_in_parts", "shared_layers"]
