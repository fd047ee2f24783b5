"""For type checkers: the names that shardline.beside finds in installed packages."""

from shardline_pipeline import DoubleBuffer as DoubleBuffer
from shardline_pipeline import Flush as Flush
from shardline_pipeline import FTPipe as FTPipe
from shardline_pipeline import GPipe as GPipe
from shardline_pipeline import NoStash as NoStash
from shardline_pipeline import Stash as Stash
from shardline_pipeline import VerticalSync as VerticalSync
from shardline_pipeline.model import Pipeline as Pipeline
