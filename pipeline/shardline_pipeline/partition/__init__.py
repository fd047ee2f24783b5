"""Where to cut a model into stages: profiles of layers, what stages cost, and the search for the best ones."""

from __future__ import annotations

from shardline_pipeline.partition.choose import Comparison, Rated, choose, rated, smallest
from shardline_pipeline.partition.costs import (
    ALL_REDUCE,
    SERVERS,
    Cluster,
    Costs,
    LayerTraffic,
    LinkLevel,
    PlannedStage,
    Stages,
    kept,
)
from shardline_pipeline.partition.dynamic import candidates
from shardline_pipeline.partition.forecast import Forecast, forecast_of
from shardline_pipeline.partition.measure import measure, shapes
from shardline_pipeline.partition.mixed import mixed
from shardline_pipeline.partition.profile import Handed, Layer, Profile, coded

__all__ = [
    "ALL_REDUCE",
    "SERVERS",
    "Cluster",
    "Comparison",
    "Costs",
    "Forecast",
    "Handed",
    "Layer",
    "LayerTraffic",
    "LinkLevel",
    "PlannedStage",
    "Profile",
    "Rated",
    "Stages",
    "candidates",
    "choose",
    "coded",
    "forecast_of",
    "kept",
    "measure",
    "mixed",
    "rated",
    "shapes",
    "smallest",
]
