"""shardline check: a job's first steps in one plain PyTorch process and through servers, compared bit by bit."""

from shardline_lab.comparison.checked_job import CheckedJob, checked_job
from shardline_lab.comparison.difference import Difference, differences
from shardline_lab.comparison.plain import PlainTraining
from shardline_lab.comparison.served import InProcessCluster, train_served

__all__ = [
    "CheckedJob",
    "Difference",
    "InProcessCluster",
    "PlainTraining",
    "checked_job",
    "differences",
    "train_served",
]
