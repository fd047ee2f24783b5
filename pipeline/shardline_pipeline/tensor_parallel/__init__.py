"""Layers that several workers share, each with a part of their weights (horizontal model parallelism). Pure."""

from shardline_pipeline.tensor_parallel.layers import (
    STYLES,
    SharedLayer,
    check_choices,
    handed_in_parts,
    layers_of,
    shared_layers,
)
from shardline_pipeline.tensor_parallel.parts import cut

__all__ = ["STYLES", "SharedLayer", "check_choices", "cut", "handed_in_parts", "layers_of", "shared_layers"]
