"""What happened in a pipeline: passes on a common clock, figures of its stages, and trace files. Pure."""

from shardline_pipeline.timeline.passes import TaskPass, Timeline
from shardline_pipeline.timeline.trace import passes_in, trace

__all__ = ["TaskPass", "Timeline", "passes_in", "trace"]
