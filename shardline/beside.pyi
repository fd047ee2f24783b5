"""For type checkers: the names that shardline.beside finds in installed packages."""

from shardline_pipeline import (
    DoubleBuffer as DoubleBuffer,
    Flush as Flush,
    FTPipe as FTPipe,
    GPipe as GPipe,
    NoStash as NoStash,
    Stash as Stash,
    VerticalSync as VerticalSync,
)
from shardline_pipeline.model import Pipeline as Pipeline
